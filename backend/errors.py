"""What may be raised by a handler author, and at one.

* `PredictionException` is for authors to raise: it chooses the status and the sentence that the
  clients of the batch get.
* The ``MetricsCache…`` errors tell an author that a metric was reported in a way that cannot be
  counted. Their names are TorchServe's, because handlers catch them; each is also the built-in
  error that a reader would expect.
* `HandlerUnusable` says that a module cannot serve as a handler, now or later; `OptionRefused` that
  it cannot do so with the options that model-config.yaml gives it.

`text_of` and `sentence_of` read what authors raise, which may be classes of their own.
"""


def text_of(error: BaseException) -> str:
    """What an exception says; empty if it cannot even do that."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception class of the author's
        return ""


def sentence_of(error: BaseException) -> str:
    """The type of an exception and what it says, if it says anything."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


class PredictionException(Exception):
    """Raised by a handler to answer every request of its batch with one status and one sentence.

    Args:
        message: What the clients are told.
        error_code: HTTP status of the answers.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerUnusable(ValueError):
    """The module holds nothing that can be called as a handler, or more than one such thing."""


class OptionRefused(HandlerUnusable):
    """model-config.yaml asks a handler for what it does not know or cannot do; the text says."""


class MetricsCacheTypeError(TypeError):
    """A metric's name, value or type is of the wrong kind."""


class MetricsCacheValueError(ValueError):
    """A unit that does not measure what the call reports."""


class MetricsCacheKeyError(KeyError):
    """No metric of that name and type."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes
