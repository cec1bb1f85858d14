"""Archives meant to do harm, each one real: refused, and nothing left behind."""

import errno
import gzip
import io
import os
import stat
import struct
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.frontend.archives.unpack import ArchiveLimits, unpack
from marserve.frontend.errors import ArchiveRefused

LIMITS = ArchiveLimits()
FILES = {
    "MAR-INF/MANIFEST.json": b"{}",
    "handler.py": b"def handle(data, context): ...\n",
    "weights.pt": os.urandom(3_000_000),
    "empty": b"",
    "sub/deep/er.txt": b"text",
}


def zip_of(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members:
            archive.writestr(member, data)
    return buffer.getvalue()


def tgz_of(*members: tuple[tarfile.TarInfo | str, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=kind) as archive:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zip_member(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def unpacked(tmp_path: Path, name: str, data: bytes, limits: ArchiveLimits = LIMITS) -> Path:
    archive, target = tmp_path / name, tmp_path / "out" / "model"
    archive.write_bytes(data)
    unpack(archive, target, limits)
    return target


def refusal(tmp_path: Path, name: str, data: bytes, limits: ArchiveLimits = LIMITS) -> str:
    """The sentence with which an archive is refused, once nothing of it is left."""
    with pytest.raises(ArchiveRefused) as refused:
        unpacked(tmp_path, name, data, limits)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([name, "out"])
    return str(refused.value)


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


# What is let in -------------------------------------------------------------------------------


def test_a_mar_becomes_its_files(tmp_path):
    target = unpacked(tmp_path, "m.mar", zip_of(*FILES.items()))
    assert contents(target) == FILES


@pytest.mark.parametrize("name", ["m.tar.gz", "m.tgz", "m", "m.MAR", "m.model"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_other_file_is_a_tar_without_its_first_component(tmp_path, name, kind):
    members = [(f"model/{path}", data) for path, data in FILES.items()]
    assert contents(unpacked(tmp_path, name, tgz_of(*members, kind=kind))) == FILES


@pytest.mark.parametrize(
    ("member", "lands_at"),
    [("flat.py", "flat.py"), ("./h.py", "h.py"), ("./m/h.py", "m/h.py"), ("m//h.py", "h.py")],
)
def test_just_the_first_component_of_a_tar_member_is_cut(tmp_path, member, lands_at):
    assert contents(unpacked(tmp_path, "m.tgz", tgz_of((member, b"x")))) == {lands_at: b"x"}


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
def test_empty_directories_are_kept_and_may_be_named_twice(tmp_path, name):
    folders = tgz_of(
        (tar_member("m", tarfile.DIRTYPE), b""),
        (tar_member("m/a/b", tarfile.DIRTYPE), b""),
        (tar_member("m/a/b", tarfile.DIRTYPE), b""),
    )
    data = zip_of(("a/b/", b""), ("a/", b"")) if name == "m.mar" else folders
    assert (unpacked(tmp_path, name, data) / "a" / "b").is_dir()


def test_neither_modes_nor_owners_are_taken_over(tmp_path):
    info = tarfile.TarInfo("m/run.sh")
    info.mode, info.uid = 0o4777, 4242
    target = unpacked(tmp_path, "m.tgz", tgz_of((info, b"#!/bin/sh")))
    state = (target / "run.sh").stat()
    assert not state.st_mode & (stat.S_ISUID | stat.S_IXUSR)
    assert state.st_uid == os.getuid()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def test_a_dense_archive_below_the_floor_is_no_bomb(tmp_path):
    target = unpacked(tmp_path, "m.mar", zip_of(("zeros.bin", bytes(5_000_000))))
    assert (target / "zeros.bin").stat().st_size == 5_000_000


# Names ----------------------------------------------------------------------------------------

ESCAPES = ["../x", "a/../../x", "/etc/x", "a/b/../c", "..", "C:/x", "c:x"]


@pytest.mark.parametrize("member", ESCAPES)
def test_a_zip_member_that_would_escape_is_refused(tmp_path, member):
    sentence = refusal(tmp_path, "m.mar", zip_of(("fine.py", b"x"), (member, b"x")))
    assert sentence == f"Detected Zip Slip vulnerability: {member}"


@pytest.mark.parametrize("member", [*ESCAPES, "m/../x", "../m/x", "m//../x", "m/C:/x"])
def test_a_tar_member_that_would_escape_is_refused(tmp_path, member):
    sentence = refusal(tmp_path, "m.tgz", tgz_of(("m/fine.py", b"x"), (member, b"x")))
    assert sentence.startswith("Detected Zip Slip vulnerability: ")


def test_a_sibling_whose_name_begins_alike_is_outside_too(tmp_path):
    member = "../model-evil/x"
    assert "Zip Slip" in refusal(tmp_path, "m.mar", zip_of((member, b"x")))


@pytest.mark.parametrize("member", ["a\\b.py", "..\\b.py"])
def test_a_backslash_in_a_name_is_refused(tmp_path, member):
    assert "invalid name" in refusal(tmp_path, "m.mar", zip_of((member, b"x")))
    (tmp_path / "m.mar").unlink()
    assert "invalid name" in refusal(tmp_path, "m.tgz", tgz_of((f"m/{member}", b"x")))


def test_a_name_with_a_nul_is_refused(tmp_path):
    honest = zip_of(("good.py_evil", b"x"))
    sentence = refusal(tmp_path, "m.mar", honest.replace(b"good.py_evil", b"good.py\0evil"))
    assert sentence == r"Archive member has an invalid name: 'good.py\x00evil'"


@pytest.mark.parametrize(
    "member", ["n" * 256, "/".join("d" * 65), "/".join(["n" * 250] * 5)], ids=len
)
def test_a_name_that_is_too_long_or_too_deep_is_refused(tmp_path, member):
    assert "too long a name" in refusal(tmp_path, "m.mar", zip_of((member, b"x")))


def test_a_file_that_loses_its_whole_name_is_refused(tmp_path):
    assert "without a name" in refusal(tmp_path, "m.tgz", tgz_of(("m/.", b"x")))


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    "names", [("a.py", "a.py"), ("a.py", "./a.py"), ("a", "a/b.py"), ("a/b.py", "a")]
)
def test_two_members_in_one_place_are_refused(tmp_path, names):
    first, second = names
    sentence = "Archive holds more than one member named "
    zipped = zip_of((first, b"1"), (second, b"2"))
    tarred = tgz_of((f"m/{first}", b"1"), (f"m/{second}", b"2"))
    assert refusal(tmp_path, "m.mar", zipped).startswith(sentence)
    (tmp_path / "m.mar").unlink()
    assert refusal(tmp_path, "m.tgz", tarred).startswith(sentence)


def test_two_tar_members_that_meet_once_their_heads_are_off_are_refused(tmp_path):
    data = tgz_of(("one/a.py", b"1"), ("two/a.py", b"2"))
    assert "more than one member named a.py" in refusal(tmp_path, "m.tgz", data)


# Kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"],
)
def test_a_tar_member_that_is_no_plain_file_is_refused(tmp_path, kind):
    data = tgz_of((tar_member("m/x", kind, "/etc/passwd"), b""), ("m/x/y", b"through the link"))
    assert "a link, a device" in refusal(tmp_path, "m.tgz", data)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK])
def test_a_zip_member_that_is_no_plain_file_is_refused(tmp_path, kind):
    data = zip_of((zip_member("x", kind | 0o777), b"/etc/passwd"))
    assert "a link or a device: x" in refusal(tmp_path, "m.mar", data)


def test_an_encrypted_member_is_refused(tmp_path):
    data = bytearray(zip_of(("secret.py", b"x")))
    data[6] |= 1  # flags of the local header
    data[data.index(b"PK\x01\x02") + 8] |= 1  # and of the index
    assert refusal(tmp_path, "m.mar", bytes(data)) == "Archive member is encrypted: secret.py"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_whose_memory_has_no_bound_are_refused(tmp_path, method):
    info = zipfile.ZipInfo("x")
    info.compress_type = method
    assert "unsupported way: x" in refusal(tmp_path, "m.mar", zip_of((info, b"x")))


# Size -----------------------------------------------------------------------------------------

TIGHT = ArchiveLimits(ratio_floor_bytes=1 << 20)
ZEROS = bytes(4 << 20)


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
def test_a_bomb_is_refused(tmp_path, name):
    data = zip_of(("x", ZEROS)) if name == "m.mar" else tgz_of(("m/x", ZEROS))
    assert "more than 200 times its size" in refusal(tmp_path, name, data, TIGHT)


def test_a_bomb_hiding_behind_honest_weights_is_refused(tmp_path):
    weights = zipfile.ZipInfo("weights"), os.urandom(1 << 20)
    data = zip_of(weights, ("x", ZEROS))
    assert "more than 200 times its size" in refusal(tmp_path, "m.mar", data, TIGHT)


def test_a_bomb_of_many_small_members_is_refused(tmp_path):
    data = zip_of(*((f"{number}", bytes(1 << 20)) for number in range(10)))
    assert "more than 200 times its size" in refusal(tmp_path, "m.mar", data, TIGHT)


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
def test_the_total_is_counted_over_all_members(tmp_path, name):
    members = [(f"m/{number}", os.urandom(400)) for number in range(3)]
    data = zip_of(*members) if name == "m.mar" else tgz_of(*members)
    assert "more than the 1000 bytes" in refusal(tmp_path, name, data, ArchiveLimits(1000))
    (tmp_path / name).unlink()
    (tmp_path / "out").rmdir()
    assert len(contents(unpacked(tmp_path, name, data, ArchiveLimits(1200)))) == 3


def test_the_free_disk_bounds_what_the_limits_would_allow(tmp_path):
    none_of_it = ArchiveLimits(disk_share=0.0)
    assert "more than the 0 bytes" in refusal(tmp_path, "m.mar", zip_of(("x", b"x")), none_of_it)


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
@pytest.mark.parametrize("members", [["a", "b", "c", "d"], ["a/b/c/d"]], ids=["files", "folders"])
def test_files_and_directories_are_counted(tmp_path, name, members):
    zipped = zip_of(*((member, b"") for member in members))
    tarred = tgz_of(*((f"m/{member}", b"") for member in members))
    data = zipped if name == "m.mar" else tarred
    assert "more than 3 files and directories" in refusal(
        tmp_path, name, data, ArchiveLimits(max_entries=3)
    )


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_a_tar_header_that_would_fill_the_memory_is_refused(tmp_path, kind):
    name = "m/" + "n" * (1 << 20)
    sentence = refusal(tmp_path, "m.tgz", tgz_of((name, b"x"), kind=kind))
    assert sentence == "Archive has a header of more than 262144 bytes."


def test_a_chain_of_tar_headers_without_end_is_refused(tmp_path):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 0
    data = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) * 100_000)
    assert refusal(tmp_path, "m.tgz", data)


