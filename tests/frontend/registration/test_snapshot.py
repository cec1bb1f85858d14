import asyncio
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from served_models import saved_entry

from marserve.frontend.archives.archive import Archive, ArchiveOpener, make_helpers
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import newest_snapshot
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import parse_properties
from marserve.frontend.errors import ArchiveRefused
from marserve.frontend.registration.snapshot import (
    Snapshots,
    SnapshotWriter,
    served_models,
)
from marserve.frontend.serving.model_version import Origin
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.settings.model_settings import resolve_settings

MODEL = saved_entry(delay=0.004, response_timeout=5, startup_timeout=6)
PROPERTIES = {"own_key": "ä", "model_snapshot": "an older one"}
NOON = 1_795_000_000.25


@pytest.fixture
def make_writer(tmp_path):
    def make(kept=100, moments=None):
        clock = (lambda: next(moments)) if moments else (lambda: NOON)
        return SnapshotWriter(tmp_path / "logs" / "config", PROPERTIES, kept, clock)

    return make


# -- one file --------------------------------------------------------------------------------------


def test_a_snapshot_is_a_configuration_that_restores(make_writer, tmp_path):
    path = make_writer().write("startup", [MODEL])
    assert path.parent == tmp_path / "logs" / "config"
    assert path.name.endswith("250-startup.cfg")
    assert len(path.name) == len("20261120213709459-startup.cfg")
    header, date, *_ = path.read_text(encoding="ascii").splitlines()
    assert header == "#Saving snapshot"
    assert date.startswith("#")
    config = load_config({"model_store": str(tmp_path)}, str(path), {})
    assert config.model_snapshot == (MODEL,)
    assert config.texts["own_key"] == "ä"
    written = parse_properties(path.read_text())["model_snapshot"]
    assert f'"name": "{path.name}"' in written
    assert f'"created": {int(NOON * 1000)}' in written


def test_nobody_else_may_read_it(make_writer):
    path = make_writer().write("startup", [])
    assert path.stat().st_mode & 0o777 == 0o600


def test_changes_in_the_same_millisecond_are_snapshots_of_their_own_in_order(make_writer):
    writer = make_writer()
    paths = [writer.write("snapshot", [MODEL]) for _ in range(3)]
    paths.append(make_writer().write("snapshot", []))  # and after a restart within it
    assert paths == sorted(set(paths))
    assert all(path.exists() for path in paths)


def test_a_clock_that_goes_back_does_not_turn_the_order(make_writer):
    writer = make_writer(moments=iter([NOON, NOON - 3600]))
    assert writer.write("snapshot", []).name < writer.write("snapshot", []).name


def test_the_last_one_is_kept_and_restored_though_the_clock_went_back(make_writer):
    before = [make_writer(kept=2).write("snapshot", [MODEL]) for _ in range(2)]
    last = make_writer(kept=2, moments=iter([60.0])).write("snapshot", [])  # of a start in 1970
    assert last.exists()
    assert not before[0].exists()
    assert newest_snapshot(last.parent) == (last, [])


def test_the_newest_of_each_kind_are_kept(make_writer, tmp_path):
    writer = make_writer(kept=2)
    start = writer.write("startup", [])
    mine = start.with_name("mine.cfg")
    mine.touch()
    changes = [writer.write("snapshot", []) for _ in range(4)]
    assert {*start.parent.iterdir()} == {start, mine, *changes[2:]}


def test_files_of_others_neither_date_a_snapshot_nor_stop_it(make_writer):
    first = make_writer().write("startup", [])
    directory = first.parent
    (directory / "mine.cfg").touch()
    os.utime(directory / "mine.cfg", (NOON + 3600,) * 2)
    (directory / "dangling.cfg").symlink_to("nowhere")
    (directory / "20261120213709459-startup.cfg").symlink_to("nowhere")
    second = make_writer().write("snapshot", [])
    assert second.stat().st_mtime - first.stat().st_mtime == pytest.approx(0.001, abs=1e-4)


