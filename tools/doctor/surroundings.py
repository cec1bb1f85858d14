"""Facts of a setup that concern several sources: variables, commands, packages, platforms.

A variable of an image or a flag of a command changes the meaning of a line of config.properties.
All facts are therefore collected before the checks run.
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
# Possessive quantifiers, so that backtracking does not skip an optional part.
_PUBLIC = (
    r"(?m)^[ \t]*\w+_address[ \t]*[=:][ \t]*+(?:https?://)?+(?!127\.|localhost|unix:|\[::1)\S+"
)
_LOGGING = (
    r"(?m)^[ \t]*(?:log_config[ \t]*[=:]|vmargs[ \t]*[=:].*-Dlog4j2?\.configuration(?:File)?=)"
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
    """An instruction of a Dockerfile with joined lines."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Fact:
    """A fact from a source, and the folder of that source."""

    folder: Path
    value: Any


@dataclass
class Surroundings:
    """The collected facts.

    With one configuration, all facts apply to it. With several, as in a repository of many
    services, the facts of the same folder, the folders above and those below apply to a file
    (`near`).

    Attributes:
        root: The examined directory.
        image: The image that replaces TorchServe's.
        is_here: Whether the configuration is for this machine, and its paths can be checked.
        configurations: Number of configuration files.
        variables: Variables set by images, pods and services: pairs of name and value.
        commands: Command lines of the server.
        packages: Normalized names of packages that pip installs.
        platforms: The detected ones of `kserve`, `sagemaker`, `vertex`.
        installing: Configurations with ``install_py_dep_per_model=true``.
        open_servers: Configurations with ``disable_token_authorization=true``.
        registering: Configurations with ``enable_model_api=true``.
        logging: Configurations that name a file for the logs.
        default_handlers: Values of ``default_service_handler`` in configurations.
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
    logging: list[Fact] = field(default_factory=list)
    default_handlers: list[Fact] = field(default_factory=list)
    public: list[Fact] = field(default_factory=list)

    def near(self, facts: Sequence[Fact], source: Source) -> list[Any]:
        """Return the values of the facts that apply to a source."""
        is_only = self.configurations < _SEVERAL
        return [fact.value for fact in facts if is_only or _are_near(fact.folder, source.folder)]

    def beside(self, facts: Sequence[Fact], source: Source) -> list[Any]:
        """Return the values as `near` does, never with those of another service."""
        return [fact.value for fact in facts if _are_near(fact.folder, source.folder)]

    def environment(self, source: Source) -> dict[str, str]:
        """Return the environment variables of the server of a source."""
        return dict(self.near(self.variables, source))

    def is_on(self, platform: str, source: Source) -> bool:
        """Return whether a source is for a platform."""
        return platform in self.near(self.platforms, source)

    def tokens_are_off(self, source: Source) -> bool:
        """Return whether a flag, a platform or another file disables tokens."""
        commands = self.near(self.commands, source)
        has_flag = any(_TOKEN_FLAGS & {*command.arguments} for command in commands)
        return has_flag or bool(
            self.near(self.platforms, source) or self.near(self.open_servers, source)
        )

    def may_register(self, source: Source) -> bool:
        """Return whether the servers of a source allow clients to register models."""
        if not self.near(self.public, source) or self.near(self.registering, source):
            return True
        commands = self.near(self.commands, source)
        has_flag = any(_REGISTER_FLAG in command.arguments for command in commands)
        return has_flag or "TS_ENABLE_MODEL_API" in self.environment(source)


def _are_near(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def read_facts(surroundings: Surroundings, source: Source) -> None:
    """Collect the facts of a source; raise OSError, ValueError or RecursionError."""
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
        self._add(self._to.logging, re.findall(_LOGGING, self._source.text))
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
                    if words[-1:] == ["serve"]:  # handled by the entrypoint of both images
                        self._add(self._to.commands, [Command(place, _SERVE, in_container=True)])
                case "RUN":
                    self._add(self._to.packages, packages_in(instruction.text))

    def _yaml(self) -> None:
        for document in documents_of(self._source.text):
            for container in containers_in(document):
                words = sorted(map(str, container.words), key=len, reverse=True)
                # A word with a template differs from the text of the file.
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
    """Return the instructions of a Dockerfile."""
    for line, text in logical_lines(source.lines):
        name, _, rest = text.strip().partition(" ")
        if name.isalpha():
            yield Instruction(line, name.upper(), rest.strip())


def logical_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Join lines continued by a backslash, without comments; return each with its number."""
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
    """Return the names of packages that a command line installs with pip."""
    found = set()
    for words in re.findall(r"\bpip3?\s+install\s+([^&;|]*)", command):
        for word in words.split():
            if not word.startswith("-") and re.match(r"[A-Za-z]", word):
                found.add(package_name(word))
    return found


def package_name(requirement: str) -> str:
    """Return the normalized name in a line of requirements, or an empty string."""
    match = re.match(r"\s*[\"']?([A-Za-z0-9][\w.-]*)", requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
