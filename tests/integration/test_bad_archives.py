"""Archives that cannot be served: the reason is told, and nothing stays behind."""

import http.server
import json
import os
import shutil
import threading
import time
import zipfile
from functools import partial

import psutil
import pytest

from marserve.tools.doctor.main import main as doctor

pytestmark = pytest.mark.integration

GOOD = "def handle(data, context):\n    return data and ['fine'] * len(data)\n"


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory):
    allowed = tmp_path_factory.mktemp("allowed")
    with start_server(
        allowed_urls=f"file://{allowed}/.*,http://127.0.0.1:[0-9]+/.*", max_archive_size="50000000"
    ) as server:
        server.allowed = allowed
        yield server


@pytest.fixture(autouse=True)
def nothing_stays_behind(server):
    unpacked, processes = server.unpacked(), {process.pid for process in server.processes()}
    outside = set(server.temp.parent.iterdir()) | set(server.temp.iterdir())
    yield
    assert server.management("GET", "/models").json()["models"] == []
    assert server.unpacked() == unpacked
    # The fork server may have come meanwhile, no worker may have stayed.
    workers = [process for process in server.processes() if process.pid not in processes]
    assert len(workers) <= 2
    assert set(server.temp.parent.iterdir()) | set(server.temp.iterdir()) >= outside
    assert not list(server.temp.rglob("evil*")) + list(server.store.rglob("evil*"))
    assert not list(server.store.glob(".*.part"))


def zipped(server, members, name="bad.mar"):
    path = server.store / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path


def manifest(**model):
    members = {"modelName": "m", "handler": "h.py", "modelVersion": "1.0", **model}
    return json.dumps({"runtime": "python", "model": members})


def error(answer):
    return answer.status_code, answer.json()["type"], answer.json()["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "Failed to parse signature.json."),
        ("[]", "Failed to parse signature.json."),
        ("", "Failed to parse signature.json."),
        ('{"runtime": "python"}', "Missing Model entry in manifest file."),
        ('{"runtime": "python", "model": {"handler": "h.py"}}', "Model name is not defined."),
        ('{"runtime": "perl", "model": {"modelName": "m"}}', "Runtime is not defined or invalid."),
        ('{"runtime": "python", "model": {"modelName": ["m"]}}', None),
    ],
)
def test_a_broken_manifest(server, text, message):
    archive = zipped(server, {"MAR-INF/MANIFEST.json": text, "h.py": GOOD})
    status, kind, found = error(server.register(archive, initial_workers=1))
    assert (status, kind) == (400, "InvalidModelException")
    assert message is None or found == message


def test_without_a_manifest_there_is_no_handler(server):
    archive = zipped(server, {"h.py": GOOD})
    status, _, message = error(server.register(archive, initial_workers=1))
    assert status == 500
    assert message.startswith("Failed to start workers for model bad version: 1.0")
    assert "No handler is named" in message


def test_without_a_manifest_the_request_may_say_it_all(server):
    archive = zipped(server, {"h.py": GOOD})
    answer = server.register(archive, initial_workers=1, model_name="m", handler="h.py:handle")
    assert answer.status_code == 200, answer.text
    assert server.predict("m").text == "fine"
    assert server.management("DELETE", "/models/m").status_code == 200


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("x = 1", "Expected only one class"),
        ("class A: pass\nclass B: pass", "Expected only one class"),
        ("class A:\n  def initialize(self, c): pass", "Expect handle method in class A"),
        ("def handle(data, context):\n  raise ValueError('at load')", "ValueError: at load"),
        ("def handle(data, context):\n  raise MemoryError('full')", "MemoryError: full"),
        (
            "class A:\n"
            "  class Mute(Exception):\n    def __str__(self): raise OSError\n"
            "  def initialize(self, c): raise self.Mute\n  def handle(s, d, c): 0",
            "version: 1.0. Mute",
        ),
        ("import sys; sys.exit(3)", "Its process ended with exit status 3."),
        ("import os; os._exit(3)", "Its process ended with exit status 3."),
        ("import os; os.kill(os.getpid(), 9)", "Its process was killed by SIGKILL."),
        (
            "class A:\n  def initialize(self, c): open('weights')\n  def handle(s, d, c): 0",
            "FileNotFoundError: [Errno 2] No such file or directory: 'weights'",
        ),
    ],
)
def test_a_handler_that_cannot_be_loaded(server, make_archive, source, reason):
    archive = make_archive(server.store, source, "unloadable")
    status, kind, message = error(server.register(archive, initial_workers=1))
    assert status == (507 if "MemoryError" in reason else 500)
    assert kind == "InternalServerException"
    assert message.startswith("Failed to start workers for model unloadable version: 1.0")
    assert reason in message
    server.wait_logged("ts_log.log", reason.removeprefix("version: 1.0. "))
    assert server.management("GET", "/models/unloadable").status_code == 404


def test_the_traceback_of_a_failed_load_is_in_the_model_log(server, make_archive):
    archive = make_archive(server.store, "import no_such_package_2", "unloadable")
    assert server.register(archive, initial_workers=1).status_code == 500
    server.wait_logged("model_log.log", "ModuleNotFoundError: No module named 'no_such_package_2'")
    server.wait_logged("model_log.log", "Load model failed: unloadable")


