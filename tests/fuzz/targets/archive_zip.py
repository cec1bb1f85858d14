"""An archive whose name ends in ``.mar``, a zip; unpacked into a directory."""

import tempfile
from pathlib import Path

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.archives.unpack import ArchiveLimits, unpack
from marserve.frontend.errors import ArchiveRefused

LIMITS = Limits(calls=20_000, calls_per_byte=100, memory=24 << 20)
_UNPACKED = ArchiveLimits(max_bytes=1 << 20, max_entries=200, max_ratio=50, ratio_floor_bytes=4096)
NAME = "model.mar"


def target(data: bytes, name: str = NAME) -> None:
    """Nothing is ever outside the directory, and nothing is left of what is refused."""
    with tempfile.TemporaryDirectory() as folder:
        outside, inside = Path(folder, name), Path(folder, "models", "unpacked")
        outside.write_bytes(data)
        try:
            unpack(outside, inside, _UNPACKED)
        except ArchiveRefused as error:
            check_refusal(error)
            assert not inside.exists()
        else:
            _check_unpacked(inside, len(data))
        assert outside.read_bytes() == data
        beside = {path.relative_to(folder).as_posix() for path in Path(folder).glob("*")}
        assert beside == {name, "models"}
        assert len(list(Path(folder, "models").iterdir())) <= 1


def _check_unpacked(inside: Path, packed_bytes: int) -> None:
    paths = list(inside.rglob("*"))
    assert len(paths) <= _UNPACKED.max_entries
    for path in paths:
        assert not path.is_symlink()
        assert path.is_file() or path.is_dir()
        if path.is_file():
            assert path.stat().st_nlink == 1
            assert not path.stat().st_mode & 0o7000
    unpacked_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    assert unpacked_bytes <= max(_UNPACKED.ratio_floor_bytes, packed_bytes * _UNPACKED.max_ratio)
