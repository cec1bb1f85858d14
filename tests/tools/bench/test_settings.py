"""Settings of a sweep: set, checked, and put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from marserve.tools.bench import main
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.model_server import ModelServer, ServedModel
from marserve.tools.bench.settings import ServedSettings, served_settings


class FakeServer:
    """Does to one model what a server does; ``is_live`` makes it a marserve."""

    model = "m"

    def __init__(self, *, is_live: bool = True, stubborn: dict[str, str] | None = None) -> None:
        self.is_live = is_live
        self.stubborn = stubborn or {}  # what model-config.yaml says
        self.calls: list[str] = []
        #: By the handler; by default what the archive says.
        self.metadata: dict[str, Any] | None = None
        self.broken: set[str] = set()
        self.interrupted: BaseException | None = None  # of who waits for a registration
        self.served: dict[str, Any] | None = None
        self.register("m.mar", initial_workers=2, batch_size="3", max_batch_delay="7")
        self.calls.clear()

    def find(self) -> ServedModel | None:
        if self.served is None:
            return None
        chosen, workers = self.served["chosen"], self.served["workers"]
        settings = {"batch_size": "1", "max_batch_delay": "100", **chosen, **self.stubborn}
        if self.is_live:
            has_goal = chosen.get("max_latency_ms", "0") != "0"
            usual = {"batch_policy": "adaptive" if has_goal else "fixed", "max_latency_ms": "0"}
            settings = {**usual, "torch_threads": "auto", **settings}
        return ServedModel(
            version="1.0",
            archive=self.served["url"],
            settings=settings,
            chosen=dict(chosen),
            scale={"min_worker": workers, "max_worker": workers},
            ready_workers=workers,
            queue_size=100,
            is_live=self.is_live,
            last_error="",
        )

    def describe(self) -> ServedModel:
        found = self.find()
        if found is None:
            raise BenchError("There is no model m.")
        return found

    def handler_metadata(self) -> dict[str, Any]:
        if self.metadata is not None:
            return self.metadata
        assert self.served is not None
        return {"optimization": {"precision": self.served["url"].removeprefix("/tmp/")}}

    def change(self, **parameters: Any) -> None:
        self._call("change", parameters)
        assert self.served is not None
        for name in parameters.pop("unset", "").split(","):
            self.served["chosen"].pop(name, None)
        self.served["workers"] = parameters.pop("min_worker", self.served["workers"])
        parameters.pop("max_worker", None)
        assert self.is_live or not parameters
        if parameters.get("batch_policy", "adaptive") != "adaptive":
            self.served["chosen"].pop("max_latency_ms", None)
        self.served["chosen"] |= parameters

    def register(self, url: str, initial_workers: int, **parameters: Any) -> None:
        self._call("register", {"url": url, **parameters})
        assert self.served is None
        self.served = {"url": url, "workers": initial_workers, "chosen": parameters}
        if self.interrupted is not None:
            raise self.interrupted

    def unregister(self, version: str) -> None:
        self._call("unregister", {})
        assert version == "1.0"
        self.served = None

    def _call(self, name: str, parameters: dict[str, Any]) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise BenchError(f"The server does not {name}.")


@contextmanager
def settings_of(server: FakeServer, **how: Any) -> Iterator[ServedSettings]:
    with served_settings(cast("ModelServer", server), **how) as opened:
        yield opened


SWEEP = (
    Point(batch_size=8),
    Point(batch_size=8, max_batch_delay_ms=20.0),
    Point(workers=4),
    Point(workers=1, batch_size=1),
)


@pytest.mark.parametrize("is_live", [True, False])
def test_what_is_asked_for_is_served_and_what_was_before_after(is_live):
    server = FakeServer(is_live=is_live)
    before = server.describe()
    with settings_of(server) as settings:
        for point in SWEEP:
            settings.set(point)
            now = server.describe()
            assert now.settings["batch_size"] == str(point.batch_size or 3)
            assert now.settings["max_batch_delay"] == ("20" if point.max_batch_delay_ms else "7")
            assert now.scale["min_worker"] == (point.workers or 2)
    assert server.describe() == before


def test_a_live_server_is_never_left_without_the_model():
    server = FakeServer()
    with settings_of(server) as settings:
        settings.set(Point(batch_size=8, workers=1))
    assert set(server.calls) == {"change"}


@pytest.mark.parametrize(
    ("point", "policy", "goal"),
    [
        (Point(max_latency_ms=20), "adaptive", "20"),
        (Point(batch_policy="adaptive", max_latency_ms=20), "adaptive", "20"),
        (Point(batch_policy="greedy"), "greedy", "0"),
        (Point(batch_size=2), "adaptive", "500"),
    ],
)
def test_a_goal_goes_with_the_policy_that_has_one(point, policy, goal):
    server = FakeServer()
    server.change(batch_policy="adaptive", max_latency_ms="500")
    before = server.describe()
    with settings_of(server) as settings:
        settings.set(point)
        now = server.describe().settings
        assert (now["batch_policy"], now["max_latency_ms"]) == (policy, goal)
    assert server.describe() == before


def test_what_is_set_already_is_not_set_again():
    server = FakeServer(is_live=False)
    with settings_of(server) as settings:
        settings.set(Point(batch_size=3, max_batch_delay_ms=7, workers=2))
    assert server.calls == []


def fail(settings: ServedSettings, point: Point, error: BaseException) -> None:
    settings.set(point)
    raise error


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("error", [BenchError("It broke."), KeyboardInterrupt(), ValueError("x")])
def test_it_is_put_back_whatever_happens(is_live, error):
    server = FakeServer(is_live=is_live)
    before = server.describe()
    with pytest.raises(type(error)), settings_of(server) as settings:
        fail(settings, Point(batch_size=8, workers=4), error)
    assert server.describe() == before


def test_a_model_that_was_lost_in_between_is_registered_again():
    server = FakeServer(is_live=False)
    before = server.describe()
    with settings_of(server) as settings:
        server.broken.add("register")
        with pytest.raises(BenchError, match="does not register"):
            settings.set(Point(batch_size=8))
        assert server.find() is None
        server.broken.clear()
    assert server.describe() == before


def test_that_it_could_not_be_put_back_is_told_with_what_went_wrong_before(monkeypatch, capsys):
    def run(_options, _command, _reports):
        server = FakeServer()
        with settings_of(server) as settings:
            settings.set(Point(batch_size=8))
            server.broken.add("change")
            raise BenchError("It broke.")

    monkeypatch.setattr(main, "_run", run)
    assert main.main(["m"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "marserve bench: It broke.",
        "marserve bench: The original settings could not be restored: The server does not change. "
        "m has batch_size=8 instead of 3.",
    ]


def test_a_model_that_cannot_be_registered_again_is_told_with_its_registration():
    server = FakeServer(is_live=False)
    lost = (
        "The server does not register. m is not served any more: register it again, with POST "
        "/models?url=m.mar&model_name=m&batch_size=3&max_batch_delay=7"
    )
    server.broken.add("register")
    with pytest.raises(BenchError) as raised, settings_of(server) as settings:
        settings.set(Point(batch_size=8))
    assert str(raised.value) == f"The original settings could not be restored: {lost}"


def test_a_server_that_keeps_what_it_had_is_told():
    server = FakeServer(is_live=False, stubborn={"batch_size": "3"})
    with (
        pytest.raises(BenchError, match="keeps batch_size=3 instead of 8"),
        settings_of(server) as settings,
    ):
        settings.set(Point(batch_size=8))


@pytest.mark.parametrize(
    ("point", "what"),
    [
        (Point(batch_policy="adaptive"), "batch_policy"),
        (Point(max_latency_ms=5), "max_latency_ms"),
        (Point(batch_size="auto"), "batch_size=auto"),
        (Point(precision="bf16"), "precision"),
        (Point(torch_threads=1), "torch_threads"),
    ],
)
def test_what_only_marserve_knows_is_not_asked_of_others(point, what):
    server = FakeServer(is_live=False)
    with (
        pytest.raises(BenchError, match=f"does not support {what}"),
        settings_of(server) as settings,
    ):
        settings.set(point)
    assert server.calls == []


# -- models that are registered for the run, and precision -----------------------------------------


def archive_for(precision: str | None) -> str:
    return f"/tmp/{precision}" if precision else "m.mar"


def unregistered() -> FakeServer:
    server = FakeServer()
    server.served = None
    return server


def test_a_model_is_there_for_the_run_only():
    server = unregistered()
    with settings_of(server, archive_for=archive_for, register=True) as settings:
        settings.set(Point(workers=2))
        assert server.describe().scale["min_worker"] == 2
    assert server.find() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BenchError("Nothing answers.")])
def test_a_registration_that_nobody_waited_for_is_undone(error):
    server = unregistered()
    server.interrupted = error
    with (
        pytest.raises(type(error)),
        settings_of(server, archive_for=archive_for, register=True),
    ):
        pass
    assert "register" in server.calls
    assert server.find() is None


def test_a_model_that_is_served_already_stays():
    server = FakeServer()
    with (
        pytest.raises(BenchError, match="is already served"),
        settings_of(server, archive_for=archive_for, register=True),
    ):
        pass
    assert server.find() is not None
    assert server.calls == []


def test_a_precision_is_another_archive():
    server = unregistered()
    seen = []
    with settings_of(server, archive_for=archive_for, register=True) as settings:
        for precision in ("fp32", "bf16", "bf16", None):
            settings.set(Point(precision=precision, batch_size=8))
            seen.append(server.describe().archive)
    assert seen == ["/tmp/fp32", "/tmp/bf16", "/tmp/bf16", "m.mar"]
    assert server.calls.count("register") == 4  # of them one before the first point
    assert server.find() is None


def test_a_precision_needs_the_archive():
    with (
        pytest.raises(BenchError, match="--register"),
        settings_of(FakeServer()) as settings,
    ):
        settings.set(Point(precision="bf16"))


@pytest.mark.parametrize(
    ("metadata", "output"),
    [
        ({}, "its handler reports none:"),
        ({"optimization": "bf16"}, "its handler reports none:"),
        ({"optimization": {"precision": "fp32"}}, "its handler reports fp32:"),
    ],
)
def test_a_precision_that_the_handler_does_not_take_over_is_told(metadata, output):
    server = unregistered()
    server.metadata = metadata
    with (
        pytest.raises(BenchError, match=f"archive sets precision bf16, but {output}"),
        settings_of(server, archive_for=archive_for, register=True) as settings,
    ):
        settings.set(Point(precision="bf16"))
    assert server.find() is None


def test_who_says_nothing_computes_in_fp32():
    server = unregistered()
    server.metadata = {}
    with settings_of(server, archive_for=archive_for, register=True) as settings:
        settings.set(Point(precision="fp32"))
        assert server.describe().archive == "/tmp/fp32"


# -- what holds for the life of a worker -----------------------------------------------------------


def test_what_only_a_registration_says_is_registered_and_put_back():
    server = FakeServer()
    server.unregister("1.0")
    server.register("m.mar", initial_workers=1, compiled_batch_sizes="1,4")
    before, _ = server.served, server.calls.clear()
    with settings_of(server) as settings:
        settings.set(Point(torch_threads=1))
        assert server.served is not None
        assert server.served["chosen"] == {"torch_threads": "1", "compiled_batch_sizes": "1,4"}
        settings.set(Point(torch_threads=1, batch_size=8))
        assert server.calls == ["unregister", "register", "change"]  # that one, while it serves
        settings.set(Point(torch_threads=1, outstanding_batches=2, batch_size=8))
        assert server.served["chosen"]["outstanding_batches"] == "2"
    assert server.served == before


def test_an_archive_that_keeps_its_threads_is_told():
    server = FakeServer(stubborn={"torch_threads": "4"})
    with (
        pytest.raises(BenchError, match="keeps torch_threads=4 instead of 1"),
        settings_of(server) as settings,
    ):
        settings.set(Point(torch_threads=1))
