# ruff: noqa: RUF009  _key() and the like are dataclasses.field() with our metadata
"""The keys of the properties file: one frozen `Config` with a field and a `Setting` for each key.

Times are float seconds, sizes are bytes; only ``token_expiration_min`` is in minutes. `loading`
resolves files, environment and flags.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from marserve.backend.json_text import JSON_NAN, KEEP
from marserve.frontend.configuration import values
from marserve.frontend.configuration.addresses import (
    HOST,
    KEYSTORE_TYPE,
    PORT,
    Address,
    TlsFiles,
    UnixAddress,
    listener_address,
)
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import (
    BATCH_POLICIES,
    MAX_WORKERS,
    THREADS,
    WAIT_POLICIES,
)
from marserve.frontend.configuration.models_key import MODELS, ModelMembers
from marserve.frontend.configuration.platforms.platform import ChosenPlatform
from marserve.frontend.configuration.saved_models import SAVED_MODELS
from marserve.frontend.configuration.setting import Setting, rows_of
from marserve.frontend.configuration.setting_kinds import FLAG, TEXT, Kind, whole, word

#: The option of a Java virtual machine for the configuration of log4j.
LOG4J_FILE = re.compile(r"-Dlog4j2?\.configuration(?:File)?=(?:file:(?://)?)?(/?[^:]+)")
# "auto" in any case.
_THREADS = replace(THREADS, parse=lambda text: THREADS.parse(text.lower()))


def _key(kind: Kind, default: str | None = None, instead: str | None = None) -> Any:
    """Return the field of a key; an empty text is None if it has no default."""
    row = {"kind": kind, "default": default, "instead": instead}
    return field(
        default_factory=lambda: None if default is None else kind.from_text(default),
        metadata={"row": row},
    )


def _flag(default: str, other_true: str = "true") -> Any:
    """Return a switch of TorchServe, where every text but "true" is false."""
    kind = replace(FLAG, parse=lambda text: text == other_true or FLAG.parse(text))
    return _key(kind, default, instead="false")


def _words(*words: str, default: str | None = None, instead: str | None = None) -> Any:
    return _key(word(*words, any_case=True), default, instead)


def _whole(minimum: int, default: str | None = None, maximum: int = 10**18 - 1) -> Any:
    return _key(whole(minimum, maximum), default)


@dataclass(frozen=True)
class Debugged:
    """The model whose handler is debugged, and the handler that replaces its own, if any."""

    model: str
    handler: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a server. Each field is a key of the properties file."""

    # Listeners
    inference_address: Address | UnixAddress = _key(
        listener_address(80, 443), "http://127.0.0.1:8080"
    )
    management_address: Address | UnixAddress = _key(
        listener_address(8081, 8444), "http://127.0.0.1:8081"
    )
    metrics_address: Address | UnixAddress = _key(
        listener_address(8082, 8445), "http://127.0.0.1:8082"
    )
    enable_metrics_api: bool = _flag("true")
    keystore: Path | None = _key(values.ABSOLUTE_PATH)
    keystore_pass: str = _key(TEXT, "changeit")
    keystore_type: str = _key(KEYSTORE_TYPE, "PKCS12", instead="PKCS12")
    private_key_file: Path | None = _key(values.ABSOLUTE_PATH)
    certificate_file: Path | None = _key(values.ABSOLUTE_PATH)
    request_head_timeout: float = _key(values.POSITIVE, "60")
    request_body_timeout: float = _key(values.POSITIVE, "60")
    request_body_rate: int = _whole(0, "1000")  # bytes per second; 0: any
    response_write_timeout: float = _key(values.POSITIVE, "60")
    response_write_rate: int = _whole(0, "1000")  # bytes per second; 0: any
    max_connections: int = _whole(0, "0")  # of a listener; 0: as many as there are descriptors
    max_client_connections: int = _whole(0, "0")  # of a listener; 0: any number
    max_bytes_in_flight: int = _whole(0, "0")  # of a listener; 0: a quarter of memory
    max_client_bytes_in_flight: int = _whole(0, "0")  # 0: half of the above
    max_request_size: int = _whole(1, "6553500")
    max_response_size: int = _whole(1, "6553500")
    max_form_parts: int = _whole(1, "1000")
    max_part_header_size: int = _whole(1, "8192")
    max_stream_backlog: int = _whole(0, "67108864")  # 0: no limit
    cors_allowed_origin: str | None = _key(TEXT)
    cors_allowed_methods: str | None = _key(TEXT)
    cors_allowed_headers: str | None = _key(TEXT)
    ts_open_inference_protocol: bool = _flag("false", "oip")  # as in the environment variable
    # The headers with the sequence of a request to a stateful model, its start and its end
    ts_header_key_sequence_id: str = _key(values.HEADER_NAME, "ts_request_sequence_id")
    ts_header_key_sequence_start: str = _key(values.HEADER_NAME, "ts_request_sequence_start")
    ts_header_key_sequence_end: str = _key(values.HEADER_NAME, "ts_request_sequence_end")

    # gRPC
    enable_grpc: bool = _key(FLAG, "true")
    grpc_inference_address: str = _key(HOST, "127.0.0.1")
    grpc_inference_port: int = _key(PORT, "7070")
    grpc_management_address: str = _key(HOST, "127.0.0.1")
    grpc_management_port: int = _key(PORT, "7071")
    grpc_inference_max_connection_age_ms: int = _whole(0, "0")  # 0: no limit
    grpc_inference_max_connection_age_grace_ms: int = _whole(0, "0")  # 0: no limit
    grpc_management_max_connection_age_ms: int = _whole(0, "0")  # 0: no limit
    grpc_management_max_connection_age_grace_ms: int = _whole(0, "0")  # 0: no limit
    enable_grpc_ssl: bool = _flag("false")
    grpc_max_calls: int = _whole(1, "10000")  # at once, of a listener
    grpc_keepalive_time: float = _key(values.POSITIVE, "60")
    grpc_keepalive_timeout: float = _key(values.POSITIVE, "20")
    grpc_compression: str = _words("none", "deflate", "gzip", default="none")
    grpc_handler_status: bool = _key(FLAG, "false")

    # Access; None if not set, see `model_api` and `token_authorization`
    enable_model_api: bool | None = _key(FLAG, instead="false")
    disable_token_authorization: bool | None = _key(FLAG, instead="false")
    token_expiration_min: float = _key(values.POSITIVE, "60", instead="60")  # minutes
    # None: the server generates keys
    token_directory: Path | None = _key(values.ABSOLUTE_PATH)

    # Models
    model_store: Path = field(metadata={"row": {"kind": values.ABSOLUTE_PATH}})
    workflow_store: Path | None = _key(values.ABSOLUTE_PATH)  # None: the model store
    load_models: tuple[str, ...] = _key(values.MODELS_TO_LOAD, "")
    models: ModelMembers = _key(MODELS, "{}", instead="{}")
    model_snapshot: tuple[ModelEntry, ...] | None = _key(SAVED_MODELS)
    model_catalog: str | None = _key(values.PATH_OR_URL)
    model_catalog_mode: str | None = _words("read-only", "read-write")
    model_catalog_interval: float = _key(values.POSITIVE, "5")
    model_catalog_timeout: float = _key(values.POSITIVE, "10")
    snapshots_kept: int = _whole(0, "100")  # of each kind; 0: no snapshots
    allowed_urls: tuple[re.Pattern[str], ...] = _key(values.URL_PATTERNS, "file://.*|http(s)?://.*")
    max_archive_size: int = _whole(0, "0")  # 0: the free space of the disk
    max_downloads: int = _whole(1, "10")  # at once
    download_timeout: float = _key(values.POSITIVE, "21600")
    max_unpacking: int = _whole(1, "8")  # processes that unpack archives, at once
    unpack_timeout: float = _key(values.POSITIVE, "3600")
    default_service_handler: str | None = _key(TEXT)
    service_envelope: str | None = _key(values.IDENTIFIER, instead="")
    decode_input_request: bool = _flag("true")
    json_nan: str = _words(*JSON_NAN, default=KEEP)
    limit_max_image_pixels: bool = _flag("true")
    install_py_dep_per_model: bool = _flag("false")
    dependency_cache: Path | None = _key(values.ABSOLUTE_PATH)  # None: the user's cache

    # Workers
    default_workers_per_model: int = _whole(0, "0", MAX_WORKERS)
    job_queue_size: int = _whole(1, "100")
    max_workflow_runs: int = _whole(0, "0")  # of a workflow; 0: its shortest job queue
    default_batch_policy: str = _words(*BATCH_POLICIES, default=BATCH_POLICIES[0])
    default_response_timeout: float = _key(values.POSITIVE, "120")
    default_startup_timeout: float = _key(values.POSITIVE, "120")
    unregister_model_timeout: float = _key(values.POSITIVE, "120")
    min_free_memory_percent: int = _whole(0, "0", 99)  # 0: loads are not checked
    lame_duck_seconds: float = _key(values.NOT_NEGATIVE, "0")
    drain_timeout: float = _key(values.NOT_NEGATIVE, "30")
    stop_grace: float = _key(values.POSITIVE, "20")
    autoscale_workers: bool = _key(FLAG, "false")
    number_of_gpu: int | None = _whole(0)  # None: all that are found
    initial_worker_port: int = _whole(1, "9000")
    initial_distribution_port: int = _whole(1, "29500")
    python: Path | None = _key(values.PROGRAM, instead="")  # None: the server's
    worker_start_method: str = _words("forkserver", "spawn", default="forkserver")
    preload_modules: tuple[str, ...] = _key(values.MODULES, "torch,torchvision")
    torch_threads: int = _key(_THREADS, "auto")
    torch_wait_policy: str = _words(*WAIT_POLICIES, default=WAIT_POLICIES[0])
    blacklist_env_vars: re.Pattern[str] | None = _key(values.PATTERN)
    cpu_launcher_enable: bool = _flag("false")
    cpu_launcher_args: str | None = _key(TEXT)
    ipex_enable: bool = _flag("false")
    ipex_gpu_enable: bool = _flag("false")

    # Metrics
    metrics_mode: str = _words("log", "prometheus", "legacy", default="log", instead="log")
    metrics_config: Path | None = _key(values.ABSOLUTE_PATH)
    model_metrics_auto_detect: bool = _flag("false")
    disable_system_metrics: bool = _flag("false")
    system_metrics_cmd: tuple[str, ...] = _key(values.ARGUMENTS, "", instead="")
    metric_time_interval: float = _key(values.POSITIVE, "60")

    # Logs
    log_config: Path | None = _key(values.ABSOLUTE_PATH)
    vmargs: tuple[str, ...] = _key(values.ARGUMENTS, "", instead="")
    log_format: str = _words("text", "json", default="text")
    async_logging: bool = _flag("false")

    # Traces; None: as the variables of OpenTelemetry say
    otel_endpoint: str | None = _key(TEXT)
    trace_sample_ratio: float | None = _key(values.SHARE)

    # Sources of values
    enable_envvars_config: bool = _flag("false")
    use_env_allowed_urls: bool = _flag("false")

    # Not keys of a file
    texts: Mapping[str, str] = field(default_factory=dict)  # those that were set, for snapshots
    debugged: Debugged | None = None  # only by the command line
    notes: tuple[str, ...] = ()  # sentences for the operator at start
    warnings: tuple[str, ...] = ()
    is_snapshot_found: bool = False  # whether the file is a snapshot that was not named
    platform: ChosenPlatform = field(default_factory=ChosenPlatform)

    @property
    def listeners(self) -> tuple[Address | UnixAddress, ...]:
        """The addresses of the HTTP listeners."""
        metrics = (self.metrics_address,) if self.enable_metrics_api else ()
        platforms = self.platform.setup.inference
        return (self.inference_address, self.management_address, *metrics, *platforms)

    @property
    def grpc_listeners(self) -> tuple[Address, ...]:
        """The addresses of the gRPC listeners, inference first, if grpc is installed."""
        scheme = "grpcs" if self.enable_grpc_ssl else "grpc"
        inference = Address(self.grpc_inference_address, self.grpc_inference_port, scheme)
        management = Address(self.grpc_management_address, self.grpc_management_port, scheme)
        return (inference, management) if self.enable_grpc else ()

    @property
    def metrics_addresses(self) -> tuple[Address | UnixAddress, ...]:
        """The addresses of /metrics: also the one that inference and management share."""
        if self.inference_address != self.management_address:
            return (self.metrics_address,)
        return tuple(dict.fromkeys((self.inference_address, self.metrics_address)))

    @property
    def has_https(self) -> bool:
        """Whether any HTTP listener uses TLS."""
        return any(each.scheme == "https" for each in self.listeners if isinstance(each, Address))

    @property
    def has_tls(self) -> bool:
        """Whether any listener, gRPC included, uses TLS."""
        return self.has_https or (self.enable_grpc and self.enable_grpc_ssl)

    @property
    def tls_files(self) -> TlsFiles:
        """The files with the identity of listeners with TLS."""
        return TlsFiles(
            self.keystore, self.keystore_pass, self.private_key_file, self.certificate_file
        )

    @property
    def is_private(self) -> bool:
        """Whether no other machine can reach any listener."""
        on_platform = self.platform.setup.grpc_inference
        listeners = (*self.listeners, *self.grpc_listeners, *on_platform)
        return all(address.is_private for address in listeners)

    @property
    def token_authorization(self) -> bool:
        """Whether requests need a key: as set, else if keys are given or other machines connect."""
        if self.disable_token_authorization is None:
            return self.token_directory is not None or not self.is_private
        return not self.disable_token_authorization

    @property
    def local_management(self) -> bool:
        """Whether programs on this machine may manage without a key, the default."""
        return not self.token_authorization and self.disable_token_authorization is None

    @property
    def workflows_directory(self) -> Path:
        """The directory with the archives of workflows."""
        return self.workflow_store or self.model_store

    @property
    def stop_seconds(self) -> float:
        """Seconds that a stop may take before the server is killed."""
        return self.lame_duck_seconds + self.drain_timeout + self.stop_grace

    @property
    def log_settings(self) -> Path | None:
        """The file that configures the logs: ``log_config``, else log4j's in ``vmargs``."""
        if self.log_config is not None:
            return self.log_config
        named = [found for found in map(LOG4J_FILE.fullmatch, self.vmargs) if found]
        return Path(unquote(named[-1][1])).absolute() if named else None

    @property
    def java_properties(self) -> dict[str, str]:
        """The values of ``-Dname=value`` in ``vmargs``."""
        options = (option[2:].partition("=") for option in self.vmargs if option.startswith("-D"))
        return {name: value for name, _, value in options}

    @property
    def model_api(self) -> bool:
        """Whether models may be registered by requests: as set, else if the server `is_private`."""
        return self.is_private if self.enable_model_api is None else self.enable_model_api


#: All keys by name, in the order of the `Config` fields.
KEYS: Mapping[str, Setting] = {row.key: row for row in rows_of(Config)}
