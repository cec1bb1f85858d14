"""A catalog in a file: complete, also after a writer was killed or overtaken."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.file_store import FileStore
from marserve.frontend.catalog.store import StoreConflict, StoreFailed


def read(store: FileStore, known: str = "") -> tuple[bytes, str]:
    document = asyncio.run(store.read(known))
    assert document is not None
    return document


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(b"first")
    path.chmod(0o640)
    store = FileStore(path, 1.0)
    _, revision = read(store)
    assert asyncio.run(store.read(revision)) is None
    later = asyncio.run(store.write(b"second", revision))
    assert read(store) == (b"second", later)
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(StoreConflict):
        asyncio.run(store.write(b"third", revision))
    assert path.read_bytes() == b"second"


def test_a_directory_stands_for_the_catalog_in_it(tmp_path: Path) -> None:
    (tmp_path / "catalog.json").write_bytes(b"text")
    assert read(FileStore(tmp_path, 1.0))[0] == b"text"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "models.json").write_bytes(b"first")
    link = tmp_path / "link.json"
    link.symlink_to("real/models.json")
    store = FileStore(link, 1.0)
    asyncio.run(store.write(b"second", read(store)[1]))
    assert link.is_symlink()
    assert (tmp_path / "real" / "models.json").read_bytes() == b"second"


def config_map(directory: Path, text: bytes, name: str) -> None:
    """Mount another content, as the kubelet does it: links to a directory, which is swapped."""
    (directory / f"..{name}").mkdir(parents=True)
    (directory / f"..{name}" / "catalog.json").write_bytes(text)
    (directory / "..data_tmp").symlink_to(f"..{name}")
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / "catalog.json").is_symlink():
        (directory / "catalog.json").symlink_to("..data/catalog.json")


@pytest.mark.parametrize("named", ["", "catalog.json"])
def test_a_config_map_is_followed_and_not_written(tmp_path: Path, named: str) -> None:
    config_map(tmp_path, b"first", "2026_1")
    store = FileStore(tmp_path / named, 1.0)
    first = read(store)
    config_map(tmp_path, b"second", "2026_2")
    assert read(store, first[1])[0] == b"second"
    assert asyncio.run(store.why_read_only()) == "it is a mounted ConfigMap or Secret"


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(b"text")
    assert asyncio.run(FileStore(path, 1.0).why_read_only()) == ""
    assert asyncio.run(FileStore(Path("/proc/models.json"), 1.0).why_read_only()) in (
        "/proc cannot be written",
        "",  # root may, as far as the system says
    )


@pytest.mark.parametrize("name", ["missing", "missing/deep", "directory", "pipe"])
def test_what_cannot_be_read_is_told_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreFailed):
        read(FileStore(tmp_path / name, 1.0))


def test_no_more_is_read_than_a_catalog_may_have(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert len(read(FileStore(path, 1.0))[0]) == MAX_BYTES + 1


def test_a_writer_waits_for_others_and_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(b"first")
    store = FileStore(path, 0.1)
    _, revision = read(store)
    with FileStore(path, 1.0)._locked(path), pytest.raises(StoreFailed, match="others"):
        asyncio.run(store.write(b"second", revision))
    asyncio.run(store.write(b"second", revision))


def test_a_disk_that_takes_no_more_keeps_the_catalog_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "catalog.json"
    file.write_bytes(b"old")
    store = FileStore(file, 1)
    _, revision = read(store)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StoreFailed, match="File too large"):
            asyncio.run(store.write(b"x" * 1000, revision))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".catalog.json.lock", file.name]
    asyncio.run(store.write(b"new", revision))
    assert file.read_bytes() == b"new"


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(b"")

    def append(letter: bytes) -> None:
        async def work() -> None:
            store = FileStore(path, 5.0)
            for _ in range(10):
                while True:
                    document = await store.read()
                    assert document is not None
                    try:
                        await store.write(document.text + letter, document.revision)
                        break
                    except StoreConflict:
                        continue

        asyncio.run(work())

    threads = [threading.Thread(target=append, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text()) == sorted("abc" * 10)


WRITER = """
import asyncio, sys
from pathlib import Path
from marserve.frontend.catalog.file_store import FileStore

async def main():
    store = FileStore(Path(sys.argv[1]), 5.0)
    revision = (await store.read()).revision
    print("begins", flush=True)
    while True:
        for letter in b"abc":
            revision = await store.write(bytes([letter]) * (1 << 20), revision)

asyncio.run(main())
"""


def test_a_writer_that_is_killed_leaves_a_whole_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_bytes(b"a" * (1 << 20))
    for pause in (0.0, 0.011, 0.023):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            threading.Event().wait(pause)  # so that it is somewhere in a write
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        text, revision = read(FileStore(path, 1.0))
        assert len(text) == 1 << 20
        assert len(set(text)) == 1
        asyncio.run(FileStore(path, 1.0).write(text, revision))
