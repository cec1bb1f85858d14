"""What a generator saw, from process to process."""

from array import array

from marserve.tools.bench.generator.record import Record


def a_record() -> Record:
    record = Record(array("d", [1.5, 2.5]), array("d", [0.25, 0.125]), lateness=array("d", [1e-6]))
    record.fail(3.0, "503")
    record.fail(4.0, 'a "kind"\nwith anything in it')
    record.busy = 0.5
    record.stopped = "connection refused"
    return record


def test_it_survives_the_pipe():
    line, body = a_record().to_bytes()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Record.body_length(line) == len(body)
    assert Record.from_bytes(line, body) == a_record()


def test_an_empty_one_does_too():
    line, body = Record().to_bytes()
    assert Record.body_length(line) == len(body) == 0
    assert Record.from_bytes(line, body) == Record()


def test_two_become_one():
    record = Record(array("d", [9.0]), array("d", [0.5]))
    record.extend(a_record())
    assert list(record.ended) == [9.0, 1.5, 2.5]
    assert list(record.latencies) == [0.5, 0.25, 0.125]
    assert list(record.failed) == [3.0, 4.0]
    assert record.kinds[0] == "503"
    assert record.stopped == "connection refused"
    assert record.count == 5
    assert record.busy == 0.5
