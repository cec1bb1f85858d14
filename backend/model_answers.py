"""What a handler gets of a model that it calls with `Context.infer`: an answer, or an exception."""

import json
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.errors import PredictionException

# The statuses that a client can act upon, whichever of the models caused them: try again, later,
# with more time, or with less data.
_PASSED_ON = (503, 504, 507)
_FAILED = 400
_SERVERS_FAULT = 500


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The answer of a model; an answer in pieces is whole here.

    Attributes:
        body: As a client would get it.
        status: 200, unless the model's handler chose another one below 400.
        headers: Those that the model's handler has set, in its spelling.
    """

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The body as text in UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """The body as JSON; raises ValueError if it is none."""
        return json.loads(self.body)


class ModelCallFailed(PredictionException):
    """A model that a handler called did not answer, or answered with a status of 400 or more.

    A handler that does not catch it fails: its client gets the status if that is 503, 504 or 507,
    or one below 500 that the model's handler chose; else 500.

    Attributes:
        model: The name of the model.
        status: What a client who had asked for that model would have got.
        reason: The sentence for it.
        type: TorchServe's word for it, such as ``ModelNotFoundException``.
        retry_after: Seconds after which another try may succeed; None where nothing is known.
        answer: What the model's handler answered; None if it did not.
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
        is_clients = answer is not None and _FAILED <= status < _SERVERS_FAULT
        code = status if is_clients or status in _PASSED_ON else _SERVERS_FAULT
        super().__init__(f'The call of model "{model}" failed with {status}: {reason}', code)
        self.model = model
        self.status = status
        self.reason = reason
        self.type = type
        self.retry_after = retry_after
        self.answer = answer

    def __str__(self) -> str:
        return self.message
