"""What the sources of a setup say of each other: variables, commands, packages, platforms.

A line of config.properties means something else beside an image that sets a variable, or a command
with a flag. So these are collected before anything is judged.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marserve.tools.doctor.commands import (
    Command,
    commands_in,
    commands_of_words,
    foreign_settings_of,
)
from marserve.tools.doctor.documents import containers_in, documents_of
from marserve.tools.doctor.findings import Place
from marserve.tools.doctor.sources import Kind, Source

_SEVERAL = 2
_REGISTER_FLAG = "--enable-model-api"
_TOKEN_FLAGS = {"--disable-token-auth", "--dt"}
# Possessive, so that what may be left out is not left out to find more.
_PUBLIC = (
    r"(?m)^[ \t]*\w+_address[ \t]*[=:][ \t]*+(?:https?://)?+(?!127\.|localhost|unix:|\[::1)\S+"
)
_SERVE = ("--start", "--disable-token-auth")
_ENV = re.compile(r"\b([A-Za-z_]\w*)(?:=(\"[^\"]*\"|'[^']*'|\S*))")
_PLATFORMS = {
    "kserve": re.compile(r"serving\.kserve\.io|torchserve-kfs|kserve_wrapper"),
    "sagemaker": re.compile(r"\bSAGEMAKER_|sagemaker[-_]|dkr\.ecr\.", re.IGNORECASE),
    "vertex": re.compile(r"\bAIP_|gcloud ai |aiplatform|vertex-ai", re.IGNORECASE),
}


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, its lines joined."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Fact:
    """Something that a source says, and the folder of that source."""

    folder: Path
    value: Any


@dataclass
class Surroundings:
    """See the module.

    Where there is one configuration, everything around is about it. Where there are several, as in
    a repository of many services, what counts for a file is what stands in its folder, above, or
    below it (`near`).

    Attributes:
        root: Where everything was found.
        image: The image to name in the place of TorchServe's.
        is_here: Whether the configuration is for this machine, so that its paths are.
        configurations: How many configuration files there are.
        variables: Variables that images, pods and services set: pairs of name and value.
        commands: Command lines of the server.
        packages: Names of what pip installs, as pip compares them.
        platforms: Of `kserve`, `sagemaker`, `vertex`, those that leave traces.
        installing: Configurations that say ``install_py_dep_per_model=true``.
        open_servers: Configurations that say ``disable_token_authorization=true``.
        registering: What lets clients register models: flags, variables, configurations.
        default_handlers: What configurations name as ``default_service_handler``.
        public: Configurations with a listener that is not bound to loopback.
    """

    root: Path
    image: str = ""
    is_here: bool = False
    configurations: int = 0
    variables: list[Fact] = field(default_factory=list)
    commands: list[Fact] = field(default_factory=list)
    packages: list[Fact] = field(default_factory=list)
    platforms: list[Fact] = field(default_factory=list)
    installing: list[Fact] = field(default_factory=list)
    open_servers: list[Fact] = field(default_factory=list)
    registering: list[Fact] = field(default_factory=list)
    default_handlers: list[Fact] = field(default_factory=list)
    public: list[Fact] = field(default_factory=list)

    def near(self, facts: Sequence[Fact], source: Source) -> list[Any]:
        """The values of the facts that are about a source."""
        is_only = self.configurations < _SEVERAL
        return [fact.value for fact in facts if is_only or _are_near(fact.folder, source.folder)]

    def beside(self, facts: Sequence[Fact], source: Source) -> list[Any]:
        """The same, but never those of another service: for what is doubtful otherwise."""
        return [fact.value for fact in facts if _are_near(fact.folder, source.folder)]

    def environment(self, source: Source) -> dict[str, str]:
        """The variables that a server of this source sees."""
        return dict(self.near(self.variables, source))

    def is_on(self, platform: str, source: Source) -> bool:
        """Whether a source is for a platform."""
        return platform in self.near(self.platforms, source)

    def tokens_are_off(self, source: Source) -> bool:
        """Whether something beside the configuration file switches tokens off."""
        commands = self.near(self.commands, source)
        has_flag = any(_TOKEN_FLAGS & {*command.arguments} for command in commands)
        return has_flag or bool(
            self.near(self.platforms, source) or self.near(self.open_servers, source)
        )

    def may_register(self, source: Source) -> bool:
        """Whether the servers that a source is about let clients register models."""
        if not self.near(self.public, source) or self.near(self.registering, source):
            return True
        commands = self.near(self.commands, source)
        has_flag = any(_REGISTER_FLAG in command.arguments for command in commands)
        return has_flag or "TS_ENABLE_MODEL_API" in self.environment(source)


def _are_near(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def read_facts(surroundings: Surroundings, source: Source) -> None:
    """Collect what a source says; OSError, ValueError or RecursionError where that fails."""
    if source.kind not in (Kind.ARCHIVE, Kind.PLUGIN):
        _Reader(surroundings, source).read()


class _Reader:
    """Reads the facts of one source."""

    def __init__(self, surroundings: Surroundings, source: Source) -> None:
        self._to = surroundings
        self._source = source
        self._readers = {
            Kind.DOCKERFILE: self._dockerfile,
            Kind.SHELL: self._script,
            Kind.REQUIREMENTS: self._requirements,
            Kind.YAML: self._yaml,
            Kind.PROPERTIES: self._properties,
        }

    def read(self) -> None:
        text = self._source.text
        found = (name for name, trace in _PLATFORMS.items() if trace.search(text))
        self._add(self._to.platforms, found)
        if reader := self._readers.get(self._source.kind):
            reader()

    def _add(self, facts: list[Fact], values: Iterable[Any]) -> None:
        facts += [Fact(self._source.folder, value) for value in values]

    def _script(self) -> None:
        for line, command in logical_lines(self._source.lines):
            self._add(self._to.commands, commands_in(command, Place(self._source.name, line)))
            self._add(self._to.packages, packages_in(command))

    def _requirements(self) -> None:
        self._add(self._to.packages, set(map(package_name, self._source.lines)) - {""})

    def _properties(self) -> None:
        self._to.configurations += 1
        self._add(self._to.installing, self._truths("install_py_dep_per_model"))
        self._add(self._to.open_servers, self._truths("disable_token_authorization"))
        self._add(self._to.registering, self._truths("enable_model_api"))
        named = re.findall(r"(?m)^[ \t]*default_service_handler\s*[=:]\s*(\S+)", self._source.text)
        self._add(self._to.default_handlers, named)
        self._add(self._to.public, re.findall(_PUBLIC, self._source.text))

    def _truths(self, key: str) -> list[str]:
        return re.findall(rf"(?mi)^[ \t]*{key}\s*[=:]\s*true", self._source.text)

    def _dockerfile(self) -> None:
        for instruction in instructions_of(self._source):
            place = Place(self._source.name, instruction.line)
            match instruction.name:
                case "ENV":
                    self._add(self._to.variables, _variables(instruction.text))
                case "CMD" | "ENTRYPOINT":
                    words = foreign_settings_of(instruction.text)
                    self._add(self._to.commands, commands_of_words(words, place))
                    if words[-1:] == ["serve"]:  # understood by the entrypoint of both images
                        self._add(self._to.commands, [Command(place, _SERVE, in_container=True)])
                case "RUN":
                    self._add(self._to.packages, packages_in(instruction.text))

    def _yaml(self) -> None:
        for document in documents_of(self._source.text):
            for container in containers_in(document):
                words = sorted(map(str, container.words), key=len, reverse=True)
                # One with a template in it stands there in another way.
                at = next((line for each in words if (line := self._source.line_of(each))), 0)
                place = Place(self._source.name, at)
                self._add(self._to.variables, container.environment.items())
                self._add(self._to.commands, commands_of_words(container.words, place))


def _variables(text: str) -> list[tuple[str, str]]:
    pairs = _ENV.findall(text)
    if not pairs and " " in text:  # the old form: ENV NAME value
        pairs = [tuple(text.split(None, 1))]
    return [(name, value.strip("\"'")) for name, value in pairs]


def instructions_of(source: Source) -> Iterator[Instruction]:
    """The instructions of a Dockerfile."""
    for line, text in logical_lines(source.lines):
        name, _, rest = text.strip().partition(" ")
        if name.isalpha():
            yield Instruction(line, name.upper(), rest.strip())


def logical_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Lines that a backslash continues as one, without comments; and where each begins."""
    pending, first = "", 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#"):
            continue
        first = first if pending else number
        text = line.rstrip()
        if text.endswith("\\"):
            pending += text[:-1] + " "
            continue
        pending += text
        if pending.strip():
            yield first, pending
        pending = ""
    if pending.strip():
        yield first, pending


def packages_in(command: str) -> set[str]:
    """Names of what a command line has pip install."""
    found = set()
    for words in re.findall(r"\bpip3?\s+install\s+([^&;|]*)", command):
        for word in words.split():
            if not word.startswith("-") and re.match(r"[A-Za-z]", word):
                found.add(package_name(word))
    return found


def package_name(requirement: str) -> str:
    """The name in a line of requirements, as pip compares names; empty for none."""
    match = re.match(r"\s*[\"']?([A-Za-z0-9][\w.-]*)", requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
