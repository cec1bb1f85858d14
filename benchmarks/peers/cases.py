"""What is compared: the loads, and what the servers are set to for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from contract import Setting

OURS, ADAPTIVE, YARDSTICK = "marserve", "marserve, adaptive", "aiohttp"
# The equal load: this share of what the slower of these carried in that case. Busy, and far enough
# from the limit that a long tail is the server's doing and not the queue's.
PACE_CASE, PACE_ENTRIES, PACE_SHARE = "64x32", (OURS, "TorchServe"), 0.5

_ECHO_1 = Setting("echo", 1024, 1, 0)
_ECHO_32 = Setting("echo", 1024, 32, 2)
_CNN_32 = Setting("cnn", 3 * 64 * 64, 32, 2)
_IN_1MB = Setting("length", 1_000_000, 1, 0)
_BACK_1MB = Setting("echo", 1_000_000, 1, 0)


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        key: Its name on the command line.
        title: Its name for readers.
        clients: Connections with one request in flight each; 0 stands for requests that arrive
            by themselves, at `PACE_SHARE` of a capacity.
        setting: Of all servers.
        reference: Which of our entries the ratios belong to.
        peers: Who takes part, all where empty.
        goals: The ratio that is wanted, by peer: of throughput, or of p99 where the load is fixed.
    """

    key: str
    title: str
    clients: int
    setting: Setting
    reference: str = OURS
    peers: tuple[str, ...] = ()
    goals: Mapping[str, float] | None = None

    @property
    def by_rate(self) -> bool:
        """Whether throughput is what comes out; else it is given, and p99 comes out."""
        return self.clients > 0

    def has(self, entry: str) -> bool:
        """Whether an entry takes part."""
        return not self.peers or entry in self.peers


def _bodies(key: str, size: str, length: int, goals: Sequence[float] = ()) -> Iterator[Case]:
    """Bodies that are echoed, by one client and many; ``goals`` are those beside TorchServe."""
    loads = ((1, 1, 0, ""), (64, 1, 0, ""), (64, 32, 2, ", batch 32, 2 ms"))
    for (clients, batch_size, delay, more), goal in zip_longest(loads, goals):
        yield Case(
            f"{key}-{clients}x{batch_size}",
            f"{size} in and out, {clients} client{'s' * (clients > 1)}{more}",
            clients,
            Setting("echo", length, batch_size, delay),
            peers=(OURS, "TorchServe"),
            goals={"TorchServe": goal} if goal else None,
        )


_FIVE = dict.fromkeys(("LitServe", "BentoML", "MLServer", "Ray Serve"), 5.0)

CASES = (
    Case("one", "1 client, batch 1", 1, _ECHO_1, goals={"TorchServe": 4.0, "mosec": 1.0, **_FIVE}),
    Case("64x1", "64 clients, batch 1", 64, _ECHO_1, goals={"TorchServe": 4.0, **_FIVE}),
    Case(
        "8x32",
        "8 clients, batch 32, 2 ms",
        8,
        _ECHO_32,
        reference=ADAPTIVE,
        goals={"TorchServe": 6.0, "mosec": 1.0, **_FIVE},
    ),
    Case("64x32", "64 clients, batch 32, 2 ms", 64, _ECHO_32, goals={"TorchServe": 2.2, **_FIVE}),
    Case(
        "equal",
        "equal load, batch 32, 2 ms",
        0,
        _ECHO_32,
        peers=(OURS, ADAPTIVE, "TorchServe", "mosec"),
        goals={"TorchServe": 2.0},
    ),
    Case("cnn", "64 clients, small CNN, batch 32, 2 ms", 64, _CNN_32),
    Case("large", "4 clients, 1 MB in", 4, _IN_1MB, peers=(OURS, "TorchServe", "mosec")),
    Case("back", "4 clients, 1 MB in and out", 4, _BACK_1MB, peers=(OURS, "TorchServe", "mosec")),
    *_bodies("100k", "100 KB", 100_000, (3.0, 3.5, 3.0)),
    *_bodies("1m", "1 MB", 1_000_000, (3.0, 3.0, 5.0)),
    *_bodies("6m", "6 MB", 6_000_000),
)


def settings_of(name: str, setting: Setting) -> dict[str, Setting]:
    """The entries of a peer: one, but for us, who show both policies where batches are formed."""
    if name != OURS or setting.batch_size == 1:
        return {name: setting}
    return {OURS: setting, ADAPTIVE: replace(setting, policy="adaptive")}
