"""Says about its model what a request told it to say; waits at a gate where one is named."""

import json
from pathlib import Path


class Describer:
    def initialize(self, context):
        self.words = "null"

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            assert data == [{}]
            if self.words == "raise":
                raise ValueError
            return [self.words]
        for row in data:
            order = row["body"]
            self.words = order.get("say", self.words)
            if "gate" in order:
                Path(order["gate"]).read_text()
        return [json.dumps(len(data))] * len(data)
