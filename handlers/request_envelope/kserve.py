"""``kserve``: KServe's protocol v1, ``{"instances": [...]}`` to ``{"predictions": [...]}``."""

import json
from typing import Any

from marserve.handlers.request_envelope.instances import InstancesEnvelope
from marserve.handlers.utils import value_of


class KServeEnvelope(InstancesEnvelope):
    """Gives the handler the instances as they are; explained, they are ``explanations``."""

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's instances."""
        body = value_of(row)
        if isinstance(body, bytes | bytearray | str):
            body = json.loads(body)
        return list(body["instances"])

    def answer(self, results: Any, index: int) -> dict[str, Any]:
        """Make ``{"predictions": results}``, or ``{"explanations": results}``."""
        del index
        # By the first request, as the handler decided what to do with the batch.
        is_explained = self.context.get_request_header(0, "explain") == "True"
        return {"explanations" if is_explained else "predictions": results}