def test_a_zip_index_that_would_fill_the_memory_is_refused(tmp_path):
    size = 65 << 20
    archive, target = tmp_path / "m.mar", tmp_path / "model"
    with archive.open("wb") as file:
        file.truncate(size)  # sparse: takes no disk
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, size, 0, 0))
    with pytest.raises(ArchiveRefused, match="an index of more than 67108864 bytes"):
        unpack(archive, target, LIMITS)
    assert not target.exists()


# Broken ---------------------------------------------------------------------------------------


def patched_size(data: bytes, size: int) -> bytes:
    """The same zip, claiming another unpacked size of its only member in its index."""
    changed = bytearray(data)
    struct.pack_into("<L", changed, data.index(b"PK\x01\x02") + 24, size)
    return bytes(changed)


@pytest.mark.parametrize("size", [0, 1, 999, 1001, 0xFFFFFFF0])
def test_a_zip_member_of_another_size_than_declared_is_refused(tmp_path, size):
    assert refusal(tmp_path, "m.mar", patched_size(zip_of(("x", bytes(1000))), size))


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
@pytest.mark.parametrize(
    "data", [b"", b"no archive at all", gzip.compress(b"", mtime=0), bytes(2048)]
)
def test_what_is_no_archive_is_refused(tmp_path, name, data):
    assert refusal(tmp_path, name, data).startswith(f"{name} is not a readable ")


