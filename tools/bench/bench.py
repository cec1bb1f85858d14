"""A session: sets, warms up and measures every point, then restores the server's settings."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from marserve.tools.bench.archive import ArchiveVariants
from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.connection import REFUSED
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.processes import Listener, generate_now
from marserve.tools.bench.generator.record import Record
from marserve.tools.bench.generator.window import measured_part
from marserve.tools.bench.machine import machine
from marserve.tools.bench.measurement import Measurement, Point, Session, Target, percentile
from marserve.tools.bench.model_server import ModelServer, ServedModel, explained
from marserve.tools.bench.options import Options
from marserve.tools.bench.payloads import Payload, generate_payload, read_payloads
from marserve.tools.bench.progress import Progress
from marserve.tools.bench.recommendation import Goal, Recommendation
from marserve.tools.bench.requests import request_bytes, with_content_type
from marserve.tools.bench.settings import ServedSettings, served_settings, wait_ready
from marserve.tools.bench.tuning import Limits, tune
from marserve.tools.bench.validation import Validated, Validation

_METRICS_TIMEOUT = 5.0
_GENERATED = "bytes"
_VALIDATED_PAYLOADS = 5
_GENERATED_HINT = "Its body was generated: give the model's input with --input or --generate."
_BUSY = 0.95  # share of the time in which the load generator ran
_LATE = 0.005  # seconds; usually some tens of microseconds


class Bench:
    """Measures the points that the options name.

    Args:
        options: The options of the command line.
        command: The command line without secrets, for the reports.
        progress: Displays the progress.

    Attributes:
        measurements: The measurements so far, including those before a failure.

    Raises:
        BenchError: An option has a value that cannot be used, such as an input without files.
    """

    def __init__(self, options: Options, command: str, progress: Progress) -> None:
        self.measurements: list[Measurement] = []
        self._options = options
        self._command = command
        self._progress = progress
        self._lateness: list[float] = []
        self._busy: list[float] = []
        self._goal_ms: float | None = None
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._inference = options.destination(options.url)
        self._payloads = _payloads(options)
        headers, host = options.headers, self._inference.host
        self._requests = [
            request_bytes(options.target, host, headers, payload) for payload in self._payloads
        ]
        self._server = _server(options)
        self._target = Target(server="", url=options.url, model=options.model)

    @property
    def session(self) -> Session:
        """Return the session with the measurements so far."""
        return Session(
            target=self._target,
            command=self._command,
            began=self._began,
            machine=machine(),
            measurements=self.measurements,
            allowed_error_share=self._options.max_error_percent / 100,
        )

    def run(self, points: Sequence[Point]) -> None:
        """Measure these points; the server's settings are restored also after a failure.

        Raises:
            BenchError: A setting or a measurement failed.
        """
        with self._opened(needs_settings=any(map(_changes_settings, points))) as settings:
            for point in points:
                if settings is not None:
                    settings.set(point)
                self._measure(point)

    def tune(self, goal: Goal) -> Recommendation:
        """Search for the best settings within a latency goal, then restore the server's settings.

        Raises:
            BenchError: A setting or a measurement failed.
        """
        with self._opened(needs_settings=True) as settings:
            assert settings is not None
            self._goal_ms = goal.latency_ms

            def measure(point: Point) -> Measurement:
                settings.set(point)
                self._measure(point)
                return self.measurements[-1]

            found = tune(goal, self._search_limits(settings.original), measure)
            return replace(found, management_url=self._options.management_url)

    def validate(self, points: Sequence[Point]) -> Iterator[Validated]:
        """Compare answers to batched and to single requests, with the settings of each point.

        Raises:
            BenchError: A setting or a request failed.
        """
        options = self._options
        inference = Client(self._inference, options.headers, options.timeout)
        with self._opened(needs_settings=any(map(_changes_settings, points))) as settings:
            validation = Validation(
                self._server, inference, options.target, self._payloads, options.tolerance
            )
            for point in points:
                if settings is not None:
                    settings.set(point)
                yield validation.run(point.clients if options.clients else None)

    def _search_limits(self, model: ServedModel) -> Limits:
        options = self._options
        usual = Limits()
        sizes = [size for size in options.batch_size if isinstance(size, int)]
        return Limits(
            max_batch_size=max(sizes, default=usual.max_batch_size),
            max_workers=max(options.workers, default=max(1, model.scale["max_worker"])),
            is_adaptive=model.is_live,
            queue_size=model.queue_size or usual.queue_size,
            allowed_error_share=options.max_error_percent / 100,
            precision=options.precision[0] if options.precision else None,
            torch_threads=options.torch_threads,
            outstanding_batches=options.outstanding_batches,
        )

    def _identify(self) -> None:
        model = f"{self._options.model} {self._options.model_version}".rstrip()
        server = self._server.identity()
        self._target = Target(server=server, url=self._options.url, model=model)

    @contextmanager
    def _opened(self, *, needs_settings: bool) -> Iterator[ServedSettings | None]:
        """Yield the settings of the served model; None if no point changes a setting."""
        self._identify()
        url = self._options.register
        settings: ServedSettings | None = None
        with ExitStack() as stack:
            archives = stack.enter_context(closing(ArchiveVariants(url))) if url else None
            if archives or needs_settings:
                archive_for = archives.url_for if archives else None
                context = served_settings(self._server, archive_for, register=bool(url))
                settings = stack.enter_context(context)
                self._goal_ms = settings.original.goal_ms
            elif model := self._server.describe_if_possible():
                _check_workers(model, self._options.model)
                wait_ready(self._server, 1)
                self._goal_ms = model.goal_ms
            yield settings

    def _measure(self, point: Point) -> None:
        first_ms = self._first_inference()
        for _ in range(self._options.repeat):
            load = self._load(point)
            self._progress.begin(point, load)
            measurement = self._run(point, load, first_ms)
            self._progress.end(measurement)
            self.measurements.append(measurement)
            first_ms = None

    def _first_inference(self) -> float | None:
        """Return the milliseconds of one request, None if the server is full and refuses it.

        Its failure ends the session before the load.
        """
        options = self._options
        payload = self._payloads[0]
        headers = with_content_type(options.headers, payload)
        client = Client(self._inference, headers, options.timeout)
        answer = client.ask("POST", options.target, payload.body)
        if answer.is_refusal:
            return None
        if not answer.is_success:
            sent = "" if options.input or options.generate else f" {_GENERATED_HINT}"
            why = explained(answer, "--token")
            raise BenchError(f"The first request was not answered with success: {why}{sent}")
        return answer.seconds * 1000

    def _load(self, point: Point) -> Load:
        options = self._options
        return Load(
            clients=point.clients,
            rate=point.rate,
            arrivals=options.arrivals,
            seed=options.seed,
            seconds=options.seconds,
            requests=options.requests,
            warm_up=options.warm_up,
            timeout=options.timeout,
            max_connections=options.max_connections,
        )

    def _goal_of(self, point: Point) -> float | None:
        """Return the latency goal of a run: its own, that of its sweep, or that of the model."""
        goals = self._options.max_latency_ms
        return point.max_latency_ms or (goals[0] if len(goals) == 1 else self._goal_ms) or None

    def _run(self, point: Point, load: Load, first_ms: float | None) -> Measurement:
        counting = _Counting(self._server, self._progress)
        record, warm = generate_now(
            load,
            self._inference,
            self._requests,
            processes=self._options.processes,
            listener=counting,
        )
        if record.stopped:
            raise ServerUnreachable(f"The server was gone during the run: {record.stopped}.")
        part = measured_part(record, load, warm)
        if not part.seconds:
            raise BenchError("Nothing was measured: no request was due, or ended, in time.")
        self._note_limits(record)
        goal_ms, errors = self._goal_of(point), dict(part.errors)
        return Measurement(
            point=point,
            seconds=part.seconds,
            answers=len(part.latencies),
            goal_ms=goal_ms,
            refused=0 if goal_ms is None else errors.pop(REFUSED, 0),
            errors=errors,
            latencies_ms=[latency * 1000 for latency in part.latencies],
            first_inference_ms=first_ms,
            mean_batch=counting.mean_batch(),
            timeline=part.timeline,
        )

    def _note_limits(self, record: Record) -> None:
        """Note a run in which the load generator, not the server, may have limited the results."""
        late = percentile(sorted(record.lateness), 99)
        if late > _LATE:
            self._lateness.append(late)
        if record.busy > _BUSY:
            self._busy.append(record.busy)

    def warnings(self) -> Iterator[str]:
        """Yield the server's about settings, and those of runs that this machine has limited."""
        yield from self._server.warnings
        if self._lateness:
            yield (
                f"In {_runs(self._lateness)} the load generator sent 99 % of the requests up to "
                f"{max(self._lateness) * 1000:.0f} ms late: this machine has too little processor "
                "time for it."
            )
        if self._busy:
            yield (
                f"In {_runs(self._busy)} the load generator was busy up to {max(self._busy):.0%} "
                "of the time: the server may be faster. Use more --processes if the machine has "
                "cores for them."
            )


