"""marserve bench against real servers: what it finds, what it leaves, what it refuses to tell."""

import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from marserve.tools.bench.main import main

pytestmark = pytest.mark.integration

MARSERVE = Path(sys.executable).with_name("marserve")
ECHO = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
# Stalls once in its life, for a second, at the 90th request.
STALLING = """
import time
seen = 0
def handle(data, context):
    global seen
    before, seen = seen, seen + len(data or [])
    if before < 90 <= seen:
        time.sleep(1)
    return data and ["fine"] * len(data)
"""
# Fails from its 50th request on.
FAILING = """
seen = 0
def handle(data, context):
    global seen
    seen += len(data or [])
    for index in range(len(data or [])):
        context.set_response_status(503 if seen > 50 else 200, "whatever", index)
    return data and ["x"] * len(data)
"""
# So slow that even a busy machine keeps pace.
COSTLY = """
import time
def handle(data, context):
    time.sleep(0.02)
    return data and ["fine"] * len(data)
"""
RECORDING = """
def handle(data, context):
    for row in data or []:
        with open({path!r}, "a") as file:
            file.write(bytes(row["body"]).decode() + "\\n")
    return data and ["fine"] * len(data)
"""
# Loads until the gate is open.
SLOW_TO_LOAD = """
open({path!r}).read()
def handle(data, context):
    return data and ["fine"] * len(data)
"""
TELLING_PRECISION = """
def handle(data, context):
    if data is None:
        with open({path!r}, "a") as file:
            file.write(context.model_yaml_config["optimization"]["precision"] + "\\n")
        return None
    if context.get_request_header(0, "describe") == "True":
        return [{{"optimization": context.model_yaml_config["optimization"]}}]
    return ["fine"] * len(data)
"""


def command(server, *arguments, **urls):
    """The command line, with the URLs of a server."""
    defaults = {
        "url": f"http://127.0.0.1:{server.ports['inference']}",
        "management-url": f"http://127.0.0.1:{server.ports['management']}",
        "metrics-url": f"http://127.0.0.1:{server.ports['metrics']}",
    }
    given = {**defaults, **{name.replace("_", "-"): url for name, url in urls.items()}}
    flags = [part for name, url in given.items() for part in (f"--{name}", url)]
    return [MARSERVE, "bench", *map(str, arguments), *flags]


