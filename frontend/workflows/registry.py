"""The workflows that are served, by name. Only `WorkflowRegistrar` changes them."""

from collections.abc import Iterator

from marserve.frontend.errors import WorkflowNotFound
from marserve.frontend.workflows.workflow import Workflow


class WorkflowRegistry:
    """All workflows."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow] = {}

    def __iter__(self) -> Iterator[Workflow]:
        """The workflows, sorted by name."""
        for _, workflow in sorted(self._workflows.items()):
            yield workflow

    def __contains__(self, name: str) -> bool:
        return name in self._workflows

    def find(self, name: str) -> Workflow:
        """Return the workflow of that name; raises WorkflowNotFound if there is none."""
        workflow = self._workflows.get(name)
        if workflow is None:
            raise WorkflowNotFound(f"Workflow not found: {name}")
        return workflow

    def add(self, workflow: Workflow) -> None:
        """Add a workflow; its name is not in use."""
        self._workflows[workflow.name] = workflow

    def remove(self, workflow: Workflow) -> None:
        """Remove a workflow."""
        del self._workflows[workflow.name]

    async def drained(self) -> None:
        """Wait until no workflow runs, without a deadline; callers set one."""
        for workflow in list(self._workflows.values()):
            await workflow.drained()
