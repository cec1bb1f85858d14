"""The schema of a model's settings: one field with one row for each setting.

All sources and documents read these rows, and `settings` resolves them. A new setting is a field
here, and its use.

msgspec and pydantic would need a validator for every kind, because their messages for wrong values
differ from those of TorchServe.
"""

# ruff: noqa: RUF009  setting() is dataclasses.field() with our metadata

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from marserve.frontend.configuration.other_servers import ForeignValues, check_foreign
from marserve.frontend.configuration.setting import (
    Fields,
    Names,
    OnWrong,
    Setting,
    read_settings,
    refuse_value,
    rows_of,
    setting,
)
from marserve.frontend.configuration.setting_kinds import (
    ABOVE_0,
    AUTOMATIC,
    CHECK,
    DIMENSIONS,
    FILES,
    FLAG,
    MAPPING,
    SIZES,
    TENSORS,
    TEXT,
    Kind,
    automatic_or,
    flag_or,
    gpu_numbers,
    milliseconds,
    numbers_of,
    positive_numbers,
    whole,
    word,
)

#: How requests become batches; the first is TorchServe's.
BATCH_POLICIES = FIXED, GREEDY, ADAPTIVE, FIXED_OR_SINGLE = (
    "fixed",
    "greedy",
    "adaptive",
    "fixed_or_single",
)
#: Which jobs share batches: in order, by length, or by length where that is faster.
BUCKETS = UNSORTED, BY_LENGTH, BY_LENGTH_IF_WORTH = ("none", "length", AUTOMATIC)
#: The values of ``parallelType``.
PARALLEL_TYPES = ("none", "pp", "tp", "pptp", "custom")
#: The maximum number of workers of a model; more would be a typing error.
MAX_WORKERS = 1000
_MAX_THREADS = 1024  # of torch; each needs memory
#: How the threads of torch wait for each other (`workers.launchers.openmp`).
WAIT_POLICIES = (AUTOMATIC, "active", "passive")
# More than keeps a device busy, and few enough to run again when a worker dies.
_MAX_OUTSTANDING = 10_000
#: The value of ``openai`` for models that OpenAI's API does not list.
NO_OPENAI = "none"
#: The priorities of requests, the first is the highest.
PRIORITIES = ("high", "normal", "low")

# The sources that may set a setting, the strongest first.
_BATCHING = ("request", "yaml", "models", "server")
_REGISTERED = ("request", "yaml", "models")
_TIMEOUT = ("yaml", "models", "request", "server")
_ARCHIVE = ("yaml", "models")
# A setting whose wrong value refuses the archive.
_strict = partial(setting, is_strict=True)
#: The number of torch's threads; 0 means that it is measured.
THREADS = replace(
    automatic_or(whole(1, _MAX_THREADS)),
    read=lambda value: 0 if value == AUTOMATIC else value,
    write=lambda threads: threads or AUTOMATIC,
)


def _live(key: str, kind: Kind, default: Any, text: str, **more: Any) -> Any:
    return _strict(key, kind, default, text, _BATCHING, is_live=True, **more)


def _archive(key: str, kind: Kind, default: Any, text: str) -> Any:
    return _strict(key, kind, default, text, _ARCHIVE)


def _workers(key: str, kind: Kind, parameter: str, text: str) -> Any:
    return setting(key, kind, 0, text, _ARCHIVE, name="workers", parameter=parameter)


def _timeout(key: str, server: str, text: str) -> Any:
    more: dict[str, Any] = {"as_configured": (-1,), "server": server}
    return setting(key, whole(1), 120.0, text, _TIMEOUT, **more)


def _spread_size(value: Any) -> Fields:
    return {"is_automatic": True} if value == AUTOMATIC else {"size": value, "is_automatic": False}


