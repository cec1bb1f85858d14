"""Servers follow one catalog: they serve its models, and change with it."""

import contextlib
import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import grpc
import pytest
import requests
from catalog_file import read, write
from grpc_client import connected
from object_store import ObjectStore
from servers import make_workflow

pytestmark = pytest.mark.integration

ECHO = "def handle(d, c):\n    return d and [{text!r}] * len(d)\n"
BROKEN = "def handle(d, c):\n    raise RuntimeError('no weights')\nhandle(None, None)\n"


def status(server) -> dict:
    return server.management("GET", "/catalog").json()


def versions(server, name: str) -> dict[str, bool]:
    """The versions of a model that a server has, and which is the default one."""
    answer = server.management("GET", f"/models/{name}/all")
    if answer.status_code == 404:
        return {}
    default = server.describe(name)["modelVersion"]
    return {
        each["modelVersion"]: each["modelVersion"] == default
        for each in answer.json()
        if each["workers"]
    }


class Replicas(list):
    """Servers of one catalog, with archives that all of them have."""

    def __init__(self, store: Path, catalog: Path, servers, make_archive) -> None:
        super().__init__(servers)
        self.store, self.catalog = store, catalog
        self._make_archive = make_archive

    def pack(self, name: str, version: str = "1.0", handler: str = "", config: str = "") -> str:
        """An archive that answers with its own name; returns its file name."""
        text = f"{name} {version}"
        handler = handler or ECHO.format(text=text)
        file = f"{name}-{version}"
        self._make_archive(self.store, handler, file, config, version=version)
        return f"{file}.mar"

    def wait_served(self, wait_for, name: str, text: str) -> None:
        for server in self:
            wait_for(
                lambda server=server: server.predict(name).text == text,
                what=lambda server=server: f"{status(server)} {server.predict(name).text}",
            )

    def wait_gone(self, wait_for, name: str) -> None:
        for server in self:
            wait_for(lambda server=server: not server.is_known(name))


@pytest.fixture
def replicas(prepare_server, make_archive, tmp_path):
    """Make so many servers of one catalog and start them."""
    store = tmp_path / "shared-store"
    store.mkdir()
    catalog = tmp_path / "catalog" / "catalog.json"
    catalog.parent.mkdir()
    write(catalog, {})
    with contextlib.ExitStack() as stack:

        def start(count=3, environment=None, **properties):
            settings = {
                "model_catalog": str(catalog),
                "model_catalog_interval": "0.2",
                "model_store": str(store),
                **properties,
            }
            servers = [
                stack.enter_context(prepare_server(environment, **settings)) for _ in range(count)
            ]
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_ready()
            return Replicas(store, catalog, servers, make_archive)

        yield start


MIXING = """
def sample_input(): return ({"x": 1}, {"x": 2})
def handle(data, context):
    rows = [row["body"]["x"] for row in data or ()]
    return [sum(rows) / len(rows) for _ in rows]
"""


def test_a_hint_batches_no_rows_that_are_mixed(replicas, make_archive, wait_for):
    (server,) = all_one = replicas(1)
    make_archive(all_one.store, MIXING, "mixing")
    entry = {"url": "mixing.mar", "minWorkers": 1}
    write(all_one.catalog, {"mixing": {"1.0": entry}})
    wait_for(lambda: server.is_known("mixing"))
    server.wait_workers("mixing", "READY")
    write(all_one.catalog, {"mixing": {"1.0": {**entry, "performanceHint": "throughput"}}})
    wait_for(lambda: "batching changes" in (server.describe("mixing")["batching"].get("why", "")))
    assert server.describe("mixing")["batching"]["size"] == 1


class Load:
    """Requests to a server, one after the other on several connections, until it is ended."""

    def __init__(self, server, *paths: str) -> None:
        self.answers: list[tuple[int, str]] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server, path)) for path in paths]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server, path: str) -> None:
        url = f"http://127.0.0.1:{server.ports['inference']}{path}"
        with requests.Session() as session:
            while not self._end.is_set():
                # Chunks, so that the model is found well before the body has been read
                answer = session.post(url, data=iter([b"x", b"y"]), timeout=20)
                self.answers.append((answer.status_code, answer.text))
                answer = session.post(url, data=b"x", timeout=20)
                self.answers.append((answer.status_code, answer.text))


