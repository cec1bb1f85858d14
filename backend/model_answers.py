"""The answers and failures of models that a handler calls with `Context.infer`."""

import json
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.errors import PredictionException

# A client can act upon these, whichever model caused them: try again, later, with more time, or
# with less data.
_PASSED_ON = (503, 504, 507)
_FAILED = 400
_SERVERS_FAULT = 500


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The answer of a model: body, status, and the headers that its handler has set."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    def json(self) -> Any:
        """Parse the body as JSON; raises ValueError if it is not JSON."""
        return json.loads(self.body)


class ModelCallFailed(PredictionException):
    """A model that a handler called did not answer, or answered with a status of 400 or more.

    If the handler does not catch it, its client gets the status if that is 503, 504 or 507, or one
    below 500 that the model's handler set; else 500.

    Attributes:
        status: The status that a client of that model would have got.
        type: TorchServe's type of the error, such as ``ModelNotFoundException``.
        retry_after: Seconds after which another try may succeed; None if unknown.
        answer: The answer of the model's handler; None if it gave none.
    """

    def __init__(
        self,
        model: str,
        status: int,
        reason: str,
        type: str = "InternalServerException",  # noqa: A002 - as in error bodies
        retry_after: int | None = None,
        answer: ModelAnswer | None = None,
    ) -> None:
        is_client_error = answer is not None and _FAILED <= status < _SERVERS_FAULT
        code = status if is_client_error or status in _PASSED_ON else _SERVERS_FAULT
        super().__init__(f'The call of model "{model}" failed with {status}: {reason}', code)
        self.model = model
        self.status = status
        self.reason = reason
        self.type = type
        self.retry_after = retry_after
        self.answer = answer

    def __str__(self) -> str:
        return self.message
