"""How many threads torch has in a worker, how they wait, and who has decided that."""

import os
import re

import psutil
import pytest

pytestmark = pytest.mark.integration

THREADS = """
import os, torch

def handle(data, context):
    if data is not None:
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        told = {name: os.environ.get(name) for name in names}
        return [{**told, "threads": torch.get_num_threads(), "parent": os.getppid()} for _ in data]
"""
DECIDES_ITSELF = f"import torch\ntorch.set_num_threads(3)\n{THREADS}"
DECIDED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def server(prepare_server):
    """A server whose workers have torch from their fork server, as usual."""
    # The library itself says on standard error what it has read, as it is loaded.
    with prepare_server({"OMP_DISPLAY_ENV": "VERBOSE"}, preload_modules="torch") as server:
        for name in DECIDED:
            server.environment.pop(name, None)
        server.start()
        yield server
        server.stop()


def asked(server, model):
    return server.predict(model, data="x").json()


def torch_of(server, model):
    return server.worker(model)["torch"]


def libraries(server):
    """What each OpenMP that was loaded in a fork server has read of how to wait."""
    text = server.console_text()
    return re.findall(r"OMP_WAIT_POLICY = '(\w+)'(?s:.*?)GOMP_SPINCOUNT = '(\w+)'", text)


def test_by_default_a_worker_has_its_share_and_waits_passively(server):
    server.install(THREADS, "usual", initial_workers=2)
    share = max(1, CORES // 2)
    told = asked(server, "usual")
    assert (told["threads"], told["OMP_WAIT_POLICY"]) == (share, "PASSIVE")
    assert torch_of(server, "usual") == {
        "threads": share,
        "threadsWhy": f"auto: its share of {CORES} cores for 2 workers",
        "waitPolicy": "passive",
        "waitPolicyWhy": "auto: a thread that waits leaves its core to others",
    }
    assert libraries(server)[0] == ("PASSIVE", "0")


def test_a_model_may_decide_both(server):
    server.install(THREADS, "usual-beside")
    server.install(THREADS, "own", "torchThreads: 5\ntorchWaitPolicy: active\n")
    server.install(THREADS, "own-too", torch_threads=1, torch_wait_policy="active")
    told, too, usual = (asked(server, name) for name in ("own", "own-too", "usual-beside"))
    assert (told["threads"], told["OMP_NUM_THREADS"], told["OMP_WAIT_POLICY"]) == (5, "5", None)
    # It was loaded with that, and not only told of it: by a fork server of its own.
    assert told["parent"] == too["parent"] != usual["parent"]
    assert libraries(server)[-1][1] != "0"
    assert "OMP_WAIT_POLICY" not in psutil.Process(told["parent"]).environ()
    described = torch_of(server, "own")
    assert described["threadsWhy"] == "torchThreads of model-config.yaml"
    assert torch_of(server, "own-too")["waitPolicyWhy"] == "torchWaitPolicy of its registration"
    assert server.describe("own-too")["torchThreads"] == 1
    assert server.describe("usual-beside")["torchThreads"] == "auto"


def test_a_handler_has_the_last_word(server):
    server.install(DECIDES_ITSELF, "decides")
    assert asked(server, "decides")["threads"] == 3
    described = torch_of(server, "decides")
    assert described["threads"] == 3
    assert described["threadsWhy"].startswith(f"set by the handler; {CORES}, auto: its share")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"torch_threads": "0"}, "torch_threads=0: it is a whole number from 1 to 1024, or auto."),
        ({"torch_threads": "many"}, "torch_threads=many: it is"),
        ({"torch_wait_policy": "quick"}, "torch_wait_policy=quick: it is one of auto, active"),
    ],
)
def test_what_cannot_be_is_refused(server, make_archive, parameters, sentence):
    make_archive(server.store, THREADS, "refused")
    answer = server.register("refused.mar", **parameters)
    assert answer.status_code == 400
    assert sentence in answer.json()["message"]


