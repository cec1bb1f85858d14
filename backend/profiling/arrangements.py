"""Arrangements of samples in a batch that tell any two of its places apart.

The number of a place, written in the base of the number of samples, says by its digits which sample
stands there in each arrangement; so whichever two rows are mixed up, in one of them they have
different samples. Shifted through all samples, each of them comes to stand at each place.
"""

from collections.abc import Iterator, Sequence


def arrangements(size: int, samples: int) -> Iterator[Sequence[int]]:
    """Yield numbers of samples, one for each place of a batch of this size."""
    digit = 1
    while True:
        for shift in range(samples):
            yield [(place // digit + shift) % samples for place in range(size)]
        digit *= samples
        if digit >= size:
            return
