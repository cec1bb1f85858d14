"""What a platform is to the configuration: how it is recognised, and what it changes there.

A platform runs servers for others: its requests come to its own ports, and its probes and clients
were written for TorchServe as the platform had set it up. To add one, write a file beside this one
that makes a `Platform`, and put that into `choice.PLATFORMS`.

Both functions of a platform are pure: they see the environment and what the user has set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marserve.frontend.configuration.addresses import Address

#: The name of no platform, though one may be recognised.
NONE = "none"


@dataclass(frozen=True)
class Surroundings:
    """What a server finds before a platform has changed anything."""

    environ: Mapping[str, str]
    settings: Mapping[str, str]  # texts of keys, as file, command line and environment set them
    config_file: Path | None = None
    decided: frozenset[str] = frozenset()  # the keys that command line and environment set


@dataclass(frozen=True)
class Change:
    """A key that a platform sets.

    A ``default`` gives way to whoever sets the key; what is ``required`` replaces what the file
    says, and gives way only to the command line and the environment, by which an operator decides
    in the one place where the platform runs. What is ``forced`` replaces these as well, because the
    server could not start otherwise.
    """

    key: str
    text: str
    reason: str  # completes "because ..."
    strength: Literal["default", "required", "forced"] = "required"


@dataclass(frozen=True)
class Setup:
    """What a platform does with a configuration."""

    changes: Sequence[Change] = ()
    #: Addresses where inference is served beside ``inference_address``. Nobody listens there before
    #: every model is READY, because the platform sends requests as soon as it can connect.
    inference: Sequence[Address] = ()
    grpc_inference: Sequence[Address] = ()  # the same for gRPC
    #: Whether nobody listens at ``inference_address`` before, either.
    when_ready: bool = False
    predict_route: str = ""  # path at which the platform asks for predictions, whatever the model
    health_route: str = ""  # the same for health
    #: By what the platform's programs find the server among all processes: an argument of its
    #: command line, and of no other. Such a server stays the process that it was started as.
    server_argument: str = ""


@dataclass(frozen=True)
class Platform:
    """A platform that servers run on."""

    name: str  # of --platform
    title: str  # as its users call it
    #: Why this is the platform, as a clause; empty where that is not beyond doubt.
    evidence: Callable[[Surroundings], str]
    set_up: Callable[[Surroundings], Setup]


@dataclass(frozen=True)
class ChosenPlatform:
    """The platform of a server, and what it makes of its configuration; by default, nothing."""

    name: str = NONE
    title: str = ""
    setup: Setup = field(default_factory=Setup)
    #: The changes that count, by key; others gave way.
    changes: Mapping[str, Change] = field(default_factory=dict)
    note: str = ""  # for the operator; empty where nothing is to be said

    @property
    def texts(self) -> Mapping[str, str]:
        """The texts of the keys that it changes."""
        return {key: change.text for key, change in self.changes.items()}
