"""A client of the server's management interface: describes, registers and changes a model.

marserve and TorchServe have the same interface; only marserve can change the batching of a model
while it is served.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import quote, urlencode

from marserve.frontend.configuration.model_schema import REGISTERED
from marserve.frontend.configuration.setting_kinds import AUTOMATIC
from marserve.frontend.settings.layers import CHOSEN
from marserve.tools.bench.client import Answer, Client
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.metrics_page import metric_families

_NOT_FOUND = 404
_CHANGE_SECONDS = 600.0  # loading a model or starting workers may take minutes
_QUEUE = "jobQueueSize"
_ORIGINS = "decidedBy"
#: Members of a description by parameter of a registration.
_MEMBERS = {
    **{row.parameter: row.key for row in REGISTERED},
    "handler": "handler",
    "runtime": "runtime",
    "s3_sse_kms": "s3SseKms",
}
_UNAUTHORIZED = (401, 403)
#: TorchServe's for the default one of several versions, and ours for a catalog that is only read.
_NOT_ABOUT_KEYS = ("InvalidModelVersionException", "CatalogException")


@dataclass(frozen=True)
class ServedModel:
    """The description of a served model version.

    Attributes:
        version: Version of the model.
        archive: The URL that the model was registered with.
        settings: Settings in force by parameter of a registration or change, as texts.
        chosen: Those that registrations and changes have set; of TorchServe, all.
        scale: Numbers of workers by parameter of a change.
        ready_workers: Number of workers that can take requests.
        queue_size: Capacity of the queue, requests.
        is_live: Whether batching can be changed while the model is served.
        last_error: The last failure of a worker that is not ready; empty if unknown.
        obstacle: Why a registration cannot make this model, after its name; empty if it can.
        largest_batch: Maximum batch size, requests.
    """

    version: str
    archive: str
    settings: Mapping[str, str]
    chosen: Mapping[str, str]
    scale: Mapping[str, int]
    ready_workers: int
    queue_size: int
    is_live: bool
    last_error: str
    obstacle: str = ""
    largest_batch: int = 1

    @property
    def goal_ms(self) -> float | None:
        """The latency goal of the model, milliseconds; None without one."""
        return float(self.settings.get("max_latency_ms", 0)) or None

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> "ServedModel":
        """Parse one version of the answer to ``GET /models/{name}``."""
        workers, settings = described["workers"], _settings(described)
        return cls(
            version=described["modelVersion"],
            archive=described["modelUrl"],
            settings=settings,
            chosen=_chosen(described, settings),
            scale={
                "min_worker": described["minWorkers"],
                "max_worker": described["maxWorkers"],
            },
            ready_workers=sum(worker["status"] == "READY" for worker in workers),
            queue_size=_queue_size(described),
            is_live=_ORIGINS in described,
            last_error=next(
                (
                    worker["lastError"]
                    for worker in workers
                    if worker.get("lastError") and worker["status"] != "READY"
                ),
                "",
            ),
            obstacle=_obstacle(described),
            largest_batch=described["batchSize"],
        )


def _settings(described: Mapping[str, Any]) -> Mapping[str, str]:
    values = {name: described.get(key) for name, key in _MEMBERS.items()}
    if described.get("batching", {}).get("isAutomatic"):
        values["batch_size"] = AUTOMATIC
    return {name: _as_text(value) for name, value in values.items() if value is not None}


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _chosen(described: Mapping[str, Any], settings: Mapping[str, str]) -> Mapping[str, str]:
    if _ORIGINS not in described:  # TorchServe; its runtime is the archive's
        return {name: text for name, text in settings.items() if name != "runtime"}
    origins = described[_ORIGINS]
    return {name: text for name, text in settings.items() if origins.get(_MEMBERS[name]) in CHOSEN}


def _obstacle(described: Mapping[str, Any]) -> str:
    if workflow := described.get("workflow"):
        return f"is a node of the workflow {workflow}"
    for key, origin in described.get(_ORIGINS, {}).items():
        if origin in CHOSEN and key not in _MEMBERS.values():
            return f"has {key} from its {origin}"
    return ""


def _queue_size(described: Mapping[str, Any]) -> int:
    if described.get(_QUEUE) is not None:  # marserve
        return int(described[_QUEUE])
    queue = described.get("jobQueueStatus", {})
    return int(queue.get("remainingCapacity", 0)) + int(queue.get("pendingRequests", 0))


class ModelServer:
    """A server and one of its models.

    Args:
        inference: Client of the inference listener.
        management: Client of the management listener.
        metrics: Client of the metrics listener.
        model: Name of the model.
        version: Version of the model; empty for the default version.

    Attributes:
        warnings: Those in the answers to changes, each once.
    """

    def __init__(
        self, inference: Client, management: Client, metrics: Client, model: str, version: str
    ) -> None:
        self._inference = inference
        self._management = management
        self._metrics = metrics
        self.model = model
        self._version = version
        self.warnings: dict[str, None] = {}

    def identity(self) -> str:
        """Return name and version of the server, as far as known.

        Raises:
            ServerUnreachable: The inference listener does not answer.
        """
        answer = self._inference.ask("OPTIONS", "/")
        document = answer.json()
        info = document.get("info") if isinstance(document, dict) else None
        if not isinstance(info, dict):
            return answer.headers.get("server", "an unknown server")
        name = str(info.get("title", "")).removesuffix(" APIs")
        return f"{name} {info.get('version', '')}".strip()

    def describe(self) -> ServedModel:
        """Return the description of the model.

        Raises:
            BenchError: The model is not served, or the server does not describe it.
        """
        if (found := self.find()) is None:
            raise BenchError(f"There is no model {self._name}. {self._served()}".strip())
        return found

    def find(self) -> ServedModel | None:
        """Return the description of the model; None if it is not served.

        Raises:
            BenchError: The server does not describe the model.
        """
        answer = self._management.ask("GET", self._path())
        if answer.status == _NOT_FOUND:
            return None
        try:
            (described,) = self._checked(answer, "describe the model").json()
            return ServedModel.from_description(described)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
            raise BenchError(
                f"The server at {self._management.destination.url} does not have TorchServe's "
                "management interface."
            ) from None

    def handler_metadata(self) -> Mapping[str, Any]:
        """Return the handler's description of the model; empty if the handler has none.

        Raises:
            ServerUnreachable: The management listener does not answer.
        """
        answer = self._management.ask("GET", f"{self._path()}?customized=true")
        try:
            metadata = answer.json()[0]["customizedMetadata"]
        except (TypeError, LookupError):
            return {}
        return metadata if isinstance(metadata, dict) else {}

    @property
    def _name(self) -> str:
        return f"{self.model} {self._version}".rstrip()

    def describe_if_possible(self) -> ServedModel | None:
        """Return the description of the model; None if the management listener does not answer.

        Raises:
            BenchError: The listener answers with an error.
        """
        try:
            return self.describe()
        except ServerUnreachable:
            return None

    def change(self, **parameters: str | int) -> None:
        """Change workers or batching.

        Raises:
            BenchError: The server refuses.
        """
        changes = ", ".join(f"{name}={value}" for name, value in parameters.items())
        # synchronous: the server answers when scaling is finished.
        path = f"{self._path()}?{urlencode({**parameters, 'synchronous': 'true'})}"
        self._change("PUT", path, f"set {changes}")

    def register(self, url: str, **parameters: str | int) -> None:
        """Register the model, and wait for its workers.

        Raises:
            BenchError: The server refuses, or the model does not load.
        """
        query = {"url": url, "model_name": self.model, "synchronous": "true", **parameters}
        self._change("POST", f"/models?{urlencode(query)}", f"register {url}")

    def unregister(self, version: str) -> None:
        """Unregister a version of the model.

        Raises:
            BenchError: The server refuses.
        """
        path = f"/models/{quote(self.model)}/{version}"
        self._change("DELETE", path, f"unregister {self.model}")

    def past_batches(self) -> list[dict[str, int]] | None:
        """Return the last batches of the model, the newest last; None if the server keeps none.

        Raises:
            ServerUnreachable: The management listener does not answer.
        """
        answer = self._management.ask("GET", f"{self._path()}/batches")
        document = answer.json()
        found = document.get("batches") if isinstance(document, dict) else None
        return found if answer.is_success and isinstance(found, list) else None

    def batches(self) -> tuple[float, float] | None:
        """Return the numbers of batched requests and of batches; None without such a metric."""
        totals = dict.fromkeys(("marserve_batch_size_sum", "marserve_batch_size_count"), 0.0)
        query = "&".join(f"name[]={name}" for name in totals)
        try:
            answer = self._metrics.ask("GET", f"/metrics?{query}")
        except ServerUnreachable:
            return None
        if not answer.is_success:
            return None
        for sample in chain.from_iterable(each.samples for each in metric_families(answer.text)):
            if sample.name in totals and self._is_ours(sample.labels):
                totals[sample.name] += sample.value
        requests, batches = totals.values()
        return (requests, batches) if batches else None

    def _is_ours(self, labels: Mapping[str, str]) -> bool:
        version = labels.get("model_version")
        return labels.get("model_name") == self.model and self._version in ("", version)

    def _path(self) -> str:
        version = f"/{quote(self._version)}" if self._version else ""
        return f"/models/{quote(self.model)}{version}"

    def _served(self) -> str:
        document = self._management.ask("GET", "/models").json()
        models = document.get("models") if isinstance(document, dict) else None
        if not isinstance(models, list):
            return ""
        names = ", ".join(str(model.get("modelName")) for model in models)
        return f"It serves: {names}." if names else "It serves no models."

    def _change(self, method: str, path: str, what: str) -> None:
        answer = self._management.ask(method, path, timeout=_CHANGE_SECONDS)
        document = self._checked(answer, what).json()
        warnings = document.get("warnings") if isinstance(document, dict) else None
        if isinstance(warnings, list):
            self.warnings |= dict.fromkeys(map(str, warnings))

    def _checked(self, answer: Answer, what: str) -> Answer:
        if answer.is_success:
            return answer
        raise BenchError(f"The server does not {what}: {explained(answer, '--management-token')}")


def explained(answer: Answer, token_option: str) -> str:
    """Return status and message of an error, with advice if it is about authorization."""
    reply = f"{answer.status} {answer.sentence}".rstrip(". ")
    document = answer.json()
    kind = document.get("type") if isinstance(document, dict) else ""
    is_unauthorized = answer.status in _UNAUTHORIZED and kind not in _NOT_ABOUT_KEYS
    if "token" in answer.sentence.lower() or is_unauthorized:
        return f"{reply}. Give it a key with {token_option} or --key-file."
    return f"{reply}."
