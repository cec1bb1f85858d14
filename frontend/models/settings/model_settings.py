"""Where each number of a model comes from: the request, model-config.yaml, the server's properties.

For each parameter the sources are asked in an order that differs by parameter, because TorchServe's
did and archives rely on it:

    batching             request > yaml > ``models=`` > server default (`batching_settings`)
    timeouts             yaml > ``models=`` > request > server default
    workers, registered  yaml pair > request > default_workers_per_model > 0
    workers, at start    yaml pair > ``models=`` > default_workers_per_model > GPUs > cores

Two differences, both supersets. A yaml without timeouts no longer hides the request's and the
server's behind TorchServe's built-in 120 s. A yaml ``maxBatchDelay: 0`` means 0, not "unset".

A wrong type in the yaml is told in the log and the key ignored.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.batching_values import Fields
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.values import MOST_WORKERS
from marserve.frontend.models.settings.batching_settings import (
    Mode,
    Origins,
    change_batching,
    models_fields,
    restore_batching,
    server_fields,
    settle_batching,
    yaml_fields,
)
from marserve.frontend.models.settings.model_yaml import Autoscaling, YamlReader
from marserve.frontend.models.settings.parallel import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Requested:
    """What a registration asked for; None where it said nothing. Times in seconds.

    Attributes:
        batching: See `configuration.batching_values`.
    """

    initial_workers: int | None = None
    response_timeout: float | None = None
    startup_timeout: float | None = None
    batching: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSettings:
    """The settled numbers of a model version. Times in seconds; 0 for a client timeout means none.

    Attributes:
        device_ids: GPUs its workers may use; None for all.
        use_gpu: Whether its workers may use GPUs at all.
        continuous_batching: Whether requests stay with a worker for several steps.
        asynchronous: Whether its handler is a coroutine that is given each request by itself.
        use_job_ticket: Whether a request is taken only when a worker waits for one.
        use_venv: Whether its packages go into a virtual environment of its own.
        parallel: How its workers are more than one device or process; None where they are not.
        autoscale: When its workers vary with its queue; None for never, as in TorchServe.
        sample_input: File of the archive that batches are made of to see what they cost; empty
            where the handler is asked for a sample.
        overlap_stages: Whether the stages of successive batches overlap in a worker; None where the
            handler decides.
        outstanding_batches: Batches that a worker has been sent and not answered, at most; None for
            as many as it can use.
        debugged: Whether its only worker has the terminal and may stand at a breakpoint.
        origins: For each settled parameter, the source that decided.
    """

    min_workers: int
    max_workers: int
    batching: Batching
    response_timeout: float
    startup_timeout: float
    max_retry_timeout: float
    client_timeout: float
    use_gpu: bool
    device_ids: tuple[int, ...] | None
    continuous_batching: bool = False
    asynchronous: bool = False
    use_job_ticket: bool = False
    use_venv: bool = False
    parallel: Parallel | None = None
    autoscale: Autoscaling | None = None
    sample_input: str = ""
    overlap_stages: bool | None = None
    outstanding_batches: int | None = None
    debugged: bool = False
    origins: Origins = field(compare=False, default_factory=dict)

    @property
    def mode(self) -> Mode:
        """Whether requests are served in a way that leaves no batches to form."""
        return _mode(asynchronous=self.asynchronous, continuous=self.continuous_batching)

    def for_debugging(self) -> "ModelSettings":
        """Settings under which the one worker may stand at a breakpoint for as long as it takes."""
        return replace(
            self, min_workers=1, max_workers=1, autoscale=None, client_timeout=0.0, debugged=True
        )

    def with_batching(self, changes: Fields) -> "ModelSettings":
        """Settings whose batching is another one.

        Raises:
            ValueError: See `change_batching`.
        """
        batching, origins = change_batching(self.batching, self.origins, changes, mode=self.mode)
        return replace(self, batching=batching, origins=origins)

    def with_saved_batching(self, saved: Fields) -> "ModelSettings":
        """Settings with the batching of a snapshot.

        Raises:
            ValueError: See `restore_batching`.
        """
        batching, origins = restore_batching(self.batching, self.origins, saved, mode=self.mode)
        return replace(self, batching=batching, origins=origins)


def settle(
    requested: Requested,
    model_yaml: Mapping[str, Any],
    numbers: Mapping[str, Any],
    config: Config,
    *,
    gpus: int,
    default_workers: int,
    at_start: bool = False,
) -> ModelSettings:
    """Settle every number of a model.

    Args:
        requested: From the registration.
        model_yaml: The parsed model-config.yaml, empty where there is none.
        numbers: The model's entry in ``models=``, as written there.
        config: The server's.
        gpus: GPUs there are.
        default_workers: Workers where nobody says anything.
        at_start: Whether the model is loaded at start rather than registered.

    Raises:
        ArchiveRefused, BadRequest: The model cannot be served so.
    """
    reader = YamlReader(model_yaml)
    settling = _Settling()
    workers = _workers(requested, reader, numbers, default_workers, at_start, settling)
    continuous, asynchronous = reader.flag("continuousBatching"), reader.flag("asyncCommunication")
    mode = _mode(asynchronous=asynchronous, continuous=continuous)
    parallel = reader.parallel()
    batching, batching_origins = settle_batching(
        {
            "request": requested.batching,
            "yaml": yaml_fields(model_yaml),
            "models": models_fields(numbers),
            "server": server_fields(config, mode),
        },
        mode,
    )
    settled = ModelSettings(
        min_workers=workers[0],
        max_workers=workers[1],
        batching=batching,
        response_timeout=settling.first(
            "response_timeout",
            yaml=reader.whole("responseTimeout", minimum=1),
            models=numbers.get("responseTimeout"),
            request=requested.response_timeout,
            server=config.default_response_timeout,
        ),
        startup_timeout=settling.first(
            "startup_timeout",
            yaml=reader.whole("startupTimeout", minimum=1),
            models=numbers.get("startupTimeout"),
            request=requested.startup_timeout,
            server=config.default_startup_timeout,
        ),
        max_retry_timeout=settling.first(
            "max_retry_timeout", yaml=reader.whole("maxRetryTimeoutInSec", minimum=0), default=300
        ),
        client_timeout=settling.first(
            "client_timeout",
            yaml=_seconds(reader.whole("clientTimeoutInMills", minimum=0)),
            default=0.0,
        ),
        use_gpu=reader.use_gpu(),
        device_ids=reader.device_ids(gpus),
        continuous_batching=continuous,
        asynchronous=asynchronous,
        use_job_ticket=reader.flag("useJobTicket"),
        use_venv=reader.flag("useVenv"),
        parallel=parallel,
        autoscale=reader.autoscale(default=config.autoscale_workers),
        sample_input=reader.sample_input(),
        overlap_stages=reader.overlap_stages(parallel),
        outstanding_batches=reader.outstanding_batches(),
        origins={**settling.origins, **batching_origins},
    )
    reader.refuse_unsupported()
    reader.tell_unread()
    return settled


def _mode(*, asynchronous: bool, continuous: bool) -> Mode:
    if asynchronous:
        return Mode("asyncCommunication")
    return Mode("continuousBatching" if continuous else "")


class _Settling:
    """Takes the first source that says something, and remembers which it was."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}

    def first(self, name: str, **sources: Any) -> Any:
        for origin, value in sources.items():
            if value is not None:
                self.origins[name] = origin
                return value
        raise AssertionError(f"{name} has no default")


def _workers(
    requested: Requested,
    reader: YamlReader,
    numbers: Mapping[str, Any],
    default_workers: int,
    at_start: bool,
    settling: _Settling,
) -> tuple[int, int]:
    low = reader.whole("minWorkers", minimum=1, maximum=MOST_WORKERS)
    high = reader.whole("maxWorkers", minimum=0)
    pair = (low, high) if low is not None and high is not None and high >= low else None
    if pair is None and (low is not None or high is not None):
        logger.warning("minWorkers needs a maxWorkers that is not less; both are ignored.")
    if at_start:
        start_low = numbers.get("minWorkers", default_workers)
        start_high = max(start_low, numbers.get("maxWorkers", start_low))
        other: tuple[int, int] = (start_low, start_high)
    else:
        wanted = requested.initial_workers
        count = default_workers if wanted is None else wanted
        other = (count, count)
    result: tuple[int, int] = settling.first(
        "workers", yaml=pair, **{"models" if at_start else "request": other}
    )
    return result


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