def test_the_environment_of_the_server_stands_where_no_model_says_otherwise(prepare_server):
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}
    with prepare_server(environment) as server:
        server.start()
        server.install(THREADS, "as-it-is")
        server.install(THREADS, "own", "torchThreads: 2\ntorchWaitPolicy: passive\n")
        told, own = asked(server, "as-it-is"), asked(server, "own")
        assert told.items() >= {**environment, "threads": 1}.items()
        described = torch_of(server, "as-it-is")
        assert "waitPolicy" not in described
        assert described["waitPolicyWhy"] == (
            "OMP_WAIT_POLICY=ACTIVE, GOMP_SPINCOUNT=7 in the server's environment"
        )
        assert described["threadsWhy"] == "OMP_NUM_THREADS=1 in the server's environment"
        # GOMP_SPINCOUNT would be stronger than the policy.
        assert (own["OMP_WAIT_POLICY"], own["GOMP_SPINCOUNT"]) == ("PASSIVE", None)
        assert (own["threads"], own["OMP_NUM_THREADS"]) == (2, "2")
        server.stop()


SMALL = """
import torch

class Handler:
    def initialize(self, context):
        self.model = torch.nn.Linear(4, 4)

    def sample_input(self):
        return [1.0, 2.0, 3.0, 4.0]

    def handle(self, data, context):
        rows = torch.tensor([row["body"] for row in data])
        return [torch.get_num_threads()] * len(self.model(rows))
"""


@pytest.mark.skipif(CORES < 2, reason="one thread is all there is")
def test_fewer_threads_are_tried_where_there_is_a_sample(server):
    server.install(SMALL, "small")
    described = torch_of(server, "small")
    tried = r"tried: a batch took|its share of the cores: (others left|a batch t)"
    assert re.match(tried, described["threadsWhy"])  # the machine may be busy
    answer = server.predict("small", json=[1.0, 2.0, 3.0, 4.0])
    assert answer.json() == described["threads"]


def test_a_sample_that_fails_is_a_line_in_the_log(server):
    server.skip_logs()
    fails = SMALL.replace("rows = ", "raise ValueError('does not fit')\n        rows = ")
    server.install(fails, "misfit")
    assert "the sample input failed with status 503" in torch_of(server, "misfit")["threadsWhy"]
    server.wait_logged("model_log.log", "The sample input failed: ValueError('does not fit')")
    assert "Traceback" not in server.log("model_log.log")
    assert server.predict("misfit", json=[1.0, 2.0, 3.0, 4.0]).status_code == 503
    server.wait_logged("model_log.log", "Traceback")


def test_a_number_that_is_chosen_is_not_tried(server):
    server.install(SMALL, "small-chosen", "torchThreads: 2\n")
    assert torch_of(server, "small-chosen") == {
        "threads": 2,
        "threadsWhy": "torchThreads of model-config.yaml",
        "waitPolicy": "passive",
        "waitPolicyWhy": "auto: a thread that waits leaves its core to others",
    }


def scale(server, name, count):
    parameters = {"min_worker": count, "max_worker": count, "synchronous": "true"}
    answer = server.management("PUT", f"/models/{name}", params=parameters)
    assert answer.status_code == 200, answer.text


@pytest.mark.skipif(CORES < 2, reason="there is nothing to share")
def test_workers_that_run_share_the_cores_anew_when_their_number_changes(server, wait_for):
    server.install(THREADS, "shared")
    pid = server.worker("shared")["pid"]
    assert asked(server, "shared")["threads"] == CORES
    scale(server, "shared", CORES)
    wait_for(lambda: torch_of(server, "shared")["threads"] == 1)
    assert {asked(server, "shared")["threads"] for _ in range(20)} == {1}
    assert torch_of(server, "shared")["threadsWhy"] == (
        f"auto: its share of {CORES} cores for {CORES} workers"
    )
    scale(server, "shared", 1)
    wait_for(lambda: torch_of(server, "shared")["threads"] == CORES)
    assert asked(server, "shared")["threads"] == CORES
    assert server.worker("shared")["pid"] == pid  # the same process all the time


@pytest.mark.skipif(CORES < 2, reason="there is nothing to share")
def test_a_handler_that_has_set_its_threads_keeps_them(server):
    server.install(DECIDES_ITSELF, "keeps")
    scale(server, "keeps", 2)
    assert {asked(server, "keeps")["threads"] for _ in range(20)} == {3}
