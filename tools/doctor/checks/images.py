"""Checks for the names of TorchServe's images and packages, which have to be replaced."""

import itertools
import re
from collections.abc import Iterator

from marserve.tools.doctor.checks.containers import check_probe
from marserve.tools.doctor.findings import Finding, Fix, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Source
from marserve.tools.doctor.surroundings import Surroundings, instructions_of, package_name

#: Name of the image that the page of deploy/docker builds.
DEFAULT_IMAGE = "marserve"
_IMAGE = re.compile(r"(?:(?:docker\.io|ghcr\.io|public\.ecr\.aws)/)?pytorch/torchserve[\w.-]*"
                    r"(?::[\w.-]+|@sha256:\w+)?(?![\w/])")  # fmt: skip
_TAGS = re.compile(r"TAG\s*=|\s(?:-t|--tag)[\s=]")
_AWS_IMAGE = re.compile(r"\d{12}\.dkr\.ecr\.[\w.-]+/(pytorch-inference[\w-]*|torchserve):([\w.-]+)")
_VERTEX_IMAGE = re.compile(
    r"[\w.-]{0,63}docker\.pkg\.dev/vertex-ai/prediction/pytorch-[\w.-]+(?::[\w.-]+)?"
)
_PACKAGES = {
    "torchserve": "marserve[grpc]",
    "torchserve-nightly": "marserve[grpc]",
    "torch-model-archiver": None,
    "torch-model-archiver-nightly": None,
    "torch-workflow-archiver": None,
    "torch-workflow-archiver-nightly": None,
}
_REGISTERS = re.compile(r"-X\s*POST\b.*/models\?\S*\burl=|/models\?\S*\burl=.*-X\s*POST\b")
_JAVA_PROCESS = re.compile(
    r"\b(?:pkill|pgrep|pidof|killall|grep)\b[^|;&]*?"
    r"(?:(?<![\w./-])java(?![\w./-])|org\.pytorch\.serve\b[\w.]*)|\bjps\b"
)
_BUILDS = re.compile(r"github\.com[/:]pytorch/serve\b|\bts_scripts/install\w*\.py")
_WAITS = re.compile(r"\b(?:until|while)\b.*/(?:ping|models)\b")
_MLFLOW = "mlflow-torchserve"
_INSTALLS = re.compile(r"\b(?:pip3?|uv pip|conda)\s+(?:\S+\s+)*?install\b")
_NAMED = re.compile(
    r"(?<![\w./-])(?P<name>(?:torchserve|torch-model-archiver|torch-workflow-archiver)"
    r"(?:-nightly)?)(?P<pin>(?:\[[\w,]*\])?(?:[=<>~!]=?[\w.*]+)?)(?![\w./-])"
)
_JAVA = re.compile(r"\b(?:openjdk|default-jre|default-jdk|java-)[\w.-]*")


