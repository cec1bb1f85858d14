"""A running sum for each sequence; answers with the sum, as text."""


class Counter:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        return [str(self._add(context, index, row)) for index, row in enumerate(data)]

    def _add(self, context, index, row):
        sequence = context.get_sequence_id(index)
        value = bytes(row.get("data") or row["body"]).decode()
        self.sums[sequence] = self.sums.get(sequence, 0) + int(value)
        return self.sums[sequence]
