"""A platform: how it is detected, and its changes of the configuration.

To add one, write a file beside this one with a `Platform`, and add that to `choice.PLATFORMS`.
Both functions of a platform are pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marserve.frontend.configuration.addresses import Address

#: The name that disables the detection of a platform.
NONE = "none"


@dataclass(frozen=True)
class Surroundings:
    """Environment and settings of a server, before the changes of a platform."""

    environ: Mapping[str, str]
    settings: Mapping[str, str]  # texts of keys, as file, command line and environment set them
    config_file: Path | None = None
    decided: frozenset[str] = frozenset()  # the keys that command line and environment set


@dataclass(frozen=True)
class Change:
    """A key that a platform sets.

    A ``default`` counts if nothing sets the key. A ``required`` value replaces that of the file;
    only command line and environment, where the operator configures the platform, win over it. A
    ``forced`` value replaces these as well, because the server could not start otherwise.
    """

    key: str
    text: str
    reason: str  # completes "because ..."
    strength: Literal["default", "required", "forced"] = "required"


@dataclass(frozen=True)
class Setup:
    """The changes of a platform."""

    changes: Sequence[Change] = ()
    #: Further addresses of inference. They are bound when every model is READY, because the
    #: platform sends requests as soon as it can connect.
    inference: Sequence[Address] = ()
    grpc_inference: Sequence[Address] = ()  # the same for gRPC
    when_ready: bool = False  # whether ``inference_address`` is bound only then, too
    predict_route: str = ""  # the platform's path of predictions, for any model
    health_route: str = ""  # the same for health
    #: The argument of the command line by which the platform's programs find the server among all
    #: processes. Such a server stays the process that was started.
    server_argument: str = ""


@dataclass(frozen=True)
class Platform:
    """A platform that servers run on."""

    name: str  # of --platform
    title: str  # for messages
    evidence: Callable[[Surroundings], str]  # as a clause; empty without clear evidence
    set_up: Callable[[Surroundings], Setup]


@dataclass(frozen=True)
class ChosenPlatform:
    """The platform of a server with its changes; by default none."""

    name: str = NONE
    title: str = ""
    setup: Setup = field(default_factory=Setup)
    texts: Mapping[str, str] = field(default_factory=dict)  # of the keys that it changes
    note: str = ""  # for the operator
