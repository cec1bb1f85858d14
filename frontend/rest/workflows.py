"""The paths of workflows, which TorchServe serves and this server does not yet.

A path of their own rather than none: who calls it is told what is missing, and not that the path is
wrong or that a model called "wfpredict" is not there.
"""

from marserve.frontend.errors import WorkflowsNotServed
from marserve.frontend.http.responses import Answer
from marserve.frontend.http.router import HttpRequest


async def refuse_workflow(_visit: HttpRequest) -> Answer:
    """/workflows[/{workflow}] and /wfpredict/{workflow}, with any method."""
    raise WorkflowsNotServed
