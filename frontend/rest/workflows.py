"""The routes of workflows; as in TorchServe a further segment of a path is ignored.

/workflows                    list, register                            management listener
/workflows/{w}                describe, unregister
/workflows/{w}/runs           the time line of the last runs
/wfpredict/{w}                run; with all methods, in any case        inference listener
"""

from collections.abc import Mapping
from dataclasses import dataclass

from marserve.frontend.errors import MethodNotAllowed, NodeFailed, RouteNotFound, ServeError
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import LARGE_BYTES, HttpRequest, PlainRequest
from marserve.frontend.http.responses import (
    HttpResponse,
    error_response,
    json_response,
    prediction_response,
)
from marserve.frontend.http.router import ANY_OTHER, Route, Submit
from marserve.frontend.operations.management import MAX_LISTED
from marserve.frontend.operations.workflows import WorkflowManagement, run_workflow
from marserve.frontend.rest.api_description import (
    describe_listener,
    describe_workflow_inference,
    describe_workflow_management,
)
from marserve.frontend.rest.inference import accept_plain, unread_request
from marserve.frontend.rest.management import outcome_response
from marserve.frontend.rest.parameters import query_parameters, read_parameters
from marserve.frontend.workflows.workflow import WorkflowRegistry

_PREDICT = "wfpredict"


def workflow_management_routes(
    operations: WorkflowManagement, max_request_bytes: int
) -> Mapping[str, Route]:
    """Return the route of the management listener; ``max_request_bytes`` limits a registration."""
    management = _Management(operations, max_request_bytes)
    return {"workflows": Route(management.workflows, "management")}


def workflow_inference_routes(
    workflows: WorkflowRegistry, max_request_bytes: int, others: Route
) -> Mapping[str, Route]:
    """Return the routes of the inference listener; ``others`` answers all other paths."""
    inference = _Inference(workflows, max_request_bytes, others)
    route = Route(inference.predict, "inference", _refuse, inference.accept)
    any_other = Route(inference.any_other, others.key, others.refuse, others.accept)
    return {_PREDICT: route, ANY_OTHER: any_other}


@dataclass(frozen=True)
class _Inference:
    registry: WorkflowRegistry
    max_request_bytes: int
    others: Route

    async def predict(self, request: HttpRequest) -> HttpResponse:
        if len(request.segments) < 2 or not request.segments[1]:
            raise RouteNotFound
        workflow = self.registry.find(request.segments[1])
        if request.method == "OPTIONS":
            return json_response(describe_workflow_inference(workflow.name))
        run = unread_request(request)
        workflow.check(run)  # before the body is read and parsed, which may take long
        run.input = await read_input(request, self.max_request_bytes, {})
        return prediction_response(await run_workflow(workflow, run))

    def accept(self, request: PlainRequest) -> Submit | None:
        if len(request.segments) < 2:
            return None
        workflow = self.registry.find(request.segments[1])
        if request.length > LARGE_BYTES and workflow.is_full:
            return None  # `predict` refuses it before the body is received
        return accept_plain(request, self.max_request_bytes, workflow.submit)

    async def any_other(self, request: HttpRequest) -> HttpResponse:
        """Also run ``/WfPredict/{workflow}``, in any case of letters."""
        if not request.segments or request.segments[0].lower() != _PREDICT:
            return await self.others.serve(request)
        try:
            return await self.predict(request)
        except NodeFailed as error:
            return _refuse(error)


@dataclass(frozen=True)
class _Management:
    operations: WorkflowManagement
    max_request_bytes: int

    async def workflows(self, request: HttpRequest) -> HttpResponse:
        match request.method, request.segments[1:]:
            case "OPTIONS", []:
                return json_response(describe_listener(["Management"]))
            case "GET", []:
                query = query_parameters(request)
                limit = query.integer("limit", MAX_LISTED)
                first = query.integer("next_page_token", 0)
                return json_response(self.operations.list_workflows(limit, first))
            case "POST", []:
                self.operations.check_model_api()  # before the body is read
                parameters = await read_parameters(request, self.max_request_bytes)
                return outcome_response(await self.operations.register(parameters))
            case "OPTIONS", [name] | [name, _]:
                self.operations.workflows.find(name)
                return json_response(describe_workflow_management(name))
            case "GET", [name, "runs"]:
                return json_response(self.operations.runs(name))
            case _, [_, "runs"]:  # not a segment that TorchServe ignores
                raise MethodNotAllowed
            case "GET", [name] | [name, _]:
                return json_response(self.operations.describe(name))
            case "DELETE", [name] | [name, _]:
                return outcome_response(await self.operations.unregister(name))
            case _, [] | [_] | [_, _]:
                raise MethodNotAllowed
        raise RouteNotFound


def _refuse(error: ServeError) -> HttpResponse:
    if not isinstance(error, NodeFailed):
        return error_response(error)
    cause = error.cause
    told = {"code": cause.status, "type": cause.wire_type, "message": cause.message}
    return error_response(error, {"node": error.node, "cause": told})
