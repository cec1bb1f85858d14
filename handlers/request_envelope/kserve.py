"""``kserve``: KServe's protocol v1, ``{"instances": [...]}`` to ``{"predictions": [...]}``."""

from typing import Any

from marserve.handlers.request_envelope.instances import (
    InstancesEnvelope,
    listed_instances,
    parsed_body,
)


class KServeEnvelope(InstancesEnvelope):
    """Passes the instances to the handler."""

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's instances."""
        return listed_instances(parsed_body(row))

    def answer(self, results: Any, index: int) -> dict[str, Any]:
        """Return ``{"predictions": results}``, or ``{"explanations": results}``."""
        del index
        # The first request decides for the batch, as in `BaseHandler`.
        is_explained = self.context.get_request_header(0, "explain") == "True"
        return {"explanations" if is_explained else "predictions": results}
