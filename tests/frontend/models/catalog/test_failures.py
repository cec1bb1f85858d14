"""What failed is tried again; the rest is in `test_convergence`."""

from marserve.frontend.models.catalog.failures import Failures
from marserve.frontend.models.catalog.plan import Unregister


def test_what_has_failed_for_days_is_still_tried_again() -> None:
    failures = Failures(lambda: 7.0)
    pauses = [failures.note("m", Unregister("1"), ValueError()) for _ in range(1100)]
    assert (pauses[0], pauses[-1]) == (1, 300)
    assert failures.waiting(7.0) == failures.names == {"m"}
    assert failures.next_retry(7.0) == 307


def test_what_is_due_is_no_next_moment() -> None:
    failures = Failures(lambda: 0.0)
    for version in ("1", "2", "2"):
        failures.note("m", Unregister(version), ValueError())
    assert [failures.next_retry(now) for now in (0.0, 1.0, 2.0)] == [1, 2, float("inf")]
    failures.forget("m", but={"1"})
    assert [each.version for each in failures.of("m")] == ["1"]
