"""Messages as the frontend and workers make them: what was encoded comes out again."""

from typing import Any

from fed_decoder import Decoder
from fuzz.choices import Choices
from fuzz.limits import Limits

from marserve.backend.framing import encode
from marserve.backend.protocol import (
    BatchCost,
    Call,
    CallReply,
    CancelCall,
    Input,
    Load,
    Loaded,
    Message,
    Part,
    Piece,
    Predict,
    Prediction,
    Profiled,
    Reply,
    Trials,
)

LIMITS = Limits(calls=3_200, calls_per_byte=300)


def target(data: bytes) -> None:
    """Messages made of the bytes are decoded as they were, whatever the pieces are."""
    choices = Choices(data)
    sizes = [1 + choices.number(400) for _ in range(4)]
    sent = [_message(choices) for _ in range(1 + choices.number(4))]
    wire = b"".join(bytes(buffer) for message in sent for buffer in encode(message))
    decoder, received = Decoder(1 << 20), list[Message]()
    at = turn = 0
    while at < len(wire):
        size = sizes[turn % len(sizes)]
        received += decoder.feed(wire[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent
    assert decoder.is_between_frames


def _message(choices: Choices) -> Message:
    make: Any = choices.one_of(
        (_load, _loaded, _profiled, _predict, _reply, _piece, _call, _cancel_call, _call_reply)
    )
    message: Message = make(choices)
    return message


def _load(choices: Choices) -> Load:
    return Load(
        model_name=choices.text(),
        model_dir=choices.text(),
        handler=choices.text(),
        batch_size=choices.integer(),
        gpu_id=choices.integer() if choices.flag() else None,
        limit_max_image_pixels=choices.flag(),
        max_response_bytes=choices.integer(),
        server_version=choices.text(),
        samples=choices.several(choices.text),
        trials=Trials(sizes=choices.several(choices.integer)),
    )


def _predict(choices: Choices) -> Predict:
    def make() -> Input:
        return Input(choices.text(), _headers(choices), _parts(choices))

    return Predict(choices.several(make), choices.integer(), choices.integer())


def _reply(choices: Choices) -> Reply:
    return Reply(
        choices.integer(),
        choices.text(),
        choices.several(lambda: _prediction(choices)),
        choices.several(lambda: choices.several(lambda: _json(choices, 3))),
        poisoned=choices.text(),
        suspect=choices.integer(),
        lengths=tuple(choices.several(lambda: (choices.integer(), _number(choices)))),
        rows=tuple(choices.several(choices.integer)),
    )


def _loaded(choices: Choices) -> Loaded:
    return Loaded(
        threads=choices.integer(),
        threads_why=choices.text(),
        profiled=_profiled(choices),
        warnings=choices.several(choices.text),
    )


def _profiled(choices: Choices) -> Profiled:
    def cost() -> BatchCost:
        return BatchCost(choices.integer(), _number(choices), choices.integer())

    return Profiled(choices.several(cost), choices.text(), choices.integer())


def _piece(choices: Choices) -> Piece:
    return Piece(
        choices.several(lambda: _prediction(choices)),
        choices.several(choices.integer),
        choices.integer(),
        choices.text(),
        choices.integer(),
    )


def _call(choices: Choices) -> Call:
    return Call(
        choices.integer(),
        choices.integer(),
        choices.text(),
        choices.text(),
        _number(choices) if choices.flag() else None,
        _headers(choices),
        _parts(choices),
    )


def _cancel_call(choices: Choices) -> CancelCall:
    return CancelCall(choices.integer())


def _call_reply(choices: Choices) -> CallReply:
    return CallReply(
        choices.integer(),
        _prediction(choices) if choices.flag() else None,
        choices.integer(),
        choices.text(),
        choices.text(),
        choices.integer() if choices.flag() else None,
    )


def _parts(choices: Choices) -> list[Part]:
    return choices.several(lambda: Part(choices.text(), choices.text(), choices.some_bytes(300)), 3)


def _prediction(choices: Choices) -> Prediction:
    body = choices.some_bytes(300)
    return Prediction(body, choices.integer(), choices.text(), _headers(choices))


def _headers(choices: Choices) -> dict[str, str]:
    return dict(choices.several(lambda: (choices.text(), choices.text()), 3))


def _number(choices: Choices) -> float:
    return choices.integer() / 256


def _json(choices: Choices, depth: int) -> Any:
    match choices.number(7 if depth else 5):
        case 0:
            return None
        case 1:
            return choices.flag()
        case 2:
            return choices.integer()
        case 3:
            return _number(choices)
        case 4:
            return choices.text()
        case 5:
            return choices.several(lambda: _json(choices, depth - 1))
    return dict(choices.several(lambda: (choices.text(), _json(choices, depth - 1))))
