"""Text classification: words and pairs of words, looked up in a vocabulary.

A model of bags, called as ``model(tokens, offsets)`` with the concatenated texts and their offsets,
takes the batch at once. A model that ignores the offsets returns too few rows and is called once
per text.
"""

from typing import Any

import torch

from marserve.backend.errors import PredictionException
from marserve.handlers.explanations import attribute_to_tokens
from marserve.handlers.inputs.texts import ngrams_iterator
from marserve.handlers.text_handler import TextHandler, index_of
from marserve.handlers.timer import timed
from marserve.handlers.utils import map_class_to_label


class TextClassifier(TextHandler):
    """Answers each text with the probability of each class."""

    ngrams = 2  # maximal number of consecutive words that are one term

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return a pair of indices, shape ``(terms,)``, and terms; for several requests, a list.

        Unknown terms have the index of ``<unk>``, or are omitted if the vocabulary has none.
        """
        pairs = [self._looked_up(text) for text in self.each_usable(self._text_of, data)]
        return pairs[0] if len(pairs) == 1 else pairs

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits of shape ``(requests, classes)``."""
        indices = [pair[0] for pair in _pairs(data)]
        scores = self._scores(indices, *args, **kwargs)
        if len(scores) == len(indices):
            return scores
        return torch.cat([self._scores([tokens], *args, **kwargs) for tokens in indices])

    @timed
    def postprocess(self, data: Any) -> list[dict[str, float]]:
        """Return ``{class name: probability}`` for each request."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(
        self, text_preprocess: Any, inputs: Any, target: Any = 0
    ) -> list[dict[str, Any]]:
        """Return ``{"importances": [number per term], "words": [terms]}`` for each request."""
        del inputs
        return [self._insight(indices, terms, target) for indices, terms in _pairs(text_preprocess)]

    def _insight(self, indices: Any, terms: list[str], target: int) -> dict[str, Any]:
        if isinstance(self.model, torch.jit.ScriptModule) or not hasattr(self.model, "embedding"):
            raise PredictionException(
                "Explanations need an eager model with a layer named embedding", 501
            )
        attributions = attribute_to_tokens(self.model, indices, target)
        importances = self.summarize_attributions(attributions).tolist()
        return {"importances": importances, "words": self.get_word_token(terms)}

    def _looked_up(self, text: str) -> tuple[Any, list[str]]:
        terms = list(ngrams_iterator(self._tokens_of(text), self.ngrams))
        found = [(index_of(self.source_vocab, term), term) for term in terms]
        known = [(index, term) for index, term in found if index is not None]
        indices = torch.tensor([index for index, _ in known], dtype=torch.int64, device=self.device)
        return indices, [term for _, term in known]

    def _scores(self, indices: list[Any], *args: Any, **kwargs: Any) -> Any:
        lengths = torch.tensor([0, *(len(tokens) for tokens in indices[:-1])], device=self.device)
        with torch.inference_mode():
            return self.model(torch.cat(indices), lengths.cumsum(0), *args, **kwargs)


def _pairs(data: Any) -> list[Any]:
    return [data] if isinstance(data, tuple) else data
