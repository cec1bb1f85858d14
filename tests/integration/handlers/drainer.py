"""A coroutine that waits for the readers of its answers; a request is a JSON object of orders.

Orders:
    name: How the request is found in the answer to ``read``: the number of pieces that were sent,
        and what has become of it.
    pieces: Number of pieces of the answer, 200,000 bytes each.
    read: Answer what is known of all requests.
"""

import asyncio
import json

SIZE = 200_000


class Drainer:
    def initialize(self, context):
        self.is_cancellable = context.model_yaml_config["handler"]["cancellable"]
        self.states = {}

    async def handle(self, data, context):
        order = data[0].get("body", data[0].get("data"))
        if not isinstance(order, dict):
            order = json.loads(bytes(order))
        if "read" in order:
            return [self.states]
        state = self.states[order["name"]] = {"sent": 0, "end": ""}
        try:
            for number in range(order["pieces"]):
                context.send_intermediate([b"%08d" % number * (SIZE // 8)])
                await context.drain()
                state["sent"] += 1
        except asyncio.CancelledError:
            state["end"] = "cancelled"
            raise
        state["end"] = "finished"
        return ["end"]
