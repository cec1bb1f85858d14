"""A receiver of spans: OTLP over HTTP, read by the protobuf messages of OpenTelemetry itself."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from servers import wait_for


class ReceivedSpan:
    """A span as it was received; ids are hexadecimal digits."""

    def __init__(self, span: Span, resource: dict[str, Any]) -> None:
        self.name = span.name
        self.kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
        self.trace_id, self.id = span.trace_id.hex(), span.span_id.hex()
        self.parent = span.parent_span_id.hex()
        self.state = span.trace_state
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = attributes_of(span.attributes)
        self.links = {(link.trace_id.hex(), link.span_id.hex()) for link in span.links}
        self.events = [event.name for event in span.events]
        self.error = span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None
        self.resource = resource

    def __repr__(self) -> str:
        return f"{self.name} {self.trace_id}/{self.id} in {self.parent}"


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


class Receiver:
    """Has the received spans and the headers of the messages; ``status`` answers the next ones."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.refused = 0

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        if path != "/v1/traces":
            return 404
        if self.status != 200:
            self.refused += 1
            return self.status
        message = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for of_resource in message.resource_spans:
            resource = attributes_of(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [ReceivedSpan(span, resource) for span in scope.spans]
        return 200

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the received spans of a trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
        """Wait for spans of a trace with just these names; return them by name."""

        def are_there() -> bool:
            return sorted(span.name for span in self.trace(trace_id)) == sorted(names)

        wait_for(are_there, what=lambda: f"{names} of {self.trace(trace_id)}")
        return {span.name: span for span in self.trace(trace_id)}


@contextmanager
def run_receiver(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver for a ``with`` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that the base class calls
            body = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.take(self.path, dict(self.headers), body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        receiver = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


class RawReceiver:
    """A receiver that answers by a function, which gets the connection after each message."""

    def __init__(self, sock: socket.socket, answer: Callable[[socket.socket], object]) -> None:
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.connections = self.messages = 0
        self._sock = sock
        self._answer = answer

    def run(self) -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = self._sock.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as sent:
            while (line := sent.readline()).startswith(b"POST"):
                length = 0
                while line.strip():
                    line = sent.readline().lower()
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                sent.read(length)
                self.messages += 1
                self._answer(connection)


@contextmanager
def run_raw_receiver(answer: Callable[[socket.socket], object]) -> Iterator[RawReceiver]:
    """Run a receiver that may break the protocol, for a ``with`` block."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        receiver = RawReceiver(sock, answer)
        threading.Thread(target=receiver.run, daemon=True).start()
        try:
            yield receiver
        finally:
            sock.shutdown(socket.SHUT_RDWR)