def test_a_new_version_takes_over_under_load_without_a_failed_request(replicas, wait_for):
    all_three = replicas()
    urls = [all_three.pack("digits", version) for version in ("1.0", "2.0")]
    write(all_three.catalog, {"digits": {"1.0": {"url": urls[0], "minWorkers": 1}}})
    all_three.wait_served(wait_for, "digits", "digits 1.0")
    with contextlib.ExitStack() as stack:
        path = "/predictions/digits"
        loads = [stack.enter_context(Load(server, path, path)) for server in all_three]
        for version, text in (("2.0", "digits 2.0"), ("1.0", "digits 1.0")):
            entry = {"url": urls[version == "2.0"], "minWorkers": 1}
            write(all_three.catalog, {"digits": {version: entry}})
            all_three.wait_served(wait_for, "digits", text)
        # The same version with another setting, which only a registration can make
        entry["responseTimeout"] = 77
        write(all_three.catalog, {"digits": {"1.0": entry}})
        for server in all_three:
            wait_for(lambda server=server: server.describe("digits")["responseTimeout"] == 77)
            wait_for(lambda server=server: status(server)["converged"])
    for load in loads:
        assert len(load.answers) > 20
        assert {status for status, _ in load.answers} == {200}
        texts = [text for text, _ in itertools.groupby(text for _, text in load.answers)]
        assert set(texts) == {"digits 1.0", "digits 2.0"}
    for server in all_three:
        wait_for(lambda server=server: len(server.unpacked()) == 1)
        assert server.metrics("marserve_ready_workers")
        server.stop()


def test_a_broken_archive_leaves_what_is_served(replicas, wait_for):
    (server,) = all_one = replicas(1)
    good, bad = all_one.pack("m"), all_one.pack("m", "2.0", BROKEN)
    entry = {"url": good, "minWorkers": 1}
    write(all_one.catalog, {"m": {"1.0": entry}})
    all_one.wait_served(wait_for, "m", "m 1.0")
    for wrong, reason in (
        ({"2.0": {"url": bad, "minWorkers": 1}}, "no weights"),
        ({"2.0": {"url": "missing.mar"}}, "Model not found at: missing.mar"),
        ({"2.0": {"url": good}}, "holds version 1.0"),
        ({"2.0": {"url": "ftp://host/m.mar"}}, "Model not found at: ftp://host/m.mar"),
        ({"1.0": {**entry, "responseTimeout": 5, "url": "gone.mar"}}, "Model not found"),
        ({"1.0": {**entry, "url": bad}}, "holds version 2.0"),
    ):
        write(all_one.catalog, {"m": wrong})
        ((version, wanted),) = wrong.items()
        pending = wait_for(
            lambda reason=reason, url=wanted["url"]: told(server, reason, url),
            what=lambda: status(server),
        )
        assert (pending["modelName"], pending["modelVersion"]) == ("m", version)
        assert not status(server)["converged"]
        assert server.predict("m").text == "m 1.0"
        ready = server.inference("GET", "/ready")
        assert ready.status_code == 200  # all replicas have the same trouble
        assert ready.json()["catalog"] == "not as the catalog wants them: m"
    assert server.metrics("marserve_catalog_pending_models").popitem()[1] == 1
    assert server.metrics("marserve_catalog_failures_total").popitem()[1] >= 6
    server.wait_logged("ts_log.log", "The catalog wants m 2.0, which failed (Register)")

    # It is tried again: when the archive comes, it is served.
    write(all_one.catalog, {"m": {"2.0": {"url": "m-3.mar", "minWorkers": 1}}})
    wait_for(lambda: told(server, "m-3.mar"))
    (all_one.store / all_one.pack("m", "2.0")).rename(all_one.store / "m-3.mar")
    all_one.wait_served(wait_for, "m", "m 2.0")
    wait_for(lambda: status(server)["converged"])
    assert (status(server)["pending"], server.inference("GET", "/ready").json()) == (
        [],
        {"status": "Ready"},
    )
    server.stop()


