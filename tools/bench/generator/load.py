"""The load of a run, and its distribution over processes."""

from dataclasses import dataclass, replace
from typing import Literal

Arrivals = Literal["poisson", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One run of the load generator; either ``clients`` or ``rate`` is set.

    Attributes:
        clients: Closed loop: connections with one request in flight each.
        rate: Open loop: requests per second, sent independently of the answers.
        arrivals: Open loop: whether requests are due at random (a Poisson process, as those of
            independent users) or at equal intervals.
        seed: Open loop: seed of random arrivals; equal seeds give equal arrivals.
        offset: Seconds before the first arrival, so that processes with equal intervals alternate.
        seconds: Length of the measurement; None if ``requests`` limits it.
        requests: Number of measured requests; None if ``seconds`` limits the measurement.
        warm_up: Seconds of load before the measurement.
        timeout: Seconds to wait for an answer.
        max_connections: Open loop: largest number of connections.
        step: Closed loop: the measurement starts and ends at a multiple of this number of answers;
            ``requests`` is rounded up to one.
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
        """Open loop: number of requests that are due in the measurement, at least 1."""
        assert self.rate is not None
        return self.requests or max(1, round(self.rate * (self.seconds or 0.0)))

    def shared(self, processes: int) -> list["Load"]:
        """Split the load into nearly equal, non-empty loads for at most ``processes`` processes.

        The sum of independent Poisson processes is a Poisson process, and alternating equal
        intervals give equal intervals.
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
            # Factor 1000: the seeds of processes differ also for adjacent seeds of runs.
            seed=self.seed * 1000 + index,
        )


def _part(whole: int, index: int, count: int) -> int:
    return whole // count + (index < whole % count)
