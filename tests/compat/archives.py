"""The archives of a comparison, packed by whichever `torch-model-archiver` is given.

`pack_all` fills a folder that serves as a model store; what no archiver would write (broken
manifests, unsafe members, directories without a manifest) is made by hand.
"""

import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HANDLERS = Path(__file__).with_name("handlers")
SHARED_HANDLERS = HANDLERS.parents[1] / "integration" / "handlers"
RICH = HANDLERS / "rich"

_TIMEOUT = "responseTimeout: 60\n"  # else TorchServe takes its yaml reader's 120 s

# Name of the model -> its handler and, where it has one, its model-config.yaml.
SIMPLE: Mapping[str, tuple[Path, str]] = {
    "probe": (HANDLERS / "probe.py", ""),
    "lab": (SHARED_HANDLERS / "lab.py", ""),
    "results": (HANDLERS / "results.py", ""),
    "stream": (HANDLERS / "stream.py", ""),
    "continuous": (
        HANDLERS / "continuous.py",
        "continuousBatching: true\nbatchSize: 4\nmaxBatchDelay: 10\nminWorkers: 1\nmaxWorkers: 1\n",
    ),
    "describing": (HANDLERS / "describing.py", ""),
    "increase": (HANDLERS / "increase.py", ""),
    "described-object": (
        HANDLERS / "metadata.py",
        _TIMEOUT + 'description: \'{"b": [1], "a": null}\'\n',
    ),
    "described-list": (HANDLERS / "metadata.py", _TIMEOUT + "description: '[1, 2]'\n"),
    "described-null": (HANDLERS / "metadata.py", _TIMEOUT + "description: 'null'\n"),
    "described-text": (HANDLERS / "metadata.py", _TIMEOUT + "description: '\"text\"'\n"),
    "described-badly": (HANDLERS / "metadata.py", _TIMEOUT + "description: '{'\n"),
    "impatient": (SHARED_HANDLERS / "lab.py", "responseTimeout: 2\n"),
    "narrow": (SHARED_HANDLERS / "lab.py", "jobQueueSize: 1\n"),
    "ticketed": (SHARED_HANDLERS / "lab.py", "useJobTicket: true\n"),
    "fails-import": (HANDLERS / "fails_to_load.py", "how: [\n"),
    "fails-memory": (HANDLERS / "fails_to_load.py", "how: memory\n"),
    "fails-cuda": (HANDLERS / "fails_to_load.py", "how: cuda\n"),
    "fails-runtime": (HANDLERS / "fails_to_load.py", "how: runtime\n"),
    "fails-exit": (HANDLERS / "fails_to_load.py", "how: exit\n"),
    "fails-value": (HANDLERS / "fails_to_load.py", "how: value\n"),
    "wide": (
        HANDLERS / "probe.py",
        "minWorkers: 1\nmaxWorkers: 2\nbatchSize: 3\nmaxBatchDelay: 70\nresponseTimeout: 33\n"
        "startupTimeout: 44\njobQueueSize: 5\ndeviceType: cpu\nmaxRetryTimeoutInSec: 10\n"
        "clientTimeoutInMills: 60000\n",
    ),
}

VERSIONS = ("1.0", "2.0", "beta")  # of the model "versions", in versions-<version>.mar

FORMS = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}

