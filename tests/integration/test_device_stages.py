"""A model spread over devices works on as many requests as it has devices, and on more behind them.

The devices are the processor, twice; a stage of the model is where a test can hold requests up.
"""

import os
import signal

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

MODEL = """
import time
from pathlib import Path

from torch import nn

FLAGS = Path({flags!r})


def pass_through(place, x):
    for row in x:
        name = f"{{place}}-{{int(row[0])}}"
        (FLAGS / f"entered-{{name}}").touch()
        while (FLAGS / f"hold-{{name}}").exists():
            time.sleep(0.005)
        if row[1] == place:
            raise ValueError("broken")


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        for place, stage in enumerate(self, 1):
            stage.register_forward_pre_hook(lambda _, args, place=place: pass_through(place, *args))
"""
CONFIG = "overlapStages: true\nresponseTimeout: 2\noptimization: {device_stages: [cpu, cpu]}\n"


class Streamed:
    """The model, and the requests that are held up in it."""

    def __init__(self, server, name, flags, background, wait_for) -> None:
        self.server, self.name, self.flags = server, name, flags
        self._background, self._wait_for = background, wait_for

    def ask(self, number, fails_in=0):
        return self._background(
            self.server.predict, self.name, json=[float(number), float(fails_in)]
        )

    def hold(self, *names) -> None:
        for name in names:
            (self.flags / f"hold-{name}").touch()

    def let_go(self, *names) -> None:
        for name in names:
            (self.flags / f"hold-{name}").unlink()

    def wait_entered(self, name) -> None:
        self._wait_for((self.flags / f"entered-{name}").exists)

    def fill(self):
        """Have the first request in the second stage, and the second one in the first."""
        self.hold("2-1", "1-2")
        answers = [self.ask(1)]
        self.wait_entered("2-1")
        answers.append(self.ask(2))
        self.wait_entered("1-2")
        return answers


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(preload_modules="marserve.handlers.base_handler") as server:
        yield server


@pytest.fixture
def streamed(server, make_archive, tmp_path, background, wait_for):
    flags = tmp_path / "flags"
    flags.mkdir()
    model = tmp_path / "net.py"
    model.write_text(MODEL.format(flags=str(flags)))
    weights = tmp_path / "net.pth"
    same = {"weight": torch.eye(2), "bias": torch.zeros(2)}
    torch.save(
        {f"{stage}.{name}": each for stage in (0, 1) for name, each in same.items()}, weights
    )
    files = {"model_file": str(model), "serialized_file": str(weights)}
    archive = make_archive(server.store, "base_handler", "streamed", CONFIG, **files)
    registered = server.register(archive, initial_workers=1, synchronous="true")
    assert registered.status_code == 200, registered.text
    yield Streamed(server, "streamed", flags, background, wait_for)
    for each in flags.glob("hold-*"):
        each.unlink()
    server.management("DELETE", "/models/streamed")
    archive.unlink()


def test_single_requests_are_in_several_stages_at_a_time(server, streamed):
    answers = streamed.fill()
    answers += [streamed.ask(number) for number in (3, 4, 5, 6)]
    server.wait_queued("streamed", 1)  # two devices and three more are with the worker
    assert not any(answer.done() for answer in answers)
    streamed.let_go("2-1", "1-2")
    assert [answer.result().json()[0] for answer in answers] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_request_that_fails_in_a_stage_fails_alone(stage, streamed):
    answers = [*streamed.fill(), streamed.ask(3, fails_in=stage), streamed.ask(4)]
    streamed.let_go("2-1", "1-2")
    assert [answer.result().status_code for answer in answers] == [200, 200, 503, 200]


def test_those_in_the_stages_of_a_killed_worker_are_answered_by_the_next(server, streamed):
    answers = [*streamed.fill(), streamed.ask(3)]
    server.wait_taken("streamed", 3)
    os.kill(server.worker("streamed")["pid"], signal.SIGKILL)
    streamed.let_go("2-1", "1-2")
    assert [answer.result().json()[0] for answer in answers] == [1.0, 2.0, 3.0]


def test_a_request_that_hangs_in_a_stage_takes_no_other_with_it(streamed):
    answers = [*streamed.fill(), streamed.ask(3)]
    streamed.let_go("1-2")
    assert [answer.result().status_code for answer in answers] == [500, 200, 200]


def test_those_in_the_stages_of_a_model_that_is_taken_away_are_answered(
    server, streamed, background
):
    answers = [*streamed.fill(), streamed.ask(3)]
    server.wait_taken("streamed", 3)
    gone = background(server.management, "DELETE", "/models/streamed")
    streamed.let_go("2-1", "1-2")
    assert [answer.result().status_code for answer in answers] == [200] * 3
    assert gone.result().status_code == 200
