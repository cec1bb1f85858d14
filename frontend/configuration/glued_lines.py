"""Settings on one line, between which a line break got lost: taken apart again.

Whoever appends to a file that does not end in a line break writes such a line, as SageMaker's
toolkit does: ``enable_model_api=truedefault_response_timeout=60``. TorchServe read the value as
false and lost the second key. Only true, false and digits are taken apart from what is behind them,
and only before a key that is known: no value of that kind can be meant to go on like this.
"""

import re
from collections.abc import Callable, Collection, Iterator

from marserve.frontend.configuration.properties import Entry


def take_apart(
    entry: Entry, known: Collection[str], is_meant: Callable[[Entry], bool]
) -> Iterator[Entry]:
    """Yields the settings of an entry: itself, or those that were glued together.

    Args:
        entry: As the file has it.
        known: The keys before which a line break may be missing.
        is_meant: Whether an entry can be read as it is.
    """
    keys = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    glued = re.compile(rf"((?i:true|false)|[0-9]+)({keys})[ \t]*[=:][ \t]*(.*)", re.DOTALL)
    while (match := glued.fullmatch(entry.value)) and not is_meant(entry):
        yield entry._replace(value=match[1])
        entry = Entry(match[2], match[3], entry.line)
    yield entry
