"""What one request does to others that it shares a batch with: nothing."""

import psutil
import pytest

pytestmark = pytest.mark.integration

NEVER = 60_000  # ms: a window that no test waits for


@pytest.fixture
def install(install):
    """Install the lab with batches of this size; returns its name."""

    def make(size, config="", **query):
        return install(config, **{"batch_size": size, "max_batch_delay": NEVER, **query})

    return make


@pytest.fixture
def ask_in_order(server, background):
    """Send requests that all are in line before the last of them fills the batch."""

    def ask(name, orders):
        futures = []
        for count, order in enumerate(orders):
            server.wait_queued(name, count)
            futures.append(background(server.ask, name, **order))
        return futures

    return ask


@pytest.fixture
def answers_in_order(ask_in_order):
    return lambda name, orders: [future.result() for future in ask_in_order(name, orders)]


def numbered(count, bad=(), **misdeed):
    """Orders with these ids; some do something bad."""
    return [{"id": number, **(misdeed if number in bad else {})} for number in range(count)]


def ids_of(answers):
    """The ids of those that were answered; None for a failure."""
    return [answer.json()["id"] if answer.status_code == 200 else None for answer in answers]


def reasons(server, name):
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"]
    return [(batch["size"], batch["reason"], batch["succeeded"]) for batch in batches]


def counted(server, metric, name):
    samples = server.metrics(metric)
    return sum(count for series, count in samples.items() if f'"{name}"' in series)


@pytest.mark.parametrize("bad", [0, 13, 31])
def test_a_bad_request_fails_alone_among_31_good_ones(server, install, answers_in_order, bad):
    name = install(32)
    answers = answers_in_order(name, numbered(32, [bad], do="refuse", message="no tea", code=418))
    assert ids_of(answers) == [None if number == bad else number for number in range(32)]
    assert (answers[bad].status_code, answers[bad].json()["message"]) == (418, "no tea")
    assert counted(server, "marserve_isolated_batches_total", name) == 1
    assert server.worker(name)["status"] == "READY"


@pytest.mark.parametrize("bad", [[2, 5], [0, 1], range(8)])
def test_several_bad_requests_fail_and_the_good_ones_do_not(install, answers_in_order, bad):
    answers = answers_in_order(install(8), numbered(8, bad, do="raise"))
    assert ids_of(answers) == [None if number in bad else number for number in range(8)]
    assert {answers[number].status_code for number in bad} == {503}


def test_a_handler_with_one_result_for_any_batch_serves_requests_one_by_one(
    server, install, answers_in_order
):
    name = install(4)
    answers = answers_in_order(name, numbered(4, range(4), do="one"))
    assert [answer.json() for answer in answers] == [{"id": n, "batch": 1} for n in range(4)]


def test_a_handler_that_must_not_see_a_request_twice_says_so(
    server, install, answers_in_order, tmp_path
):
    record = tmp_path / "record"
    name = install(3, "isolateFailures: false\nretryOnWorkerDeath: false\n")
    orders = [{**item, "record": str(record)} for item in numbered(3, [1], do="raise")]
    answers = answers_in_order(name, orders)
    assert [answer.status_code for answer in answers] == [503] * 3
    orders = [{**item, "record": str(record)} for item in numbered(3, [1], do="os._exit")]
    answers = answers_in_order(name, orders)
    assert [answer.status_code for answer in answers] == [500] * 3
    assert record.read_text().split() == [*"012012"]


def test_explanations_are_isolated_too(server, background):
    source = (
        "def handle(data, context):\n"
        "    bodies = [bytes(row['body']) for row in data or []]\n"
        "    if b'bad' in bodies:\n"
        "        raise ValueError\n"
        "    return [context.get_request_header(i, 'explain') for i in range(len(bodies))]\n"
    )
    server.install(source, "explained", batch_size=2, max_batch_delay=NEVER)
    bad, good = (
        background(server.inference, "POST", "/explanations/explained", data=body)
        for body in (b"bad", b"good")
    )
    assert (bad.result().status_code, good.result().text) == (503, "True")


