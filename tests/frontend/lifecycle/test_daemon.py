import os

import pytest

from marserve.frontend.lifecycle.daemon import Outcome, StartReport, wait_for_outcome


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_listening(pipe):
    reader, writer = pipe
    report = StartReport(writer)
    report.listening("http://here", ["a", "b"], ["c"])
    report.failed("too late")
    assert wait_for_outcome(reader, 10) == Outcome("http://here", ["a", "b"], failed=["c"])


def test_failed(pipe):
    reader, writer = pipe
    StartReport(writer).failed("no port" + "!" * 100_000)  # more than a pipe holds
    outcome = wait_for_outcome(reader, 10)
    assert outcome is not None
    assert outcome.error.startswith("no port!")


def test_dead_without_a_report(pipe):
    reader, writer = pipe
    os.close(writer)
    assert wait_for_outcome(reader, 10) == Outcome()


def test_a_start_that_takes_longer(pipe):
    reader, writer = pipe
    assert wait_for_outcome(reader, 0) is None
    os.close(writer)


def test_without_a_starter_reports_are_ignored():
    reader, writer = os.pipe()
    os.close(reader)
    StartReport(writer).listening("http://here", [])
    StartReport(None).failed("no port")


def test_workers_do_not_inherit_it(pipe):
    _, writer = pipe
    os.set_inheritable(writer, True)
    StartReport(writer)
    assert not os.get_inheritable(writer)
    os.close(writer)
