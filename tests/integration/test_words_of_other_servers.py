"""Words of other servers, and names that nobody reads: on every surface they mean or are told."""

import itertools
import json

import grpc
import pytest
from grpc_client import GrpcClient

pytestmark = pytest.mark.integration

PLAIN = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
#: What a word comes to: members of a description.
MEANT = {
    "performance_hint=latency": {"batchPolicy": "adaptive", "maxBatchDelay": 0},
    "performance_hint=THROUGHPUT": {"batchPolicy": "adaptive", "isAutomatic": True},
    "performance_hint=cumulative_throughput": {"batchPolicy": "adaptive", "isAutomatic": True},
    "performance_mode=LATENCY": {"batchPolicy": "adaptive", "maxBatchDelay": 0},
    "performance_hint=none": {"batchPolicy": "fixed", "batchSize": 1, "maxBatchDelay": 100},
    "performance_hint=undefined": {"batchPolicy": "fixed", "batchSize": 1},
    "batchable=true": {"batchPolicy": "adaptive", "isAutomatic": True},
    "batchable=false": {"batchPolicy": "fixed", "batchSize": 1, "isAutomatic": False},
    "allow_auto_batching=true": {"batchPolicy": "fixed", "batchSize": 1},
    "allow_auto_batching=false": {"batchSize": 1, "isAutomatic": False},
    "dynamic_batch_size=true": {"dynamicBatchSize": True},
    "max_batch_size=7": {"batchSize": 7},
    "max_latency_ms=900": {"batchPolicy": "adaptive", "maxLatencyMs": 900},
    "num_requests=5": {"numRequests": 5},
    "performance_hint=throughput batch_policy=greedy": {
        "batchPolicy": "greedy",
        "isAutomatic": True,
    },
    "performance_hint=throughput allow_auto_batching=false": {
        "batchPolicy": "adaptive",
        "batchSize": 1,
        "isAutomatic": False,
    },
}
#: What is refused, with what it is called or contradicts.
REFUSED = {
    "performance_hint=fast": "performance_hint=fast: it is one of latency, throughput, ",
    "batchable=maybe": "batchable=maybe: it is true or false.",
    "batchable=false max_batch_size=4": "batchable=false is a batch size of 1, but another",
    "allow_auto_batching=false batch_size=auto": "allow_auto_batching=false and batch_size=auto",
}
CALLED_OTHERWISE = {
    "max_queue_delay_microseconds=100": "here it is max_batch_delay, in milliseconds.",
    "auto_batch_timeout=0": "here it is max_batch_delay, in milliseconds; 0, no batches, is "
    "batch_size=1.",
    "preferred_batch_size=4": "batch_policy=adaptive finds the sizes itself.",
    "nireq=8": "here it is num_requests.",
    "AUTO_BATCH_DEVICE=GPU": "here BATCH:GPU(4) is batch_size=4 with "
    "batch_policy=fixed_or_single, and BATCH:GPU is batch_size=auto.",
    "NUM_STREAMS=2": "here it is the number of workers: initial_workers, or min_worker and "
    "max_worker.",
}
SURFACES = ("query", "json", "camel_json", "put", "put_json", "yaml", "camel_yaml")


def values_of(words: str) -> dict[str, object]:
    """As JSON and yaml have them."""
    pairs = dict(word.split("=") for word in words.split())
    return {name: _plain(text) for name, text in pairs.items()}


