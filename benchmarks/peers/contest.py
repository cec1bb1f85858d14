"""The cases, with all peers taking turns.

Peers that share a setting are started once for all cases that want it. While one is measured the
others are frozen, so that none pays for what its neighbours do when idle (Ray and MLServer do a
lot). Who fails is out of the contest, with a sentence, and the others go on.
"""

import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import models
import wrk
from cases import PACE, PACE_CASE, PACE_SHARE, Case, settings_of
from contract import PORTS, Peer, Setting, Site
from load import Measured
from processes import free_ports
from running import PeerFailed, RunningPeer, start

_WARM_UP_SECONDS = 1
# Before the first turn of a case; the JVM compiles what is hot only after thousands of requests.
_FIRST_WARM_UP_SECONDS = 3
# TorchServe goes on with what clients who have left had asked for, which fills its queue meanwhile.
_SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class Runs:
    """How often and how long.

    Attributes:
        rounds: Turns of each.
        seconds: Of each turn, without its warm-up.
    """

    rounds: int
    seconds: int


@dataclass
class Results:
    """What came of it.

    Attributes:
        turns: By key of case and name of entry, round by round.
        failures: What became of those who failed, one sentence and their log's end each.
    """

    turns: dict[tuple[str, str], list[Measured]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Contest:
    """All cases, one setting after the other.

    Args:
        peers: Who takes part, with the interpreter of each.
        directory: For their files.
        runs: How often and how long.
    """

    def __init__(self, peers: Mapping[Peer, Path], directory: Path, runs: Runs) -> None:
        self._peers = peers
        self._directory = directory
        self._runs = runs
        self.results = Results()

    def hold(self, cases: Sequence[Case]) -> Results:
        """Run the cases; those with the same setting must follow each other."""
        for setting, group in groupby(cases, key=lambda case: case.setting):
            together = list(group)
            with ExitStack() as running:
                entries = self._start(running, setting, together)
                for case in together:
                    self._hold_case(case, entries)
        return self.results

    def _start(
        self, running: ExitStack, setting: Setting, cases: Sequence[Case]
    ) -> dict[str, RunningPeer]:
        """Start them side by side, for most of starting is waiting; each ends frozen."""
        _say(f"starting servers: {setting.model}, batch {setting.batch_size} ...")
        body = body_of(setting)
        (expected,) = models.load(setting.model)([body])
        started = {}
        for peer, python in self._peers.items():
            for name, own in settings_of(peer.name, setting).items():
                if setting.model in peer.models and any(case.has(name) for case in cases):
                    directory = Path(tempfile.mkdtemp(dir=self._directory))
                    site = Site.prepare(directory, free_ports(PORTS), python)
                    service = peer.set_up(site, own)
                    started[name] = running.enter_context(start(service, site, body)), service
        entries = {}
        for name, (entry, service) in started.items():
            with self._reported(name):
                entry.await_answer(service, expected)
                entries[name] = entry
                entry.freeze()
        return entries

    def _hold_case(self, case: Case, entries: dict[str, RunningPeer]) -> None:
        taking_part = [name for name in entries if case.has(name)]
        for number in range(self._runs.rounds):
            for name in taking_part:
                if name not in entries:
                    continue
                _say(f"{case.key}, round {number + 1} of {self._runs.rounds}: {name}")
                with self._reported(f"{name}, {case.title}", lambda n=name: entries.pop(n)):
                    measured = self._turn(case, entries[name], number)
                    self.results.turns.setdefault((case.key, name), []).append(measured)

    def _turn(self, case: Case, entry: RunningPeer, number: int) -> Measured:
        entry.thaw()
        try:
            if not case.by_rate:
                return self._at_given_rate(entry, number)
            warm_up = _WARM_UP_SECONDS if number else _FIRST_WARM_UP_SECONDS
            wrk.measure(entry.target, case.clients, warm_up)
            time.sleep(_SETTLE_SECONDS)
            return wrk.measure(entry.target, case.clients, self._runs.seconds)
        except wrk.LoadFailed as error:
            raise entry.failure(str(error)) from None
        finally:
            time.sleep(_SETTLE_SECONDS)
            entry.freeze()

    def _at_given_rate(self, entry: RunningPeer, number: int) -> Measured:
        shown = self.results.turns.get((PACE_CASE, PACE))
        if not shown:
            raise wrk.LoadFailed(f"needs the capacity of {PACE} in case {PACE_CASE}")
        rate = PACE_SHARE * statistics.median(one.rate for one in shown)
        return wrk.measure_open_loop(entry.target, rate, self._runs.seconds, number)

    @contextmanager
    def _reported(self, what: str, otherwise: Callable[[], object] = int) -> Iterator[None]:
        """Note down a failure, and go on without who failed."""
        try:
            yield
        except PeerFailed as error:
            self.results.failures.append(f"{what}: {error}")
            otherwise()


def body_of(setting: Setting) -> bytes:
    """What clients want to send: ASCII letters, so that a JSON string can hold them."""
    letters = string.ascii_letters.encode()
    return (letters * (setting.body_bytes // len(letters) + 1))[: setting.body_bytes]


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
