"""The page about licences names what is installed with the server."""

import configparser
import gzip
import hashlib
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser(interpolation=None)
SETUP.read(ROOT / "setup.cfg")
EXTRAS = SETUP["options.extras_require"]
DASHBOARD, SERVER, TOOLS = re.split(
    r"^## The server|^## Models", (ROOT / "docs" / "licences.md").read_text(), flags=re.MULTILINE
)
VENDORED = ROOT / "frontend" / "dashboard" / "vendor"


def rows(text: str) -> dict[str, str]:
    """Package to what it is installed with."""
    table = re.findall(r"^\| ([a-z][\w-]+) \| [^|]+ \| `?\[?(\w+)\]?`? \|$", text, re.MULTILINE)
    return dict(table)


def requirements(text: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("%")]


def with_what_they_bring(wanted: Iterable[Requirement]) -> set[str]:
    """Names of packages and of those that they need, as installed here."""
    names: set[str] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and name not in names:
            names.add(name)
            waiting += map(Requirement, metadata.requires(name) or [])
    return names


def test_every_package_of_the_server_is_listed_and_no_other():
    core = with_what_they_bring(requirements(SETUP["options"]["install_requires"]))
    listed = dict.fromkeys(core, "core")
    for extra in ("grpc", "s3", "tls", "otel"):
        new = with_what_they_bring(requirements(EXTRAS[extra])) - listed.keys()
        listed |= dict.fromkeys(new, extra)
    assert rows(SERVER) == listed


@pytest.mark.parametrize("extra", ["vision", "bench", "demo", "docs"])
def test_every_package_of_an_extra_is_listed_and_no_other(extra):
    listed = {name for name, with_extra in rows(TOOLS).items() if with_extra == extra}
    assert listed == {each.name for each in requirements(EXTRAS[extra])}


@pytest.mark.parametrize("name", rows(SERVER))
def test_no_package_of_the_server_has_a_licence_that_spreads(name):
    described = metadata.metadata(name)
    fields = ("License", "License-Expression", "Classifier")
    said = [text for field in fields for text in described.get_all(field) or []]
    licences = [text for text in said if "::" not in text or text.startswith("License ::")]
    assert licences
    assert not re.search(r"\bA?GPL|GNU (Affero )?General", "\n".join(licences))


def test_every_vendored_file_is_listed_with_its_hash_and_no_other():
    listed = dict(re.findall(r"^SHA-256 of `(.+)`: `(.+)`\.$", DASHBOARD, re.MULTILINE))
    files = {path.name: path.read_bytes() for path in VENDORED.glob("*.js")}
    assert listed == {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
    assert sum(len(gzip.compress(text)) for text in files.values()) <= 30_000


def test_the_licences_of_vendored_files_come_with_them():
    texts = {path.name: path.read_text() for path in VENDORED.glob("*.LICENSE.txt")}
    assert texts.keys() == {"htm.LICENSE.txt", "preact.LICENSE.txt"}
    assert "Apache License" in texts["htm.LICENSE.txt"]
    assert "MIT License" in texts["preact.LICENSE.txt"]
