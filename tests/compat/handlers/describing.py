"""Describes and explains itself, as BaseHandler lets its children do."""

from ts.torch_handler.base_handler import BaseHandler


class Describing(BaseHandler):
    """No weights: what counts is which method is called."""

    def initialize(self, context):
        self.context = context
        self.initialized = True

    def preprocess(self, data):
        return [_text(row.get("data") or row.get("body") or "") for row in data]

    def inference(self, data, *args, **kwargs):
        return data

    def postprocess(self, data):
        return [f"predicted {item}" for item in data]

    def explain_handle(self, data_preprocess, raw_data):
        return [{"explained": item} for item in data_preprocess]

    def describe_handle(self):
        return {"classes": ["a", "b"], "nested": {"n": 1}, "html": "<b>"}


def _text(value):
    return value if isinstance(value, str) else bytes(value).decode()
