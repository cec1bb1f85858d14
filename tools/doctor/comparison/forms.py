"""Multipart forms: writing them for requests, and parsing them in responses."""

import re
from collections.abc import Iterable
from email import message_from_bytes, message_from_string

_BOUNDARY = "marserve-doctor-8e3f0b6c5a"
_MAX_PARTS = 1000  # the last one contains the rest
_MAX_HEAD = 1024  # bytes of a part's headers that are read


def multipart(fields: Iterable[tuple[str, bytes, str, str]]) -> tuple[bytes, str]:
    """Return body and content type of a form.

    Args:
        fields: Name, content, content type and file name of each field.
    """
    body = b""
    for name, content, content_type, file_name in fields:
        head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
        head += f'; filename="{file_name}"' if file_name else ""
        head += f"\r\nContent-Type: {content_type}" if content_type else ""
        body += head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + f"--{_BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={_BOUNDARY}"


def parts(body: bytes, content_type: str) -> list[tuple[str, str, bytes]] | None:
    """Return name, content type and content of each part; None if it has no parts.

    Nested parts are not separated: `email` does so recursively, in a time proportional to the
    product of depth and number of lines.
    """
    if not content_type.lower().startswith("multipart/"):
        return None
    boundary = message_from_string(f"Content-Type: {content_type}\n\n").get_boundary("")
    delimiter = re.escape(boundary.encode("latin-1", "replace"))
    pattern = rb"(?:\A|\r?\n)--" + delimiter + rb"(--)?[ \t]*(?=\r?\n|\Z)"
    _, *pieces = re.split(pattern, body, maxsplit=_MAX_PARTS)
    if not boundary or not pieces:
        return None
    found = []
    for end, piece in zip(pieces[::2], pieces[1::2], strict=True):
        if end:
            break
        head, *content = re.split(rb"\r?\n\r?\n", piece, maxsplit=1)
        part = message_from_bytes(head[:_MAX_HEAD].strip())
        part.set_payload(b"".join(content).decode("ascii", "surrogateescape"))
        kept = part.get_payload(decode=True)
        name = part.get_param("name", "", "content-disposition")
        found.append((str(name), part.get_content_type(), kept if isinstance(kept, bytes) else b""))
    return found
