"""The frontend's keys of a model-config.yaml, but for those of batching (`batching_settings`).

A wrong type is told in the log and the key ignored, as in TorchServe; new keys refuse the model
where nobody would notice.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marserve.frontend.configuration.repr_limits import shown
from marserve.frontend.configuration.unread_keys import told_of_yaml
from marserve.frontend.errors import ArchiveRefused
from marserve.frontend.logs.setup import one_line
from marserve.frontend.models.settings.parallel import PARALLEL_TYPES, Parallel, TorchRun

logger = logging.getLogger(__name__)

#: The largest number of the contract, a Java int.
MAX_NUMBER = 2**31 - 1
_MAX_YAML_BYTES = 1 << 20
_MOST_KEYS = 500  # that are looked at one by one
_TORCHRUN = (
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-conf",
    "monitor-interval",
    "node-rank",
    "OMP_NUMBER_THREADS",
)

_AUTO = "auto"
# Far beyond what keeps a device busy, and still little to run again when its worker dies.
_MOST_OUTSTANDING = 64
# Its requests must reach the worker that holds their sequence's state.
_REFUSED = "sequenceBatching"


@dataclass(frozen=True)
class Autoscaling:
    """When a model gets a worker more or less, between its minimum and its maximum; seconds.

    Attributes:
        grow_after: A request that waits longer, while all workers are busy, calls for one more.
        shrink_after: A worker too many for so long is taken away.
    """

    grow_after: float = 1.0
    shrink_after: float = 60.0


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


class YamlReader:
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
        for key in itertools.islice(found, _MOST_KEYS):
            if key not in _TORCHRUN:
                hint = told_of_yaml(key, _TORCHRUN) or f"{shown(key)} is no key that is read here."
                logger.warning("model-config.yaml: torchrun: %s", hint)
        reader = YamlReader(found)
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

    def sample_input(self) -> str:
        """``sampleInput``, the name of a file.

        Raises:
            ArchiveRefused: It is none; nobody would notice that nothing is tried out.
        """
        value = self._parsed.get("sampleInput")
        if value is not None and (not isinstance(value, str) or not value):
            raise _wrong("sampleInput", value, "it is a file's name")
        return value or ""

    def overlap_stages(self, parallel: Parallel | None) -> bool | None:
        """``overlapStages``: true, false, or ``auto`` for what the handler decides.

        Args:
            parallel: What `parallel` says.

        Raises:
            ArchiveRefused: It is none of these, or cannot be true beside another key.
        """
        value = self._parsed.get("overlapStages")
        if value not in (None, _AUTO) and not isinstance(value, bool):
            raise _wrong("overlapStages", value, f"it is true, false or {_AUTO}")
        beside = self._without_batches()
        if parallel and parallel.has_ranks:  # each would have to run the stages in the same order
            beside = f"parallelType={parallel.type}"
        if value is True and beside:
            raise _idle("overlapStages: true", beside)
        return False if value is False or beside else value is True or None

    def outstanding_batches(self) -> int | None:
        """``outstandingBatches``; None when absent.

        Raises:
            ArchiveRefused: It is no number in bounds, or has no meaning beside another key.
        """
        value = self._parsed.get("outstandingBatches")
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= _MOST_OUTSTANDING:
            rule = f"it is a whole number from 1 to {_MOST_OUTSTANDING}"
            raise _wrong("outstandingBatches", value, rule)
        if value > 1 and (beside := self._without_batches()):
            raise _idle(f"outstandingBatches: {value}", beside)
        return value

    def _without_batches(self) -> str:
        """The key that leaves no batches which could follow each other; empty for none."""
        keys = ("asyncCommunication", "continuousBatching")
        return next((key for key in keys if self._parsed.get(key) is True), "")

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

    def tell_unread(self) -> None:
        """Tell of keys that were probably meant for the server; the others are the handler's."""
        for key in itertools.islice(self._parsed, _MOST_KEYS):
            if told := told_of_yaml(key):
                logger.warning("model-config.yaml: %s", told)

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
            logger.warning(
                "model-config.yaml: %s=%s is ignored, it takes %s.", key, shown(value), allowed
            )
            return None
        return value


def _wrong(key: str, value: object, rule: str) -> ArchiveRefused:
    return ArchiveRefused(f"model-config.yaml: {key}={shown(value)}: {rule}.")


def _idle(said: str, beside: str) -> ArchiveRefused:
    return ArchiveRefused(f"model-config.yaml: {said} has no meaning beside {beside}.")


_THRESHOLDS = {"growAfterSec": "grow_after", "shrinkAfterSec": "shrink_after"}


def _are_thresholds(value: object) -> bool:
    return isinstance(value, dict) and all(
        key in _THRESHOLDS and type(number) in (int, float) and 0 < number <= MAX_NUMBER
        for key, number in value.items()
    )


def _tell_idle(key: str, why: str) -> None:
    logger.warning("model-config.yaml: %s has no effect beside asyncCommunication: %s.", key, why)