def check_images(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Report lines that name TorchServe's images in a Dockerfile, YAML file or script."""
    image = around.image or DEFAULT_IMAGE
    for number, line in enumerate(source.lines, 1):
        if line.lstrip().startswith("#"):
            continue
        place = Place(source.name, number)
        if found := _IMAGE.search(line):
            fixes = [Fix(source.path, number, line, _IMAGE.sub(lambda _: image, line))]
            yield finding(
                "image",
                place,
                "The line names an image of TorchServe.",
                f"Use marserve's ({image}, built by deploy/docker), which starts in the same way.",
                # A tag with a variable, or one of an image to build, may be the user's.
                fixes=[] if line[found.end() :][:1] == "$" or _TAGS.search(line) else fixes,
            )
        elif found := _AWS_IMAGE.search(line):
            yield finding(
                "image",
                place,
                f"{found[1]}:{found[2]} of AWS contains TorchServe, with torch up to 2.6.",
                "Build deploy/sagemaker: Amazon's toolkit with marserve, for any version of torch.",
                link="docs/platforms/sagemaker.md#change-the-image",
            )
        elif found := _VERTEX_IMAGE.search(line):
            yield finding(
                "image",
                place,
                f"{found[0]} contains TorchServe.",
                f"Use marserve's ({image}), which supports Vertex AI's ports, routes and models.",
                link="docs/platforms/vertex.md#what-to-change",
            )


def check_dockerfile(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Check packages, health check and Java of an image."""
    for each in instructions_of(source):
        if each.name == "HEALTHCHECK":
            yield from check_probe(source, Place(source.name, each.line), each.text, around)
    joined = [(each.line, each.text) for each in instructions_of(source) if each.name == "RUN"]
    yield from _installs(source, joined)
    for line, text in joined:
        if found := _JAVA.search(text):
            at = next(
                (n for n in range(line, len(source.lines) + 1) if found[0] in source.lines[n - 1]),
                line,
            )
            yield finding(
                "no-java",
                Place(source.name, at),
                f"{found[0]} is installed; marserve needs no Java.",
                "Remove it, unless other software needs it, for a smaller image.",
            )
            break


def check_script(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Check packages, server commands and registrations of a script."""
    lines = list(enumerate(source.lines, 1))
    yield from _installs(source, lines)
    yield from _foreground(source)
    for number, line in lines:
        if found := _JAVA_PROCESS.search(line.partition("#")[0]):
            yield finding(
                "java-process",
                Place(source.name, number),
                f"`{' '.join(found[0].split())}` looks for TorchServe's Java process, which does "
                "not exist.",
                "Request GET /ready, and stop the server with torchserve --stop.",
            )
    for number, line in lines:
        is_public = around.near(around.public, source) and not around.tokens_are_off(source)
        if is_public and _WAITS.search(line.partition("#")[0]):
            what = "This loop does not end: its requests need a token."
            yield finding("probe", Place(source.name, number), what, "Request GET /ready.")
    for number, line in lines:
        if _REGISTERS.search(line) and not around.may_register(source):
            yield finding(
                "model-api",
                Place(source.name, number),
                "Models are registered over HTTP. This is disabled if a listener is not private, "
                "as on TorchServe since 0.11.1.",
                "Set enable_model_api=true, or list the models in load_models.",
            )
            break


def check_requirements(source: Source) -> Iterator[Finding]:
    """Report TorchServe's packages in a requirements file."""
    has_ours = any(package_name(line) == "marserve" for line in source.lines)
    for number, line in enumerate(source.lines, 1):
        name = package_name(line)
        if name == _MLFLOW:
            yield _mlflow(Place(source.name, number))
        if name not in _PACKAGES and not line.startswith("#") and _BUILDS.search(line):
            what = f"{line.strip()} builds TorchServe from its source."
            do = "Require marserve[grpc], which contains the archivers."
            yield finding("package", Place(source.name, number), what, do)
        if name in _PACKAGES:
            after = None if has_ours or _PACKAGES[name] is None else _PACKAGES[name]
            yield finding(
                "package",
                Place(source.name, number),
                f"{line.strip()} belongs to TorchServe.",
                "Require marserve[grpc], which contains the archivers.",
                fixes=[Fix(source.path, number, line, after)],
            )


def _installs(source: Source, commands: list[tuple[int, str]]) -> Iterator[Finding]:
    for line, command in commands:
        if not command.lstrip().startswith("#") and _BUILDS.search(command):
            what = "TorchServe is built from its source."
            do = "Install marserve[grpc], which contains the archivers."
            yield finding("package", Place(source.name, line), what, do)
        if _MLFLOW in command and "--no-deps" not in command and _INSTALLS.search(command):
            yield _mlflow(Place(source.name, line))
        if not _INSTALLS.search(command) or not _NAMED.search(command):
            continue
        names = list(dict.fromkeys(found["name"] for found in _NAMED.finditer(command)))
        yield finding(
            "package",
            Place(source.name, line),
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} installed.",
            "Install marserve[grpc], which contains the archivers.",
            fixes=[] if "conda" in command else _renamed(source, line),  # conda has no marserve
        )


def _mlflow(place: Place) -> Finding:
    return finding(
        "package",
        place,
        f"{_MLFLOW} also installs TorchServe.",
        f"Install it with pip install --no-deps {_MLFLOW}, beside marserve[grpc] and mlflow.",
        link="docs/platforms/mlflow.md",
    )


def _renamed(source: Source, first: int) -> list[Fix]:
    """Return fixes that replace TorchServe's packages in a command by marserve, named once."""
    fixes, number, is_first = [], first, True
    while number <= len(source.lines):
        line = source.lines[number - 1]
        if not line.lstrip().startswith("#") and _NAMED.search(line):
            after = line
            for found in [*_NAMED.finditer(line)][::-1]:
                is_server = _PACKAGES[found["name"]] is not None
                new = "'marserve[grpc]'" if is_server and is_first else ""
                rest = after[found.end() :]
                after = after[: found.start()] + (new + rest if new else rest.removeprefix(" "))
                is_first = is_first and not new
            after = re.sub(r"(?<=\S) {2,}", " ", after).rstrip() + (
                " \\" if line.rstrip().endswith("\\") and not after.rstrip().endswith("\\") else ""
            )
            if re.search(r"install(?:\s+-\S+)*\s*(?:;|&&|\\|$)", after):
                return []  # the command would install nothing
            fixes.append(Fix(source.path, number, line, after))
        if not line.rstrip().endswith("\\"):
            break
        number += 1
    return fixes


def _foreground(source: Source) -> Iterator[Finding]:
    """Report a script that starts a server and then waits forever."""
    code = [
        (number, line.strip())
        for number, line in enumerate(source.lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for (number, line), (after, waiting) in itertools.pairwise(code):
        waits = re.fullmatch(r"(?:tail -f /dev/null|sleep infinity)", waiting)
        if not waits or not re.match(r"(?:torchserve\b|eval \"\$@\"|fi$)", line):
            continue
        fixes = []
        if line.startswith("torchserve --start") and not re.search(r"[&|;\\]$", line):
            new = line.replace("torchserve --start", "exec torchserve --start --foreground", 1)
            before = source.lines[number - 1]
            fixes = [
                Fix(source.path, number, before, before.replace(line, new)),
                Fix(source.path, after, source.lines[after - 1], None),
            ]
        yield finding(
            "outlives-server",
            Place(source.name, after),
            f"`{waiting}` keeps the container running after the end of the server, which "
            "receives no SIGTERM.",
            "End with `exec torchserve --start --foreground …`, or use the entrypoint of "
            "marserve's image, which does so.",
            fixes=fixes,
        )
        return
