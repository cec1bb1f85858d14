"""The management of workflows: list, describe, register, unregister and run."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from marserve.backend.protocol import Prediction
from marserve.frontend.configuration.unread_keys import unread_parameter
from marserve.frontend.errors import BadRequest, MethodNotAllowed
from marserve.frontend.operations.management import Outcome, logged, page_of
from marserve.frontend.operations.model_parameters import unread_sentences
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.operations.predictions import last_of_each_name
from marserve.frontend.serving.predict_request import PredictRequest
from marserve.frontend.workflows.registrar import WorkflowRegistrar, WorkflowRegistration
from marserve.frontend.workflows.workflow import Workflow, WorkflowRegistry

# The last has no effect, as in TorchServe.
_PARAMETERS = (
    "url",
    "workflow_name",
    "response_timeout",
    "startup_timeout",
    "s3_sse_kms",
    "synchronous",
)


@dataclass(frozen=True)
class WorkflowManagement:
    """The operations of the management API; they raise `ServeError`."""

    workflows: WorkflowRegistry
    registrar: WorkflowRegistrar
    model_api: bool  # whether models, and so workflows, may be registered and unregistered

    def list_workflows(self, limit: int, first: int) -> dict[str, Any]:
        """Return a page of the workflows by name, and the number of the next page."""
        found, next_page = page_of(list(self.workflows), limit, first)
        page = [
            {"workflowName": workflow.name, "workflowUrl": workflow.archive.url}
            for workflow in found
        ]
        return {"nextPageToken": next_page, "workflows": page}

    def describe(self, name: str) -> list[dict[str, Any]]:
        """Return a workflow: TorchServe's members, then ours."""
        workflow = self.workflows.find(name)
        specification = workflow.specification
        defaults = specification.defaults
        return [
            {
                "workflowName": workflow.name,
                "workflowUrl": workflow.archive.url,
                "minWorkers": defaults.min_workers,
                "maxWorkers": defaults.max_workers,
                "batchSize": defaults.batch_size,
                "maxBatchDelay": defaults.max_batch_delay_ms,
                "workflowDag": specification.dag_text,
                "longestRunMs": round(specification.longest * 1000),
                "runs": {"underWay": workflow.runs, "most": workflow.max_runs},
                "nodes": [
                    {
                        "node": node.name,
                        "modelName": workflow.graph.model_names[node.name],
                        "isFunction": node.is_function,
                        "parents": list(node.parents),
                        "timeoutMs": node.settings.timeout_ms,
                        "retryAttempts": node.settings.retry_attempts,
                    }
                    for node in specification.nodes.values()
                ],
            }
        ]

    def runs(self, name: str) -> dict[str, Any]:
        """Return the time line of the last runs of a workflow."""
        workflow = self.workflows.find(name)
        return {
            "workflowName": workflow.name,
            "runs": [run.document() for run in workflow.timeline],
        }

    def check_model_api(self) -> None:
        """Raise MethodNotAllowed unless workflows may be registered and unregistered."""
        if not self.model_api:
            raise MethodNotAllowed

    async def register(self, parameters: Parameters) -> Outcome:
        """Register a workflow, and wait for all its workers; parameters have TorchServe's names."""
        self.check_model_api()
        if not parameters.has("url"):
            raise BadRequest("Parameter url is required.")
        sentence_of = partial(unread_parameter, known=_PARAMETERS)
        unread = unread_sentences(parameters, {*_PARAMETERS}, sentence_of)
        workflow = await self.registrar.register(
            WorkflowRegistration(
                url=parameters.text("url"),
                name=parameters.text("workflow_name"),
                response_timeout=parameters.at_least("response_timeout", 1),
                startup_timeout=parameters.at_least("startup_timeout", 1),
                s3_sse_kms=parameters.flag("s3_sse_kms", default=False),
            )
        )
        return Outcome(
            200,
            f"Workflow {workflow.name} has been registered and scaled successfully.",
            logged(
                [*unread, *workflow.specification.warnings],
                f"Registration of {workflow.archive.url}",
            ),
        )

    async def unregister(self, name: str) -> Outcome:
        """Unregister a workflow with all its nodes."""
        self.check_model_api()
        await self.registrar.unregister(name)
        return Outcome(200, f'Workflow "{name}" unregistered')


async def run_workflow(workflow: Workflow, request: PredictRequest) -> Prediction:
    """Run a workflow; of form fields with the same name it gets the last."""
    input_ = request.input
    if len(input_.parts) > 1:
        input_.parts = last_of_each_name(input_.parts)
    return await workflow.run(request)