def test_all_that_were_in_a_batch_whose_worker_was_killed_are_answered(
    server, install, ask_in_order, gate, wait_for
):
    name = install(8)
    pid = server.worker(name)["pid"]
    orders = numbered(8)
    orders[3]["gate"] = gate.path
    answers = ask_in_order(name, orders)
    gate.wait_entered()
    psutil.Process(pid).kill()
    wait_for(lambda: not psutil.pid_exists(pid))
    gate.open_for_all()  # the one that stood there stands there again
    documents = [answer.result().json() for answer in answers]
    assert documents == [{"id": number, "batch": 1} for number in range(8)]
    assert server.worker(name)["pid"] != pid
    assert counted(server, "marserve_retried_requests_total", name) == 8
    assert reasons(server, name) == [(8, "full", False), *[(1, "alone", True)] * 8]


@pytest.mark.parametrize("end", ["segfault", "os._exit", "sys.exit"])
def test_whoever_ends_its_process_dies_of_the_second_and_takes_nobody_along(
    server, install, answers_in_order, end
):
    name = install(8)
    answers = answers_in_order(name, numbered(8, [4], do=end))
    assert ids_of(answers) == [None if number == 4 else number for number in range(8)]
    assert answers[4].status_code == 500
    assert answers[4].json()["message"].startswith("Worker died. Its process ")
    assert ids_of(answers_in_order(name, numbered(8))) == [*range(8)]
    assert counted(server, "marserve_worker_failures_total", name) == 2


def test_whoever_hangs_costs_the_others_one_timeout(server, install, answers_in_order):
    name = install(3, response_timeout=1)
    answers = answers_in_order(name, numbered(3, [0], do="hang"))
    assert ids_of(answers) == [None, 1, 2]
    assert answers[0].json()["message"].startswith("Worker died. Timeout: ")


def test_another_worker_takes_over_where_there_is_one(server, install, answers_in_order):
    name = install(3, "maxRetryTimeoutInSec: 0\n", initial_workers=2)
    answers = answers_in_order(name, numbered(3, [2], do="os._exit"))
    assert ids_of(answers) == [0, 1, None]
    assert answers[2].json()["message"] == "Worker died. Its process ended with exit status 3."
    refused = server.ask(name, id=3)
    assert refused.status_code == 503


def test_what_does_not_fit_into_memory_is_run_in_halves_and_the_bound_remembered(
    server, install, answers_in_order, together
):
    name = install(16, "isolateFailures: false\n")
    orders = numbered(16, range(16), do="gpu memory", most=4)
    assert [item.json() for item in answers_in_order(name, orders)] == [
        {"id": number, "batch": 4} for number in range(16)
    ]
    again = together([lambda order=order: server.ask(name, **order) for order in orders])
    assert [item.json()["batch"] for item in again] == [4] * 16
    assert reasons(server, name) == [
        (16, "full", False),
        (8, "out_of_memory", False),
        (4, "out_of_memory", True),
        (8, "out_of_memory", False),
        *[(4, "out_of_memory", True)] * 3,
        *[(4, "full", True)] * 4,
    ]


def test_a_request_that_needs_too_much_memory_by_itself_fails_alone(install, answers_in_order):
    name = install(4)
    answers = answers_in_order(name, numbered(4, [1], do="memory"))
    assert ids_of(answers) == [0, None, 2, 3]
    assert (answers[1].status_code, answers[1].json()["message"]) == (507, "Out of resources")


