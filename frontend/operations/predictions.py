"""Predictions: of a whole request, or of each row where the model splits lists of clients."""

from collections.abc import Iterable
from dataclasses import replace

from marserve.backend.protocol import Part, Prediction
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.operations.client_lists import ClientList, read_list
from marserve.frontend.operations.tensor_rows import TensorRows
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest


async def predict(
    model: ModelVersion, request: PredictRequest, long_work: LongWork
) -> Prediction | Stream:
    """Predict; of form fields with the same name the handler gets the last."""
    input_ = request.input
    if model.settings.batching.splits_lists:
        capacity = model.queue.free_capacity(request.options.priority)
        client_list = await long_work.run(read_list(input_, model.manifest.envelope, capacity))
        if client_list is not None:
            return await predict_rows(model, request, client_list, long_work)
    if len(input_.parts) > 1:
        input_.parts = last_of_each_name(input_.parts)
    return await model.predict(request)


async def predict_rows(
    model: ModelVersion, request: PredictRequest, rows: ClientList | TensorRows, long_work: LongWork
) -> Prediction:
    """Predict the rows of a request instead of its input, and join their answers."""
    requests = [replace(request, input=row) for row in rows.rows]
    predictions = await model.predict_all(requests) if requests else ()
    with request.holding() as holding:
        holding.hold(2 * sum(len(row.body) for row in predictions))  # and for the joint answer
        return await long_work.run(rows.join(predictions))


def last_of_each_name(parts: Iterable[Part]) -> list[Part]:
    """Return the last part of each name, in the order of the first ones."""
    return list({part.name: part for part in parts}.values())