@dataclass(frozen=True, kw_only=True)
class BatchingValues(ForeignValues):
    """How the requests of a model version become batches. Times in seconds; 0 for none."""

    #: The maximum that is tried, if it is automatic (``batch_size=auto``).
    size: int = _live(
        "batchSize",
        automatic_or(whole(1)),
        1,
        "Requests predicted together; `auto` finds it by measuring.",
        other_key="maxBatchSize",
        as_configured=(-1,),
        is_strict=False,
        spread=_spread_size,
    )
    is_automatic: bool = False
    #: The window of the fixed policies, and the longest hold of the adaptive one.
    delay: float = _live(
        "maxBatchDelay",
        milliseconds(whole(0)),
        0.1,
        "Milliseconds a batch waits to be filled; 0: it takes only what is queued.",
        as_configured=(-1, -100),
        is_strict=False,
    )
    policy: str = _live(
        "batchPolicy",
        word(*BATCH_POLICIES),
        BATCH_POLICIES[0],
        "How requests become batches.",
        server="default_batch_policy",
    )
    max_latency: float = _live(
        "maxLatencyMs",
        milliseconds(whole(0)),
        0.0,
        "The latency goal; 0: none. Makes the policy adaptive.",
    )
    num_requests: int = _live(
        "numRequests", whole(0), 0, "Requests that the clients keep in flight; 0: unknown."
    )
    compiled_sizes: tuple[int, ...] = _live(
        "compiledBatchSizes", SIZES, (), "Sizes the model runs, rising, as `1,4,8`; empty: any."
    )
    queue_size: int = _live(
        "jobQueueSize",
        whole(1),
        100,
        "Places to wait.",
        is_strict=False,
        server="job_queue_size",
        spread=lambda value: {"queue_size": value, "is_queue_bounded": True},
    )
    #: Whether `queue_size` was chosen; else only the adaptive policy's refusals limit the queue of
    #: a model with a latency goal.
    is_queue_bounded: bool = True
    #: `auto` is the default of the adaptive policy.
    bucket_by: str = _live(
        "batchBucketBy",
        word(*BUCKETS),
        UNSORTED,
        "Whether requests of alike lengths share batches; `auto`: where costs depend on it.",
    )
    #: By position in `PRIORITIES`.
    capacities: Mapping[Any, int] = _archive(
        "priorityQueueSizes", numbers_of(*PRIORITIES), {}, "Places to wait, of single priorities."
    )
    isolates: bool = _archive(
        "isolateFailures",
        FLAG,
        True,
        "Whether a batch that fails is split to find who is to blame.",
    )
    retries: bool = _archive(
        "retryOnWorkerDeath", FLAG, True, "Whether requests whose worker died are run once more."
    )
    splits_lists: bool = _live(
        "dynamicBatchSize",
        FLAG,
        False,
        "Whether each item of a client's list, or row of its tensors, is a request.",
    )
    batch_dims: tuple[int, int] = _archive(
        "batchDim",
        DIMENSIONS,
        (0, 0),
        "Dimension of tensors that has the rows, of inputs and outputs.",
    )


@dataclass(frozen=True)
class Autoscaling:
    """When a model gets a worker more or less, between minimum and maximum; in seconds."""

    grow_after: float = 1.0  # one more, if a request waits longer while all workers are busy
    shrink_after: float = 60.0  # one less, if it was not needed for this time


_THRESHOLDS = {"growAfterSec": "grow_after", "shrinkAfterSec": "shrink_after"}


def _autoscaling(value: Any) -> Autoscaling | None:
    if isinstance(value, dict):
        return Autoscaling(**{_THRESHOLDS[key]: float(value[key]) for key in value})
    return Autoscaling() if value else None


_BACKEND = replace(TEXT, read=lambda text: text or "c10d")


@dataclass(frozen=True)
class TorchRun:
    """The ``torchrun`` map of model-config.yaml; torchrun decides what is None or empty."""

    nnodes: int = setting("nnodes", whole(1), 1, "Machines.")
    processes: int = setting("nproc-per-node", whole(1), 1, "Processes of a worker.")
    rdzv_backend: str = setting(
        "rdzv-backend", _BACKEND, "c10d", "How the processes find each other."
    )
    rdzv_endpoint: str = setting("rdzv-endpoint", TEXT, "", "Where the processes find each other.")
    rdzv_conf: str = setting("rdzv-conf", TEXT, "", "Options of the rendezvous.")
    monitor_interval: int | None = setting(
        "monitor-interval", whole(1), None, "Seconds between two checks of the processes."
    )
    node_rank: int | None = setting("node-rank", whole(0), None, "Number of this machine.")
    omp_threads: int = setting("OMP_NUMBER_THREADS", whole(1), 1, "Threads of each process.")