def _plain(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def camel(values):
    return {
        "".join(word.capitalize() if index else word for index, word in enumerate(name.split("_")))
        if name.islower()
        else name: v
        for name, v in values.items()
    }


def texts(values):
    return {name: _text(value) for name, value in values.items()}


def _text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


class Door:
    """Registers a model, or changes one, by one of the surfaces."""

    def __init__(self, server, make_archive, surface: str) -> None:
        self.server, self.surface = server, surface
        self._make = lambda name, config="": make_archive(server.store, PLAIN, name, config)

    def say(self, name: str, words: str):
        """The answer to whoever says these words."""
        values, surface = values_of(words), self.surface
        server = self.server
        if surface in ("put", "put_json"):
            assert server.register(self._make(name)).status_code == 200
            how = {"params": texts(values)} if surface == "put" else {"json": values}
            return server.management("PUT", f"/models/{name}", **how)
        if surface == "query":
            return server.register(self._make(name), **texts(values))
        if surface in ("json", "camel_json"):
            # Our own settings have one spelling in requests; the words of others have both.
            given = camel(values) if surface == "camel_json" and is_foreign(values) else values
            document = {"url": self._make(name).name, **given}
            return server.management("POST", "/models", json=document)
        given = camel(values) if surface == "camel_yaml" else values
        config = "".join(f"{key}: {_text(value)}\n" for key, value in given.items())
        return server.register(self._make(name, config))


def is_foreign(values):
    return all(name.startswith(("performance_", "batchable", "allow_auto_")) for name in values)


@pytest.fixture(params=SURFACES)
def door(server, make_archive, request):
    return Door(server, make_archive, request.param)


@pytest.fixture
def name(server, request):
    name = f"m{abs(hash(request.node.name))}"
    yield name
    server.management("DELETE", f"/models/{name}")


def by_surfaces(table):
    """All words in a query, and one of them on each other surface: all have one reader."""
    others = zip(SURFACES[1:], itertools.cycle(table), strict=False)
    pairs = [*itertools.product(SURFACES[:1], table), *others]
    return pytest.mark.parametrize(("door", "words"), pairs, indirect=["door"])


def assert_means(described, meant) -> None:
    have = {**described, **described["batching"]}
    assert {key: have[key] for key in meant} == meant


@by_surfaces(MEANT)
def test_a_word_means_the_same_everywhere(door, name, words):
    answer = door.say(name, words)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()
    assert_means(door.server.describe(name), MEANT[words])


@by_surfaces(REFUSED)
def test_a_wrong_or_contradicting_word_is_refused_everywhere(door, name, words):
    if door.surface in ("yaml", "camel_yaml") and " batch_size" in words:
        words = words.replace("batch_size", "batchSize")
    answer = door.say(name, words)
    assert answer.status_code == 400, answer.text
    told = answer.json()["message"]
    expected = REFUSED.get(words) or REFUSED[words.replace("batchSize", "batch_size")]
    assert expected.partition(":")[2] in told or expected in told, told


@by_surfaces(CALLED_OTHERWISE)
def test_a_name_that_we_have_another_for_is_told_with_it(door, name, words):
    answer = door.say(name, words)
    if "yaml" in door.surface:  # where it may be the handler's
        assert answer.status_code == 200
        (told,) = answer.json()["warnings"]
    else:
        assert answer.status_code == 400
        told = answer.json()["message"]
    assert told.endswith(f"; {CALLED_OTHERWISE[words]}")


def test_what_nobody_reads_is_told_in_the_answer_and_in_the_log(door, name):
    put = "put" in door.surface
    answer = door.say(name, "max_latency=50 num_requests=5" if put else "max_latency=50")
    assert answer.status_code == 200
    (told,) = answer.json()["warnings"]
    meant = "maxLatencyMs" if "yaml" in door.surface else "max_latency_ms"
    assert told.endswith(f"; did you mean {meant}?")
    door.server.wait_logged("ts_log.log", told)


@pytest.mark.parametrize(
    ("parameter", "advice"),
    [
        ("device=BATCH:GPU(4)", "here BATCH:GPU(4) is batch_size=4 with batch_policy=fixed_or_sin"),
        ("PERFORMANCE_HINT=LATENCY", "did you mean performance_hint?"),
    ],
)
def test_words_of_openvino_are_told_with_ours(server, make_archive, name, parameter, advice):
    archive = make_archive(server.store, PLAIN, name)
    (warning,) = server.register(archive, **values_of(parameter)).json()["warnings"]
    word = parameter.partition("=")[0]
    assert warning.startswith(f"{word} is not a parameter of this server; {advice}")


def test_words_in_an_archive_are_read_and_told(server, make_archive, name):
    words = "batching: {max_batch_size: 12, max_latency_ms: 800}\n"
    words += "device: BATCH:GPU(4)\nrunners: {timeout: 3}\n"
    warnings = server.register(make_archive(server.store, PLAIN, name, words)).json()["warnings"]
    meant = {"batchSize": 12, "batchPolicy": "adaptive", "maxLatencyMs": 800}
    assert_means(server.describe(name), meant)
    told = "\n".join(sorted(warnings))
    assert "device: here BATCH:GPU(4) is batch_size=4" in told
    assert "runners is no key that the server reads here; here they are batchSize" in told


def test_a_setting_of_archives_only_is_told_where_it_counts(server, make_archive, name):
    archive = make_archive(server.store, PLAIN, name)
    answer = server.register(archive, overlap_stages="true", isolateFailures="false")
    assert answer.json()["warnings"] == [
        "isolateFailures is not a parameter of this server; isolateFailures counts in "
        "model-config.yaml.",
        "overlap_stages is not a parameter of this server; overlapStages counts in "
        "model-config.yaml.",
    ]


def test_bentomls_section_in_a_request_is_told_with_ours(server, make_archive, name):
    archive = make_archive(server.store, PLAIN, name)
    section = {"batching": {"enabled": False}}
    told = (
        "batching is not a parameter of this server; here its keys are batchable, max_batch_size "
        "and max_latency_ms."
    )
    answer = server.management("POST", "/models", json={"url": archive.name, **section})
    assert (answer.status_code, answer.json()["message"]) == (400, told)
    server.register(archive, initial_workers=2)
    answer = server.management("PUT", f"/models/{name}", json=section)
    assert (answer.status_code, answer.json()["message"]) == (400, told)
    assert server.describe(name)["minWorkers"] == 2


@pytest.mark.parametrize(
    ("parameter", "advice"),
    [
        ("precision=bf16", "precision counts in the section optimization of model-config.yaml."),
        ("optimization=bf16", "optimization counts in model-config.yaml."),
        ("minWorkers=2", "minWorkers counts in model-config.yaml."),
        ("min_worker=2", "the workers are initial_workers, or later min_worker and max_worker."),
        ("batch_dimension=1", "did you mean batchDim in model-config.yaml?"),
        ("optimise_it=1", ""),
    ],
)
def test_a_key_of_archives_in_a_request_is_told_where_it_counts(
    server, make_archive, name, parameter, advice
):
    archive = make_archive(server.store, PLAIN, name)
    (warning,) = server.register(archive, **values_of(parameter)).json()["warnings"]
    said = f"; {advice}" if advice else "."
    assert warning == f"{parameter.partition('=')[0]} is not a parameter of this server{said}"


def test_a_change_of_what_only_registrations_say_scales_nothing(server, make_archive, name):
    archive = make_archive(server.store, PLAIN, name)
    server.register(archive, initial_workers=2)
    answer = server.management("PUT", f"/models/{name}?torch_threads=1&synchronous=true")
    assert answer.status_code == 400
    told = "torch_threads counts when a model is registered, and not later."
    assert answer.json()["message"] == told
    assert server.describe(name)["minWorkers"] == 2
    answer = server.management("PUT", f"/models/{name}?torch_threads=1&min_worker=1")
    assert (answer.status_code, answer.json()["warnings"]) == (202, [told])


def test_a_query_beside_a_body_of_json_is_told(server, make_archive, name):
    archive = make_archive(server.store, PLAIN, name)
    answer = server.management("POST", "/models?batch_size=8", json={"url": archive.name})
    told = ["'batch_size' in the query does not count beside a body of JSON."]
    assert answer.json()["warnings"] == told
    answer = server.management("PUT", f"/models/{name}?batch_size=8", json={"num_requests": 2})
    assert answer.json()["warnings"] == told
    described = server.describe(name)
    assert (described["batchSize"], described["numRequests"]) == (1, 2)


def test_grpc_tells_it_below_the_sentence(server, make_archive, name):
    make_archive(server.store, PLAIN, name, "maxLatency: 5\nmaxBatchSize: 2\n")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['management']}") as channel:
        client = GrpcClient(channel)
        told = client.manage("RegisterModel", url=f"{name}.mar", synchronous=True)
        sentence, warning = told.splitlines()
        assert sentence.startswith(f'Model "{name}" Version: 1.0 registered')
        assert warning == (
            "Warning: model-config.yaml: maxLatency is no key that the server reads here; did you "
            "mean maxLatencyMs?"
        )
        assert server.describe(name)["batchSize"] == 2