_GOOD_MODEL = {"modelName": "odd", "modelVersion": "1.0", "handler": "versions.py"}
BROKEN_MANIFESTS: Mapping[str, object] = {
    "no-model": {"runtime": "python", "archiverVersion": "0.12.0"},
    "no-name": {
        "runtime": "python",
        "model": {"modelVersion": "1.0", "handler": "versions.py"},
        "archiverVersion": "0.12.0",
    },
    "no-version": {
        "runtime": "python",
        "model": {"modelName": "odd", "handler": "versions.py"},
        "archiverVersion": "0.12.0",
    },
    "no-runtime": {"model": _GOOD_MODEL, "archiverVersion": "0.12.0"},
    "unknown-runtime": {"runtime": "java", "model": _GOOD_MODEL, "archiverVersion": "0.12.0"},
    "no-handler": {
        "runtime": "python",
        "model": {"modelName": "odd", "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
    },
    "no-archiver": {"runtime": "python", "model": _GOOD_MODEL},
    "list": [],
    "empty": {},
}


def pack_all(archiver: Path, store: Path) -> None:
    """Fill a folder with every archive of the comparison."""
    scratch = store.parent / "scratch"
    for directory in (store, scratch):
        directory.mkdir(parents=True, exist_ok=True)
    calls = [
        *(lambda n=name: _pack_simple(archiver, store, scratch, n) for name in SIMPLE),
        *(lambda v=version: _pack_version(archiver, store, scratch, v) for version in VERSIONS),
        *(lambda f=form: pack_rich(archiver, store, f"rich-{f}", f) for form in FORMS),
    ]
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()
    _make_odd_ones(store)


def pack(archiver: Path, store: Path, name: str, handler: Path, *flags: str) -> None:
    """Run the archiver for one model."""
    command = [archiver, "--model-name", name, "--handler", handler, "--export-path", store]
    command += ["--force", *flags]
    if "--version" not in flags:
        command += ["--version", "1.0"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _pack_simple(archiver: Path, store: Path, scratch: Path, name: str) -> None:
    handler, yaml = SIMPLE[name]
    flags: tuple[str, ...] = ()
    if yaml:
        file = scratch / name / "model-config.yaml"
        file.parent.mkdir()
        file.write_text(yaml)
        flags = ("--config-file", str(file))
    pack(archiver, store, name, handler, *flags)


def _pack_version(archiver: Path, store: Path, scratch: Path, version: str) -> None:
    own = scratch / f"version-{version}"
    own.mkdir()
    pack(archiver, own, "versions", HANDLERS / "versions.py", "--version", version)
    shutil.move(own / "versions.mar", store / f"versions-{version}.mar")


def pack_rich(archiver: Path, store: Path, name: str, form: str) -> None:
    """The archive with one of everything, in one of the archiver's forms."""
    extras = f"{RICH / 'beside.py'},{RICH / 'extras'}"
    pack(
        archiver, store, name, RICH / "rich.py",
        "--archive-format", form, "--extra-files", extras,
        "--serialized-file", str(RICH / "weights.bin"),
        "--config-file", str(RICH / "model-config.yaml"),
        "--requirements-file", str(RICH / "requirements.txt"),
    )  # fmt: skip


def _make_odd_ones(store: Path) -> None:
    for name, manifest in BROKEN_MANIFESTS.items():
        write_mar(store / f"manifest-{name}.mar", json.dumps(manifest))
    write_mar(store / "manifest-no-json.mar", "{broken")
    write_mar(store / "manifest-none.mar", None)
    (store / "no-zip.mar").write_bytes(b"this is no archive")
    (store / "no-tar.tar.gz").write_bytes(b"this is no archive")
    write_mar(store / "slip.mar", json.dumps({"model": _GOOD_MODEL}), {"../../slipped.py": "x"})
    make_tgz(store / "renamed.tgz", store / "rich-no-archive", "anything")
    make_tgz(store / "renamed.bin", store / "rich-no-archive", "anything")
    make_sagemaker(store / "sagemaker")
    shutil.copytree(store / "sagemaker", store / "nested" / "inner")


def write_mar(path: Path, manifest: str | None, members: Mapping[str, str] | None = None) -> None:
    """A zip as the archiver would never write it."""
    with zipfile.ZipFile(path, "w") as archive:
        if manifest is not None:
            archive.writestr("MAR-INF/MANIFEST.json", manifest)
        archive.writestr("versions.py", (HANDLERS / "versions.py").read_text())
        for name, text in (members or {}).items():
            archive.writestr(name, text)


def make_tgz(path: Path, directory: Path, top: str) -> None:
    """A gzipped tar of a directory, whose members lie below a top folder of any name."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(directory, arcname=top)


def make_sagemaker(directory: Path) -> None:
    """A model directory as the SageMaker toolkit leaves it: no manifest, code and data."""
    directory.mkdir(parents=True)
    (directory / "service.py").write_text(
        "import os\n"
        "def handle(data, context):\n"
        "    if data is None:\n"
        "        return None\n"
        "    found = {'name': context.model_name, 'manifest': context.manifest,\n"
        "             'files': sorted({*os.listdir('.')} - {'__pycache__'})}\n"
        "    return [found] * len(data)\n"
    )
    (directory / "model.pth").write_text("weights")
