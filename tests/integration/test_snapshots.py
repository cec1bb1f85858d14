"""Snapshots of a real server: when they are written, and what comes back."""

import json
import re
import resource

import pytest
from servers import wait_for

from marserve.frontend.configuration.properties import parse_properties

pytestmark = pytest.mark.integration

FINE = "def handle(data, context):\n    return data and ['{0}'] * len(data)\n"


@pytest.fixture
def prepared(prepare_server):
    """A server of this test alone that writes and restores snapshots; not started."""
    with prepare_server(load_models="one.mar", default_workers_per_model="1") as server:
        server.habits = []
        yield server


def snapshots(server):
    """Kind and path of each snapshot, in the order of their names."""
    files = sorted((server.directory / "logs" / "config").glob("*"))
    assert all(re.fullmatch(r"\d{17}-[a-z]+\.cfg", file.name) for file in files)
    return [(file.stem.partition("-")[2], file) for file in files]


def start(server, *arguments):
    """Start it and wait until it has told so: its first snapshot comes after the listeners."""
    before = server.console_text().count("Model server started.")
    server.start(*arguments)
    wait_for(lambda: server.console_text().count("Model server started.") > before)


def saved(server):
    """The models of the newest snapshot."""
    _, file = snapshots(server)[-1]
    return json.loads(parse_properties(file.read_text())["model_snapshot"])["models"]


def kinds(server):
    return [kind for kind, _ in snapshots(server)]


def test_each_change_writes_one_and_the_newest_comes_back(prepared, make_archive):
    newer = make_archive(prepared.store, FINE.format("2.0"), "two", version="2.0")
    newer.rename(prepared.store / "two2.mar")
    for name in ("one", "two"):
        make_archive(prepared.store, FINE.format("1.0"), name)
    start(prepared)
    assert kinds(prepared) == ["startup"]
    assert list(saved(prepared)) == ["one"]

    batching = {"batch_size": 3, "max_batch_delay": 70, "response_timeout": 33}
    assert prepared.register("two.mar", initial_workers=0, **batching).status_code == 200
    assert prepared.register("two2.mar", initial_workers=1).status_code == 200
    assert kinds(prepared) == ["startup", "snapshot", "snapshot"]
    scaled = prepared.management(
        "PUT", "/models/two/1.0?min_worker=1&max_worker=2&synchronous=true"
    )
    assert scaled.status_code == 200
    assert prepared.management("PUT", "/models/two/2.0/set-default").status_code == 200
    assert prepared.management("DELETE", "/models/one").status_code == 200
    assert kinds(prepared) == ["startup", *["snapshot"] * 5]
    assert saved(prepared) == {
        "two": {
            "1.0": {
                "defaultVersion": False,
                "marName": "two.mar",
                "minWorkers": 1,
                "maxWorkers": 2,
                "batchSize": 3,
                "maxBatchDelay": 70,
                "responseTimeout": 33,
                "startupTimeout": 120,
                "runtimeType": "python",
                "setByRequests": ["batchSize", "maxBatchDelay", "responseTimeout"],
            },
            "2.0": {
                "defaultVersion": True,
                "marName": "two2.mar",
                "minWorkers": 1,
                "maxWorkers": 1,
                "batchSize": 1,
                "maxBatchDelay": 100,
                "responseTimeout": 120,
                "startupTimeout": 120,
                "runtimeType": "python",
            },
        }
    }
    before = prepared.management("GET", "/models/two/all").json()
    prepared.stop()
    assert kinds(prepared)[-1] == "shutdown"
    assert {file.stat().st_mode & 0o777 for _, file in snapshots(prepared)} == {0o600}
    newest = snapshots(prepared)[-1][1]
    assert newest.read_text().startswith("#Saving snapshot\n#")

    # The file in the working directory is beaten, and the operator hears of it.
    start(prepared)
    beaten = prepared.directory / "config.properties"
    assert (
        f"restored from the newest snapshot, {newest}, not from {beaten}: its changes have no "
        "effect. Start with --ncs, or --ts-config config.properties, to read it."
    ) in prepared.console_text()
    listed = prepared.management("GET", "/models").json()["models"]
    assert [each["modelName"] for each in listed] == ["two"]
    prepared.wait_workers("two", "READY")
    assert prepared.predict("two").text == "2.0"
    prepared.management("PUT", "/models/two/1.0?min_worker=1&max_worker=2&synchronous=true")
    assert prepared.predict("two/1.0").text == "1.0"
    after = prepared.management("GET", "/models/two/all").json()
    for old, new in zip(before, after, strict=True):
        assert {*new["decidedBy"].values()} == {"snapshot", "server"}  # was: request
        # batching: what was learnt.
        changing = ("workers", "loadedAtStartup", "batching", "decidedBy")
        assert {k: v for k, v in new.items() if k not in changing} == {
            k: v for k, v in old.items() if k not in changing
        }
    prepared.stop()

    # Models that somebody asks for are not beaten.
    newest = snapshots(prepared)[-1][1]
    start(prepared, "--models", "first=one.mar")
    prepared.wait_printed(f"The newest snapshot, {newest}, is passed over")
    listed = prepared.management("GET", "/models").json()["models"]
    assert [each["modelName"] for each in listed] == ["first"]
    prepared.stop()

    prepared.habits = ["--ncs"]
    count = len(snapshots(prepared))
    start(prepared)
    assert prepared.is_known("one")
    assert not prepared.is_known("two")
    prepared.stop()
    assert len(snapshots(prepared)) == count


