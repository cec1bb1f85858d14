"""The paths of workflows, which TorchServe serves and this server does not yet.

A path of their own rather than none: who calls it is told what is missing, and not that the path is
wrong or that a model called "wfpredict" is not there.
"""

from marserve.frontend.api.door import Visit
from marserve.frontend.api.outputs import Answer
from marserve.frontend.errors import WorkflowsNotServed


async def refuse_workflow(_visit: Visit) -> Answer:
    """/workflows[/{workflow}] and /wfpredict/{workflow}, with any method."""
    raise WorkflowsNotServed