@pytest.mark.parametrize("name", ["m.mar", "m.zip", "m.tgz", "m"])
def test_the_content_decides_the_format(tmp_path, name):
    for number, data in enumerate((zip_of(("x", b"x")), tgz_of(("m/x", b"x")))):
        (tmp_path / name).write_bytes(data)
        unpack(tmp_path / name, tmp_path / str(number), LIMITS)
        assert (tmp_path / str(number) / "x").read_bytes() == b"x"


def test_a_damaged_archive_is_named_for_what_its_name_says(tmp_path):
    zip_file = refusal(tmp_path, "m.mar", b"damaged")
    assert zip_file.startswith("m.mar is not a readable zip archive: ")
    (tmp_path / "m.mar").unlink()
    tar_file = refusal(tmp_path, "m.tgz", b"damaged")
    assert tar_file.startswith("m.tgz is not a readable gzip-compressed tar archive: ")


def test_a_wrong_checksum_in_a_zip_is_refused(tmp_path):
    info = zipfile.ZipInfo("x")  # stored: the file contains the bytes unchanged
    data = zip_of((info, b"the very bytes"))
    assert "CRC" in refusal(tmp_path, "m.mar", data.replace(b"very", b"vary", 1))


def test_a_wrong_checksum_in_a_tar_is_refused(tmp_path):
    data = bytearray(tgz_of(("m/x", b"x")))
    data[-8] ^= 1
    assert "CRC" in refusal(tmp_path, "m.tgz", bytes(data))