class _Counting(Listener):
    """Counts batches from the end of the warm-up on, and passes request counts to the progress."""

    def __init__(self, server: ModelServer, progress: Progress) -> None:
        self._server = server
        self._progress = progress
        self._before: tuple[float, float] | None = None

    def measuring(self) -> None:
        self._before = self._server.batches() or (0.0, 0.0)

    def counted(self, count: int) -> None:
        self._progress.count(count)

    def mean_batch(self) -> float | None:
        """Return requests per batch since the warm-up; None if the server has no such metric."""
        now = self._server.batches()
        if now is None or self._before is None:
            return None
        requests, batches = (new - old for new, old in zip(now, self._before, strict=True))
        return requests / batches if batches else None


def _server(options: Options) -> ModelServer:
    inference = Client(options.destination(options.url), options.headers, options.timeout)
    management = Client(
        options.destination(options.management_url), options.management_headers, options.timeout
    )
    metrics = Client(options.destination(options.metrics_url), {}, _METRICS_TIMEOUT)
    return ModelServer(inference, management, metrics, options.model, options.model_version)


def _payloads(options: Options) -> list[Payload]:
    if options.input:
        return [payload for pattern in options.input for payload in read_payloads(pattern)]
    several = range(_VALIDATED_PAYLOADS if options.validate else 1)
    return [generate_payload(options.generate or _GENERATED, number) for number in several]


def _changes_settings(point: Point) -> bool:
    loads = ("clients", "rate")
    return any(value is not None for name, value in vars(point).items() if name not in loads)


def _check_workers(model: ServedModel, name: str) -> None:
    """Check that a worker is ready, or loads without a failure so far."""
    is_loading = model.scale["min_worker"] and not model.last_error
    if not model.ready_workers and not is_loading:
        why = f" {model.last_error}" if model.last_error else " Start one with --workers 1."
        raise BenchError(f"The model {name} has no worker that is ready.{why}")


def _runs(values: Sequence[float]) -> str:
    return "one run" if len(values) == 1 else f"{len(values)} runs"
