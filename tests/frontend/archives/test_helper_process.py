"""The processes that read untrusted files: their limits, and how they end."""

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from marserve.frontend.aio.background import Slots
from marserve.frontend.archives import helper
from marserve.frontend.archives.archive import ArchiveOpener, make_helpers
from marserve.frontend.archives.contents import Contents, read_contents
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.setting_kinds import TEXT
from marserve.frontend.errors import ArchiveRefused, ModelNotFound, ServerBusy

HANDLER = "def handle(data, context):\n    return data\n"


def packed(folder: Path, members: Mapping[str, Any], **model: object) -> Path:
    folder.mkdir(exist_ok=True)
    manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", **model}}
    with zipfile.ZipFile(folder / "m.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, data in {"h.py": HANDLER, **members}.items():
            archive.writestr(name, data)
    return folder / "m.mar"


def opened(store: Path) -> Contents:
    config = Config(model_store=store)
    opener = ArchiveOpener(config, store.parent / "work", make_helpers(config))
    return asyncio.run(opener.open("m.mar")).contents


def helpers_left() -> list[psutil.Process]:
    """Other tests of the session may have servers."""
    children = psutil.process_iter(["ppid", "cmdline"])  # None for what cannot be read any more
    return [
        each
        for each in children
        if each.info["ppid"] == os.getpid() and helper.__name__ in str(each.info["cmdline"])
    ]


def everything_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")} - {"models"}


def test_the_server_gets_what_it_has_to_know(tmp_path):
    yaml = (
        "minWorkers: 2\nmaxBatchDelay: 2020-01-01\nsampleInput: s.txt\nmin_workers: 3\n"
        f"batchSize: 0x{'f' * 5000}\nhandler: {{secret: [1, 2]}}\n7: seven\n"
    )
    packed(tmp_path / "store", {"c.yaml": yaml, "s.txt": "sample"}, configFile="c.yaml")
    contents = opened(tmp_path / "store")
    assert contents.manifest is not None
    assert (contents.manifest.model_name, contents.manifest.config_file) == ("m", "c.yaml")
    assert contents.has_samples
    found = contents.model_yaml
    assert (found["minWorkers"], found["handler"], found["min_workers"]) == (2, None, None)
    for name, text in (
        ("batchSize", "<a number of 20000 bits>"),
        ("maxBatchDelay", "datetime.date(2020, 1, 1)"),
    ):
        assert repr(found[name]) == text
        assert not TEXT.accepts(found[name])
    assert 7 not in found
    assert list(found)[:3] == ["minWorkers", "maxBatchDelay", "sampleInput"]  # their order counts


@pytest.mark.parametrize(
    ("handler", "names"),
    [
        ("{model_path: org/m, adapters: {a: x, 7: y}, secret: 1}", ["org/m", "a", "7"]),
        ("{served_model_name: [s, 5], vllm_engine_config: {model: m}}", ["s", "5"]),
        (f"{{served_model_name: 0x{'f' * 5000}}}", []),
        ("text", []),
        ("[]", []),
    ],
)
def test_of_the_handlers_section_it_gets_the_names_of_models(tmp_path, handler, names):
    packed(tmp_path / "store", {"c.yaml": f"handler: {handler}\n"}, configFile="c.yaml")
    assert list(opened(tmp_path / "store").openai_names) == names


def test_a_yaml_that_cannot_be_read_is_logged_and_counts_as_absent(tmp_path, caplog):
    packed(tmp_path / "store", {"c.yaml": "a: ["}, configFile="c.yaml")
    assert opened(tmp_path / "store").model_yaml == {}
    assert "Cannot read c.yaml" in caplog.text


@pytest.mark.parametrize(
    ("members", "model", "reason"),
    [
        ({"c.yaml": "[" * 10_000}, {"configFile": "c.yaml"}, r"^c.yaml is nested more than"),
        ({}, {"configFile": "../../x"}, "points outside the archive"),
        ({}, {"modelName": "n" * 500_000}, "exceed 262144 bytes"),
        ({"c.yaml": "labels: " + "x" * 500_000}, {"configFile": "c.yaml"}, None),
        (
            {"c.yaml": "deviceType: " + "x" * 500_000},
            {"configFile": "c.yaml"},
            "exceed 262144 bytes",
        ),
        ({"MAR-INF": ""}, {}, "more than one member"),
    ],
)
def test_what_costs_too_much_is_refused(tmp_path, members, model, reason):
    packed(tmp_path / "store", members, **model)
    if reason is None:
        opened(tmp_path / "store")
    else:
        with pytest.raises(ArchiveRefused, match=reason):
            opened(tmp_path / "store")
        assert everything_in(tmp_path / "work") == set()
    assert helpers_left() == []


@pytest.mark.parametrize("text", [b'{"model":' * 100_000, b" " * 1_100_000, b'"\xff"'])
def test_a_hostile_manifest_is_refused(tmp_path, text):
    archive = tmp_path / "store" / "m.mar"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as opened_archive:
        opened_archive.writestr("MAR-INF/MANIFEST.json", text)
    with pytest.raises(ArchiveRefused, match=r"Manifest|signature"):
        opened(tmp_path / "store")


@pytest.mark.integration
def test_more_memory_than_it_may_have_is_a_refusal(tmp_path):
    """An index of a million members, of which the first hundred thousand would be allowed."""
    entry = b"PK\1\2" + bytes(24) + b"\1\0" + bytes(16) + b"x"
    count = 1_300_000
    index = entry * count
    end = b"PK\5\6" + bytes(4) + b"\xff\xff" * 2 + len(index).to_bytes(4, "little") + bytes(6)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "m.mar").write_bytes(index + end)
    with pytest.raises(ArchiveRefused, match="bytes of memory"):
        opened(tmp_path / "store")
    assert everything_in(tmp_path / "work") == set()