def told(server, reason: str, url: str = "") -> dict | None:
    """What is pending for a reason."""
    pending = status(server)["pending"]
    found = (each for each in pending if reason in each["reason"] and url in each["modelUrl"])
    return next(found, None)


def test_a_catalog_that_is_broken_or_gone_unregisters_nothing(replicas, wait_for):
    (server,) = all_one = replicas(1)
    catalog = all_one.catalog
    models = {"m": {"1.0": {"url": all_one.pack("m"), "minWorkers": 1}}}
    write(catalog, models)
    all_one.wait_served(wait_for, "m", "m 1.0")
    revision = status(server)["revision"]
    whole = catalog.read_bytes()

    def damage(content):
        if content is None:
            catalog.unlink()
        else:
            catalog.write_bytes(content)

    for content, reason in (
        (b"", "not valid JSON"),
        (whole[: len(whole) // 2], "not valid JSON"),
        (b'{"models": [], "version": 2}', "no other key beside"),
        (None, "No such file"),
    ):
        damage(content)
        wait_for(
            lambda reason=reason: reason in status(server).get("failure", ""),
            what=lambda: status(server),
        )
        assert (status(server)["revision"], server.predict("m").text) == (revision, "m 1.0")
        assert server.inference("GET", "/ready").status_code == 200
    assert not catalog.exists()
    assert server.metrics("marserve_catalog_read_failures_total").popitem()[1] >= 3
    server.wait_logged("ts_log.log", "the last one that could be read stays")

    write(catalog, models)
    wait_for(lambda: "failure" not in status(server))
    assert server.predict("m").text == "m 1.0"
    write(catalog, {})
    all_one.wait_gone(wait_for, "m")
    server.stop()


def test_a_model_that_cannot_be_read_stops_no_other(replicas, wait_for):
    (server,) = all_one = replicas(1)
    entry = {"url": all_one.pack("m"), "minWorkers": 1}
    write(all_one.catalog, {"m": {"1.0": entry}})
    all_one.wait_served(wait_for, "m", "m 1.0")
    wrong = {"1.0": {**entry, "batchSise": 3}}
    other = {"1.0": {"url": all_one.pack("other"), "minWorkers": 1}}
    write(all_one.catalog, {"m": wrong, "other": other})
    all_one.wait_served(wait_for, "other", "other 1.0")
    assert server.predict("m").text == "m 1.0"
    (pending,) = status(server)["pending"]
    assert pending["reason"] == "m 1.0: 'batchSise' is unknown; did you mean batchSize?"
    assert not status(server)["converged"]
    assert server.inference("GET", "/ready").status_code == 200
    assert server.metrics("marserve_catalog_pending_models").popitem()[1] == 1
    # A server that never had it waits for it.
    server.stop()
    server.start()
    wait_for(lambda: server.inference("GET", "/ready").json().get("models") == ["m"])
    assert "batchSise" in server.predict("m").text
    write(all_one.catalog, {"m": {"1.0": entry}})
    all_one.wait_served(wait_for, "m", "m 1.0")
    wait_for(lambda: server.inference("GET", "/ready").json() == {"status": "Ready"})
    server.stop()


def test_a_start_waits_for_the_catalog_and_for_its_models(replicas, wait_for):
    (server,) = all_one = replicas(1, model_catalog="later/catalog.json")
    catalog = server.directory / "later" / "catalog.json"
    ready = server.inference("GET", "/ready")
    assert (ready.status_code, ready.json()) == (
        503,
        {"status": "Not ready", "models": [], "catalog": "the catalog has not been read yet"},
    )
    assert ("revision" in status(server), status(server)["converged"]) == (False, False)
    catalog.parent.mkdir()
    good, bad = all_one.pack("good"), all_one.pack("bad", handler=BROKEN)
    entries = {
        "good": {"1.0": {"url": good, "minWorkers": 1}},
        "bad": {"1.0": {"url": bad, "minWorkers": 1}},
    }
    write(catalog, entries)
    wait_for(lambda: server.predict("good").text == "good 1.0")
    wait_for(lambda: server.inference("GET", "/ready").json()["models"] == ["bad"])
    wait_for(lambda: "could not be loaded" in server.predict("bad").text)  # between two tries
    del entries["bad"]
    write(catalog, entries)
    wait_for(lambda: server.inference("GET", "/ready").status_code == 200)
    # What comes later and fails takes no server from its clients.
    entries["bad"] = {"1.0": {"url": bad, "minWorkers": 1}}
    write(catalog, entries)
    wait_for(lambda: told(server, "no weights"))
    assert server.inference("GET", "/ready").status_code == 200
    # A server that is killed finds all of it again.
    server.terminate(9)
    server.process.wait()
    server.start()
    wait_for(lambda: server.predict("good").text == "good 1.0")
    server.stop()


def test_requests_cannot_change_the_models_of_a_catalog(replicas, wait_for):
    (server,) = all_one = replicas(1, ts_open_inference_protocol="true")
    url = all_one.pack("m")
    write(all_one.catalog, {"m": {"1.0": {"url": url, "minWorkers": 1}}})
    all_one.wait_served(wait_for, "m", "m 1.0")
    before = all_one.catalog.read_bytes(), server.describe("m")
    why = f"the catalog {all_one.catalog}, which this server only reads. Change them there."
    for method, path in (
        ("POST", f"/models?url={url}&model_name=other"),
        ("PUT", "/models/m?min_worker=2"),
        ("PUT", "/models/m?batch_size=2"),
        ("PUT", "/models/m?unset=batch_size"),
        ("PUT", "/models/m/1.0/set-default"),
        ("DELETE", "/models/m"),
        ("DELETE", "/models/unknown"),
        ("POST", "/v2/repository/models/m/unload"),
        ("POST", "/v2/repository/models/other/load"),
    ):
        answer = server.management(method, path)
        assert (answer.status_code, why in answer.text) == (403, True), (path, answer.text)
    with connected(server, "management") as client, pytest.raises(grpc.RpcError) as refused:
        client.manage("UnregisterModel", model_name="m")
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert before == (all_one.catalog.read_bytes(), server.describe("m"))
    assert server.predict("m").text == "m 1.0"
    server.wait_logged("ts_log.log", "Requests cannot change them.")
    server.stop()
    server.write_property("model_catalog_mode", "read-write")
    assert server.launch().wait(20) == 1
    server.wait_printed("servers do not write a catalog any more")


def test_settings_and_workers_change_in_place(replicas, wait_for):
    (server,) = all_one = replicas(1)
    entry = {"url": all_one.pack("m", config="maxBatchDelay: 30\n"), "minWorkers": 1}
    write(all_one.catalog, {"m": {"1.0": entry}})
    all_one.wait_served(wait_for, "m", "m 1.0")
    pid = server.worker("m")["pid"]

    def in_force():
        described = server.describe("m")
        is_automatic = described["batching"]["isAutomatic"]
        return is_automatic, described["maxBatchDelay"], len(described["workers"])

    for members, wanted in (
        ({"batchSize": 4}, (False, 30, 1)),
        ({"performanceHint": "latency"}, (True, 0, 1)),
        ({"batchable": False, "batchSize": 4}, (False, 30, 1)),
        ({"batchSize": "auto"}, (True, 30, 1)),
        ({"maxBatchDelay": 20, "minWorkers": 2}, (False, 20, 2)),
        ({}, (False, 30, 1)),
    ):
        write(all_one.catalog, {"m": {"1.0": entry | members}})
        wait_for(lambda wanted=wanted: in_force() == wanted, what=in_force)
        wait_for(lambda: status(server)["converged"], what=lambda: status(server))
        assert pid in [each["pid"] for each in server.describe("m")["workers"]]
    server.stop()


def test_a_mounted_config_map_is_followed(replicas, wait_for):
    (server,) = all_one = replicas(1, model_catalog="mounted")
    mounted = server.directory / "mounted"

    def mount(name, models):
        (mounted / name).mkdir(parents=True)
        (mounted / name / "catalog.json").write_text(json.dumps({"models": models}))
        (mounted / "..new").symlink_to(name)
        (mounted / "..new").rename(mounted / "..data")

    server.stop()
    url = all_one.pack("m")
    mount("..1", {"m": {"1.0": {"url": url, "minWorkers": 1}}})
    (mounted / "catalog.json").symlink_to("..data/catalog.json")
    server.start()
    all_one.wait_served(wait_for, "m", "m 1.0")
    mount("..2", {})
    all_one.wait_gone(wait_for, "m")
    server.stop()


def test_thousands_of_models_that_cannot_be_read_do_not_freeze_the_server(
    replicas, wait_for, background
):
    (server,) = all_one = replicas(1)
    url = all_one.pack("m")
    taken = threading.Event()

    def ping():
        worst = 0.0
        while not taken.is_set():
            began = time.perf_counter()
            with contextlib.suppress(requests.ConnectionError):  # it does not listen yet
                assert server.inference("GET", "/ping").status_code == 200
                worst = max(worst, time.perf_counter() - began)
        return worst

    unread = {f"m{number}": {"1.0": {"url": url, "newWord": 1}} for number in range(20_000)}
    for restarts in range(2):
        if restarts:
            server.stop()
            taken.clear()
        pinging = background(ping)
        if restarts:
            server.start()
        else:
            write(all_one.catalog, {**unread, "good": {"1.0": {"url": url, "minWorkers": 1}}})
        all_one.wait_served(wait_for, "good", "m 1.0")
        for _ in range(3):
            server.inference("GET", "/ready")
            server.metrics()
        taken.set()
        # Quadratic work took 5 s at the start. On two idle cores it is 0.1 s, at the start 0.2 s,
        # which is the collection of garbage before the server serves.
        assert pinging.result() < 1
    described = status(server)
    assert (described["unconverged"], len(described["pending"])) == (20_000, 100)
    text = server.console_text()
    assert text.count("models cannot be read (their earlier entries stay)") == 2
    assert text.count("newWord") < 40
    server.stop()


def test_thousands_of_models_that_cannot_be_loaded_hold_up_no_other(replicas, wait_for):
    (server,) = all_one = replicas(1)
    url = all_one.pack("m")
    missing = {f"a{number}": {"1.0": {"url": "missing.mar"}} for number in range(3000)}
    write(all_one.catalog, missing)
    wait_for(lambda: status(server)["pending"])
    write(all_one.catalog, {**missing, "good": {"1.0": {"url": url, "minWorkers": 1}}})
    all_one.wait_served(wait_for, "good", "m 1.0")
    described = status(server)
    assert len(described["pending"]) + len(described["underWay"]) <= 200
    write(all_one.catalog, {"good": {"1.0": {"url": url, "minWorkers": 1}}})
    all_one.wait_served(wait_for, "good", "m 1.0")
    wait_for(lambda: status(server)["converged"])
    server.stop()


def test_half_a_surrogate_pair_stops_only_its_own_model(replicas, wait_for):
    (server,) = all_one = replicas(1, ts_open_inference_protocol="true")
    url = all_one.pack("m")
    entry, half = {"url": url, "minWorkers": 1}, "\ud800"
    wrong = {
        f"name{half}": {"1.0": entry},
        "version": {f"1{half}": entry},
        "url": {"1.0": {**entry, "url": f"https://host/{half}.mar"}},
        "handler": {"1.0": {**entry, "handler": half}},
        "unknown": {"1.0": {**entry, "newWord": {half: [half]}}},
        "list": [half],
    }
    write(all_one.catalog, {**wrong, "good": {"1.0": entry}})
    all_one.wait_served(wait_for, "good", "m 1.0")
    assert len(status(server)["pending"]) == len(wrong)
    assert server.management("GET", "/models").status_code == 200
    assert any("failed_loads" in name for name in server.metrics())
    assert server.inference("POST", "/v2/repository/index", data=b"{}").status_code == 200
    assert server.inference("GET", "/ready").status_code == 200
    server.stop()


class Secretive(BaseHTTPRequestHandler):
    """Answers with a status line that is none, and that has the request in it."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.1 " + self.raw_requestline + b"leaked " * 1000 + b"\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


def test_no_secret_of_a_url_stands_in_the_log(replicas, wait_for):
    with ThreadingHTTPServer(("127.0.0.1", 0), Secretive) as site:
        threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True).start()
        place = f"127.0.0.1:{site.server_port}/c.json"
        url = f"http://user:pa55@{place}?X-Amz-Signature=t0psecret&token=t0ken"
        (server,) = all_one = replicas(1, model_catalog=url)
        failure = wait_for(lambda: status(server).get("failure"))
        refused = server.management("DELETE", "/models/m")
        assert (refused.status_code, f"the catalog http://{place}," in refused.text) == (403, True)
        server.stop()
        server.write_property("model_catalog", str(all_one.catalog))
        write(all_one.catalog, {"m": {"1.0": {"url": url.replace("c.json", "m.mar")}}})
        server.start()
        archive_failure = f"from: http://{place.replace('c.json', 'm.mar')}: no usable answer"
        wait_for(lambda: told(server, archive_failure), what=lambda: status(server))
        server.stop()
        site.shutdown()
    for text in (f"The catalog http://{place}: no usable answer (", archive_failure):
        server.wait_printed(text)
        server.wait_logged("ts_log.log", text)
    log = server.console_text() + server.log("ts_log.log")
    lines = [*log.splitlines(), failure, refused.text]
    secrets = ("pa55", "t0psecret", "t0ken", "leaked")
    assert [line for line in lines if any(word in line for word in secrets)] == []


def test_a_catalog_in_a_bucket(replicas, wait_for, make_archive, tmp_path):
    with ObjectStore(is_signed=True).served() as objects:
        archive = make_archive(tmp_path, ECHO.format(text="stored"), "stored")
        objects.objects["/bucket/stored.mar"] = archive.read_bytes()
        entry = {"url": "s3://bucket/stored.mar", "minWorkers": 1}
        catalog = json.dumps({"models": {"stored": {"1.0": entry}}})
        objects.objects["/bucket/catalog.json"] = catalog.encode()
        first, second = both = replicas(
            2,
            objects.environment(),
            model_catalog="s3://bucket/catalog.json",
            model_catalog_timeout="1",
            allowed_urls="s3://.*",
        )
        # Both have one model store, where their downloads would meet.
        both.wait_served(wait_for, "stored", "stored")
        assert list(both.store.iterdir()) == []
        wait_for(lambda: ("/bucket/catalog.json", 304) in objects.requests)

        objects.is_silent = True
        wait_for(lambda: status(first).get("failure") == "no answer within 1 s")
        assert first.predict("stored").text == "stored"
        objects.is_silent = False
        wait_for(lambda: "failure" not in status(first))
        objects.objects["/bucket/catalog.json"] = b'{"models": {}}'
        both.wait_gone(wait_for, "stored")
        first.stop()
        second.stop()


def test_nodes_of_a_workflow_are_the_servers_own(replicas, tmp_path):
    (server,) = all_one = replicas(1, workflow_store=str(tmp_path / "shared-store"))
    url = all_one.pack("m")
    specification = f"models:\n  min-workers: 1\n  n:\n    url: {url}\ndag:\n  n: []\n"
    make_workflow(all_one.store, "flow", specification)
    answer = server.management("POST", "/workflows?url=flow.war&workflow_name=flow")
    assert answer.status_code == 200, answer.text
    for change in ("min_worker=2&synchronous=true", "batch_size=2"):
        answer = server.management("PUT", f"/models/flow__n?{change}")
        assert answer.status_code == 200, answer.text
    assert len(server.describe("flow__n")["workers"]) == 2
    assert server.management("PUT", "/models/flow__n/1.0/set-default").status_code == 200
    assert read(all_one.catalog) == {}
    assert server.management("DELETE", "/models/flow__n").status_code == 200
    assert server.management("DELETE", "/workflows/flow").status_code == 200
    server.stop()


def test_what_else_would_name_models_is_refused(prepare_server):
    with prepare_server(model_catalog="catalog.json", load_models="m.mar") as server:
        assert server.launch().wait(20) == 1
        server.wait_printed("load_models")
        server.wait_printed("has no meaning beside model_catalog")


def test_a_server_that_brings_a_model_up_can_be_stopped(replicas, wait_for):
    (server,) = all_one = replicas(1)
    slow = "import time\ntime.sleep(100)\ndef handle(d, c):\n    return d\n"
    write(all_one.catalog, {"slow": {"1.0": {"url": all_one.pack("slow", handler=slow)}}})
    wait_for(lambda: server.is_known("slow"))
    assert not status(server)["converged"]
    server.stop()
