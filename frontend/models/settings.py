"""Where each number of a model comes from: the request, model-config.yaml, the server's properties.

For each parameter the sources are asked in an order that differs by parameter, because TorchServe's
did and archives rely on it:

    batch size, delay    request > yaml > ``models=`` > built-in 1 and 100 ms
    timeouts             yaml > ``models=`` > request > server default
    workers, registered  yaml pair > request > default_workers_per_model > 0
    workers, at start    yaml pair > ``models=`` > default_workers_per_model > GPUs > cores

Two differences, both supersets. A yaml without timeouts no longer hides the request's and the
server's behind TorchServe's built-in 120 s. A yaml ``maxBatchDelay: 0`` means 0, not "unset".

A wrong type in the yaml is told in the log and the key ignored; so is a key that TorchServe knows
and this version does not support yet.
"""

import logging
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marserve.frontend.config import Config

logger = logging.getLogger(__name__)

#: The largest number of the contract, a Java int.
MAX_NUMBER = 2**31 - 1
_MAX_YAML_BYTES = 1 << 20
# Wrong values in few words: the aliases of a yaml can nest a line of gigabytes.
_short = reprlib.Repr()
_short.maxlevel = 2

_UNSUPPORTED = frozenset(
    {
        "asyncCommunication",
        "continuousBatching",
        "maxNumSequence",
        "maxSequenceJobQueueSize",
        "parallelLevel",
        "parallelType",
        "sequenceBatching",
        "sequenceMaxIdleMSec",
        "sequenceTimeoutMSec",
        "torchrun",
        "useJobTicket",
        "useVenv",
    }
)


@dataclass(frozen=True)
class Requested:
    """What a registration asked for; None where it said nothing. Times in seconds."""

    batch_size: int | None = None
    max_batch_delay: float | None = None
    initial_workers: int | None = None
    response_timeout: float | None = None
    startup_timeout: float | None = None


@dataclass(frozen=True)
class ModelSettings:
    """The settled numbers of a model version. Times in seconds; 0 for a client timeout means none.

    Attributes:
        device_ids: GPUs its workers may use; None for all.
        use_gpu: Whether its workers may use GPUs at all.
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
    origins: Mapping[str, str] = field(compare=False)


def read_model_yaml(path: Path) -> Mapping[str, Any]:
    """Read model-config.yaml; unreadable counts as absent here (the worker then fails to load)."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_YAML_BYTES + 1)
        if len(text) > _MAX_YAML_BYTES:
            raise ValueError(f"it is longer than {_MAX_YAML_BYTES} bytes")  # noqa: TRY301
        parsed = yaml.safe_load(text)
    except Exception as error:  # noqa: BLE001 - the user's file meets the parser's every corner
        logger.error("Cannot read %s: %s", path.name, error)  # noqa: TRY400 - said in full
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
        origins=settling.origins,
    )
    reader.tell_unsupported()
    return settled


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
    low = reader.whole("minWorkers", minimum=1)
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

    def whole(self, key: str, *, minimum: int) -> int | None:
        """An integer, at least ``minimum``; None when absent or unusable."""
        value: int | None = self._checked(
            key,
            f"an integer of at least {minimum}",
            lambda value: type(value) is int and minimum <= value <= MAX_NUMBER,
        )
        return value

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

    def tell_unsupported(self) -> None:
        """Say which keys ask for something this version cannot do."""
        for key in sorted(_UNSUPPORTED & self._parsed.keys()):
            if self._parsed[key] not in (False, None, "", 0):
                logger.warning("model-config.yaml: %s is not supported yet and is ignored.", key)

    def _checked(self, key: str, allowed: str, is_allowed: Callable[[Any], bool]) -> Any:
        value = self._parsed.get(key)
        if value is None:
            return None
        if not is_allowed(value):
            shown = _short.repr(value)
            logger.warning("model-config.yaml: %s=%s is ignored, it takes %s.", key, shown, allowed)
            return None
        return value


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
