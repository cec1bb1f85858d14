"""Predictions: of a whole request, or of each row where the model splits lists of clients."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from marserve.backend.json_text import KEEP
from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.operations.client_lists import read_list
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, Ticket

T = TypeVar("T")


async def predict(model: ModelVersion, request: PredictRequest) -> Prediction | Stream:
    """Predict; of form fields with the same name the handler gets the last."""
    input_ = request.input
    if model.settings.batching.splits_lists:
        reading = read_list(input_, model.manifest.envelope, model.max_rows)
        client_list = await request.memory.run(reading)
        if client_list is not None:
            rows, join = client_list.rows, client_list.join
            client_list.is_strict = model.json_nan != KEEP
            return await predict_rows(model, request, rows, join)
    if len(input_.parts) > 1:
        input_.parts = last_of_each_name(input_.parts)
    return await model.predict(request)


async def predict_rows(
    model: ModelVersion,
    request: PredictRequest,
    rows: Sequence[Input],
    join: Callable[[Sequence[Prediction]], Steps[T]],
    on_ticket: Callable[[Ticket], object] | None = None,
) -> T:
    """Predict the rows of a request instead of its input, and join their answers."""
    predictions = await model.predict_all(request, rows, on_ticket) if rows else []
    return await request.memory.run(join(predictions))


def last_of_each_name(parts: Iterable[Part]) -> list[Part]:
    """Return the last part of each name, in the order of the first ones."""
    return list({part.name: part for part in parts}.values())
