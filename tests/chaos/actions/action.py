"""The register of actions."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from chaos.world import World

Perform = Callable[[World, Random], Awaitable[str]]


@dataclass(frozen=True)
class Action:
    """Something that goes wrong.

    Attributes:
        perform: Does it, and undoes what has to be undone; a sentence for the journal.
        weight: How often it occurs.
        is_exclusive: Whether it waits for all others to end, and others for it.
    """

    perform: Perform
    weight: int
    is_exclusive: bool


ACTIONS: dict[str, Action] = {}


def action(*, weight: int = 1, is_exclusive: bool = False) -> Callable[[Perform], Perform]:
    """Register an action under the name of its function."""

    def register(perform: Perform) -> Perform:
        ACTIONS[perform.__name__] = Action(perform, weight, is_exclusive)
        return perform

    return register
