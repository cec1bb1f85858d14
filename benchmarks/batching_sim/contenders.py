"""Everybody who is compared."""

from functools import partial

from baselines import Aimd, Cork, TakeLiving, WindowFromPoll
from engine import Contender, Foreign
from profiles import Profile

from marserve.frontend.batching.options import ADAPTIVE as ADAPTIVE_POLICY
from marserve.frontend.batching.options import FIXED, GREEDY, Batching
from marserve.frontend.batching.policies import BatchPolicy

# The window of those that have one, seconds; and the seats in TorchServe's line.
_WINDOW = 0.010
_TORCHSERVE_SEATS = 100
_ENDLESS = 1_000_000


def _adaptive(profile: Profile, num_requests: int = 0) -> Batching:
    return Batching(
        policy=ADAPTIVE_POLICY,
        size=profile.size,
        max_latency=profile.goal,
        num_requests=num_requests,
        is_queue_bounded=False,
    ).check()


def _foreign(profile: Profile, policy: BatchPolicy, seats: int = _ENDLESS) -> Batching:
    return Foreign(size=profile.size, queue_size=seats, foreign=policy)


def fixed_window(seconds: float) -> Contender:
    """The production's window, counted from the arrival; its line is as long as it gets."""
    name = f"fixed window, {seconds * 1000:.0f} ms"
    return Contender(
        name, lambda one: Batching(policy=FIXED, size=one.size, delay=seconds, queue_size=_ENDLESS)
    )


def told_of(clients: int) -> Contender:
    """The adaptive policy where it is known how many requests the clients keep in flight."""
    return Contender("… num_requests", partial(_adaptive, num_requests=clients), True)


ADAPTIVE = Contender("adaptive", _adaptive, sees_deadlines=True)
SHORT_WINDOW = fixed_window(_WINDOW)
LONG_WINDOW = fixed_window(5 * _WINDOW)
TORCHSERVE = Contender(
    "TorchServe's window",
    lambda one: _foreign(one, WindowFromPoll(one.size, _WINDOW), _TORCHSERVE_SEATS),
)
TAKE_ALL = Contender(
    "take-all (greedy)", lambda one: Batching(policy=GREEDY, size=one.size, queue_size=_ENDLESS)
)
TAKE_LIVING = Contender(
    "take-all, expired removed",
    lambda one: _foreign(one, TakeLiving(one.size)),
    sees_deadlines=True,
)
CORK = Contender(
    "BentoML's cork",
    lambda one: _foreign(one, Cork(one.size, one.goal, one.alpha, one.beta)),
    sees_deadlines=True,
)
AIMD = Contender("AIMD on batch time", lambda one: _foreign(one, Aimd(one.size, one.goal)))

CONTENDERS = (TORCHSERVE, SHORT_WINDOW, TAKE_ALL, TAKE_LIVING, CORK, AIMD, ADAPTIVE)
#: BentoML's dispatcher has one batch in flight, whatever the crew.
FOR_MANY_WORKERS = tuple(one for one in CONTENDERS if one is not CORK)