def test_a_tenth_of_bad_requests_gives_the_others_no_error(server, install, together):
    """Beyond a tenth of the time of the model, all requests of a failed batch got its error."""
    name = install(8, max_batch_delay=20)  # the size may change within a round
    good, bad = [], []
    for first in range(0, 96, 8):
        orders = numbered(8, [(first // 8) % 8] if first % 80 else [1, 6], do="raise")
        orders = [{**order, "round": first} for order in orders]
        answers = together([lambda order=order: server.ask(name, **order) for order in orders])
        for order, answer in zip(orders, answers, strict=True):
            (bad if "do" in order else good).append(answer.status_code)
    assert set(good) == {200}
    assert set(bad) == {503}
    failures = server.describe(name)["batching"]["failures"]
    assert 0.0 < failures["share"] < 0.5
    assert failures["remembered"] == len(bad)
    assert not failures["failsForAll"]


def test_a_request_that_failed_runs_alone_when_it_is_sent_again(server, install, answers_in_order):
    name = install(2)
    bad = {"id": 7, "do": "refuse", "message": "no tea", "code": 418}
    assert ids_of(answers_in_order(name, [{"id": 1}, bad])) == [1, None]
    before = len(reasons(server, name))
    # Nobody shares a batch with it, nor does it wait for the window to be over.
    assert server.ask(name, **bad).status_code == 418
    assert reasons(server, name)[before:] == [(1, "suspected", False)]
    assert counted(server, "marserve_suspected_requests_total", name) == 1
    assert counted(server, "marserve_remembered_failures", name) == 1
    assert ids_of(answers_in_order(name, numbered(2))) == [0, 1]


def test_a_failing_request_whose_type_is_no_text_was_never_answered(server):
    """Its worker was lost with it: its content could not be remembered."""
    source = "def handle(data, context):\n    return [1 // (data is None)]\n"
    server.install(source, "no-text", batch_size=2, max_batch_delay=1)
    pid = server.worker("no-text")["pid"]
    for _ in range(2):  # the second time it is remembered
        answer = server.predict("no-text", data=b"x", headers={"Content-Type": b"text/\xff"})
        assert answer.status_code == 503
    assert server.worker("no-text")["pid"] == pid


def test_the_row_that_a_loop_was_busy_with_runs_alone_and_the_others_together(server, background):
    source = (
        "def handle(data, context):\n"
        "    answers = []\n"
        "    for row in data or []:\n"  # Python 3.12 forgets the variable of a comprehension
        "        answers.append(b'%d' % (12 // int(row['body'])))\n"
        "    return answers\n"
    )
    server.install(source, "loop", batch_size=8, max_batch_delay=NEVER)
    bodies = [b"1", b"2", b"3", b"0", b"4", b"6", b"12", b"2"]
    answers = []
    for count, body in enumerate(bodies):
        server.wait_queued("loop", count)
        answers.append(background(server.predict, "loop", data=body))
    assert [answer.result().status_code for answer in answers] == [200] * 3 + [503] + [200] * 4
    assert reasons(server, "loop") == [
        (8, "full", False),
        (7, "isolation", True),
        (1, "isolation", False),
    ]


@pytest.mark.parametrize("end", ["segfault", "os._exit"])
def test_crashing_requests_do_not_make_the_next_worker_wait(server, install, answers_in_order, end):
    """One a second cut the rate of the others to a tenth: each counted against the model."""
    name = install(4)
    for number in range(4):
        orders = numbered(4, [2], do=end, marker=number)
        assert ids_of(answers_in_order(name, orders)) == [0, 1, None, 3]
    log = (server.directory / "logs" / "ts_log.log").read_text()
    pauses = [line.rpartition(" in ")[2] for line in log.splitlines() if "Retry worker" in line]
    assert set(pauses[-8:]) == {"0 seconds."}


def test_what_has_ended_a_worker_ends_one_worker_the_next_time_and_nobody_is_with_it(
    server, install, answers_in_order
):
    name = install(4)
    orders = numbered(4, [2], do="os._exit")
    assert ids_of(answers_in_order(name, orders)) == [0, 1, None, 3]
    before = len(reasons(server, name))
    assert server.ask(name, **orders[2]).status_code == 500
    assert reasons(server, name)[before:] == [(1, "suspected", False)]
    assert counted(server, "marserve_worker_failures_total", name) == 3
    assert ids_of(answers_in_order(name, numbered(4))) == [*range(4)]
