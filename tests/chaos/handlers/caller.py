"""A coroutine that has another model answer: `context.infer`."""

import asyncio

import orders
from ts.utils.util import PredictionException

from marserve.handlers.model_calls import ModelCallFailed


class Caller:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        (row,) = data
        order = orders.read(row)
        if order.get("do") == "hang":
            await asyncio.Event().wait()
        orders.obey([{**order, "ms": 0}])
        order.pop("do", None)
        try:
            return [(await context.infer("batched", data=order)).text]
        except ModelCallFailed as error:
            raise PredictionException(str(error), error.status) from error
