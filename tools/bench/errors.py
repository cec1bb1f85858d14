"""What can go wrong with a benchmark, as the person at the command line is told."""


class BenchError(Exception):
    """Nothing was, or can be, measured; one sentence that says why and, if known, what to do."""


class ServerUnreachable(BenchError):
    """Nobody listens there, or nobody that speaks HTTP."""
