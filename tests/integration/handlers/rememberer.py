"""Remembers what was said in each sequence; a request is a JSON object of orders.

Orders:
    say: A letter, remembered; the answer has all of them.
    gate: Named pipe to wait at.
    do: "die" or "raise".
    over: Ids of sequences that the handler says are over.
    pieces: How many pieces the answer has, with continuous batching.
    record: File for what `end_sequence` is told from now on: id, reason, letters.
"""

import os
import signal
from pathlib import Path


class Rememberer:
    def initialize(self, context):
        self.said = {}
        self.left = {}
        self.record = None

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return [{"sequence": str(context.get_sequence_id(0))}]
        ids = [context.get_request_id(place) for place in range(len(data))]
        answers = [self._answer(row, place, context, len(data)) for place, row in enumerate(data)]
        context.stopping_criteria = [self._is_over(each) for each in ids]
        return answers

    def _answer(self, row, place, context, size):
        sequence, request = context.get_sequence_id(place), context.get_request_id(place)
        if not row:  # a further step of an answer in pieces
            return "."
        order = row["body"]
        if context.get_request_header(place, context.header_key_sequence_start):
            self.said[sequence] = ""
        self.record = order.get("record", self.record)
        if "gate" in order:
            Path(order["gate"]).read_text()
        if order.get("do") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order.get("do") == "raise":
            raise ValueError("the handler's")
        if "over" in order:
            context.set_response_header(place, context.header_key_sequence_end, order["over"])
        self.said[sequence] += order.get("say", "")
        self.left[request] = order.get("pieces")
        return {"said": self.said[sequence], "batch": size, "pid": os.getpid()}

    def _is_over(self, request):
        def check(_answer):
            if self.left.get(request) is None:
                return None
            self.left[request] -= 1
            return self.left[request] <= 0

        return check

    def end_sequence(self, sequence_id, reason):
        if self.record:
            with Path(self.record).open("a") as file:
                file.write(f"{sequence_id} {reason} {self.said.get(sequence_id)}\n")
        if self.said.pop(sequence_id) == "raise":
            raise ValueError("the hook's")
