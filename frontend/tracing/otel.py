"""Exports the spans of recorded requests by OTLP over HTTP, the protocol of OpenTelemetry.

A recorded request leaves its time line in a bounded queue. A thread makes spans of it afterwards
(`otel_spans`), so that no request waits. Only that thread imports the SDK, whose variables OTEL_*
have their documented meaning.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.configuration.values import SHARE
from marserve.frontend.telemetry.trace_context import Sampling
from marserve.frontend.tracing.time_lines import TimeLine

logger = logging.getLogger(__name__)

#: What the extra ``otel`` installs.
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")

# Of OTEL_TRACES_SAMPLER, perhaps behind "parentbased_".
_RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": 1.0}
_PARENT_BASED = "parentbased_"
_TRACES_PATH = "/v1/traces"
# Requests whose spans are not made yet.
_MAX_WAITING = 10_000
# Of a request: its own, the wait, and the handler.
_SPANS = 3
# Between two exports; and for the last one, when the server stops.
_PAUSE_SECONDS, _FLUSH_SECONDS = 1.0, 5.0
# After the end of a batch; until then all its requests are answered, except streams.
_MARGIN_SECONDS = 0.1


def find_receiver(endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the URL that gets the spans: of ``otel_endpoint``, else of variables; None for none.

    A warning is logged if there is one, and the packages that send spans are missing.
    """
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    url = base and base.rstrip("/") + _TRACES_PATH
    if endpoint is None:
        url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or url
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or is_off or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        for package in PACKAGES:
            version(package)
    except PackageNotFoundError as error:
        text = "Spans are not sent to %s: %s. Install the extra marserve[otel]: pip install %s"
        logger.warning(text, url, error, " ".join(PACKAGES))
        return None
    return url


def sampling_of(ratio: float | None, environ: Mapping[str, str]) -> Sampling:
    """Return the sampling by ``trace_sample_ratio``, else by the variables of OpenTelemetry."""
    if ratio is not None:
        return Sampling(ratio)
    name = environ.get("OTEL_TRACES_SAMPLER", "").lower() or "parentbased_always_on"
    text = environ.get("OTEL_TRACES_SAMPLER_ARG")
    kind = name.removeprefix(_PARENT_BASED)
    if kind not in _RATIOS:
        logger.warning("OTEL_TRACES_SAMPLER=%.80s: it is a sampler of the SDK.", name)
        return Sampling(1.0)
    ratio = _RATIOS[kind]
    if kind == "traceidratio" and text:
        try:
            ratio = SHARE.from_text(text)
        except ValueError as rule:
            logger.warning("OTEL_TRACES_SAMPLER_ARG=%.80s: it is %s.", text, rule)
    return Sampling(ratio, is_parent_based=kind != name)


class SpanExport:
    """Sends the spans of recorded requests to ``endpoint``, from `start` to `close`.

    ``on_dropped`` is called in the event loop with the number of spans that are not sent: the
    receiver is down or slow, or there are more than the thread can send.
    """

    def __init__(self, endpoint: str, on_dropped: Callable[[int], object]) -> None:
        self._endpoint = endpoint
        self._on_dropped = on_dropped
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[TimeLine] = deque()
        self._is_closing = threading.Event()
        # A daemon, because a receiver may not answer.
        self._thread = threading.Thread(target=self._run, name="OpenTelemetry", daemon=True)
        self.start = self._thread.start

    async def close(self) -> None:
        """Send what is waiting; give up after some seconds."""
        self._is_closing.set()
        await in_abandonable_thread(self._thread.join, _FLUSH_SECONDS)
        if self._thread.is_alive():
            logger.warning("The last spans were not sent: %s does not accept them.", self._endpoint)

    def add(self, line: TimeLine) -> None:
        """Queue the time line of a recorded request."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(line)
        else:
            self._on_dropped(_SPANS)

    def _take(self, until: float | None) -> list[TimeLine]:
        """Take the requests whose batches had ended before ``until``; with None, take all."""
        taken: list[TimeLine] = []
        while self._waiting and (until is None or _end_of(self._waiting[0]) <= until):
            taken.append(self._waiting.popleft())
        return taken

    def _run(self) -> None:
        try:
            # Here, because it takes a tenth of a second and 20 MB.
            from marserve.frontend.tracing.otel_spans import OtlpSpans

            spans = OtlpSpans(self._endpoint)
        except Exception:  # a defect, or a variable OTEL_* that the SDK refuses
            logger.exception("Spans are not sent to %s.", self._endpoint)
            return
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(_PAUSE_SECONDS)
            lines = self._take(None if is_last else time.monotonic() - _MARGIN_SECONDS)
            try:
                spans.add(lines)
                dropped = spans.send()
            except Exception:  # an exporter raises for a receiver that is too slow
                logger.exception("Spans were not sent to %s.", self._endpoint)
                dropped = _SPANS * len(lines)
            if dropped:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_dropped, dropped)
        spans.close()


def _end_of(line: TimeLine) -> float:
    batch = line.batch
    return line.answered if batch is None else batch.closed + batch.took