def test_a_missing_handler(server):
    archive = zipped(server, {"MAR-INF/MANIFEST.json": manifest(handler="gone.py")})
    status, _, message = error(server.register(archive, initial_workers=1))
    assert status == 500
    assert "There is no handler 'gone.py'" in message


def test_a_load_that_hangs_is_killed_after_its_startup_timeout(server, make_archive):
    source = "import signal\ndef handle(data, context):\n    signal.pause()\n"
    archive = make_archive(server.store, source, "hung")
    answer = server.register(archive, initial_workers=1, startup_timeout=1)
    assert error(answer)[:2] == (500, "InternalServerException")
    assert "did not respond in given time" in error(answer)[2]


def test_after_a_failure_the_repaired_archive_can_be_registered(server, make_archive):
    archive = make_archive(server.store, "import no_such_package", "repaired")
    assert server.register(archive, initial_workers=1).status_code == 500
    make_archive(server.store, GOOD, "repaired")
    assert server.register(archive, initial_workers=1).status_code == 200
    assert server.predict("repaired").text == "fine"
    assert server.management("DELETE", "/models/repaired").status_code == 200


def test_a_failed_second_version_leaves_the_first(server, make_archive):
    first = make_archive(server.store, GOOD, "twice")
    assert server.register(first, initial_workers=1).status_code == 200
    second = make_archive(server.store, "import no_such_package", "twice", version="2.0")
    assert server.register(second, initial_workers=1).status_code == 500
    assert server.predict("twice").text == "fine"
    assert len(server.management("GET", "/models/twice/all").json()) == 1
    assert server.management("DELETE", "/models/twice").status_code == 200


@pytest.mark.parametrize(
    "member",
    ["../evil.txt", "a/../../evil.txt", "/tmp/evil.txt", "..\\evil.txt", "MAR-INF/../../evil"],
)
def test_an_archive_that_would_write_elsewhere(server, member):
    members = {"MAR-INF/MANIFEST.json": manifest(), "h.py": GOOD, member: "evil"}
    archive = zipped(server, members)
    assert error(server.register(archive))[:2] == (400, "InvalidModelException")


def test_an_archive_with_a_link(server):
    link = zipfile.ZipInfo("evil-link")
    link.external_attr = 0o120777 << 16
    archive = zipped(server, {"MAR-INF/MANIFEST.json": manifest(), "h.py": GOOD})
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(link, "/etc/passwd")
    assert error(server.register(archive))[:2] == (400, "InvalidModelException")


def test_a_bomb(server):
    archive = server.store / "bomb.mar"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("MAR-INF/MANIFEST.json", manifest())
        opened.writestr("zeros", bytes(100_000_000))
    assert error(server.register(archive))[:2] == (400, "InvalidModelException")


@pytest.mark.parametrize("name", ["bad.mar", "bad.tar.gz", "bad"])
@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive(server, name, content):
    path = server.store / name
    path.write_bytes(content)
    assert error(server.register(path))[:2] == (400, "InvalidModelException")
    path.unlink()


def test_a_manifest_that_points_outside(server):
    members = {"MAR-INF/MANIFEST.json": manifest(configFile="../../../etc/hosts"), "h.py": GOOD}
    archive = zipped(server, members)
    assert error(server.register(archive))[:2] == (400, "InvalidModelException")


def test_a_model_yaml_that_is_broken_fails_the_load(server, make_archive):
    archive = make_archive(server.store, GOOD, "yaml", "{broken: [")
    assert error(server.register(archive, initial_workers=1))[0] == 500


def test_a_model_yaml_without_keys_is_an_error_in_the_log(server, make_archive, capsys):
    archive = make_archive(server.store, GOOD, "keyless", "batchSize:4\nmaxBatchDelay:5\n")
    assert server.register(archive).status_code == 200
    told = "is not a map of keys: none of its settings count"
    server.wait_logged("ts_log.log", f"{told}: 'batchSize:4 maxBatchDelay:5'")
    assert doctor([str(archive)]) == 0
    assert told in capsys.readouterr().out
    server.management("DELETE", "/models/keyless")


def test_a_yaml_bomb_is_refused_and_holds_nothing_up(start_server, make_archive):
    levels = [f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 10)}]}}" for n in range(1, 11)]
    bomb = "\n".join(["a: &b0 {x: 1}", *levels])
    with start_server() as server:
        before = psutil.Process(server.process.pid).memory_info().rss
        archive = make_archive(server.store, GOOD, "bomb", bomb)
        assert error(server.register(archive)) == (
            400,
            "InvalidModelException",
            "model-config.yaml expands to more than 100000 values.",
        )
        server.install(GOOD, "good")
        assert psutil.Process(server.process.pid).memory_info().rss - before < 50_000_000
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5