@pytest.mark.parametrize("name", ["c.yaml", "requirements.txt"])
def test_a_pipe_in_a_model_directory_holds_nobody_up(tmp_path, name):
    (tmp_path / "MAR-INF").mkdir()
    model = {"modelName": "m", "configFile": "c.yaml", "requirementsFile": "requirements.txt"}
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    for each in ("c.yaml", "requirements.txt"):
        (tmp_path / each).touch()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ArchiveRefused, match=name):
        read_contents(tmp_path, needs_requirements=True)


def arguments(tmp_path: Path) -> dict[str, Any]:
    return {
        "url": "m.mar",
        "store": str(tmp_path / "store"),
        "source": None,
        "root": str(tmp_path / "work" / "r"),
        "limits": ArchiveLimits().as_json(),
        "known_keys": [],
        "needs_requirements": False,
    }


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"timeout": 0.02}, r"took more than 0.02 s \(unpack_timeout\)"),
        ({"timeout": 60, "stall": 0.0}, "made no progress for 0 s"),
    ],
)
def test_one_that_takes_too_long_is_killed(tmp_path, limits, reason):
    packed(tmp_path / "store", {})
    helpers = HelperProcesses(Slots(1, "helpers"), **limits)
    with pytest.raises(ArchiveRefused, match=reason):
        asyncio.run(helpers.run("open", **arguments(tmp_path)))
    assert helpers_left() == []


def test_one_that_nobody_waits_for_is_killed_and_leaves_nothing(tmp_path):
    packed(tmp_path / "store", {f"zeros{n}": bytes(40_000_000) for n in range(5)})
    config = Config(model_store=tmp_path / "store")
    opener = ArchiveOpener(config, tmp_path / "work", make_helpers(config))

    def is_begun():
        return any(tmp_path.glob("work/models/*/zeros0"))

    async def cancel():
        opening = asyncio.ensure_future(opener.open("m.mar"))
        while not is_begun():  # noqa: ASYNC110 - no event for a new file
            await asyncio.sleep(0.001)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(cancel())
    assert everything_in(tmp_path / "work") == set()
    assert helpers_left() == []


def test_more_than_may_wait_are_refused(tmp_path):
    packed(tmp_path / "store", {})
    helpers = HelperProcesses(Slots(1, "archives are read", max_waiting=1), timeout=60)

    async def three():
        calls = [helpers.run("open", **arguments(tmp_path / str(n))) for n in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(three())
    assert [type(each) for each in outcomes] == [ModelNotFound, ModelNotFound, ServerBusy]


def test_whoever_waits_too_long_for_others_is_told_so(tmp_path):
    slots = Slots(1, "archives are read")
    helpers = HelperProcesses(slots, timeout=0.01)

    async def wait():
        async with slots.taken():
            await helpers.run("open", **arguments(tmp_path))

    with pytest.raises(ServerBusy, match=r"^Waiting for other archives took more than 0\.01 s"):
        asyncio.run(wait())


def test_libraries_that_are_loaded_everywhere_leave_an_archive_its_memory(tmp_path, monkeypatch):
    """As those that a container preloads, or that a ``sitecustomize`` imports."""
    (tmp_path / "sitecustomize.py").write_text("import mmap\nreserved = mmap.mmap(-1, 1 << 30)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    packed(tmp_path / "store", {"weights": bytes(10_000_000)})
    assert opened(tmp_path / "store").manifest is not None


def test_a_limit_of_the_system_that_is_lower_than_ours_stays(tmp_path):
    packed(tmp_path / "store", {})
    code = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_CPU, (5, 5)); "
        f"runpy.run_module({helper.__name__!r}, run_name='__main__', alter_sys=True)"
    )
    request = json.dumps({"operation": "open", **arguments(tmp_path)})
    answer = subprocess.run(
        [sys.executable, "-c", code], input=request, capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["result"]["contents"]["manifest"]["model_name"] == "m"
