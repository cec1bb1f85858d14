"""A model whose batches take what model-config.yaml says, and no processor.

``perBatchMs`` and ``perRequestMs``; ``sigma``, of a lognormal factor on each batch whose mean is 1;
and ``cliff``, the largest batch that does not take ``jumpMs`` more.
"""

import random
import time
from typing import Any

_random = random.Random(0)


def handle(data: Any, context: Any) -> Any:
    """Initialise (``data`` is None), or answer a batch."""
    if data is None:
        return None
    costs, count = context.model_yaml_config["costs"], len(data)
    milliseconds = costs["perBatchMs"] + costs["perRequestMs"] * count
    milliseconds += costs["jumpMs"] if count > costs["cliff"] else 0
    factor = _random.lognormvariate(-(costs["sigma"] ** 2) / 2, costs["sigma"])
    until = time.perf_counter() + milliseconds * factor / 1000
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)
    return [b"done"] * count
