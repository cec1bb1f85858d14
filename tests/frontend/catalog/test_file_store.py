"""A catalog in a file."""

import asyncio
import os
from pathlib import Path

import pytest

from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.file_store import FileStore
from marserve.frontend.catalog.store import StoreFailed


def read(store: FileStore, known: str = "") -> tuple[bytes, str]:
    document = asyncio.run(store.read(known))
    assert document is not None
    return document


def test_a_file_is_read_again_when_its_content_differs(tmp_path):
    path = tmp_path / "models.json"
    path.write_bytes(b"first")
    store = FileStore(path)
    _, revision = read(store)
    assert asyncio.run(store.read(revision)) is None
    path.write_bytes(b"other")
    assert read(store, revision)[0] == b"other"


def test_a_directory_stands_for_the_catalog_in_it(tmp_path):
    (tmp_path / "catalog.json").write_bytes(b"text")
    assert read(FileStore(tmp_path))[0] == b"text"


def config_map(directory: Path, text: bytes, name: str) -> None:
    """Mount another content, as the kubelet does it: links to a directory, which is swapped."""
    (directory / f"..{name}").mkdir(parents=True)
    (directory / f"..{name}" / "catalog.json").write_bytes(text)
    (directory / "..data_tmp").symlink_to(f"..{name}")
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / "catalog.json").is_symlink():
        (directory / "catalog.json").symlink_to("..data/catalog.json")


@pytest.mark.parametrize("named", ["", "catalog.json"])
def test_a_config_map_is_followed(tmp_path, named):
    config_map(tmp_path, b"first", "2026_1")
    store = FileStore(tmp_path / named)
    first = read(store)
    config_map(tmp_path, b"second", "2026_2")
    assert read(store, first[1])[0] == b"second"


@pytest.mark.parametrize("name", ["missing", "missing/deep", "directory", "pipe"])
def test_what_cannot_be_read_is_told_at_once(tmp_path, name):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreFailed):
        read(FileStore(tmp_path / name))


def test_no_more_is_read_than_a_catalog_may_have(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert len(read(FileStore(path))[0]) == MAX_BYTES + 1
