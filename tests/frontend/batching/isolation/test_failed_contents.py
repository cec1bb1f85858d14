import fakes
import pytest
from cpu_time import least_cpu_seconds

from marserve.backend.protocol import Input, Part
from marserve.frontend.batching.isolation import failed_contents
from marserve.frontend.batching.isolation.failed_contents import FailedContents
from marserve.frontend.batching.jobs import Group


@pytest.fixture
def job_of(loop):
    """A job with this body, or these parts."""

    def make(body=b"body", *parts, group=Group.PREDICT):
        input_ = Input("id", {}, [*parts] or [Part("body", "", body)])
        return fakes.AwaitedJob(input_, 0.0, loop.create_future(), group)

    return make


def test_the_same_content_is_known_again_whatever_holds_it(job_of):
    contents = FailedContents()
    assert not contents
    contents.add(job_of(b"bad"))
    assert contents
    for body in (b"bad", bytearray(b"bad"), memoryview(b"bad")):
        assert job_of(body) in contents


def test_other_contents_are_not(job_of):
    contents = FailedContents()
    contents.add(job_of(b"bad"))
    others = [
        job_of(b"dab"),
        job_of(b"bad "),
        job_of(b"bad", group=Group.EXPLAIN),
        job_of(b"", Part("data", "", b"bad")),
        job_of(b"", Part("body", "text/plain", b"bad")),
        job_of(b"", Part("body", "", b"ba"), Part("more", "", b"d")),
    ]
    assert not [job for job in others if job in contents]


def test_names_and_types_that_are_no_text_are_remembered_too(job_of):
    contents = FailedContents()
    contents.add(job_of(b"", Part("\udcff", "text/\udcfe", b"bad")))
    assert job_of(b"", Part("\udcff", "text/\udcfe", b"bad")) in contents
    assert job_of(b"", Part("\udcff", "text/\udcff", b"bad")) not in contents


def test_what_succeeds_is_forgotten(job_of):
    contents = FailedContents()
    contents.add(job_of(b"bad"))
    contents.discard(job_of(b"other"))
    contents.discard(job_of(b"dab"))
    assert len(contents) == 1
    contents.discard(job_of(b"bad"))
    assert not contents
    assert job_of(b"bad") not in contents


def test_what_ended_a_worker_is_known_for_that(job_of):
    contents = FailedContents()
    contents.add(job_of(b"raises"))
    contents.add(job_of(b"ends"), crashes=True)
    contents.add(job_of(b"ends"))
    assert not contents.has_crashed(job_of(b"raises"))
    assert contents.has_crashed(job_of(b"ends"))
    assert not contents.has_crashed(job_of(b"other"))


def test_memory_is_bounded_and_the_latest_are_kept(job_of, monkeypatch):
    monkeypatch.setattr(failed_contents, "_CAPACITY", 3)
    contents = FailedContents()
    for body in (b"1", b"2", b"3", b"1", b"4"):
        contents.add(job_of(body))
    assert [body for body in (b"1", b"2", b"3", b"4") if job_of(body) in contents] == [
        b"1",
        b"3",
        b"4",
    ]
    for number in range(9):
        contents.add(job_of(bytes(number + 10)))
    assert job_of(b"4") not in contents
    assert len(contents) == 3


def test_contents_are_forgotten_after_a_while(job_of):
    now = [0.0]
    contents = FailedContents(lambda: now[0])
    contents.add(job_of(b"old"))
    now[0] = 300.0
    contents.add(job_of(b"new"))
    now[0] = 600.0
    assert job_of(b"old") not in contents
    assert job_of(b"new") in contents
    assert len(contents) == 1


def test_large_contents_are_distinguished_without_hashing_the_whole(job_of):
    contents = FailedContents()
    size = 64 * 1024 * 1024
    contents.add(job_of(bytes(size)))
    assert job_of(bytes(size)) in contents
    for place in (0, size // 2, size - 1):
        other = bytearray(size)
        other[place] = 1
        assert job_of(other) not in contents

    def look_up():
        for _ in range(10):
            assert job_of(other) not in contents

    assert least_cpu_seconds(look_up, 0.1) < 0.1  # hashing the whole takes half a second
