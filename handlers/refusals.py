"""Requests that a handler cannot use, beside those of their batch that it can."""

from marserve.backend.errors import PredictionException


class UnusableInput(Exception):
    """One request's input cannot be used; the text is for the client."""


class RefusedInputs(PredictionException):
    """Some requests of a batch cannot be used; the others can.

    `BaseHandler` answers those with status 400 and runs the others again without them. Whoever does
    not know how to tell them apart answers the whole batch with status 400. ``reasons`` has, for a
    place in the batch, the sentence for that client.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(" ".join(f"Request {i}: {why}" for i, why in reasons.items()), 400)
        self.reasons = reasons