def test_a_pipe_where_a_yaml_belongs_holds_nobody_up(server):
    """Each took one of the threads that all registrations shared."""
    for number in range(8):
        directory = server.store / f"pipe{number}"
        (directory / "MAR-INF").mkdir(parents=True)
        (directory / "MAR-INF" / "MANIFEST.json").write_text(manifest(configFile="c.yaml"))
        os.mkfifo(directory / "c.yaml")
        assert error(server.register(directory)) == (
            400,
            "InvalidModelException",
            "c.yaml is no file.",
        )
        shutil.rmtree(directory)


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x.mar",
        "https://127.0.0.1:1/x.mar",
        "file:///etc/passwd",
        "http://127.0.0.1:80@example.com/x.mar",
    ],
)
def test_a_url_outside_the_allowed_ones(server, url):
    assert error(server.register(url)) == (
        404,
        "ModelNotFoundException",
        f"Given URL {url.replace('127.0.0.1:80@', '')} does not match any allowed URL(s)",
    )


@pytest.mark.parametrize("url", ["file://{}/../x.mar", "file://{}/%2e%2e/x.mar", "a/../x.mar"])
def test_a_url_with_dots(server, url):
    url = url.format(server.allowed)
    message = f"Relative path is not allowed in url: {url}"
    assert error(server.register(url)) == (404, "ModelNotFoundException", message)


def test_a_file_url(server, make_archive):
    archive = make_archive(server.allowed, GOOD, "by-file")
    answer = server.register(f"file://{archive}", initial_workers=1)
    assert answer.status_code == 200, answer.text
    assert server.predict("by-file").text == "fine"
    assert (server.store / "by-file.mar").exists()
    assert server.management("DELETE", "/models/by-file").status_code == 200
    assert not (server.store / "by-file.mar").exists()
    assert archive.exists()


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def web(server):
    handler = partial(_QuietFiles, directory=str(server.allowed))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{files.server_address[1]}"
        files.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["secret", "secret.mar", "secret.tgz"])
def test_what_is_no_archive_is_not_quoted(server, name):
    """The first bytes of any file that the server may read stood in the answer and in the log."""
    secret = server.allowed / name
    secret.write_text("ro0t:secret\n")
    answer = server.register(f"file://{secret}")
    assert error(answer)[:2] == (400, "InvalidModelException")
    assert "ro" not in error(answer)[2].partition(":")[2]
    assert "ro0t" not in server.log("ts_log.log")
    assert "b'ro'" not in server.log("ts_log.log")
    secret.unlink()


def test_a_pipe_behind_a_file_url_holds_nobody_up(server):
    os.mkfifo(server.allowed / "pipe.mar")
    url = f"file://{server.allowed}/pipe.mar"
    assert error(server.register(url))[:2] == (400, "DownloadArchiveException")
    assert list(server.store.glob("*.part")) == []


def test_a_download(server, web, make_archive):
    make_archive(server.allowed, GOOD, "by-http")
    answer = server.register(f"{web}/by-http.mar", initial_workers=1)
    assert answer.status_code == 200, answer.text
    described = server.describe("by-http")
    assert described["modelUrl"] == f"{web}/by-http.mar"
    assert server.predict("by-http").text == "fine"
    assert server.management("DELETE", "/models/by-http").status_code == 200
    assert not (server.store / "by-http.mar").exists()


def test_a_download_that_fails(server, web):
    url = f"{web}/nowhere.mar"
    assert error(server.register(url)) == (
        400,
        "DownloadArchiveException",
        f"Failed to download archive from: {url}: HTTP Error 404: File not found.",
    )


def test_a_url_whose_file_a_model_uses(server, web, make_archive):
    make_archive(server.allowed, GOOD, "in-use")
    assert server.register(f"{web}/in-use.mar").status_code == 200
    assert error(server.register(f"{web}/in-use.mar")) == (
        500,
        "InternalServerException",
        "Model file already exists in-use.mar: another model uses it.",
    )
    assert server.management("DELETE", "/models/in-use").status_code == 200
    assert server.register(f"{web}/in-use.mar").status_code == 200
    server.management("DELETE", "/models/in-use")


def test_a_download_of_what_is_no_archive(server, web):
    (server.allowed / "page.mar").write_text("<html>")
    assert error(server.register(f"{web}/page.mar"))[:2] == (400, "InvalidModelException")
    assert not (server.store / "page.mar").exists()


def test_a_download_over_a_file_in_the_store(server, web, make_archive):
    make_archive(server.allowed, GOOD, "taken")
    (server.store / "taken.mar").write_text("mine")
    assert error(server.register(f"{web}/taken.mar")) == (
        500,
        "InternalServerException",
        "Model file already exists taken.mar: the model store has another file of this name. "
        "Register that by its name, or delete it.",
    )
    assert (server.store / "taken.mar").read_text() == "mine"


def test_a_model_of_the_cpp_backend_is_refused_with_the_reason(server, make_archive):
    archive = make_archive(server.store, "def handle(data, context): ...\n", "cpp")
    answer = server.register(archive, runtime="LSP")
    assert (answer.status_code, answer.json()["type"]) == (400, "InvalidModelException")
    assert "C++ backend" in answer.json()["message"]
    assert not server.is_known("cpp")
