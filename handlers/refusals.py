"""Errors for unusable requests in a batch whose other requests are usable."""

from marserve.backend.errors import PredictionException


class UnusableInput(Exception):
    """A request's input is unusable; the client receives the message."""


class RefusedInputs(PredictionException):
    """Some requests of a batch are unusable; ``reasons`` has the message for each, by index.

    `BaseHandler` answers them with status 400 and runs the others again.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(" ".join(f"Request {i}: {why}" for i, why in reasons.items()), 400)
        self.reasons = reasons
