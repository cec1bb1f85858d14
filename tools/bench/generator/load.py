"""What load is put on a server, and how it is shared out between processes."""

from dataclasses import dataclass, replace
from typing import Literal

Arrivals = Literal["poisson", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One run of the load generator; either ``clients`` or ``rate`` is set.

    Attributes:
        clients: Of a closed loop: connections with one request in flight each.
        rate: Of an open loop: requests per second, whatever comes back.
        arrivals: Of an open loop: whether its requests come at random (a Poisson process, as those
            of independent users do) or at equal distances.
        seed: Of the arrivals, so that those who are compared get the same.
        offset: Seconds by which the first arrival is put off: processes with equal distances take
            turns.
        seconds: How long is measured; None where ``requests`` says when to end.
        requests: How many are measured; None where ``seconds`` says when to end.
        warm_up: Seconds of load before that.
        timeout: Seconds after which nobody waits for an answer any more.
        max_connections: Of an open loop: the most at a time.
        step: Of a closed loop: the clock starts and stops only with a multiple of so many answers;
            ``requests`` are made up to one.
    """

    clients: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    seed: int = 0
    offset: float = 0.0
    seconds: float | None = None
    requests: int | None = None
    warm_up: float = 0.0
    timeout: float = 60.0
    max_connections: int = 1000
    step: int = 1

    @property
    def measured_requests(self) -> int:
        """Of an open loop: how many are due while it is measured; at least one."""
        assert self.rate is not None
        return self.requests or max(1, round(self.rate * (self.seconds or 0.0)))

    def shared(self, processes: int) -> list["Load"]:
        """The same load as the sum of several, as equal as can be; none of them is without work.

        Independent Poisson processes add up to one, and equal distances that take turns to equal
        distances.
        """
        count = min(self.clients or processes, self.requests or processes, self.max_connections)
        count = max(1, min(processes, count))
        return [self._share(index, count) for index in range(count)]

    def _share(self, index: int, count: int) -> "Load":
        return replace(
            self,
            clients=self.clients and _part(self.clients, index, count),
            requests=self.requests and _part(self.requests, index, count),
            max_connections=_part(self.max_connections, index, count),
            rate=self.rate and self.rate / count,
            offset=index / self.rate if self.rate else 0.0,
            # Far apart, so that neighbouring seeds of the user's do not meet.
            seed=self.seed * 1000 + index,
        )


def _part(whole: int, index: int, count: int) -> int:
    return whole // count + (index < whole % count)