def run(server, *arguments, **urls):
    """Exit status, standard output, standard error."""
    done = subprocess.run(
        command(server, *arguments, **urls),
        cwd=server.directory,
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def measured(server, *arguments, **urls):
    """The points of the JSON report of a run that went well."""
    report = server.directory / f"{uuid.uuid4().hex}.json"
    status, _, complaints = run(server, *arguments, "--no-progress", "--json", report, **urls)
    assert status == 0, complaints
    return json.loads(report.read_text())["points"]


def figures(point):
    (run_,) = point["runs"]
    return run_


def refused(server, *arguments, **urls):
    """The only sentence of a run that cannot be."""
    status, output, complaints = run(server, *arguments, "--no-progress", **urls)
    assert status == 1
    assert output == ""
    (sentence,) = complaints.splitlines()
    assert sentence.startswith("marserve bench: ")
    return sentence.removeprefix("marserve bench: ")


def settings(server, name):
    described = server.describe(name)
    keys = ("maxBatchDelay", "batchPolicy", "maxLatencyMs", "minWorkers", "maxWorkers", "modelUrl")
    keys += ("compiledBatchSizes", "torchThreads")
    is_automatic = described["batching"]["isAutomatic"]
    size = "auto" if is_automatic else described["batchSize"]
    return {"batchSize": size, **{key: described[key] for key in keys}}


SHORT = ("--seconds", "0.3", "--warm-up", "0.1")
LONGER = ("--seconds", "1", "--warm-up", "0.5")


# -- what it finds ---------------------------------------------------------------------------------


def test_a_closed_loop(server, install):
    name = install(handler=ECHO, batch_size=4, max_batch_delay=20)
    report = server.directory / "closed.csv"
    status, output, news = run(server, name, *SHORT, "--clients", "1,8", "--csv", report)
    assert status == 0, news
    assert output.startswith("marserve 0.")
    assert "p99.9 ms" in output
    assert "1/2  1 client:" in news
    one, eight = csv.DictReader(report.read_text().splitlines())
    assert float(eight["throughput_per_s"]) > float(one["throughput_per_s"]) > 0
    assert float(one["mean_batch"]) == 1
    assert 1 < float(eight["mean_batch"]) <= 4
    assert float(one["first_inference_ms"]) > 0
    assert one["errors"] == eight["errors"] == "0"


def test_so_many_requests(server, install):
    (point,) = measured(server, install(handler=ECHO), "--requests", 70, "--warm-up", 0)
    assert figures(point)["answers"] == 70


def test_several_processes(server, install):
    flags = ("--clients", 4, "--processes", 3, "--rate", 100, *SHORT)
    closed, opened = measured(server, install(handler=ECHO), *flags)
    assert figures(closed)["answers"] > 50
    assert 0 < figures(opened)["answers"] < 100


def test_a_server_that_stalls_shows_in_an_open_loop_as_long_as_it_stalled(server, install):
    """In a closed loop it shows once: nobody else is sent to it meanwhile."""
    flags = ("--warm-up", 0, "--max-batch-delay", 0)
    (closed,) = measured(
        server, install(handler=STALLING), "--clients", 1, "--requests", 1000, *flags
    )
    (opened,) = measured(
        server,
        install(handler=STALLING),
        "--rate",
        50,
        "--arrivals",
        "uniform",
        "--seconds",
        3,
        *flags,
    )
    assert figures(closed)["percentiles_ms"]["100"] > 1000
    assert figures(closed)["percentiles_ms"]["99"] < 500
    # 50 of 150 requests were due in that second, and waited for its end: evenly 0 to 1 s each.
    assert figures(opened)["answers"] == 150
    assert figures(opened)["percentiles_ms"]["99"] > 900
    assert figures(opened)["percentiles_ms"]["90"] > 600
    assert figures(opened)["percentiles_ms"]["75"] > 150


def test_files_are_sent_in_turn(server, install, record):
    inputs = server.directory / uuid.uuid4().hex
    inputs.mkdir()
    for text in ("a", "b", "c"):
        (inputs / text).write_text(text)
    name = install(handler=RECORDING.format(path=str(record)))
    flags = ("--clients", 1, "--requests", 20, "--warm-up", 0)
    measured(server, name, "--input", inputs, *flags)
    first, *others = record.read_text().split()
    assert first == "a"  # the first inference, apart from the rest
    assert others[:7] == ["a", "b", "c", "a", "b", "c", "a"]


def test_several_inputs_are_all_sent(server, install, record):
    for text in ("a", "b"):
        (server.directory / f"{text}.input").write_text(text)
    name = install(handler=RECORDING.format(path=str(record)))
    inputs = ("--input", "a.input", "--input", "b.input")
    measured(server, name, *inputs, "--clients", 1, "--requests", 4, "--warm-up", 0)
    assert set(record.read_text().split()) == {"a", "b"}


def test_reports_in_a_directory(server, install):
    folder = server.directory / "reports" / "today"
    status, _, _ = run(server, install(handler=ECHO), *SHORT, "--output-dir", folder)
    assert status == 0
    assert {path.suffix for path in folder.iterdir()} == {".json", ".csv", ".html"}


def test_tuning(server, install):
    name = install(handler=COSTLY, batch_size=3, max_batch_delay=7)
    before = settings(server, name)
    flags = ("--tune", 2000, "--batch-size", 2, *SHORT)
    status, output, complaints = run(server, name, *flags)
    assert status == 0, output + complaints
    assert "Recommended for p99 within 2000 ms" in output
    assert "model-config.yaml:" in output
    assert f"curl -X POST 'http://127.0.0.1:{server.ports['management']}/models?" in output
    assert settings(server, name) == before


@pytest.mark.parametrize("own", [{}, {"batch_policy": "adaptive", "max_latency_ms": 100}])
def test_refusals_under_a_goal_are_no_failure(server, install, own):
    name = install(handler=COSTLY, batch_size=1, **own)
    goal = () if own else ("--max-latency-ms", 100, "--batch-policy", "fixed,adaptive")
    report = server.directory / f"{uuid.uuid4().hex}.json"
    status, output, news = run(server, name, "--clients", 16, *goal, *LONGER, "--json", report)
    assert status == 0, output + news
    points = json.loads(report.read_text())["points"]
    found = figures(points[-1])
    assert found["refused"] > 0
    assert found["errors"] == {}
    requests = found["answers"] + found["refused"]
    in_time = found["answers"] - found["late"]
    assert found["in_time_percent"] == pytest.approx(100 * in_time / requests)
    assert found["in_time_per_s"] == pytest.approx(in_time / found["seconds"])
    assert {figures(point)["goal_ms"] for point in points} == {100}
    assert "in time %  in time/s  refused  late" in output
    assert "% in time, " in news


def test_a_goal_of_0_is_none(server, install):
    flags = ("--clients", 1, "--warm-up", 0, "--requests", 5, "--max-latency-ms", 0)
    (point,) = measured(server, install(handler=COSTLY), *flags)
    assert figures(point)["goal_ms"] is None


def test_a_full_queue_without_a_goal_fails_a_run(server, install):
    name = install(handler=COSTLY, job_queue_size=2)
    status, output, _ = run(server, name, "--clients", 16, *SHORT)
    assert status == 1
    assert "503 refused (" in output


# -- other listeners -------------------------------------------------------------------------------


def test_unix_sockets(prepare_server, make_archive):
    with prepare_server() as server:
        urls = {
            "url": f"unix:{server.directory / 'i'}",
            "management_url": f"unix:{server.directory / 'm'}",
            "metrics_url": f"unix:{server.directory / 'x'}",
        }
        for listener, url in zip(
            ("inference", "management", "metrics"), urls.values(), strict=True
        ):
            server.write_property(f"{listener}_address", url)
        archive = make_archive(server.store, ECHO, "echo")
        server.launch("--models", archive.name)
        wait_started(server)
        server.wait_logged("model_log.log", "loaded in")
        closed, opened = measured(server, "echo", "--clients", 2, "--rate", 50, *SHORT, **urls)
        assert figures(closed)["answers"] > 0
        assert figures(closed)["mean_batch"] == 1
        assert figures(opened)["answers"] > 0
        server.stop()


def wait_started(server):
    from servers import wait_for

    wait_for(
        lambda: "Model server started." in server.console_text() or not server.is_running,
        what=server.console_text,
    )
    assert server.is_running, server.console_text()


def test_https(prepare_server, make_archive, tmp_path):
    from certificates import make_authority

    authority = make_authority(tmp_path)
    with prepare_server() as server:
        urls = {}
        for listener, port in server.ports.items():
            url = f"https://localhost:{port}"
            urls["url" if listener == "inference" else f"{listener}_url"] = url
            server.write_property(f"{listener}_address", url)
        server.write_property("private_key_file", authority.file("key1.pem"))
        server.write_property("certificate_file", authority.file("chain.pem"))
        archive = make_archive(server.store, ECHO, "echo")
        server.launch("--models", archive.name)
        wait_started(server)
        server.wait_logged("model_log.log", "loaded in")
        for trust in (["--insecure"], ["--ca-certificate", authority.file("root.pem")]):
            (point,) = measured(server, "echo", "--clients", 2, *SHORT, *trust, **urls)
            assert figures(point)["answers"] > 0
        assert "certificate is not trusted" in refused(server, "echo", *SHORT, **urls)
        server.stop()


def test_tokens(start_server, make_archive):
    with start_server(disable_token_authorization="false") as server:
        archive = make_archive(server.store, ECHO, "echo")
        keys = json.loads((server.directory / "key_file.json").read_text())
        headers = {"Authorization": f"Bearer {keys['management']['key']}"}
        query = f"url={archive.name}&initial_workers=1"
        assert server.management("POST", f"/models?{query}", headers=headers).status_code == 200

        (point,) = measured(server, "echo", "--key-file", "key_file.json", *SHORT)
        assert figures(point)["answers"] > 0
        management = ("--management-token", keys["management"]["key"])
        (point,) = measured(
            server, "echo", "--token", keys["inference"]["key"], *management, *SHORT
        )
        assert figures(point)["answers"] > 0
        assert "--management-token or --key-file" in refused(server, "echo", *SHORT)
        output = refused(server, "echo", *SHORT, *management, "--token", "wrong")
        assert "Token" in output
        assert "--token or --key-file" in output


# -- what it leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [
        {"batch_size": 3, "max_batch_delay": 7},
        {"batch_size": "auto", "batch_policy": "adaptive", "max_latency_ms": 500},
    ],
)
def test_a_sweep_leaves_everything_as_it_was(server, install, own):
    name = install(handler=ECHO, **own)
    before = settings(server, name)
    sweep = ("--batch-size", "1,8", "--max-batch-delay", 1, "--workers", "1,2", "--clients", 16)
    points = measured(server, name, *sweep, "--batch-policy", "greedy", *SHORT)
    assert [point["settings"]["batch_size"] for point in points] == [1, 8, 1, 8]
    assert [point["settings"]["workers"] for point in points] == [1, 1, 2, 2]
    single, batched, *_ = map(figures, points)
    assert single["mean_batch"] == 1
    assert batched["mean_batch"] > 1
    assert settings(server, name) == before


