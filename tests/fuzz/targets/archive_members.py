"""Archives of members that want to get out or in each other's way, in both formats."""

import io
import stat
import tarfile
import warnings
import zipfile

from fuzz.choices import Choices
from fuzz.limits import Limits
from fuzz.targets import archive_tar, archive_zip

LIMITS = Limits(calls=20_000, calls_per_byte=300, memory=24 << 20)
_NAMES = (
    "a",
    "b",
    "m",
    "..",
    ".",
    "",
    "/",
    "tmp",
    "MAR-INF",
    "MANIFEST.json",
    "A",
    "C:",
    "\\",
    "%2e",
)
_ZIP_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, 0)
_TAR_KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE,
              tarfile.FIFOTYPE, tarfile.CHRTYPE)  # fmt: skip
_LINKS = ("/etc", "..", "../..", "a", "/tmp/x")


def target(data: bytes) -> None:
    """As for any archive."""
    choices = Choices(data)
    packed_zip, packed_tar = io.BytesIO(), io.BytesIO()
    with (
        warnings.catch_warnings(action="ignore"),  # of names that are there twice
        zipfile.ZipFile(packed_zip, "w", zipfile.ZIP_DEFLATED) as as_zip,
        tarfile.open(fileobj=packed_tar, mode="w") as as_tar,
    ):
        for _ in range(1 + choices.number(6)):
            _add(choices, as_zip, as_tar)
    archive_zip.target(packed_zip.getvalue())
    archive_tar.target(packed_tar.getvalue())


def _add(choices: Choices, as_zip: zipfile.ZipFile, as_tar: tarfile.TarFile) -> None:
    name = "/".join(choices.one_of(_NAMES) for _ in range(1 + choices.number(4)))
    kind = choices.number(12)
    kind = kind if kind < len(_ZIP_KINDS) else 0  # mostly files
    link = choices.one_of(_LINKS)
    content = b"x" * choices.number(200) * (1000 if choices.number(8) == 7 else 1)
    member = tarfile.TarInfo(f"m/{name}" if choices.flag() else name)
    member.type, member.linkname = _TAR_KINDS[kind], link
    member.size = len(content) if kind == 0 else 0
    as_tar.addfile(member, io.BytesIO(content))
    info = zipfile.ZipInfo(name)
    info.external_attr = (_ZIP_KINDS[kind] | choices.number(0o10000)) << 16
    as_zip.writestr(info, link if kind == 2 else content)
