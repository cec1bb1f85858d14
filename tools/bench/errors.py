"""The errors of a benchmark; their texts are printed on the command line."""


class BenchError(Exception):
    """A failure of the benchmark: a sentence with the cause and, if known, what to do."""


class ServerUnreachable(BenchError):
    """No server answers HTTP requests at the address."""
