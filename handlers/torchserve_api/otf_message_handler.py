"""Messages of a worker: TorchServe's streaming function stood here before `handlers.utils`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from marserve.handlers import utils
from marserve.handlers.torchserve_api.predict_response import create_predict_response

__all__ = ["create_predict_response", "send_intermediate_predict_response"]


def send_intermediate_predict_response(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str] | None,
    message: str,
    code: int,
    context: Any = None,
) -> None:
    """Send what is there so far of a batch's answers; see the function of this name in utils.

    Raises:
        RuntimeError: The context belongs to no batch.
        ValueError: The results do not fit the requests, or there is no context.
    """
    warnings.warn(
        "Import send_intermediate_predict_response from ts.handler_utils.utils",
        PendingDeprecationWarning,
        stacklevel=2,
    )
    if context is None:
        raise ValueError("send_intermediate_predict_response needs the context of the batch")
    utils.send_intermediate_predict_response(ret, req_id_map, message, code, context)
