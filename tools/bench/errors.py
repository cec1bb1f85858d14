"""The errors of a benchmark; their texts are printed on the command line."""


class BenchError(Exception):
    """Nothing was, or can be, measured; one sentence that says why and, if known, what to do."""


class ServerUnreachable(BenchError):
    """Nobody listens there, or nobody that speaks HTTP."""