def test_what_cannot_be_written_leaves_nothing(make_writer, tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        make_writer().write("snapshot", [MODEL])
    assert list((tmp_path / "logs" / "config").iterdir()) == []


# -- while the server runs; in real time, because a thread writes ----------------------------------


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "logs" / "config"


def kinds(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.glob("*.cfg"))
    return [name.partition("-")[2].removesuffix(".cfg") for name in names]


def test_nothing_is_written_before_the_start_is_over_and_after_the_end(make_writer, directory):
    async def scenario():
        snapshots = Snapshots(make_writer(), lambda: [MODEL])
        await snapshots.save()
        await snapshots.end()
        assert kinds(directory) == []
        await snapshots.begin()
        await snapshots.save()
        await snapshots.end()
        await snapshots.save()
        assert kinds(directory) == ["startup", "snapshot", "shutdown"]

    asyncio.run(scenario())


def test_without_a_writer_nothing_is_looked_up():
    def models():
        raise AssertionError("must not be called")

    async def scenario():
        snapshots = Snapshots(None, models)
        await snapshots.begin()
        await snapshots.save()
        await snapshots.end()

    asyncio.run(scenario())


def test_changes_at_once_are_written_in_their_order(make_writer, directory):
    served = []

    async def change(snapshots):
        served.append(replace(MODEL, name=str(len(served))))
        await snapshots.save()

    async def scenario():
        snapshots = Snapshots(make_writer(), lambda: list(served))
        await snapshots.begin()
        await asyncio.gather(*(change(snapshots) for _ in range(5)))
        await snapshots.end()

    asyncio.run(scenario())
    counts = [
        parse_properties(path.read_text())["model_snapshot"].count("marName")
        for path in sorted(directory.glob("*-snapshot.cfg"))
    ]
    assert counts == [1, 2, 3, 4, 5]


def test_a_full_disk_is_reported_once_and_serving_goes_on(
    make_writer, directory, caplog, monkeypatch
):
    disk = {"full": True}
    synchronise = os.fsync

    def fail_while_full(descriptor):
        if disk["full"]:
            raise OSError(28, "No space left on device")
        synchronise(descriptor)

    def errors():
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    async def scenario():
        snapshots = Snapshots(make_writer(), list)
        await snapshots.begin()
        await snapshots.save()
        assert errors() == 1
        disk["full"] = False
        await snapshots.save()
        assert kinds(directory) == ["snapshot"]
        disk["full"] = True
        await snapshots.end()
        assert errors() == 2

    monkeypatch.setattr("os.fsync", fail_while_full)
    asyncio.run(scenario())


def test_what_a_full_disk_did_not_take_is_written_when_it_has_space_again(
    make_writer, directory, monkeypatch
):
    disk, is_written = {"full": True}, threading.Event()
    write = SnapshotWriter.write

    def fail_while_full(self, kind, models):
        if disk["full"]:
            raise OSError(28, "No space left on device")
        path = write(self, kind, models)
        is_written.set()
        return path

    async def scenario():
        served = [MODEL]
        snapshots = Snapshots(make_writer(), lambda: list(served))
        await snapshots.begin()
        served.clear()
        await snapshots.save()
        disk["full"] = False
        assert await asyncio.to_thread(is_written.wait, 10)
        await asyncio.sleep(0.1)
        assert kinds(directory) == ["snapshot"]  # and not one for each attempt
        path, _ = newest_snapshot(directory)
        assert path is not None
        assert MODEL.url not in await asyncio.to_thread(path.read_text)
        await snapshots.end()

    monkeypatch.setattr(SnapshotWriter, "write", fail_while_full)
    monkeypatch.setattr("marserve.frontend.registration.snapshot._RETRY_SECONDS", 0.01)
    asyncio.run(scenario())


# -- what it says and what becomes of it -----------------------------------------------------------


def test_saved_numbers_win_and_say_so(config):
    yaml = {
        "minWorkers": 4,
        "maxWorkers": 4,
        "responseTimeout": 9,
        "batchSize": 3,
        "jobQueueSize": 2,
    }
    settings = resolve_settings({}, yaml, {}, config, gpus=0, default_workers=1)
    restored = settings.restored(MODEL)
    assert (restored.min_workers, restored.max_workers, restored.batching.size) == (1, 2, 3)
    assert (restored.response_timeout, restored.startup_timeout) == (5, 6)
    assert restored.batching.delay == 0.004
    assert restored.batching.queue_size == 2
    assert restored.origins["workers"] == restored.origins["response_timeout"] == "snapshot"
    assert restored.origins["batch_size"] == "yaml"  # the numbers agree


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A model store; the working directory is another."""
    for folder in ("store/inside/MAR-INF", "cwd/outside/MAR-INF", "work"):
        (tmp_path / folder).mkdir(parents=True)
        manifest = tmp_path / folder / "MANIFEST.json"
        manifest.write_text('{"model": {}}')
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("inside", "inside"),
        ("{store}/inside", "inside"),
        ("outside", "{cwd}/outside"),
        ("{cwd}/outside", "{cwd}/outside"),
    ],
)
def test_the_saved_name_leads_to_the_archive_again(url, name, store, run, serve_model):
    places = {"store": store, "cwd": Path.cwd()}
    config = Config(model_store=store)
    opener = ArchiveOpener(config, store.parent / "work", make_helpers(config))
    archive = asyncio.run(opener.open(url.format(**places)))

    async def scenario():
        async with serve_model(archive=archive) as model:
            registry = ModelRegistry()
            registry.add(model)
            (saved,) = served_models(registry, store)
            assert saved.url == name.format(**places)

    run(scenario())


def test_what_is_known_of_batches_is_saved_and_comes_back(store, config, run, serve_model):
    async def scenario():
        asked = {"max_latency": 0.5, "queue_size": 7, "compiled_sizes": (1, 2, 4)}
        async with serve_model(batching=asked) as model:
            model.batcher.seed([(1, 0.02), (2, 0.021), (4, 0.04)])
            registry = ModelRegistry()
            registry.add(model)
            (saved,) = served_models(registry, store)
            assert saved.settings.items() >= {
                ("size", 2),
                ("is_automatic", True),
                ("max_latency", 0.5),
                ("policy", "adaptive"),
                ("compiled_sizes", (1, 2, 4)),
                ("queue_size", 7),
            }
            assert [row[:2] for row in saved.batch_costs] == [(1, 0.02), (2, 0.021), (4, 0.04)]
            asked_again = {"delay": 0.0}
            fresh = resolve_settings(asked_again, {}, {}, config, gpus=0, default_workers=1)
            restored = fresh.restored(saved)
            assert restored.batching == model.settings.batching
            assert restored.origins["batch_policy"] == "snapshot"

    run(scenario())


def test_what_nobody_chose_is_not_saved(store, run, serve_model):
    async def scenario():
        async with serve_model() as model:
            model.batcher.seed([(1, 0.02)])
            registry = ModelRegistry()
            registry.add(model)
            (saved,) = served_models(registry, store)
            assert saved.settings.keys() == MODEL.settings.keys()
            assert (saved.batch_costs, saved.settings["is_automatic"]) == ((), False)

    run(scenario())


def test_a_snapshot_that_contradicts_the_archive_of_today_is_refused(config):
    yaml = {"compiledBatchSizes": [1, 2]}
    settings = resolve_settings({}, yaml, {}, config, gpus=0, default_workers=1)
    with pytest.raises(ArchiveRefused, match="batch_size=3: the largest of compiled_batch_sizes"):
        settings.restored(MODEL)


def test_a_download_is_found_in_the_store(store, run, serve_model):
    root = store.parent / "work"
    fetched = store / "b.mar"
    archive = Archive("http://host/a/b.mar?x=1", root, root, fetched, is_downloaded=True)

    async def scenario():
        async with serve_model(archive=archive, origin=Origin("", handler="other")) as model:
            model.workers.resize(1, 3)
            registry = ModelRegistry()
            registry.add(model)
            (saved,) = served_models(registry, store)
            assert saved.url == "b.mar"
            assert (saved.workers, saved.is_default) == ((1, 3), True)
            assert (saved.handler, saved.runtime) == ("other", "python")

    run(scenario())


def test_what_a_killed_server_had_begun_to_write_goes_before_what_is_whole(make_writer):
    writer = make_writer(kept=2)
    first = writer.write("startup", [])
    unfinished = first.with_name(f".{first.name}.k2_x7a.new")
    unfinished.touch()
    second = writer.write("startup", [])
    assert sorted(first.parent.iterdir()) == [first, second]
