import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.context import Context
from marserve.backend.metrics import MetricsStore
from marserve.backend.profiling.batch_sizes import SizeProfiler
from marserve.backend.profiling.measurements import Measurements
from marserve.backend.protocol import Load, Prediction, Profiled, Reply, Trials
from marserve.backend.service import Service

Cost = Callable[[int], float]


@dataclass
class Bench:
    """A model of known cost, the clock it takes its time from, and the memory it lives in."""

    seconds: Cost = lambda size: 0.01 + 0.001 * size
    bytes: Cost = lambda size: 10 * size
    available_bytes: int | None = None
    extra: dict[int, float] = field(default_factory=dict)  # what the nth run takes beyond that
    replies: dict[int, Reply | BaseException] = field(default_factory=dict)  # by size
    now: float = 100.0
    runs: list[int] = field(default_factory=list)
    highest: float = 0

    def clock(self) -> float:
        return self.now

    def run(self, size: int) -> Reply:
        self.now += self.seconds(size) + self.extra.get(len(self.runs), 0.0)
        self.runs.append(size)
        self.highest = max(self.highest, self.bytes(size))
        reply = self.replies.get(size, Reply())
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def reset_peak(self) -> None:
        self.highest = 0

    def peak(self) -> int:
        return int(self.highest)

    def available(self) -> int | None:
        return self.available_bytes

    def release(self) -> None:
        raise AssertionError("whoever made the memory releases it")

    def profile(self, *sizes: int, seconds: float = 2.0) -> Profiled:
        profiler = SizeProfiler(self.run, self, self.clock, seconds)
        for _ in profiler.runs(sizes):
            pass
        return profiler.found


def sizes_of(findings: Profiled) -> list[int]:
    return [size for size, _, _ in findings.costs]


def test_each_size_is_warmed_up_and_timed_three_times():
    bench = Bench()
    findings = bench.profile(1, 2, 4)
    assert bench.runs == [1] * 4 + [2] * 4 + [4] * 4
    assert [row[:2] for row in findings.costs] == [
        (1, pytest.approx(0.011)),
        (2, pytest.approx(0.012)),
        (4, pytest.approx(0.014)),
    ]
    assert [row[2] for row in findings.costs] == [10, 20, 40]
    assert (findings.note, findings.too_large) == ("", 0)


def test_the_median_counts_and_neither_warm_up_nor_outlier():
    findings = Bench(extra={0: 0.5, 2: 0.1, 3: 0.001}).profile(1)
    assert findings.costs[0][1] == pytest.approx(0.012)


def test_sizes_are_run_smallest_first_and_each_once():
    assert sizes_of(Bench().profile(4, 1, 2, 4)) == [1, 2, 4]


# -- time ------------------------------------------------------------------------------------------


def test_a_slow_model_is_warmed_up_and_timed_once():
    bench = Bench(seconds=lambda size: 5.0 * size)
    findings = bench.profile(1, 2)
    assert bench.runs == [1, 1]
    assert findings.costs == [(1, pytest.approx(5.0), 10)]
    assert "size 2 did not fit the 2 s" in findings.note
    assert findings.too_large == 0


def test_a_slow_first_warm_up_does_not_stand_for_the_cost():
    findings = Bench(extra={0: 30.0}).profile(1)
    assert findings.costs == [(1, pytest.approx(0.011), 10)]


def test_a_warm_up_far_beyond_what_was_foretold_is_not_followed_by_a_timed_run():
    bench = Bench(extra={4: 30.0})
    findings = bench.profile(1, 2, 4)
    assert bench.runs == [1] * 4 + [2]
    assert sizes_of(findings) == [1]
    assert "size 2 did not fit" in findings.note


def test_a_size_is_not_begun_that_would_not_fit():
    bench = Bench(seconds=lambda size: 0.1 * size**0.5)
    findings = bench.profile(1, 4, 16, 64, seconds=2.5)
    assert sizes_of(findings) == [1, 4, 16]  # 0.4 and 0.8 s are spent, and then 0.4 for each run
    assert bench.now - 100.0 <= 2.5
    assert "size 64" in findings.note


def test_a_size_is_not_begun_for_its_warm_up_alone():
    bench = Bench(seconds=lambda size: 0.5 * size)
    assert sizes_of(bench.profile(1, 2, seconds=3.5)) == [1]  # 1.5 s are left, for a run of 1 s
    assert bench.runs == [1] * 4


