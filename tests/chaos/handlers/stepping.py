"""Continuous batching: a request takes as many steps as its token is repeated."""

import orders


class Stepping:
    def initialize(self, context):
        self.states = {}

    def handle(self, data, context):
        if data is None:
            return None
        ids = [context.get_request_id(place) for place in range(len(data))]
        for request_id, row in zip(ids, data, strict=True):
            if row:
                self.states[request_id] = [orders.read(row), 0]
        self.states = {item: self.states[item] for item in ids}
        states = list(self.states.values())
        orders.obey([order for order, _ in states])
        for state in states:
            state[1] += 1
        context.stopping_criteria = [
            lambda _result, state=state: state[1] >= state[0].get("repeat", 1) for state in states
        ]
        return [f"{order['token']} " for order, _ in states]
