"""Where each number of a model comes from: the request, model-config.yaml, the server's properties.

For each parameter the sources are asked in an order that differs by parameter, because TorchServe's
did and archives rely on it:

    batch size, delay    request > yaml > ``models=`` > built-in 1 and 100 ms
    timeouts             yaml > ``models=`` > request > server default
    workers, registered  yaml pair > request > default_workers_per_model > 0
    workers, at start    yaml pair > ``models=`` > default_workers_per_model > GPUs > cores

Two differences, both supersets. A yaml without timeouts no longer hides the request's and the
server's behind TorchServe's built-in 120 s. A yaml ``maxBatchDelay: 0`` means 0, not "unset".

A wrong type in the yaml is told in the log and the key ignored.
"""

import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.values import MOST_WORKERS
from marserve.frontend.errors import ArchiveRefused
from marserve.frontend.logs.setup import one_line
from marserve.frontend.models.parallel import PARALLEL_TYPES, Parallel, TorchRun

logger = logging.getLogger(__name__)

#: The largest number of the contract, a Java int.
MAX_NUMBER = 2**31 - 1
_MAX_YAML_BYTES = 1 << 20
_MOST_BITS = 128

# Its requests must reach the worker that holds their sequence's state.
_REFUSED = "sequenceBatching"


@dataclass(frozen=True)
class Requested:
    """What a registration asked for; None where it said nothing. Times in seconds."""

    batch_size: int | None = None
    max_batch_delay: float | None = None
    initial_workers: int | None = None
    response_timeout: float | None = None
    startup_timeout: float | None = None


@dataclass(frozen=True)
class Autoscaling:
    """When a model gets a worker more or less, between its minimum and its maximum; seconds.

    Attributes:
        grow_after: A request that waits longer, while all workers are busy, calls for one more.
        shrink_after: A worker too many for so long is taken away.
    """

    grow_after: float = 1.0
    shrink_after: float = 60.0


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
        origins: For each settled parameter, the source that decided.
    """

    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: float
    response_timeout: float
    startup_timeout: float
    max_retry_timeout: float
    client_timeout: float
    job_queue_size: int
    use_gpu: bool
    device_ids: tuple[int, ...] | None
    continuous_batching: bool = False
    asynchronous: bool = False
    use_job_ticket: bool = False
    use_venv: bool = False
    parallel: Parallel | None = None
    autoscale: Autoscaling | None = None
    origins: Mapping[str, str] = field(compare=False, default_factory=dict)


def read_model_yaml(path: Path) -> Mapping[str, Any]:
    """Read model-config.yaml; unreadable counts as absent here (the worker then fails to load)."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_YAML_BYTES + 1)
        if len(text) > _MAX_YAML_BYTES:
            raise ValueError(f"it is longer than {_MAX_YAML_BYTES} bytes")  # noqa: TRY301
        parsed = yaml.safe_load(text)
    except Exception as error:  # noqa: BLE001 - the user's file meets the parser's every corner
        logger.error("Cannot read %s: %s", path.name, one_line(error))  # noqa: TRY400 - said in full
        return {}
    if not isinstance(parsed, dict):
        return {}
    return parsed


