"""A version of a stateful model."""

from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.stateful.stateful_admission import StatefulAdmission
from marserve.frontend.serving.stateful.stateful_workers import StatefulWorkerPool


class StatefulModelVersion(ModelVersion):
    """A version of a stateful model."""

    workers: StatefulWorkerPool
    repeats_requests = False
    _capacity_phrase = "sequences are open"
    # How long a handler may take to process the ends of its sequences before its worker stops.
    _stop_seconds = 5.0
    _pool_type = StatefulWorkerPool
    _admission_type = StatefulAdmission

    @property
    def sequences(self) -> SequenceTable:
        """The sequences of this version."""
        return self.workers.sequences.table

    @property
    def queued(self) -> int:
        """Jobs that wait for their turn in a sequence, or for a worker."""
        return self.sequences.queued + sum(len(each.queue) for each in self.workers.batchers)

    @property
    def free_capacity(self) -> int:
        """How many more jobs may wait, if they belong to the right sequences."""
        limits = self.sequences.limits
        return limits.max_sequences * limits.max_queue - self.sequences.queued

    @property
    def has_capacity(self) -> bool:
        """False: a request mostly waits for its sequence, not for a worker."""
        return False

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether there is such a sequence."""
        return sequence_id in self.sequences

    def leave_sequence(self, sequence_id: str) -> None:
        """End a sequence whose client has left."""
        self.sequences.leave(sequence_id)

    async def close(self, drain: float) -> None:
        """Drain, stop the workers, and fail the requests that are still waiting."""
        await super().close(drain)
        self.workers.sequences.close()