@given(
    alpha=st.floats(0, 1),
    beta=st.floats(1e-4, 0.2),
    seconds=st.floats(0, 5),
    sizes=st.lists(st.integers(1, 128), min_size=1, max_size=8),
)
def test_the_budget_is_kept_but_for_the_first_size(alpha, beta, seconds, sizes):
    bench = Bench(seconds=lambda size: alpha + beta * size)
    findings = bench.profile(*sizes, seconds=seconds)
    smallest = min(sizes)
    assert sizes_of(findings)[0] == smallest
    assert bench.now - 100.0 <= max(seconds, 2 * bench.seconds(smallest)) + 1e-6
    assert all(cost == pytest.approx(bench.seconds(size)) for size, cost, _ in findings.costs)
    assert bool(findings.note) == (len(findings.costs) < len(set(sizes)))


# -- memory ----------------------------------------------------------------------------------------


def test_a_size_is_not_run_whose_peak_would_not_fit():
    bench = Bench(bytes=lambda size: (100 + 10 * size) * 2**20, available_bytes=210 * 2**20)
    findings = bench.profile(1, 2, 4, 8, 16)
    assert sizes_of(findings) == [1]  # all of 110 MiB may be the row's: 220 for two
    assert findings.too_large == 2
    assert "size 2 would take about 220 MiB, and there are 210 MiB" in findings.note


def test_the_second_row_tells_what_is_a_constant():
    bench = Bench(bytes=lambda size: 100 + 10 * size, available_bytes=280)
    findings = bench.profile(1, 2, 4, 8, 16)
    assert sizes_of(findings) == [1, 2, 4, 8]
    assert findings.too_large == 16
    assert 16 not in bench.runs


def test_a_peak_is_of_its_own_size():
    findings = Bench(bytes=lambda size: 100 // size).profile(1, 2, 4)
    assert [peak for _, _, peak in findings.costs] == [100, 50, 25]


def test_some_room_is_left_over():
    assert Bench(available_bytes=40).profile(1, 2, 4).too_large == 4
    assert Bench(available_bytes=45).profile(1, 2, 4).too_large == 0


@pytest.mark.parametrize(
    "reply", [Reply(507, "Out of resources"), Reply(predictions=[Prediction(b"", 507)])]
)
def test_running_out_of_memory_ends_profiling_and_is_remembered(reply):
    bench = Bench(replies={4: reply})
    findings = bench.profile(1, 2, 4, 8)
    assert sizes_of(findings) == [1, 2]
    assert (findings.note, findings.too_large) == ("size 4 ran out of memory", 4)
    assert bench.runs.count(4) == 1


# -- gain ------------------------------------------------------------------------------------------


def test_it_ends_when_throughput_gained_too_little_twice():
    bench = Bench(seconds=lambda size: 0.001 * size)
    findings = bench.profile(1, 8, 16, 32)
    assert sizes_of(findings) == [1, 8, 16]
    assert "less than 3%" in findings.note
    assert findings.too_large == 0


def test_a_gain_in_between_lets_it_go_on():
    steps = {1: 1.0, 16: 16.0, 32: 16.0, 64: 64.0, 128: 64.0}
    bench = Bench(seconds=lambda size: 0.001 * steps[size])
    assert sizes_of(bench.profile(1, 16, 32, 64, 128)) == [1, 16, 32, 64, 128]


def test_threads_that_wait_for_each_other_do_not_end_it_at_small_sizes():
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    bench = Bench(seconds=lambda size: 0.0009 if size == 1 else 0.01 + 0.0002 * size)
    assert sizes_of(bench.profile(*sizes)) == sizes


def test_profiling_whose_last_size_gained_little_is_complete():
    assert Bench(seconds=lambda size: 0.001 * size).profile(1, 2, 4).note == ""


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (Reply(503, "Prediction failed"), "size 4 failed with status 503: Prediction failed"),
        (Reply(299, "fine?"), "size 4 failed with status 299: fine?"),
        (
            Reply(predictions=[Prediction(b"", 200), Prediction(b"", 400)]),
            "size 4 failed with status 400",
        ),
        (SystemExit(3), "size 4 failed: SystemExit(3)"),
    ],
)
def test_a_run_that_fails_ends_profiling_and_its_size_is_remembered(reply, note):
    findings = Bench(replies={4: reply}).profile(1, 2, 4, 8)
    assert sizes_of(findings) == [1, 2]
    assert (findings.note, findings.too_large) == (note, 4)


def test_a_model_that_fails_at_once_has_no_costs():
    findings = Bench(replies={1: Reply(503, "no")}).profile(1, 2)
    assert (findings.costs, findings.note) == ([], "size 1 failed with status 503: no")
    assert findings.too_large == 0


