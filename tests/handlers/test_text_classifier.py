import json

import pytest
import torch

from marserve.backend.errors import PredictionException
from marserve.handlers.explanations import attribute_to_tokens
from marserve.handlers.text_classifier import TextClassifier

WORDS = ["<unk>", "good", "bad", "not", "not bad", "film"]

MODEL_FILE = """
import torch

class Mood(torch.nn.Module):
    '''Class 1 is good: a bag of the words' values.'''

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(6, 2, mode="sum")
        values = [[0, 0], [0, 2], [3, 0], [1, 0], [0, 9], [0, 0]]
        self.embedding.weight = torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))
        self.batches = []

    def forward(self, text, offsets):
        self.batches.append(offsets.tolist())
        return self.embedding(text, offsets)
"""


class WithoutOffsets(torch.nn.Module):
    """Reads one text only and ignores the offsets."""

    def __init__(self, embedding: torch.nn.EmbeddingBag) -> None:
        super().__init__()
        self.table = embedding

    def forward(self, text, offsets):
        return self.table.weight[text].sum(dim=0, keepdim=True)


@pytest.fixture
def handler(tmp_path, make_context):
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE)
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "bad", "1": "good"}))
    torch.save(WORDS, tmp_path / "source_vocab.pt")
    handler = TextClassifier()
    handler.initialize(make_context(modelFile=name))
    return handler


@pytest.fixture
def classify(handler, make_context, begin_batch):
    def run(*rows, headers=None):
        context = begin_batch(make_context(), *(headers or [{}] * len(rows)))
        return handler.handle(list(rows), context), context

    return run


def probabilities(bad: float, good: float) -> dict[str, float]:
    values = torch.softmax(torch.tensor([bad, good], dtype=torch.float32), dim=0).tolist()
    return {"bad": pytest.approx(values[0]), "good": pytest.approx(values[1])}


@pytest.mark.parametrize("text", ["A good film!", b"A good film!", bytearray(b"GOOD")])
@pytest.mark.parametrize("key", ["data", "body"])
def test_one_text(classify, key, text):
    assert classify({key: text})[0] == [probabilities(0, 2)]


def test_pairs_of_words_count(classify):
    assert classify({"body": "<b>Not</b> bad."})[0] == [probabilities(4, 9)]


def test_contractions_are_written_out_before(classify):
    assert classify({"body": "it isn't"})[0] == [probabilities(1, 0)]


def test_every_request_of_a_batch_in_one_call_of_the_model(handler, classify):
    answers, _ = classify({"body": "good"}, {"body": "bad"}, {"body": "good film"})
    assert answers == [probabilities(0, 2), probabilities(3, 0), probabilities(0, 2)]
    assert handler.model.batches == [[0, 1, 2]]


def test_a_model_that_ignores_offsets(handler, classify):
    handler.model = WithoutOffsets(handler.model.embedding)
    answers, _ = classify({"body": "good"}, {"body": "bad bad"})
    assert answers == [probabilities(0, 2), probabilities(6, 0)]


def test_an_empty_text(classify):
    assert classify({"body": ""}, {"body": "bad"})[0] == [probabilities(0, 0), probabilities(3, 0)]


def test_words_without_an_index_are_omitted(handler, classify):
    handler.source_vocab = {"good": 1}
    assert classify({"body": "a very good film"})[0] == [probabilities(0, 2)]


@pytest.mark.parametrize("bad", [b"\xff\xfe", {"text": "good"}, 7, None])
def test_a_request_without_text_is_refused_alone(classify, bad):
    answers, context = classify({"body": "good"}, {"body": bad}, {"body": "bad"})
    assert [answers[0], answers[2]] == [probabilities(0, 2), probabilities(3, 0)]
    assert (answers[1]["code"], answers[1]["type"]) == (400, "BadRequestException")
    assert [context.get_response_status(i)[0] for i in range(3)] == [200, 400, 200]


def test_the_stages_of_one_request_have_torchserves_shapes(handler):
    indices, terms = handler.preprocess([{"body": "not bad"}])
    assert (indices.tolist(), terms) == ([3, 2, 4], ["not", "bad", "not bad"])
    assert handler.inference((indices, terms)).tolist() == [[4.0, 9.0]]


def test_explanations(classify):
    rows = [{"body": "good film", "target": "1"}, {"body": "bad"}]
    (first, second), _ = classify(*rows, headers=[{"explain": "True"}] * 2)
    assert first["words"] == ["good", "film", "good film"]
    assert first["importances"] == pytest.approx([1, 0, 0])
    assert second == {"words": ["bad"], "importances": [0.0]}


def test_explanations_need_a_layer_named_embedding(handler, classify):
    handler.model = WithoutOffsets(handler.model.embedding)
    with pytest.raises(PredictionException, match=r"layer named embedding : 501"):
        classify({"body": "good"}, headers=[{"explain": "True"}])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_sum_of_importances_is_the_effect_of_the_text(mode):
    class Curved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.EmbeddingBag(5, 3, mode=mode)
            self.out = torch.nn.Linear(3, 2)

        def forward(self, text, offsets):
            return self.out(torch.tanh(self.embedding(text, offsets)))

    torch.manual_seed(0)
    model, tokens, offsets = Curved(), torch.tensor([1, 4, 2]), torch.tensor([0])
    attributions = attribute_to_tokens(model, tokens, 1)

    assert attributions.shape == (3, 3)
    change = model(tokens, offsets)[0, 1] - model.out(torch.zeros(3))[1]
    assert attributions.sum().item() == pytest.approx(change.item(), abs=0.01)


def test_importances_of_a_layer_that_embeds_each_word():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 2)
            self.embedding.weight = torch.nn.Parameter(torch.tensor([[0.0, 0], [1, 0], [0, 5]]))

        def forward(self, text, offsets):
            return self.embedding(text).sum(dim=0, keepdim=True)

    attributions = attribute_to_tokens(Plain(), torch.tensor([2, 0, 1]), 1)
    assert attributions.sum(dim=1).tolist() == pytest.approx([5, 0, 0])


def test_the_sample_is_classified_as_a_clients_text(handler, classify):
    samples = handler.sample_input()
    assert len(set(samples)) == 2
    answers, context = classify(*({"body": sample} for sample in samples))
    for place, answer in enumerate(answers):
        assert answer.keys() == {"bad", "good"}
        assert context.get_response_status(place)[0] == 200
