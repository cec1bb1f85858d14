"""What every target expects of a refusal."""

_MAX_LENGTH = 5_000


def check_refusal(error: Exception) -> None:
    """It has a sentence, which is not as long as one likes: clients and logs get it."""
    assert 0 < len(str(error)) <= _MAX_LENGTH, repr(error)[:200]
