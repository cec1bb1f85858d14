"""``kserve``: KServe's protocol v1, ``{"instances": [...]}`` to ``{"predictions": [...]}``."""

from typing import Any

from marserve.handlers.request_envelope.instances import (
    InstancesEnvelope,
    listed_instances,
    parsed_body,
)


class KServeEnvelope(InstancesEnvelope):
    """Gives the handler the instances as they are; explained, they are ``explanations``."""

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's instances."""
        return listed_instances(parsed_body(row))

    def answer(self, results: Any, index: int) -> dict[str, Any]:
        """Make ``{"predictions": results}``, or ``{"explanations": results}``."""
        del index
        # By the first request, as the handler decided what to do with the batch.
        is_explained = self.context.get_request_header(0, "explain") == "True"
        return {"explanations" if is_explained else "predictions": results}
