"""Why a worker cannot answer any more, or never could."""


class ConnectionLost(Exception):
    """The worker cannot answer any more; says why. Its process has to be replaced.

    Attributes:
        cause: What was found out about it since, a sentence; empty for nothing.
    """

    cause = ""

    def __str__(self) -> str:
        return with_cause(str(self.args[0]), self.cause)


class Disconnected(ConnectionLost):
    """The worker closed its end, by its own end mostly."""


class ResponseTimedOut(ConnectionLost):
    """The worker owed an answer for too long."""


class Poisoned(ConnectionLost):
    """The worker said that it can serve no more: a GPU's error that sticks to the process, say."""


class StartTimedOut(ConnectionLost):
    """There was no process in time."""


class LostInProfiling(ConnectionLost):
    """The worker ended, or hung, in a load that tried out sizes of batches."""


class LoadFailed(Exception):
    """The worker reported that its model cannot be loaded.

    Attributes:
        code: The status it reported: 500, or 507 for out of memory.
        permanent: Whether the next try would fail for the same reason.
    """

    def __init__(self, code: int, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.permanent = permanent


def with_cause(what: str, cause: str) -> str:
    """Two sentences; only the first where there is no cause."""
    return f"{what.removesuffix('.')}. {cause}" if cause else what