# -- a model as a whole ----------------------------------------------------------------------------


def make_load(model_dir: Path, *sizes: int, **changes: Any) -> Load:
    plain = ("m", str(model_dir), "h", 4, None, True, 1000, "1")
    return Load(*plain, trials=Trials(sizes=list(sizes), seconds=60.0), **changes)


def profile_model(load: Load, service: Service, **options: Any) -> Profiled:
    return Measurements(load, service, **options).run_trials().profiled


def make_service(handle: Callable[[Any, Context], Any], sample: Any = "a sample") -> Service:
    context = Context("m", "/m", None, 4, None, "1", metrics=MetricsStore())
    return Service(handle, context, owner=SimpleNamespace(sample_input=lambda: sample))


def test_the_handler_gets_batches_of_the_sample_as_from_clients(tmp_path):
    (tmp_path / "rows.json").write_text('{"a": 1}')
    seen = []

    def handle(data, context):
        seen.append((data, list((context.request_ids or {}).values())))
        assert context.get_request_header(0, "Content-Type") == "application/json"
        data[0]["body"]["a"] = "changed in place"
        return data

    findings = profile_model(make_load(tmp_path, 1, 2, samples=["rows.json"]), make_service(handle))
    assert sizes_of(findings) == [1, 2]
    rows, ids = seen[-1]
    assert rows == [{"body": {"a": "changed in place"}}, {"body": {"a": 1}}]
    assert len(set(ids)) == 2
    assert {len(rows) for rows, _ in seen} == {1, 2}


@pytest.mark.parametrize(
    ("error", "note", "too_large"),
    [
        (ValueError("at size 4"), "size 4 failed with status 503: Prediction failed", 4),
        (RuntimeError("CUDA out of memory"), "size 4 ran out of memory", 4),
    ],
)
def test_a_handler_that_raises_at_a_size_keeps_the_costs_so_far(tmp_path, error, note, too_large):
    def handle(data, _context):
        if len(data) == 4:
            raise error
        return data

    findings = profile_model(make_load(tmp_path, 1, 2, 4, 8), make_service(handle))
    assert sizes_of(findings) == [1, 2]
    assert (findings.note, findings.too_large) == (note, too_large)


def test_what_the_gpus_allocator_kept_for_profiling_is_released(tmp_path, monkeypatch):
    kept = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda _: 100,
        max_memory_allocated=lambda _: 100 + 10 * len(kept),
        memory_reserved=lambda _: 100,
        mem_get_info=lambda _: (1000, 2000),
        reset_peak_memory_stats=lambda _: None,
        empty_cache=kept.clear,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, Tensor=bytes))

    def handle(data, _context):
        kept[:] = ["block"] * len(data)
        return ["answer"] * len(data)

    load = dataclasses.replace(make_load(tmp_path, 1, 2), gpu_id=0)
    findings = profile_model(load, make_service(handle))
    assert [(size, peak) for size, _, peak in findings.costs] == [(1, 10), (2, 20)]
    assert kept == []


def never(_data: Any, _context: Context) -> Any:
    raise AssertionError("there is nothing to run")


@pytest.mark.parametrize(
    ("changes", "sample", "note"),
    [
        ({}, None, "there is no sample input"),
        ({"samples": ["../outside"]}, "a sample", "outside the model's directory"),
        ({"samples": ["gone"]}, "a sample", "cannot be read"),
        ({"asynchronous": True}, "a sample", "coroutine"),
    ],
)
def test_without_anything_to_run_there_is_no_profiling_but_a_reason(
    tmp_path, changes, sample, note, caplog
):
    with caplog.at_level(logging.INFO):
        findings = profile_model(make_load(tmp_path, 1, 2, **changes), make_service(never, sample))
    assert findings.costs == []
    assert note in findings.note
    [line] = caplog.messages
    assert line == f"Batch sizes profiled: none - {findings.note}"


def test_the_log_has_it_in_one_line(tmp_path, caplog):
    ticks = iter(range(1000))
    with caplog.at_level(logging.INFO):
        profile_model(
            make_load(tmp_path, 1, 2),
            make_service(lambda data, _: data),
            clock=lambda: next(ticks) / 1000,
        )
    assert caplog.messages == ["Batch sizes profiled: 1 in 1 ms, 2 in 1 ms"]


def test_a_clock_that_fails_does_not_fail_the_load(tmp_path):
    def broken():
        raise OSError

    findings = profile_model(make_load(tmp_path, 1), make_service(never), clock=broken)
    assert (findings.costs, findings.too_large) == ([], 0)
    assert "profiling failed" in findings.note
