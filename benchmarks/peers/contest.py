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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import models
import wrk
from cases import PACE_CASE, PACE_ENTRIES, PACE_SHARE, Case, settings_of
from contract import PORTS, Peer, Service, Setting, Site
from load import Measured
from processes import free_ports
from results import Turn
from running import PeerFailed, RunningPeer, start

_WARM_UP_SECONDS = 1
# TorchServe goes on with what clients who have left had asked for, which fills its queue meanwhile.
_SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class Runs:
    """How often and how long.

    Attributes:
        rounds: Turns of each.
        seconds: Of each turn, without its warm-up.
        first_warm_up: Seconds before the first turn of a case; the JVM compiles what is hot only
            after thousands of requests.
    """

    rounds: int
    seconds: int
    first_warm_up: int = 3


@dataclass
class Results:
    """What came of it.

    Attributes:
        turns: By key of case and name of entry, round by round.
        failures: What became of those who failed, one sentence and their log's end each.
    """

    turns: dict[tuple[str, str], list[Turn]] = field(default_factory=dict)
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
                for entry in entries.values():
                    entry.dismiss()
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
        return {
            name: entry
            for name, (entry, service) in started.items()
            if self._is_ready(name, entry, service, expected)
        }

    def _is_ready(self, name: str, entry: RunningPeer, service: Service, expected: bytes) -> bool:
        """Wait for a right answer and freeze; else note down why not."""
        try:
            entry.await_answer(service, expected)
        except PeerFailed as error:
            self.results.failures.append(f"{name}: {error}")
            return False
        entry.freeze()
        return True

    def _hold_case(self, case: Case, entries: Mapping[str, RunningPeer]) -> None:
        taking_part = {name: entry for name, entry in entries.items() if case.has(name)}
        for number in range(self._runs.rounds):
            for name, entry in list(taking_part.items()):
                _say(f"{case.key}, round {number + 1} of {self._runs.rounds}: {name}")
                try:
                    turn = self._turn(case, entry, number)
                except PeerFailed as error:
                    self.results.failures.append(f"{name}, {case.title}: {error}")
                    del taking_part[name]
                else:
                    self.results.turns.setdefault((case.key, name), []).append(turn)

    def _turn(self, case: Case, entry: RunningPeer, number: int) -> Turn:
        entry.thaw()
        try:
            if case.by_rate:
                warm_up = _WARM_UP_SECONDS if number else self._runs.first_warm_up
                wrk.measure(entry.target, case.clients, warm_up)
                time.sleep(_SETTLE_SECONDS)
            busy_before = entry.cpu_seconds()
            measured, answers = self._load(case, entry, number)
            busy = entry.cpu_seconds() - busy_before
        except wrk.LoadFailed as error:
            raise entry.failure(str(error)) from None
        finally:
            time.sleep(_SETTLE_SECONDS)
            entry.freeze()
        return Turn(measured.rate, measured.p50_ms, measured.p99_ms, busy / answers * 1e6)

    def _load(self, case: Case, entry: RunningPeer, number: int) -> tuple[Measured, float]:
        """What was measured, and how many answers were given meanwhile."""
        seconds = self._runs.seconds
        if case.by_rate:
            measured = wrk.measure(entry.target, case.clients, seconds)
            return measured, measured.rate * seconds
        rate = self._equal_rate()
        warm_up = _WARM_UP_SECONDS
        measured = wrk.measure_open_loop(entry.target, rate, warm_up, seconds, seed=number)
        return measured, rate * (warm_up + seconds)

    def _equal_rate(self) -> float:
        turns = [self.results.turns.get((PACE_CASE, name)) for name in PACE_ENTRIES]
        shown = [statistics.median(turn.rate for turn in of_one) for of_one in turns if of_one]
        if not shown:
            raise wrk.LoadFailed(f"nobody of {PACE_ENTRIES} finished {PACE_CASE}")
        return PACE_SHARE * min(shown)


def body_of(setting: Setting) -> bytes:
    """What clients want to send: ASCII letters, so that a JSON string can hold them."""
    letters = string.ascii_letters.encode()
    return (letters * (setting.body_bytes // len(letters) + 1))[: setting.body_bytes]


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