def test_words_in_the_wrong_file(start_server):
    words = {"performance_hint": "latency", "batch_policy": "adaptive", "nireq": "4"}
    with start_server(**words, precision="bf16", device="BATCH:GPU(4)") as server:
        server.wait_logged("ts_log.log", "here it is num_requests.")
        console = server.log("ts_log.log")
        assert "performance_hint" in console
        assert (
            "it is a setting of a model, given as performanceHint in its model-config.y" in console
        )
        assert "is an unknown key, ignored; did you mean default_batch_policy?" in console
        assert "is an unknown key, ignored; here it is num_requests." in console
        assert "; precision counts in the section optimization of model-config.yaml." in console
        assert "is an unknown key, ignored; here BATCH:GPU(4) is batch_size=4 with" in console


def test_keys_of_the_handler_are_nobodys_business(server, make_archive, name):
    config = "max_length: 150\nmodel_name: bert\nhandler:\n  batch_sizes: [1]\n"
    answer = server.register(make_archive(server.store, PLAIN, name, config))
    assert answer.json().keys() == {"status"}


def test_torchserves_keys_count_in_camel_case_only(server, make_archive, name):
    """TorchServe passed these over, and left them to the handler."""
    answer = server.register(make_archive(server.store, PLAIN, name, "batch_size: 8\n"))
    (told,) = answer.json()["warnings"]
    assert told.endswith("did you mean batchSize?")
    assert server.describe(name)["batchSize"] == 1


