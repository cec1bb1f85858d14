"""A stand-in for S3, and for web servers: objects with ETags.

Signatures are checked by the book (Signature Version 4), without botocore, which makes them.
"""

import contextlib
import datetime as dt
import hashlib
import hmac
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
REGION = "eu-north-1"


def signature_problem(method: str, target: str, headers: Any) -> str:
    """Why S3 refuses a request, in its words; empty where it does not."""
    fields = dict(re.findall(r"(\w+)=([^,]+)", headers.get("authorization", "").partition(" ")[2]))
    if not fields:
        return "AccessDenied"
    key, day, region, service, kind = fields["Credential"].split("/")
    if region != REGION:
        return "AuthorizationHeaderMalformed"
    names = fields["SignedHeaders"].split(";")
    path, _, query = target.partition("?")
    canonical = "\n".join(
        [method, path, query]
        + [f"{name}:{headers[name].strip()}" for name in names]
        + ["", fields["SignedHeaders"], headers["x-amz-content-sha256"]]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    scope = f"{day}/{region}/{service}/{kind}"
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    signing = b"AWS4" + SECRET.encode()
    for part in (day, region, service, kind, text):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    sent = dt.datetime.strptime(headers["x-amz-date"] + "+0000", "%Y%m%dT%H%M%SZ%z")
    age = dt.datetime.now(dt.UTC) - sent
    if key != KEY or signing.hex() != fields["Signature"] or "host" not in names:
        return "SignatureDoesNotMatch"
    return "RequestTimeTooSkewed" if abs(age) > dt.timedelta(minutes=15) else ""


class ObjectStore:
    """Objects by path, behind a URL of this machine.

    Attributes:
        objects: Path to content.
        requests: Path and status of each request.
        is_signed: Whether requests have to be signed, as for S3.
        is_silent: Whether nothing is answered.
        is_weak: Whether ETags are weak ones.
    """

    def __init__(self, *, is_signed: bool = False) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, int]] = []
        self.is_signed = is_signed
        self.is_silent = False
        self.is_weak = False
        self.url = ""
        self._ended = threading.Event()

    @contextlib.contextmanager
    def served(self) -> Iterator["ObjectStore"]:
        """Serve them within the block."""
        with ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) as server:
            server.daemon_threads = True
            server.block_on_close = False
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                self._ended.set()
                server.shutdown()
                thread.join()

    def environment(self) -> dict[str, str]:
        """What makes a program find it where it looks for S3."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_SESSION_TOKEN": "",
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
            "no_proxy": "*",
        }

    def etag(self, path: str) -> str:
        """The ETag of an object."""
        tag = f'"{hashlib.md5(self.objects[path], usedforsecurity=False).hexdigest()}"'
        return f"W/{tag}" if self.is_weak else tag

    def _get(self, path: str, headers: Any) -> tuple[int, bytes, Mapping[str, str]]:
        if path not in self.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        tag = {"ETag": self.etag(path)}
        if headers.get("if-none-match") == tag["ETag"]:
            return 304, b"", tag
        return 200, self.objects[path], tag

    def _answer(self, path: str, headers: Any) -> tuple[int, bytes, Mapping[str, str]]:
        problem = ""
        if self.is_signed:
            problem = signature_problem("GET", path, headers)
            if hashlib.sha256(b"").hexdigest() != headers["x-amz-content-sha256"]:
                problem = problem or "XAmzContentSHA256Mismatch"
        if problem:
            return 403, f"<Error><Code>{problem}</Code></Error>".encode(), {}
        return self._get(path, headers)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if store.is_silent:
                    store._ended.wait(20)
                    return
                status, content, headers = store._answer(self.path, self.headers)
                store.requests.append((self.path, status))
                self.send_response(status)
                if status != 304:
                    self.send_header("Content-Length", str(len(content)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
