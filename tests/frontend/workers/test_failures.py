"""How failures read in the log."""

from marserve.frontend.workers.failures import Failure, report


def test_an_exception_of_several_lines_passed_for_lines_of_the_log() -> None:
    failure = Failure("ValueError: a\n2026-01-01 [INFO ] forged\x07", "", 0.0)
    assert report(failure, "W-9000-m_1.0").splitlines() == [
        "Backend worker error: W-9000-m_1.0: ValueError: a",
        "    2026-01-01 [INFO ] forged\\x07",
    ]
