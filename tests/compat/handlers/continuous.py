"""Counts to the number in each request, one step per call; requests join and leave on the way."""


class Counter:
    """Continuous batching: what a request still wants is kept between the steps."""

    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        answers, criteria = [], []
        for index, row in enumerate(data):
            id_ = context.get_request_id(index)
            if id_ not in context.cache:
                context.cache[id_] = {"step": 0, "until": int(row["body"]["until"])}
            state = context.cache[id_]
            state["step"] += 1
            answers.append(f"{state['step']};")
            criteria.append(self._criterion(state))
        context.stopping_criteria = criteria
        return answers

    @staticmethod
    def _criterion(state):
        return lambda _answer: state["step"] >= state["until"]
