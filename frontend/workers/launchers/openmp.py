"""How the threads of OpenMP, with which torch computes, wait for each other.

By default they *spin* for some milliseconds, which is fastest if each thread has its own core. If
not (another worker, a client, the frontend itself, a quota), spinning threads occupy the core that
the last thread needs; sleeping threads leave it free.

The library (libgomp in torch's wheels, Intel's libiomp5 in others) reads this from the environment
only when it is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ACTIVE, PASSIVE = "active", "passive"

#: The variables that the libraries read. The last two override the first, each for its library.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

#: ``active`` is OpenMP's default: threads spin for a moment, then sleep. OMP_WAIT_POLICY=ACTIVE is
#: different: libgomp's threads then spin for minutes, even when idle.
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    ACTIVE: {},
    PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
}


@dataclass(frozen=True)
class TorchOptions:
    """The options with which a worker's torch is started, and their reasons."""

    threads: int = 0  # 0 leaves it to the environment
    threads_why: str = ""
    is_share: bool = False  # the number is the worker's share of the cores; fewer may be enough
    wait_policy: str = ""  # empty if OpenMP's own variables are set
    wait_why: str = ""


def with_wait_policy(environment: Mapping[str, str], policy: str) -> dict[str, str]:
    """Return an environment with this wait policy, in place of the one that it had."""
    others = {name: value for name, value in environment.items() if name not in VARIABLES}
    return {**others, **_ENVIRONMENTS[policy]}


def variables_of(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of an environment that OpenMP reads when it is loaded."""
    return {name: environment[name] for name in VARIABLES if name in environment}