def test_a_hint_in_models_of_the_configuration(start_server, make_archive):
    def entry(words):
        return {"1.0": values_of(words)}

    cases = {f"m{index}": words for index, words in enumerate(MEANT)}
    models = {name: entry(words) for name, words in cases.items()}
    models["other"] = entry("max_queue_delay_microseconds=100 max_latency=5 precision=bf16")
    models["camel"] = {"1.0": camel(values_of("performance_hint=latency"))}
    with start_server(models=json.dumps(models)) as server:
        for name in cases:
            assert server.register(make_archive(server.store, PLAIN, name)).status_code == 200
            assert_means(server.describe(name), MEANT[cases[name]])
        server.register(make_archive(server.store, PLAIN, "camel"))
        assert_means(server.describe("camel"), MEANT["performance_hint=latency"])
        server.wait_logged("ts_log.log", "did you mean maxLatencyMs?")
        log = server.log("ts_log.log")
        assert "of other 1.0 is ignored; here it is max_batch_delay, in milliseconds." in log
        assert "max_latency=5 of other 1.0 is ignored; did you mean maxLatencyMs?" in log
        assert "ignored; precision counts in the section optimization of model-config.yaml." in log


def test_a_hint_of_nothing_does_not_count_as_scaling(server, make_archive, name):
    server.register(make_archive(server.store, PLAIN, name), initial_workers=2)
    answer = server.management("PUT", f"/models/{name}?performance_hint=none")
    assert answer.json()["status"].startswith("Batching updated")
    assert len(server.describe(name)["workers"]) == 2


def test_a_later_hint_undoes_an_earlier_one(server, make_archive, name):
    server.register(make_archive(server.store, PLAIN, name, "maxBatchDelay: 30\n"))
    for words, meant in (
        ("performance_hint=latency", {"performanceHint": "latency", "maxBatchDelay": 0}),
        ("performance_hint=throughput", {"maxBatchDelay": 30, "isAutomatic": True}),
        ("allow_auto_batching=false", {"batchPolicy": "fixed", "batchSize": 1}),
        ("batchable=true", {"batchPolicy": "adaptive", "isAutomatic": True}),
        ("max_batch_delay=40", {"maxBatchDelay": 40}),
        ("performance_hint=throughput", {"maxBatchDelay": 40, "isAutomatic": True}),
        ("performance_hint=none", {"batchPolicy": "fixed", "maxBatchDelay": 40, "batchSize": 1}),
    ):
        assert server.management("PUT", f"/models/{name}?{words}").status_code == 200
        assert_means(server.describe(name), meant)


def test_lists_are_split_from_the_next_request_on(server, make_archive, name):
    server.register(make_archive(server.store, PLAIN, name), initial_workers=1)
    assert server.predict(name, json=[1, [2]]).json() == [1, [2]]
    described = server.describe(name)
    assert described["dynamicBatchSize"] is False
    counted = len(server.management("GET", f"/models/{name}/batches").json()["batches"])
    assert server.management("PUT", f"/models/{name}?dynamic_batch_size=true").status_code == 200
    assert server.predict(name, json=[1, [2]]).json() == [1, [2]]
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"][counted:]
    assert sum(each["size"] for each in batches) == 2
