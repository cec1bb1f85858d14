import pytest
from steps import result_of

from marserve.backend.protocol import Input, Part
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.jobs import Job
from marserve.frontend.tracing.time_lines import (
    FAILED,
    REFUSED,
    ModelLines,
    NestedLines,
    TimeLine,
    TimeLines,
)


@pytest.fixture
def server():
    return TimeLines()


def line(model: ModelLines, id_: str, took: float, *, at: float = 0.0, **more: object) -> TimeLine:
    return TimeLine(id_, model, at, at, None, at + took)._replace(**more)


def ids(lines: list[TimeLine]) -> list[str]:
    return [each.id for each in lines]


def test_the_slowest_of_all_models_come_first(server):
    first, second = server.of_model("a", "1"), server.of_model("b", "1")
    for number in range(30):
        first.add(line(first, f"a{number}", number))
    second.add(line(second, "b", 28.5))
    assert ids(result_of(server.slowest(4, lambda _: True))) == ["a29", "b", "a28", "a27"]
    assert ids(result_of(server.slowest(2, lambda each: each.model is second))) == ["b"]


def test_many_quick_requests_do_not_displace_a_slow_one(server):
    model = server.of_model("m", "1")
    model.add(line(model, "slow", 5.0))
    for number in range(20_000):
        model.add(line(model, f"quick{number}", 0.001, at=number / 1000))
    assert ids(result_of(server.slowest(1, lambda _: True))) == ["slow"]
    assert server.find("slow") is not None
    assert server.find("quick19999") is not None
    assert server.find("quick100") is None
    assert len(server.recent) == 10_000


def test_each_half_minute_has_its_own_slowest_and_ten_are_kept(server):
    model = server.of_model("m", "1")
    for minute in range(20):
        for number in range(50):
            model.add(line(model, f"{minute}/{number}", 100 - minute, at=minute * 60.0))
    kept = ids(result_of(server.slowest(1000, lambda _: True)))
    assert len(kept) == 200
    assert {each.partition("/")[0] for each in kept} == {str(minute) for minute in range(10, 20)}


def test_failures_are_kept_apart_from_a_flood_of_refusals(server):
    model = server.of_model("m", "1")
    model.add(line(model, "failed", 1.0, outcome=FAILED, status=500, error="no"))
    for number in range(1000):
        model.refused(f"refused{number}", 5.0, 5.0, 503, "full")
    for number in range(1000):
        model.add(line(model, f"shed{number}", 1.0, at=5.0, outcome=REFUSED))
    found = result_of(server.failed(1000, lambda _: True))
    assert len(found) == 21
    assert found[-1].id == "failed"
    assert {each.outcome for each in found[:-1]} == {"refused"}
    assert server.find("shed999") is not None


def test_a_slow_request_keeps_the_sizes_of_its_batch(server):
    model = server.of_model("m", "1")
    inputs = [Input("id", {}, [Part("body", "", bytes(size))]) for size in (10, 500)]
    batch = Batch([Job(each, 0.0, None) for each in inputs], 0.0)
    model.add(line(model, "slow", 5.0, batch=batch))
    batch.release()
    (found,) = result_of(server.slowest(1, lambda _: True))
    assert found.batch is not None
    assert list(found.batch.request_bytes) == [10, 500]


def test_an_unregistered_model_has_no_slow_requests(server):
    model = server.of_model("m", "1")
    model.add(line(model, "slow", 5.0))
    model.close()
    model.close()
    assert result_of(server.slowest(1, lambda _: True)) == []
    assert server.find("slow") is not None  # still in the ring


def test_a_request_keeps_a_hundred_nested_lines_in_all_depths(server):
    model = server.of_model("m", "1")

    def tree(depth):
        nested = NestedLines()
        for _ in range(9 if depth else 0):
            nested.nest(tree(depth - 1))
        return line(model, "a", 1.0, nested=nested)

    def count(each):
        return sum(1 + count(inner) for inner in each.nested)

    assert [count(tree(depth)) for depth in range(4)] == [0, 9, 90, 99]
    assert len(tree(3).nested) == 9
