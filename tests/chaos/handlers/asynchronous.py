"""A coroutine: each request by itself, as many at a time as there are."""

import asyncio

import orders


class Asynchronous:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        (row,) = data
        order = orders.read(row)
        await asyncio.sleep(order.get("ms", 1) / 1000)
        if order.get("do") == "hang":
            await asyncio.Event().wait()
        orders.obey([order])
        return [orders.answer(order)]
