"""Counts, one number per step, up to what the request says; for continuous batching.

What it saw in each step is written to the file that the first request names: ids of the requests
with input, a bar, ids of those without.
"""

from pathlib import Path


class Stepper:
    def initialize(self, context):
        self.states = {}
        self.record = None

    def handle(self, data, context):
        ids = [context.get_request_id(place) for place in range(len(data))]
        for request_id, row in zip(ids, data, strict=True):
            if row:
                self.states[request_id] = {**row["body"], "count": 0}
                self.record = self.record or Path(row["body"]["record"])
        self.states = {item: self.states[item] for item in ids}
        self._note(data, ids)
        states = list(self.states.values())
        for state in states:
            if "gate" in state and state["count"] == 1:
                Path(state["gate"]).read_text()
            if state.get("fail_at") == state["count"]:
                raise ValueError(state["name"])
            state["count"] += 1
        context.stopping_criteria = [
            lambda _result, state=state: state["count"] >= state["until"] for state in states
        ]
        return [f"{state['name']}{state['count']};" for state in states]

    def _note(self, data, ids):
        fresh = [self.states[item]["name"] for item, row in zip(ids, data, strict=True) if row]
        cached = [self.states[item]["name"] for item, row in zip(ids, data, strict=True) if not row]
        with self.record.open("a") as file:
            file.write(f"{''.join(fresh)}|{''.join(cached)}\n")
