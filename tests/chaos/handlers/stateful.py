"""Answers with the number of the request in its sequence; a request without ``step`` ends it."""

import orders


class Stateful:
    def initialize(self, context):
        self.counts = {}

    def handle(self, data, context):
        asked = [orders.read(row) for row in data]
        orders.obey(asked)
        return [self.count(order, place, context) for place, order in enumerate(asked)]

    def count(self, order, place, context):
        sequence = context.get_sequence_id(place)
        if context.get_request_header(place, context.header_key_sequence_start):
            self.counts[sequence] = 0
        self.counts[sequence] += 1
        if "step" not in order:
            context.set_response_header(place, context.header_key_sequence_end, sequence)
        return f"{orders.answer(order)} {self.counts[sequence]}"

    def end_sequence(self, sequence_id, reason):
        self.counts.pop(sequence_id, None)