def torchserve_snapshot(server, **members):
    """A file as TorchServe 0.12.0 writes it, of one model; other members replace its own."""
    model = {
        "defaultVersion": True,
        "marName": "probe.mar",
        "minWorkers": 1,
        "maxWorkers": 2,
        "batchSize": 3,
        "maxBatchDelay": 70,
        "responseTimeout": 33,
        "startupTimeout": 120,
        "runtimeType": "python",
        **members,
    }
    snapshot = {
        "name": "20261120213709459-startup.cfg",
        "modelCount": 1,
        "created": 1795210629459,
        "models": {"probe": {"1.0": model}},
    }
    escaped = json.dumps(snapshot, indent=2).replace(":", "\\:").replace("\n", "\\n")
    own = (server.directory / "config.properties").read_text().replace("://", "\\://")
    file = server.directory / "torchserve.cfg"
    file.write_text(
        f"#Saving snapshot\n#Fri Nov 20 21\\:37\\:09 UTC 2026\n{own}"
        "tsConfigFile=/etc/ts/config.properties\nversion=0.12.0\nnumber_of_netty_threads=32\n"
        f"vmargs=-Xmx4g\npython=/opt/torchserve/bin/python3\nload_models=all\nmodel_snapshot={escaped}\n"
    )
    return str(file)


def test_a_snapshot_of_torchserve_itself_is_restored_and_beats_the_yaml(prepared, make_archive):
    yaml = "minWorkers: 3\nmaxWorkers: 3\nbatchSize: 9\nmaxBatchDelay: 9\nresponseTimeout: 9\n"
    make_archive(prepared.store, FINE.format("fine"), "probe", yaml)
    make_archive(prepared.store, FINE.format("fine"), "other")
    start(prepared, "--ts-config", torchserve_snapshot(prepared))
    assert not prepared.is_known("other")
    described = prepared.describe("probe")
    numbers = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout")
    assert [described[key] for key in numbers] == [1, 2, 3, 70, 33]
    assert described["loadedAtStartup"] is False
    prepared.wait_workers("probe", "READY")
    assert prepared.predict("probe").text == "fine"
    prepared.wait_printed("vmargs")
    assert "tsConfigFile (" not in prepared.console_text()
    prepared.stop()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"marName": "gone.mar"}, "Model archive file for model :probe, version :1.0 not found"),
        ({"marName": "newer.mar"}, "not found in model store: newer.mar holds version 2.0"),
        ({"minWorkers": "one"}, "minWorkers of probe 1.0 to be a whole number"),
    ],
)
def test_what_cannot_be_restored_stops_the_start(prepared, make_archive, members, words):
    newer = make_archive(prepared.store, FINE.format("fine"), "probe", version="2.0")
    newer.rename(prepared.store / "newer.mar")
    process = prepared.launch("--ts-config", torchserve_snapshot(prepared, **members))
    assert process.wait(30) == 1
    prepared.wait_printed(words)
    assert "Traceback" not in prepared.console_text()
    prepared.assert_nothing_left()
    # What is on disk is still what the last good start has left.
    assert snapshots(prepared) == []


