"""Sessions of ``marserve bench`` that nobody had to wait for."""

from collections.abc import Mapping, Sequence

from marserve.tools.bench.measurement import Measurement, Point, Session, Target


def run(
    point: Point | None = None,
    latencies_ms: Sequence[float] = (1.0, 2.0, 3.0, 4.0),
    *,
    seconds: float = 2.0,
    errors: Mapping[str, int] | None = None,
    first_inference_ms: float | None = None,
    mean_batch: float | None = None,
    goal_ms: float | None = None,
    refused: int = 0,
    timeline: Sequence[int] = (),
) -> Measurement:
    """A run with as many answers as there are latencies."""
    return Measurement(
        point=point or Point(clients=1),
        seconds=seconds,
        answers=len(latencies_ms),
        errors=errors or {},
        latencies_ms=sorted(latencies_ms),
        first_inference_ms=first_inference_ms,
        mean_batch=mean_batch,
        goal_ms=goal_ms,
        refused=refused,
        timeline=timeline,
    )


def session(*runs: Measurement, model: str = "resnet", allowed: float = 0.0) -> Session:
    """A session of these runs."""
    return Session(
        target=Target(server="marserve 0.1.0", url="http://127.0.0.1:8080", model=model),
        command=f"marserve bench {model}",
        began="2026-11-21T09:30:00+00:00",
        machine={"processor": "Imaginary 9000", "cores": "2"},
        measurements=runs,
        allowed_error_share=allowed,
    )


def sweep(*, repeat: int = 1) -> Session:
    """Two batch sizes under three loads, slower with each repetition."""
    points = [Point(clients=clients, batch_size=size) for size in (1, 8) for clients in (1, 4, 16)]
    return session(
        *(
            run(
                point,
                [latency * (1 + again) for latency in range(1, 1 + 10 * (point.clients or 1))],
                timeline=[5, 5],
            )
            for point in points
            for again in range(repeat)
        )
    )


#: Almost nothing but refusals, and those very fast.
REFUSED = run(Point(clients=500), [0.1], errors={"503": 999}, timeline=[1])
