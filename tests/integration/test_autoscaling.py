"""Workers between minimum and maximum: load makes a second one come, silence makes it go."""

import pytest

pytestmark = pytest.mark.integration

BETWEEN = "minWorkers: 1\nmaxWorkers: 2\n"
QUICK = BETWEEN + "autoscale:\n  growAfterSec: 0.2\n  shrinkAfterSec: 1\n"


def workers(server, name):
    return len(server.describe(name)["workers"])


def times_grown(server, name):
    return server.log("ts_log.log").count(f"Model {name} 1.0: 2 workers: a request has waited")


@pytest.fixture
def load(server, background, make_gate):
    """Keeps two requests of a model waiting, until it is called off."""

    def begin(name):
        gates = [make_gate(), make_gate()]
        answers = [
            background(server.ask, name, id=n, gate=gate.path) for n, gate in enumerate(gates)
        ]

        def end():
            for opened in [background(gate.open) for gate in gates]:  # in whatever order they came
                opened.result(20)
            assert [answer.result(20).json()["id"] for answer in answers] == [0, 1]

        return end

    return begin


def test_a_worker_comes_with_the_load_and_goes_with_it(server, handlers, load, wait_for):
    server.install(handlers / "lab.py", "gated", QUICK)
    assert workers(server, "gated") == 1
    end = load("gated")
    server.wait_workers("gated", "READY", "READY")
    end()
    wait_for(lambda: workers(server, "gated") == 1)
    described = server.describe("gated")
    assert (described["minWorkers"], described["maxWorkers"]) == (1, 2)
    assert times_grown(server, "gated") == 1
    server.wait_logged("ts_log.log", "Model gated 1.0: 1 workers: one was idle")


def test_a_worker_that_cannot_come_is_not_asked_for_again_and_again(
    server, handlers, load, tmp_path, wait_for
):
    flag = tmp_path / "loaded"
    only_one = f"""
if os.path.exists({str(flag)!r}):
    raise MemoryError("no room for another")
open({str(flag)!r}, "w").close()
"""
    source = (handlers / "lab.py").read_text() + only_one
    server.install(source, "single", QUICK)
    server.install(handlers / "lab.py", "double", QUICK)
    end_single = load("single")
    server.wait_logged("ts_log.log", "Model single 1.0 keeps its workers: ")
    wait_for(lambda: workers(server, "single") == 1)
    # Meanwhile another model comes and goes, so there was time enough for many tries.
    end_double = load("double")
    server.wait_workers("double", "READY", "READY")
    end_double()
    wait_for(lambda: workers(server, "double") == 1)
    assert times_grown(server, "single") == 1
    assert workers(server, "single") == 1
    end_single()


def test_num_requests_needs_no_bound_on_workers_of_its_own(
    server, handlers, load, gate, background
):
    """As many clients as it says keep no more workers busy; if there are more, they get more."""
    server.install(handlers / "lab.py", "said", QUICK, num_requests=1)
    server.install(handlers / "lab.py", "beside", QUICK)
    one = background(server.ask, "said", gate=gate.path)
    gate.wait_entered()
    end_double = load("beside")  # meanwhile there is time enough to scale
    server.wait_workers("beside", "READY", "READY")
    assert workers(server, "said") == 1
    end_double()
    gate.open()
    assert one.result(20).status_code == 200
    end = load("said")
    server.wait_workers("said", "READY", "READY")
    end()


def test_only_where_it_is_switched_on(server, handlers, load):
    server.install(handlers / "lab.py", "still", BETWEEN)
    server.install(handlers / "lab.py", "moving", QUICK.replace("0.2", "2"))
    end_still, end_moving = load("still"), load("moving")
    server.wait_workers("moving", "READY", "READY")
    assert workers(server, "still") == 1
    end_still()
    end_moving()