def test_a_broken_archive_kept_all_models_of_a_snapshot_down(prepared, make_archive):
    for name in ("one", "two"):
        make_archive(prepared.store, FINE.format(name), name)
    start(prepared)
    assert prepared.register("two.mar", initial_workers=1, batch_size=3).ok
    prepared.stop()
    before = saved(prepared)

    (prepared.store / "one.mar").unlink()
    (prepared.store / "two.mar").write_text("no archive")
    make_archive(prepared.store, FINE.format("three"), "three")
    start(prepared)
    ready = prepared.inference("GET", "/ready")
    assert (ready.status_code, ready.json()["models"]) == (503, ["one", "two"])
    assert saved(prepared) == before  # they come back when their archives do
    assert prepared.register("three.mar", initial_workers=1).ok
    assert prepared.predict("three").text == "three"
    prepared.stop()

    for name in ("one", "two"):
        make_archive(prepared.store, FINE.format(name), name)
    start(prepared)
    wait_for(lambda: prepared.inference("GET", "/ready").status_code == 200)
    assert prepared.describe("two")["batchSize"] == 3
    prepared.stop()


def test_a_broken_archive_does_not_stop_the_start_from_a_named_snapshot(prepared):
    (prepared.store / "probe.mar").write_text("no archive")
    start(prepared, "--ts-config", torchserve_snapshot(prepared))
    listed = prepared.management("GET", "/models").json()["models"]
    assert listed == [{"modelName": "probe", "modelUrl": "probe.mar"}]
    assert prepared.describe("probe")["state"] == "FAILED"
    prepared.stop()


def test_a_snapshot_of_no_models_is_an_empty_start(prepared, make_archive):
    make_archive(prepared.store, FINE.format("fine"), "one")
    with (prepared.directory / "config.properties").open("a") as config:
        config.write('model_snapshot={"modelCount": 0}\n')
    start(prepared)
    assert prepared.management("GET", "/models").json()["models"] == []
    prepared.wait_printed("The snapshot contains no models")
    prepared.stop()


def test_a_handler_chosen_at_registration_and_a_directory_come_back(prepared, make_archive):
    source = FINE.format("chosen")
    directory = prepared.directory / "elsewhere"
    directory.mkdir()
    (directory / "chosen.py").write_text(source)
    (directory / "MAR-INF").mkdir()
    manifest = {"modelName": "m", "modelVersion": "1.0", "handler": "missing.py"}
    text = json.dumps({"model": manifest, "runtime": "python"})
    (directory / "MAR-INF" / "MANIFEST.json").write_text(text)
    make_archive(prepared.store, FINE.format("one"), "one")
    start(prepared)
    answer = prepared.register(str(directory), handler="chosen.py", initial_workers=1)
    assert answer.status_code == 200, answer.text
    assert prepared.predict("m").text == "chosen"
    prepared.stop()
    start(prepared)
    prepared.wait_workers("m", "READY")
    assert prepared.predict("m").text == "chosen"
    prepared.stop()