@dataclass(frozen=True, kw_only=True)
class ModelValues:
    """All other settings of a model version; times in seconds."""

    min_workers: int = _workers(
        "minWorkers", whole(1, MAX_WORKERS), "min_worker", "Workers that are kept running."
    )
    max_workers: int = _workers(
        "maxWorkers", whole(0), "max_worker", "Workers there may be at most."
    )
    response_timeout: float = _timeout(
        "responseTimeout", "default_response_timeout", "Seconds a worker may take for a batch."
    )
    startup_timeout: float = _timeout(
        "startupTimeout", "default_startup_timeout", "Seconds a worker may take to load the model."
    )
    max_retry_timeout: float = setting(
        "maxRetryTimeoutInSec",
        whole(0),
        300.0,
        "Seconds during which a failing worker is started again.",
        name="max_retry_timeout",
    )
    client_timeout: float = setting(
        "clientTimeoutInMills",
        milliseconds(whole(0)),
        0.0,
        "Milliseconds after which a request expires; 0: never.",
        name="client_timeout",
    )
    parallel_type: str = setting(
        "parallelType", word(*PARALLEL_TYPES, any_case=True), "", "How one worker spans devices."
    )
    parallel_level: int = setting(
        "parallelLevel", whole(0), 0, "Devices or processes that make up one worker."
    )
    torchrun: TorchRun | None = setting(
        "torchrun", MAPPING, None, "How the processes of a worker are started."
    )
    use_gpu: bool = setting(
        "deviceType",
        word("cpu", "gpu", rule="cpu or gpu", any_case=True),
        True,
        "What the model runs on: cpu or gpu.",
        spread=lambda value: {"use_gpu": value == "gpu"},
    )
    device_ids: tuple[int, ...] | None = setting(  # None: all
        "deviceIds", gpu_numbers(MAX_WORKERS), None, "GPUs it is bound to."
    )
    continuous_batching: bool = setting(
        "continuousBatching", FLAG, False, "Whether requests join a running batch."
    )
    use_job_ticket: bool = setting(
        "useJobTicket", FLAG, False, "Whether requests are refused when no worker is idle."
    )
    use_venv: bool = setting(
        "useVenv", FLAG, False, "Whether workers run in a separate environment."
    )
    asynchronous: bool = setting(
        "asyncCommunication", FLAG, False, "Whether each request goes to the handler alone."
    )
    stateful: bool = _strict(
        "sequenceBatching",
        FLAG,
        False,
        "Whether the requests of a sequence go to the same worker, in order.",
    )
    sequence_max_idle: float = setting(
        "sequenceMaxIdleMSec",
        milliseconds(whole(0)),
        0.0,
        "Milliseconds after which a sequence without requests ends; sequenceBatching needs it.",
    )
    sequence_timeout: float = setting(
        "sequenceTimeoutMSec",
        milliseconds(whole(0)),
        0.0,
        "Milliseconds that a sequence may take in all; 0: any.",
    )
    max_sequences: int = setting(
        "maxNumSequence",
        whole(1),
        1,
        "Sequences there may be at a time; at least as many as the workers' batches hold.",
    )
    max_sequence_queue: int = setting(
        "maxSequenceJobQueueSize",
        whole(1),
        1,
        "Requests of one sequence that may wait, in addition to the running one.",
    )
    autoscale: Autoscaling | None = setting(  # None: never, as in TorchServe
        "autoscale",
        flag_or(
            positive_numbers(_THRESHOLDS),
            "true, false, or growAfterSec and shrinkAfterSec as numbers above 0",
            _autoscaling,
        ),
        None,
        "Whether its workers vary with its queue, and how fast.",
    )
    sample_inputs: tuple[str, ...] = _strict(  # empty: the handler is asked for samples
        "sampleInput",
        FILES,
        (),
        "File of the archive that batches are made of to see what they cost; several are compared.",
    )
    validation: str = _strict(  # empty: none; auto: if the server chooses the batch size
        "validateBatching",
        CHECK,
        AUTOMATIC,
        "Whether batches of samples are compared with single ones before the model is served; "
        "auto: where the server chooses the batch size, which stays 1 after a difference.",
        _REGISTERED,
    )
    validation_tolerance: float | None = _strict(  # None: the usual tolerance of the precision
        "validateBatchingTolerance",
        ABOVE_0,
        None,
        "The difference of numbers that this comparison allows.",
        _REGISTERED,
    )
    overlap_stages: bool = _strict(
        "overlapStages",
        flag_or(
            word(AUTOMATIC),
            f"true, false or {AUTOMATIC}",
            lambda value: value is True,  # automatic is off: the gain was rarely measurable
        ),
        False,
        "Whether the stages of successive batches overlap in a worker.",
    )
    tensors: Mapping[str, Any] = _strict(
        "openInference",
        TENSORS,
        {},
        "The input and output tensors of the handler, for the metadata of clients.",
    )
    openai: str = _archive(  # server is the default of the handler vllm_handler
        "openai",
        word("server", "embeddings", "rerank", NO_OPENAI),
        NO_OPENAI,
        "What the handler offers of OpenAI's API: an engine's server, embeddings or rerank.",
    )
    stack_inputs: str = _strict(  # empty: a list with a dict for each row
        "stackInputs",
        flag_or(
            word("numpy", "torch"),
            "true, false, numpy or torch",
            lambda value: {True: "numpy", False: ""}.get(value, value),
        ),
        "",
        "Whether the handler gets arrays of all rows of a batch, and of which library.",
    )
    outstanding_batches: int | None = _strict(  # None: the number that a worker can use
        "outstandingBatches",
        whole(1, _MAX_OUTSTANDING),
        None,
        "Maximum number of batches, or with asyncCommunication requests, of a worker at a time.",
        _REGISTERED,
    )
    torch_threads: int = _strict(  # 0: the worker's share of the cores, or fewer if that is as fast
        "torchThreads",
        THREADS,
        0,
        "Threads that torch computes with in a worker; `auto`: its share of the cores.",
        _BATCHING,
        server="torch_threads",
    )
    torch_wait_policy: str = _strict(
        "torchWaitPolicy",
        word(*WAIT_POLICIES),
        AUTOMATIC,
        "How threads of torch wait for each other: `active` keeps their cores busy.",
        _BATCHING,
        server="torch_wait_policy",
    )


BATCHING = rows_of(BatchingValues)
SETTINGS = (*BATCHING, *rows_of(ModelValues))
#: The settings of changes of a served model.
LIVE = tuple(row for row in SETTINGS if row.is_live)
#: The settings of requests to register a model.
REGISTERED = tuple(row for row in SETTINGS if "request" in row.sources)
#: The rows by their names in yaml and JSON.
BY_KEY: Mapping[str, Setting] = {key: row for row in SETTINGS for key in row.keys}
#: The rows by all spellings; the usual ones are last.
BY_SPELLING: Mapping[str, Setting] = {
    **{name: row for row in BY_KEY.values() for name in row.spellings if name not in row.keys},
    **BY_KEY,
}


def read_consistent(
    rows: Iterable[Setting],
    values: Mapping[str, Any],
    on_wrong: OnWrong = refuse_value,
    names: Names = lambda row: row.spellings,
) -> Fields:
    """Return the settings of one source (`read_settings`).

    Raises:
        ValueError: A value is wrong, or a foreign setting excludes one of ours.
    """
    found = read_settings(rows, values, on_wrong, names)
    check_foreign(found)
    return found
