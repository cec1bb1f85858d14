"""A coroutine that calls other models, as each request asks; a request is a JSON object of orders.

Orders:
    calls: Arguments of `context.infer`, of one call or more; they are made together.
    group: Make them in a task group, which an exception ends.
    catch: Exceptions of calls become answers.
    patience: Seconds after which the handler waits no longer for them.
    leave: Answer without waiting for them; what becomes of them is the next answer to ``left``.
    left: Answer what became of the calls that were left.
    fail: Raise when the first call is answered.
    piece: Send this piece first.

The answer is a list of what the calls answered.
"""

import asyncio

from marserve.handlers.model_calls import ModelCallFailed


class Caller:
    def __init__(self):
        self.left = []

    def initialize(self, context):
        pass

    async def handle(self, data, context):
        self.context = context  # as many handlers do; the next request's takes its place
        order = data[0]["body"]
        if "piece" in order:
            context.send_intermediate([order["piece"]])
        if "left" in order:
            left = await asyncio.gather(*self.left, return_exceptions=True)
            return [[f"{type(each).__name__}: {each}" for each in left]]
        calls = [self.call(each, order) for each in order["calls"]]
        if "leave" in order:
            self.left = [asyncio.ensure_future(each) for each in calls]
            await asyncio.sleep(0)
            return [[]]
        if "group" in order:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in calls]
            return [[task.result() for task in tasks]]
        if "fail" in order:
            await next(asyncio.as_completed(calls))
            raise ValueError("the handler has failed")
        try:
            async with asyncio.timeout(order.get("patience")):
                return [await asyncio.gather(*calls)]
        except TimeoutError:
            return [["impatient"]]

    async def call(self, arguments, order):
        try:
            answer = await self.context.infer(**arguments)
        except ModelCallFailed as error:
            if "catch" not in order:
                raise
            return {"status": error.status, "reason": error.reason, "type": error.type}
        try:
            return answer.json()
        except ValueError:
            return answer.text
