"""Fields in a multipart body as urllib3 writes it: they are read as they were."""

from typing import Any

from fuzz.choices import Choices
from fuzz.limits import Limits
from fuzz.targets.forms import read_form
from urllib3 import encode_multipart_formdata

LIMITS = Limits(calls=30_000, calls_per_byte=400, seconds=1.0)


def target(data: bytes) -> None:
    """Names, values and the media types of files arrive."""
    choices = Choices(data)
    fields: dict[str, Any] = {}
    for name in choices.several(lambda: _name(choices), 6):
        value: Any = choices.some_bytes(200)
        if b"\r\n--b0" in value or value.startswith(b"--b0"):
            continue
        is_file = choices.flag()
        fields[name] = (_name(choices), value, "image/png") if is_file else value
    body, _ = encode_multipart_formdata(fields, boundary="b0")
    input_, status = read_form(body, b"multipart/form-data; boundary=b0")
    assert status == 200
    assert input_ is not None
    assert {part.name: (part.content_type, bytes(part.body)) for part in input_.parts} == {
        name: (value[2], value[1]) if isinstance(value, tuple) else ("", value)
        for name, value in fields.items()
    }


def _name(choices: Choices) -> str:
    """A name that needs no escapes, of which there are several kinds."""
    name = "".join(c for c in choices.text() if c.isprintable() and c not in '"\\%')
    return name.strip("/ ") or "n"
