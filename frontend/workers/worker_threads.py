"""The number of threads with which torch computes in one worker."""

from typing import NamedTuple

from marserve.backend.protocol import Loaded, SetThreads, ThreadsSet
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.launchers.openmp import TorchOptions


class ThreadChoice(NamedTuple):
    """A number of threads, 0 if torch is not loaded; and its reason, empty for `TorchOptions`'."""

    number: int
    why: str


class WorkerThreads:
    """The threads of one worker.

    Attributes:
        options: For the present number of workers.
        tried: The numbers to compare at the next load.
        found: The result of such trials, by this worker or another.
        in_use: The number that torch uses.
    """

    def __init__(
        self, options: TorchOptions, tried: list[int], found: ThreadChoice | None = None
    ) -> None:
        self.options = options
        self.tried = tried
        self.found = found
        self.in_use = found or ThreadChoice(0, "")
        self._count = found.number if found else options.threads
        #: The number that the running process was given, or has found.
        self._given = 0

    def give(self) -> int:
        """Return the number for a process that is started now."""
        self._given = self._count
        return self._count

    def share_out(self, options: TorchOptions, tried: list[int]) -> None:
        """Use another share of the cores, because the number of workers has changed.

        A number that was found and is smaller than the old share is kept, unless the new share is
        even smaller.
        """
        old, found = self.options, self.found
        if not (options.is_share and old.is_share) or options.threads == old.threads:
            return
        count = options.threads
        if found is not None and found.number < old.threads:
            count = min(count, found.number)
            self.found = found._replace(number=count)
        else:
            self.found = None
        self.options, self.tried, self._count = options, tried, count

    def loaded(self, loaded: Loaded) -> None:
        """Note the number that a worker uses after a load."""
        if loaded.threads_why:
            self.found = ThreadChoice(loaded.threads, loaded.threads_why)
            self._count = self._given = loaded.threads
        self._note(loaded.threads)

    def adjust(self, connection: WorkerConnection, timeout: float | None) -> None:
        """Send the number to the running process, if it has changed.

        Not if the handler has set another number, or torch is not loaded; nor if stages overlap:
        other threads compute then, and the number holds from the next start on.
        """
        count, given = self._count, self._given
        if count == given or not self.options.is_share or self.in_use.number != given:
            return
        if not connection.lost.done() and not connection.overlaps:
            self._given = count
            connection.request(SetThreads(given, count), timeout, self._on_set)

    def _on_set(self, answer: ThreadsSet) -> None:
        self._note(answer.count)

    def _note(self, count: int) -> None:
        found = self.found
        self.in_use = ThreadChoice(count, found.why if found and found.number == count else "")