@pytest.mark.parametrize("name", ["m.mar", "m.tgz"])
@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
def test_a_truncated_archive_is_refused(tmp_path, name, kept):
    members = [(f"m/{path}", data) for path, data in FILES.items()]
    data = zip_of(*members) if name == "m.mar" else tgz_of(*members)
    assert refusal(tmp_path, name, data[: int(len(data) * kept)])


def test_a_broken_header_within_a_tar_is_not_its_end(tmp_path):
    plain = bytearray(gzip.decompress(tgz_of(("m/a", b"a"), ("m/b", b"b"), ("m/c", b"c"))))
    plain[1024 + 148] ^= 0xFF  # the checksum of the second header
    data = gzip.compress(bytes(plain))
    assert "broken header within" in refusal(tmp_path, "m.tgz", data)


SOUND = {
    "m.mar": zip_of(("MAR-INF/MANIFEST.json", b"{}"), ("a/b.py", b"x = 1\n" * 50)),
    "m.tgz": tgz_of(("m/MAR-INF/MANIFEST.json", b"{}"), ("m/a/b.py", b"x = 1\n" * 50)),
    "m.tar": tgz_of(("m/MANIFEST.json", b"{}"), ("m/é", b"x"), kind=tarfile.GNU_FORMAT),
}


def disturbed(sound: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    data = bytearray(sound)
    for position, value in changes:
        data[position % len(data)] = value
    return bytes(data[: len(data) - cut])


def disturbed_tar(sound: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    """The damage inside the compression, with header checksums made right again."""
    plain = bytearray(disturbed(gzip.decompress(sound)[:4096], changes, cut))
    for start in range(0, len(plain) - 511, 512):
        plain[start + 148 : start + 156] = b" " * 8
        total = sum(plain[start : start + 512])
        plain[start + 148 : start + 156] = b"%06o\0 " % total
    return gzip.compress(bytes(plain))


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=8)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, disturbed) for name in SOUND] + [(name, disturbed_tar) for name in ("m.tgz", "m.tar")],
)
@settings(max_examples=60, deadline=None)
@given(changes=CHANGES, cut=st.sampled_from([0, 0, 1, 100, 512]))
def test_any_damage_ends_in_files_or_in_a_refusal(name, damage, changes, cut):
    with tempfile.TemporaryDirectory() as folder:
        archive, target = Path(folder, name), Path(folder, "model")
        archive.write_bytes(damage(SOUND[name], changes, cut))
        try:
            unpack(archive, target, LIMITS)
        except ArchiveRefused:
            assert not target.exists()
        assert {path.name for path in Path(folder).iterdir()} <= {name, "model"}


# Interrupted ----------------------------------------------------------------------------------


class FailingLimits(ArchiveLimits):
    """Limits whose question for free disk space ends in a given way."""

    def room_in(self, directory: Path) -> int:
        assert directory.is_dir()  # so there is something to clean up
        raise ENDINGS[self.max_entries]


ENDINGS = [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]


@pytest.mark.parametrize("ending", [0, 1], ids=["interrupt", "disk-full"])
def test_an_interruption_passes_through_and_leaves_nothing(tmp_path, ending):
    with pytest.raises(type(ENDINGS[ending])):
        unpacked(tmp_path, "m.mar", zip_of(("x", b"x")), FailingLimits(max_entries=ending))
    assert not (tmp_path / "out" / "model").exists()


def test_a_directory_that_exists_is_never_touched(tmp_path):
    target = tmp_path / "out" / "model"
    target.mkdir(parents=True)
    (target / "mine").touch()
    with pytest.raises(FileExistsError):
        unpacked(tmp_path, "m.mar", zip_of(("x", b"x")))
    assert contents(target) == {"mine": b""}
