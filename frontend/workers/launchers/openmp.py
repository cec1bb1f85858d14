"""How the threads of OpenMP, with which torch computes, wait for each other.

Each operation of a model is shared out among threads, and the first to finish waits for the last.
By default it *spins* for some milliseconds, which is quickest where each thread has a core to
itself. Where it has not (another worker, a client, the frontend itself, a quota), the core that the
last one needs is taken by those that wait for it. Threads that sleep instead leave it to them.

The library (libgomp in torch's wheels, Intel's libiomp5 in others) reads this from the environment
when it is loaded and never again. So it is the same for the life of a process, and for all that
are forked from one that has torch loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ACTIVE, PASSIVE = "active", "passive"

#: What the libraries read. The last two are stronger than the first, each for its library.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

#: ``active`` is how OpenMP waits if nobody says anything: threads spin for a moment, then sleep.
#: OMP_WAIT_POLICY=ACTIVE is another thing: libgomp's threads then spin for minutes, idle or not.
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    ACTIVE: {},
    PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
}


@dataclass(frozen=True)
class TorchOptions:
    """What a worker's torch is started with, and why.

    Attributes:
        threads: How many it computes with; 0 leaves that to others.
        threads_why: Who has decided that, and by what.
        is_share: Whether it is the worker's share of the cores, of which fewer may be enough.
        wait_policy: How they wait; empty where OpenMP's own variables say so.
        wait_why: Who has decided that.
    """

    threads: int = 0
    threads_why: str = ""
    is_share: bool = False
    wait_policy: str = ""
    wait_why: str = ""


def with_wait_policy(environment: Mapping[str, str], policy: str) -> dict[str, str]:
    """An environment in which OpenMP waits so, whatever it said of that before."""
    others = {name: value for name, value in environment.items() if name not in VARIABLES}
    return {**others, **_ENVIRONMENTS[policy]}


def says_how_to_wait(environment: Mapping[str, str]) -> bool:
    """Whether somebody has decided already how OpenMP waits."""
    return any(name in environment for name in VARIABLES)


def variables_of(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Those of an environment that OpenMP reads when it is loaded."""
    return {name: environment[name] for name in VARIABLES if name in environment}