def test_snapshots_that_cannot_be_written_do_not_stop_the_serving(prepared, make_archive):
    make_archive(prepared.store, FINE.format("one"), "one")
    (prepared.directory / "logs").mkdir()
    (prepared.directory / "logs" / "config").write_text("in the way")
    start(prepared)
    assert prepared.management("PUT", "/models/one?min_worker=1&synchronous=true").ok
    prepared.wait_workers("one", "READY")
    assert prepared.predict("one").text == "one"
    prepared.stop()
    assert prepared.console_text().count("Snapshots cannot be written") == 1


def test_a_full_disk_neither_refuses_changes_nor_leaves_a_cut_snapshot(prepared, make_archive):
    make_archive(prepared.store, FINE.format("one"), "one")
    make_archive(prepared.store, FINE.format("two"), "two")
    start(prepared)
    newest = snapshots(prepared)[-1]
    # As many bytes as fit the beginning of a snapshot; log files, which are longer, fail at once.
    limit_files(prepared, 64)
    assert prepared.management("PUT", "/models/one?min_worker=1&synchronous=true").ok
    assert prepared.management("PUT", "/models/one/1.0/set-default").ok
    assert prepared.predict("one").text == "one"
    assert snapshots(prepared)[-1] == newest  # also that there is no half-written one
    refused = prepared.register("two.mar")
    assert refused.status_code == 500
    assert refused.json()["message"] == "The archive cannot be opened: File too large."
    assert len(prepared.unpacked()) == 1
    limit_files(prepared, resource.RLIM_INFINITY)
    assert prepared.register("two.mar", initial_workers=1).ok
    assert list(saved(prepared)) == ["one", "two"]
    assert saved(prepared)["one"]["1.0"]["minWorkers"] == 1
    prepared.stop()


def limit_files(server, bytes_of_a_file):
    """Let the server write no longer files from now on."""
    _, most = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (bytes_of_a_file, most))


def test_a_cut_newest_snapshot_started_an_empty_server(prepared, make_archive):
    make_archive(prepared.store, FINE.format("one"), "one")
    start(prepared)
    prepared.stop()
    kept = snapshots(prepared)[-1][1]
    later = kept.with_name("20990101000000000-shutdown.cfg")
    later.write_bytes(kept.read_bytes()[:-40])
    start(prepared)
    prepared.wait_printed(f"The snapshot {later} is passed over: it ends too early.")
    prepared.wait_printed(f"restored from the newest snapshot, {kept}")
    prepared.wait_workers("one", "READY")
    assert prepared.predict("one").text == "one"
    prepared.stop()


def test_no_more_are_kept_than_asked_for(prepared, make_archive):
    make_archive(prepared.store, FINE.format("one"), "one")
    prepared.write_property("snapshots_kept", "2")
    start(prepared)
    for _ in range(4):
        assert prepared.management("PUT", "/models/one/1.0/set-default").ok
    prepared.stop()
    assert kinds(prepared) == ["startup", "snapshot", "snapshot", "shutdown"]


def test_a_server_that_was_killed_leaves_what_it_served(prepared, make_archive):
    make_archive(prepared.store, FINE.format("one"), "one")
    make_archive(prepared.store, FINE.format("two"), "two")
    start(prepared)
    assert prepared.register("two.mar", initial_workers=1).ok
    prepared.process.kill()
    prepared.process.wait()
    start(prepared)
    prepared.wait_workers("two", "READY")
    assert prepared.predict("two").text == "two"
    prepared.terminate()
    assert prepared.process.wait(30) == 0


def test_the_place_follows_the_logs(prepare_server, tmp_path, make_archive):
    place = tmp_path / "moved"
    with prepare_server({"LOG_LOCATION": str(place)}) as server:
        server.habits = []
        start(server)
        server.stop()
        names = sorted(file.name for file in (place / "config").iterdir())
        assert [name.partition("-")[2] for name in names] == ["startup.cfg", "shutdown.cfg"]
