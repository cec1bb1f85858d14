"""A coroutine. A request is a JSON object: id, wait (for the request of that id), pieces, fail."""

import asyncio
import os
from collections import defaultdict

from ts.handler_utils.utils import send_intermediate_predict_response


class Juggler:
    def __init__(self):
        self.seen = defaultdict(asyncio.Event)

    def initialize(self, context):
        self.loop = asyncio.get_event_loop()
        self.loop.run_until_complete(asyncio.sleep(0))

    async def handle(self, data, context):
        (row,) = data
        order = row["body"]
        self.seen[order["id"]].set()
        for number in range(order.get("pieces", 1) - 1):
            piece = [f"{order['id']}{number};"]
            send_intermediate_predict_response(piece, context.request_ids, "", 200, context)
        if "wait" in order:
            await self.seen[order["wait"]].wait()
        if order.get("fail") == "raise":
            raise ValueError
        if order.get("fail") == "exit":
            os._exit(3)
        context.set_response_header(0, "x-id", order["id"])
        return [f"{order['id']}end"]
