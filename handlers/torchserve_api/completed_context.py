"""Contexts that authors of handlers made by hand for their tests, with only what TorchServe needed.

The best known is TorchServe's own MockContext, of which there are many copies: a dict or two,
`metrics`, and a `get_request_header`. Ours asks for more here and there.
"""

from typing import Any

from marserve.backend.context import Context, RequestProcessor


class EndlessRequests(list[RequestProcessor]):
    """As many requests as are asked for: those missing up to a place are made."""

    def __getitem__(self, place: Any) -> Any:
        """Return the request at a place, or a slice."""
        if isinstance(place, int):
            self.extend(RequestProcessor({}) for _ in range(len(self), place + 1))
        return super().__getitem__(place)


class CompletedContext:
    """Somebody's context, with what it lacks taken from an empty one of ours."""

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
