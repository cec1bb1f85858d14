"""TorchServe's management service."""

from dataclasses import dataclass
from typing import Any

from marserve.backend.protocol import Input
from marserve.frontend.documents import json_steps
from marserve.frontend.errors import BadRequest
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import Message, load_proto
from marserve.frontend.operations.management import MAX_LISTED, ModelManagement, Outcome
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.serving.request_ids import new_request_id

_MANAGEMENT = load_proto("management.proto")
_Response = _MANAGEMENT.messages.ManagementResponse
_NUMBERS = (
    "batch_size",
    "initial_workers",
    "max_batch_delay",
    "response_timeout",
    "startup_timeout",
)
_TEXTS = ("handler", "model_name", "runtime", "url")


def management_service(operations: ModelManagement) -> Service:
    """Return the service that calls the operations."""
    descriptor = _MANAGEMENT.services["ManagementAPIsService"]
    return Service(descriptor, _Management(operations), key="management")


@dataclass(frozen=True)
class _Management:
    operations: ModelManagement

    async def describe_model(self, request: Message, call: Call) -> Message:
        asked = Input(new_request_id(), {}, []) if request.customized else None
        version = request.model_version or None
        name = request.model_name
        return await _document(
            await self.operations.describe(name, version, call.memory, asked), call
        )

    async def list_models(self, request: Message, call: Call) -> Message:
        """Without a limit TorchServe lists nothing."""
        limit = request.limit or MAX_LISTED
        page = self.operations.list_models(limit, request.next_page_token)
        return await _document(page, call)

    async def register_model(self, request: Message, _call: Call) -> Message:
        """Unlike POST /models, it is asynchronous by default."""
        self.operations.check_model_api()
        given: dict[str, Any] = {
            "synchronous": request.synchronous,
            "s3_sse_kms": request.s3_sse_kms,
        }
        for name in _NUMBERS:
            if getattr(request, name) > 0:
                given[name] = getattr(request, name)
        for name in _TEXTS:
            if getattr(request, name):
                given[name] = getattr(request, name)
        return _sentence(await self.operations.register(Parameters(given)))

    async def scale_worker(self, request: Message, _call: Call) -> Message:
        """At least one worker, because 0 counts as absent."""
        low = request.min_worker if request.min_worker > 0 else 1
        high = request.max_worker if request.max_worker > 0 else low
        parameters = Parameters(
            {"min_worker": low, "max_worker": high, "synchronous": request.synchronous}
        )
        version = request.model_version or None
        return _sentence(await self.operations.change(request.model_name, version, parameters))

    async def set_default(self, request: Message, _call: Call) -> Message:
        changed = self.operations.set_default(request.model_name, request.model_version)
        return _sentence(await changed)

    async def unregister_model(self, request: Message, _call: Call) -> Message:
        self.operations.check_model_api()
        if not request.model_name:
            raise BadRequest("Parameter url is required.")  # TorchServe's message
        version = request.model_version or None
        return _sentence(await self.operations.unregister(request.model_name, version))


async def _document(document: object, call: Call) -> Message:
    text = await call.memory.run(json_steps(document))
    return _Response(msg=text.decode().rstrip("\n"))


def _sentence(outcome: Outcome) -> Message:
    """Return the sentence of an outcome, followed by its warnings: the message has one field."""
    warnings = (f"Warning: {warning}" for warning in outcome.warnings)
    return _Response(msg="\n".join((outcome.sentence, *warnings)))
