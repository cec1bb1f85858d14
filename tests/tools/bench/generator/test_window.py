"""Which requests count."""

from array import array

import pytest

from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.record import Record
from marserve.tools.bench.generator.window import measured_part


def record(*ended: float, failed: dict[float, str] | None = None) -> Record:
    """Each answer took a tenth of the moment at which it ended: that tells which one it is."""
    made = Record(array("d", ended), array("d", [item / 10 for item in ended]))
    for moment, kind in (failed or {}).items():
        made.fail(moment, kind)
    return made


def test_the_clock_starts_and_stops_with_an_answer():
    seen = record(1, 2, 11, 13, 16, 18, 22, 23, 31)
    part = measured_part(seen, Load(clients=1, seconds=10), warm=10)
    assert part.seconds == 11  # 11 to 22: the first at or behind the warm-up, ten seconds later
    assert list(part.latencies) == pytest.approx([1.3, 1.6, 1.8, 2.2])  # 11 is the start itself


def test_a_server_that_answers_by_the_batch_is_measured_over_whole_batches():
    moments = [batch + member / 1000 for batch in range(1, 20) for member in range(4)]
    part = measured_part(record(*moments), Load(clients=8, seconds=10, step=4), warm=3)
    assert len(part.latencies) == 40
    assert part.seconds == pytest.approx(10)


def test_processes_are_measured_over_the_time_in_which_all_were_on():
    # Each process has its own clock: 10.1 to 12.1 here, 10.2 to 12.4 there.
    seen = record(10.1, 11.0, 12.1)
    seen.extend(record(10.2, 11.1, 12.0, 12.4))
    part = measured_part(seen, Load(clients=2, seconds=2), warm=10)
    assert part.seconds == pytest.approx(2.0)
    assert list(part.latencies) == pytest.approx([1.02, 1.1, 1.11, 1.2, 1.21])


def test_so_many_requests():
    seen = record(*range(1, 100), failed={10.5: "503"})
    part = measured_part(seen, Load(clients=1, requests=20), warm=5)
    assert len(part.latencies) == 19
    assert part.errors == {"503": 1}
    assert part.seconds == 19


def test_errors_count_within_the_time_that_is_measured():
    failures = {3.0: "503", 5.0: "503", 6.5: "timeout", 7.5: "503", 20.5: "503"}
    seen = record(*range(1, 30), failed=failures)
    part = measured_part(seen, Load(clients=1, seconds=10), warm=4)
    assert part.errors == {"503": 2, "timeout": 1}


def test_a_run_of_errors_alone_has_no_answers_but_a_length():
    failures = {float(moment): "500" for moment in range(1, 30)}
    part = measured_part(record(failed=failures), Load(clients=1, seconds=10), warm=4)
    assert not part.latencies
    assert part.errors == {"500": 10}
    assert part.seconds == 10


def test_of_an_open_loop_all_counts_until_the_last_answer():
    # What was due in the warm-up is not recorded in the first place.
    seen = record(10.5, 12, 13, failed={15.5: "timeout"})
    part = measured_part(seen, Load(rate=2, seconds=2), warm=10)
    assert len(part.latencies) == 3
    assert part.errors == {"timeout": 1}
    assert part.seconds == 5  # the server fell behind: that is no throughput of 2/s


@pytest.mark.parametrize("load", [Load(rate=1, seconds=2), Load(rate=1, requests=2)])
def test_a_slow_server_may_keep_pace(load):
    part = measured_part(record(17.5, 18.5), load, warm=10)
    assert part.seconds == 2
    assert len(part.latencies) == 2


@pytest.mark.parametrize("load", [Load(clients=1, seconds=1), Load(rate=1, requests=5)])
def test_nothing_is_nothing(load):
    part = measured_part(Record(), load, warm=10)
    assert part.seconds == 0
    assert not part.latencies
    assert not part.errors


def test_the_timeline_counts_whole_seconds():
    part = measured_part(record(10, 10.5, 11.2, 12.4, 12.6), Load(clients=1, seconds=2.5), warm=10)
    assert part.timeline == [1, 1]  # the sixth of a second that is left over is no slow second
