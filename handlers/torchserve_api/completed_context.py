"""Contexts of tests, completed to our interface.

Many projects have copies of TorchServe's MockContext: a dict or two, ``metrics`` and a
``get_request_header``.
"""

from typing import Any

from marserve.backend.context import Context, RequestProcessor


class EndlessRequests(list[RequestProcessor]):
    """A list that creates missing requests up to the index that is read."""

    def __getitem__(self, index: Any) -> Any:
        """Return the request at an index, or a slice."""
        if isinstance(index, int):
            self.extend(RequestProcessor({}) for _ in range(len(self), index + 1))
        return super().__getitem__(index)


class _CompletedContext:
    """A context whose missing attributes are those of an empty `Context`."""

    def __init__(self, own: Any) -> None:
        empty = Context("", "", None, 1, None, "")
        empty.request_processor = EndlessRequests()
        vars(self).update(_own=own, _empty=empty)

    def __getattr__(self, name: str) -> Any:
        own, empty = vars(self)["_own"], vars(self)["_empty"]
        return getattr(own if hasattr(own, name) else empty, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_own"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_own"], name)


def completed(context: Any) -> Any:
    """Return a context with our interface: a `Context` itself, others completed."""
    return context if isinstance(context, Context) else _CompletedContext(context)
