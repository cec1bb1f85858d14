"""What failed is tried again; the rest is in `test_convergence`."""

from marserve.frontend.catalog.failed_steps import FailedSteps
from marserve.frontend.catalog.plan import Register, Unregister
from marserve.frontend.configuration.model_entry import ModelEntry


def test_what_has_failed_for_days_is_still_tried_again():
    failures = FailedSteps(lambda: 7.0)
    pauses = [failures.note("m", Unregister("1"), ValueError()) for _ in range(1100)]
    assert (pauses[0], pauses[-1]) == (1, 300)
    assert [each.retry_at for each in failures.of("m")] == [307]


def test_failures_of_other_versions_are_kept():
    failures = FailedSteps(lambda: 0.0)
    for version in ("1", "2", "2"):
        failures.note("m", Unregister(version), ValueError())
    assert [each.retry_at for each in failures.of("m")] == [1, 2]
    failures.forget("m", keep={"1"})
    assert [each.version for each in failures.of("m")] == ["1"]
    failures.forget("m")
    assert failures == {}


def test_the_secrets_of_urls_are_not_shown():
    failures = FailedSteps(lambda: 0.0)
    entry = ModelEntry("https://user:pa55@example.org/m.mar?signature=t0p")
    failures.note("m", Register("1", entry), ValueError())
    failures.note("m", Unregister("2"), ValueError())
    shown = [each.described(0.0)["modelUrl"] for each in failures.of("m")]
    assert shown == ["https://example.org/m.mar", ""]
