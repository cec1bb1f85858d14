"""Everybody who is compared."""

from dataclasses import replace
from functools import partial

from baselines import Aimd, Cork, RefuseByMean, TakeLiving, WindowFromPoll
from engine import Contender, Foreign, Start
from profiles import Profile

from marserve.frontend.batching.options import MAX_AUTOMATIC_SIZE, Batching
from marserve.frontend.batching.policies import BatchPolicy
from marserve.frontend.configuration.model_schema import ADAPTIVE as ADAPTIVE_POLICY
from marserve.frontend.configuration.model_schema import FIXED, GREEDY

# The window of those that have one, seconds; and the capacity of TorchServe's queue.
_WINDOW = 0.010
_TORCHSERVE_CAPACITY = 100
_ENDLESS = 1_000_000


def _adaptive(profile: Profile, num_requests: int = 0) -> Batching:
    return Batching(
        policy=ADAPTIVE_POLICY,
        size=profile.size,
        max_latency=profile.goal,
        num_requests=num_requests,
        is_queue_bounded=False,
    ).check()


def _automatic(profile: Profile) -> Batching:
    return replace(_adaptive(profile), size=MAX_AUTOMATIC_SIZE, is_automatic=True)


def _foreign(profile: Profile, policy: BatchPolicy, capacity: int = _ENDLESS) -> Batching:
    return Foreign(
        size=profile.size,
        queue_size=capacity,
        foreign=lambda _: policy,
        observed=getattr(policy, "observed", None),
    )


def _mean_refusal(profile: Profile) -> Batching:
    return Foreign(
        size=profile.size,
        queue_size=_ENDLESS,
        foreign=lambda costs: RefuseByMean(profile.size, costs=costs),
    )


def fixed_window(seconds: float) -> Contender:
    """The production's window, counted from the arrival; its line is as long as it gets."""
    name = f"fixed window, {seconds * 1000:.0f} ms"
    return Contender(
        name,
        lambda profile: Batching(
            policy=FIXED, size=profile.size, delay=seconds, queue_size=_ENDLESS
        ),
    )


def with_known_clients(clients: int) -> Contender:
    """The adaptive policy where it is known how many requests the clients keep in flight."""
    return Contender("… num_requests", partial(_adaptive, num_requests=clients), True)


ADAPTIVE = Contender("adaptive", _adaptive, sees_deadlines=True)
COLD = replace(ADAPTIVE, name="adaptive, cold", start=Start.COLD)
AUTOMATIC = Contender("adaptive, automatic size", _automatic, sees_deadlines=True)
LATE_GOAL = replace(ADAPTIVE, name="adaptive, goal set late", start=Start.LATE_GOAL)
REFUSE_BY_MEAN = Contender("refusal by the mean", _mean_refusal, sees_deadlines=True)
SHORT_WINDOW = fixed_window(_WINDOW)
LONG_WINDOW = fixed_window(5 * _WINDOW)
TORCHSERVE = Contender(
    "TorchServe's window",
    lambda profile: _foreign(profile, WindowFromPoll(profile.size, _WINDOW), _TORCHSERVE_CAPACITY),
)
TAKE_ALL = Contender(
    "take-all (greedy)",
    lambda profile: Batching(policy=GREEDY, size=profile.size, queue_size=_ENDLESS),
)
TAKE_LIVING = Contender(
    "take-all, expired removed",
    lambda profile: _foreign(profile, TakeLiving(profile.size)),
    sees_deadlines=True,
)
CORK = Contender(
    "BentoML's cork",
    lambda profile: _foreign(profile, Cork(profile.size, profile.goal, *profile.line)),
    sees_deadlines=True,
)
AIMD = Contender(
    "AIMD on batch time", lambda profile: _foreign(profile, Aimd(profile.size, profile.goal))
)

CONTENDERS = (TORCHSERVE, SHORT_WINDOW, TAKE_ALL, TAKE_LIVING, CORK, AIMD, ADAPTIVE)
#: BentoML's dispatcher has one batch in flight, however many workers there are.
FOR_MANY_WORKERS = tuple(contender for contender in CONTENDERS if contender is not CORK)