def test_a_sweep_over_performance_hints(server, install):
    name = install(handler=ECHO, batch_size=3, max_batch_delay=7)
    before = settings(server, name)
    flags = ("--performance-hint", "none,latency,throughput", *SHORT)
    found = [point["settings"] for point in measured(server, name, *flags)]
    hints = ["none", "latency", "throughput"]
    assert [each["performance_hint"] for each in found] == hints
    assert {each["batch_policy"] for each in found} == {None}
    assert settings(server, name) == before


def test_a_sweep_over_threads_and_batches_outstanding(server, install):
    name = install(handler=ECHO, batch_size=3, compiled_batch_sizes="1,3", torch_threads=2)
    before = settings(server, name)
    sweep = ("--torch-threads", "1,2", "--outstanding-batches", "1,2", "--batch-size", 3)
    points = measured(server, name, *sweep, *SHORT)
    found = [point["settings"] for point in points]
    pairs = [(each["torch_threads"], each["outstanding_batches"]) for each in found]
    assert pairs == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert settings(server, name) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_it_gets_the_settings_back(server, install, wait_for, number):
    name = install(handler=ECHO, batch_size=3, max_batch_delay=7)
    before = settings(server, name)
    sweep = ("--batch-size", 8, "--workers", 2, "--seconds", 100, "--warm-up", 0)
    with bench(server, name, *sweep) as process:
        wait_served(server, name, 50, wait_for)
        assert settings(server, name) != before
        process.send_signal(number)
        assert process.wait(20) == 130
    assert settings(server, name) == before


