"""Forms: written for requests, and taken apart in answers that have several parts."""

from collections.abc import Iterable
from email import message_from_bytes
from email.policy import HTTP

_BOUNDARY = "marserve-doctor-8e3f0b6c5a"


def multipart(fields: Iterable[tuple[str, bytes, str, str]]) -> tuple[bytes, str]:
    """Body and content type of a form of name, content, content type and file name each."""
    body = b""
    for name, content, content_type, file_name in fields:
        head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
        head += f'; filename="{file_name}"' if file_name else ""
        head += f"\r\nContent-Type: {content_type}" if content_type else ""
        body += head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + f"--{_BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={_BOUNDARY}"


def parts(body: bytes, content_type: str) -> list[tuple[str, str, bytes]] | None:
    """Name, content type and content of each part; None if it has no parts."""
    if not content_type.lower().startswith("multipart/"):
        return None
    head = f"Content-Type: {content_type}\r\nMIME-Version: 1.0\r\n\r\n"
    message = message_from_bytes(head.encode("latin-1", "replace") + body, policy=HTTP)
    if not message.is_multipart():
        return None
    found = []
    for part in message.iter_parts():
        content = part.get_payload(decode=True)
        name = part.get_param("name", "", "content-disposition")
        kept = content if isinstance(content, bytes) else b""
        found.append((str(name), part.get_content_type(), kept))
    return found