def settle(
    requested: Requested,
    model_yaml: Mapping[str, Any],
    numbers: Mapping[str, int],
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
        numbers: The model's entry in ``models=``, milliseconds and seconds as written there.
        config: The server's.
        gpus: GPUs there are.
        default_workers: Workers where nobody says anything.
        at_start: Whether the model is loaded at start rather than registered.
    """
    reader = _YamlReader(model_yaml)
    settling = _Settling()
    workers = _workers(requested, reader, numbers, default_workers, at_start, settling)
    settled = ModelSettings(
        min_workers=workers[0],
        max_workers=workers[1],
        batch_size=settling.first(
            "batch_size",
            request=requested.batch_size,
            yaml=reader.whole("batchSize", minimum=1),
            models=numbers.get("batchSize"),
            default=1,
        ),
        max_batch_delay=settling.first(
            "max_batch_delay",
            request=requested.max_batch_delay,
            yaml=_seconds(reader.whole("maxBatchDelay", minimum=0)),
            models=_seconds(numbers.get("maxBatchDelay")),
            default=0.1,
        ),
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
        job_queue_size=settling.first(
            "job_queue_size",
            yaml=reader.whole("jobQueueSize", minimum=1),
            server=config.job_queue_size,
        ),
        use_gpu=reader.use_gpu(),
        device_ids=reader.device_ids(gpus),
        continuous_batching=reader.flag("continuousBatching"),
        asynchronous=reader.flag("asyncCommunication"),
        use_job_ticket=reader.flag("useJobTicket"),
        use_venv=reader.flag("useVenv"),
        parallel=reader.parallel(),
        autoscale=reader.autoscale(default=config.autoscale_workers),
        origins=settling.origins,
    )
    reader.refuse_unsupported()
    return settled


def _tell_idle(key: str, why: str) -> None:
    logger.warning("model-config.yaml: %s has no effect beside asyncCommunication: %s.", key, why)


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
    reader: "_YamlReader",
    numbers: Mapping[str, int],
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


class _YamlReader:
    """Reads the frontend's keys of a model-config.yaml; a wrong type is told and ignored."""

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        self._parsed = parsed

    def whole(self, key: str, *, minimum: int, maximum: int = MAX_NUMBER) -> int | None:
        """An integer from ``minimum`` to ``maximum``; None when absent or unusable."""
        value: int | None = self._checked(
            key,
            f"an integer from {minimum} to {maximum}",
            lambda value: type(value) is int and minimum <= value <= maximum,
        )
        return value

    def flag(self, key: str) -> bool:
        """A switch, off when absent or unusable."""
        return bool(self._checked(key, "true or false", lambda value: isinstance(value, bool)))

    def use_gpu(self) -> bool:
        """False when ``deviceType`` says cpu."""
        value = self._checked(
            "deviceType",
            "cpu or gpu",
            lambda value: isinstance(value, str) and value.lower() in ("cpu", "gpu"),
        )
        return value is None or str(value).lower() == "gpu"

    def device_ids(self, gpus: int) -> tuple[int, ...] | None:
        """The GPUs listed in ``deviceIds``; None when absent or when one does not exist."""
        value = self._checked(
            "deviceIds",
            f"a list of GPU numbers from 0 to {gpus - 1}",
            lambda value: (
                isinstance(value, list)
                and all(type(one) is int and 0 <= one < gpus for one in value)
            ),
        )
        return tuple(value) if value else None

    def parallel(self) -> Parallel | None:
        """``parallelType`` with ``parallelLevel`` or ``torchrun``."""
        kind = self._word("parallelType", PARALLEL_TYPES)
        torchrun = self._torchrun()
        level = self._parallel_level(torchrun)
        if kind is None or not level:
            if kind is not None or level:
                logger.warning(
                    "model-config.yaml: parallelType and parallelLevel have no effect without each "
                    "other."
                )
            return None
        return Parallel(kind, level, torchrun or TorchRun(processes=level))

    def _parallel_level(self, torchrun: TorchRun | None) -> int:
        """As written; or the processes of torchrun, whichever comes later in the file."""
        level = self.whole("parallelLevel", minimum=0) or 0
        keys = list(self._parsed)
        if torchrun and (not level or keys.index("torchrun") > keys.index("parallelLevel")):
            return torchrun.processes
        return level

    def _torchrun(self) -> TorchRun | None:
        found = self._checked("torchrun", "a map", lambda value: isinstance(value, dict))
        if found is None:
            return None
        reader = _YamlReader(found)
        return TorchRun(
            nnodes=reader.whole("nnodes", minimum=1) or 1,
            processes=reader.whole("nproc-per-node", minimum=1) or 1,
            rdzv_backend=reader._text("rdzv-backend") or "c10d",
            rdzv_endpoint=reader._text("rdzv-endpoint"),
            rdzv_conf=reader._text("rdzv-conf") or None,
            monitor_interval=reader.whole("monitor-interval", minimum=1),
            node_rank=reader.whole("node-rank", minimum=0),
            omp_threads=reader.whole("OMP_NUMBER_THREADS", minimum=1) or 1,
        )

    def _word(self, key: str, words: Sequence[str]) -> str | None:
        value = self._checked(
            key,
            f"one of {', '.join(words)}",
            lambda value: isinstance(value, str) and value.lower() in words,
        )
        return None if value is None else str(value).lower()

    def _text(self, key: str) -> str:
        return str(self._checked(key, "a text", lambda value: isinstance(value, str)) or "")

    def autoscale(self, *, default: bool) -> Autoscaling | None:
        """``autoscale``: true, false, or a mapping of thresholds in seconds."""
        value = self._checked(
            "autoscale",
            "true, false, or growAfterSec and shrinkAfterSec as numbers above 0",
            lambda value: isinstance(value, bool) or _are_thresholds(value),
        )
        if isinstance(value, dict):
            return Autoscaling(**{_THRESHOLDS[key]: float(value[key]) for key in value})
        return Autoscaling() if (default if value is None else value) else None

    def refuse_unsupported(self) -> None:
        """Refuse what this version cannot do, and tell which keys have no say beside others.

        Raises:
            ArchiveRefused: Without it the model would give wrong answers.
        """
        if self.flag("asyncCommunication") and self.flag("continuousBatching"):
            _tell_idle("continuousBatching", "every request is on its way by itself")
        if self.flag("asyncCommunication") and self._parsed.get("autoscale"):
            _tell_idle("autoscale", "its requests never wait in the queue")
        if self._parsed.get(_REFUSED):
            raise ArchiveRefused(f"model-config.yaml: {_REFUSED} is not supported yet.")

    def _checked(self, key: str, allowed: str, is_allowed: Callable[[Any], bool]) -> Any:
        value = self._parsed.get(key)
        if value is None:
            return None
        if not is_allowed(value):
            shown = _short.repr(value)
            logger.warning("model-config.yaml: %s=%s is ignored, it takes %s.", key, shown, allowed)
            return None
        return value


class _Short(reprlib.Repr):
    """Wrong values in few words: the aliases of a yaml can nest a line of gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write thousands of digits, which hexadecimal ones get past yaml."""
        if x.bit_length() > _MOST_BITS:
            return f"<a number of {x.bit_length()} bits>"
        return super().repr_int(x, level)


_short = _Short()
_THRESHOLDS = {"growAfterSec": "grow_after", "shrinkAfterSec": "shrink_after"}


def _are_thresholds(value: object) -> bool:
    return isinstance(value, dict) and all(
        key in _THRESHOLDS and type(number) in (int, float) and 0 < number <= MAX_NUMBER
        for key, number in value.items()
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