@contextlib.contextmanager
def bench(server, *arguments):
    """One that runs until the end of the block at the latest."""
    with subprocess.Popen(
        command(server, *arguments, "--no-progress"),
        cwd=server.directory,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_served(server, name, count, wait_for):
    """Wait until so many requests of a model have been served."""

    def served():
        sums = server.metrics("marserve_batch_size_sum")
        return sum(value for series, value in sums.items() if f'"{name}"' in series) >= count

    wait_for(served)


def test_a_model_that_is_registered_for_the_run(server, make_archive):
    archive = make_archive(server.store, ECHO, "for-the-run")
    flags = ("for-the-run", "--register", archive.name, "--workers", 2, *SHORT)
    (point,) = measured(server, *flags)
    assert figures(point)["answers"] > 0
    assert not server.is_known("for-the-run")


def test_who_interrupts_a_registration_gets_it_undone(server, make_archive, gate, wait_for):
    handler = SLOW_TO_LOAD.format(path=gate.path)
    archive = make_archive(server.store, handler, "slow-to-load")
    with bench(server, "slow-to-load", "--register", archive.name) as process:
        wait_for(lambda: server.is_known("slow-to-load"))
        process.send_signal(signal.SIGINT)  # the removal does not wait for the handler
        assert process.wait(20) == 130
    assert not server.is_known("slow-to-load")


def test_precisions(server, make_archive, record, tmp_path):
    handler = TELLING_PRECISION.format(path=str(record))
    archive = make_archive(tmp_path, handler, "precise", "optimization: {precision: fp32}\n")
    shutil.move(archive, server.store)
    path = server.store / archive.name
    points = measured(
        server, "precise", "--register", path, "--precision", "bf16,fp16", *SHORT, "--clients", 2
    )
    assert [point["settings"]["precision"] for point in points] == ["bf16", "fp16"]
    assert record.read_text().split() == ["fp32", "bf16", "fp16"]
    assert not server.is_known("precise")


def test_a_precision_that_the_handler_ignores(server, make_archive):
    archive = make_archive(server.store, ECHO, "imprecise")
    flags = ("imprecise", "--register", archive, "--precision", "bf16", *SHORT)
    status, _, complaints = run(server, *flags, "--no-progress")
    warning, sentence = complaints.splitlines()
    assert warning.startswith("optimization of model-config.yaml is applied by BaseHandler")
    assert "precision bf16, but its handler reports none" in sentence
    assert (status, server.is_known("imprecise")) == (1, False)


# -- what it refuses to tell -----------------------------------------------------------------------


def test_no_server(server, install, free_port):
    nowhere = f"http://127.0.0.1:{free_port}"
    assert refused(server, "m", url=nowhere) == (
        f"Nothing answers at {nowhere}: connection refused."
    )
    output = refused(server, install(handler=ECHO), "--workers", 2, management_url=nowhere)
    assert output == f"Nothing answers at {nowhere}: connection refused."


@pytest.fixture
def free_port():
    with socket.socket() as found:  # bound, so nobody else gets it, and nobody listens
        found.bind(("127.0.0.1", 0))
        yield found.getsockname()[1]


def test_without_management_and_metrics_it_measures_all_the_same(server, install, free_port):
    nowhere = f"http://127.0.0.1:{free_port}"
    (point,) = measured(
        server, install(handler=ECHO), *SHORT, management_url=nowhere, metrics_url=nowhere
    )
    assert figures(point)["answers"] > 0
    assert figures(point)["mean_batch"] is None


def test_wrong_requests(server, install):
    name = install(handler=ECHO)
    assert refused(server, "nobody").startswith("There is no model nobody. It serves: ")
    assert refused(server, name, "--model-version", "7").startswith("There is no model")
    assert refused(server, name, "--path", "/nowhere").startswith(
        "The first request was not answered with success: 404 "
    )
    assert refused(server, name, "--input", "missing.jpg").startswith("There is nothing to send")
    assert refused(server, name, "--workers", 5000) == (
        "The server does not set min_worker=5000, max_worker=5000: "
        "400 5000 workers are too many; the maximum is 1000."
    )
    assert refused(server, name, "--json", "no/such/directory/x").startswith("The report no/such")


def test_a_model_without_workers(server, install):
    name = install(handler=ECHO, initial_workers=0)
    assert "has no worker that is ready" in refused(server, name)
    (point,) = measured(server, name, "--workers", 1, *SHORT)
    assert figures(point)["answers"] > 0
    assert settings(server, name)["minWorkers"] == 0


@pytest.mark.parametrize("tuning", [(), ("--tune", 5000, "--batch-size", 1)])
def test_a_worker_that_is_still_loading_is_waited_for(server, make_archive, gate, wait_for, tuning):
    name = f"loading-{len(tuning)}"
    archive = make_archive(server.store, SLOW_TO_LOAD.format(path=gate.path), name)
    answer = server.register(archive, initial_workers=1, synchronous="false")
    assert answer.status_code == 202, answer.text
    gate.wait_entered()
    with bench(server, name, *SHORT, *tuning) as process:
        wait_for(lambda: server.log("access_log.log").count(f"GET /models/{name} ") > 1)
        gate.open_for_all()
        output, complaints = process.communicate(timeout=30)
    assert process.returncode == 0, output + complaints


def test_a_doubt_about_all_runs_is_printed_once(server, install, monkeypatch, capsys):
    monkeypatch.setattr("marserve.tools.bench.bench._BUSY", -1.0)
    arguments = command(server, install(handler=ECHO), *SHORT, "--clients", "1,2")
    assert main([str(argument) for argument in arguments[2:]]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "busy" in line]
    assert line.startswith("In 2 runs the load generator was busy up to ")


def test_a_handler_that_fails_at_once(server, install):
    output = refused(server, install(handler="def handle(data, context):\n    return data and 5\n"))
    assert output.startswith("The first request was not answered with success: 503 ")
    assert output.endswith("give the model's input with --input or --generate.")


def test_errors_are_no_throughput(server, install):
    name = install(handler=FAILING)
    report = server.directory / "failed.json"
    flags = ("--clients", 1, "--warm-up", 0, "--requests", 200, "--json", report)
    status, output, complaints = run(server, name, *flags, "--no-progress")
    assert status == 1
    assert "FAILED" in output
    assert "503 (152)" in output
    assert "of the requests failed, 0.00% are allowed: 503 (152)." in complaints
    (point,) = json.loads(report.read_text())["points"]
    assert point["status"] == "failed"
    assert figures(point)["throughput_per_s"] is None
    assert figures(point)["errors"] == {"503": 152}


def test_a_server_that_refuses_the_first_request_is_measured_all_the_same(
    server, install, background, gate
):
    name = install(job_queue_size=1)
    first = background(server.ask, name, id=0, gate=gate.path)
    gate.wait_entered()
    queued = background(server.ask, name, id=1)
    server.wait_queued(name, 1)
    flags = ("--clients", 1, "--warm-up", 0, "--requests", 3, "--no-progress")
    status, _, complaints = run(server, name, *flags)
    gate.open()
    assert first.result().status_code == queued.result().status_code == 200
    assert status == 1
    assert "Not one request was answered with success: 503 refused (3)." in complaints


def test_errors_under_a_goal_are_a_failure(server, install):
    flags = ("--clients", 1, "--warm-up", 0, "--requests", 200, "--max-latency-ms", 1000)
    status, _, complaints = run(server, install(handler=FAILING), *flags, "--no-progress")
    assert status == 1
    assert "0.00% are allowed: 503 (152)" in complaints


def test_errors_that_are_allowed(server, install):
    flags = ("--clients", 1, "--warm-up", 0, "--requests", 60, "--max-error-percent", 50)
    (point,) = measured(server, install(handler=FAILING), *flags)
    assert figures(point)["answers"] == 48
    assert figures(point)["errors"] == {"503": 12}


@pytest.mark.parametrize("load", [("--clients", 4), ("--rate", 200)])
def test_a_server_that_is_killed_in_the_middle(start_server, wait_for, load):
    with start_server() as server:
        server.install(ECHO, "echo")
        with bench(server, "echo", *load, "--seconds", 100, "--warm-up", 0) as process:
            wait_served(server, "echo", 50, wait_for)
            os.kill(server.process.pid, signal.SIGKILL)
            output, complaints = process.communicate(timeout=20)
            assert process.returncode == 1
            assert output == ""
            assert complaints == (
                "marserve bench: The server was gone during the run: connection refused.\n"
            )
        server.process.wait()
        server.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "the answer is not HTTP"),
        (b"", "remote end closed connection"),
        (None, "no whole answer within 0.5 s"),
    ],
)
def test_something_else_listens_there(server, text, sentence):
    with listener(text) as port:
        output = refused(server, "m", "--timeout", 0.5, url=f"http://127.0.0.1:{port}")
    assert output.startswith(f"Nothing answers at http://127.0.0.1:{port}: {sentence}")


@contextlib.contextmanager
def listener(text):
    """Says that to everybody and hangs up; None: says nothing, and does not hang up."""
    with socket.create_server(("127.0.0.1", 0)) as opened, contextlib.ExitStack() as taken:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection = taken.enter_context(opened.accept()[0])
                    if text is not None:
                        connection.recv(65536)
                        connection.sendall(text)
                        connection.shutdown(socket.SHUT_RDWR)
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield opened.getsockname()[1]
        finally:
            opened.shutdown(socket.SHUT_RDWR)
            thread.join()
