"""Metadata of the server and its models in the Open Inference Protocol, as JSON values.

Model repository, configuration and statistics are extensions of Triton:

* The repository is the model store. Loading a model registers ``NAME.mar``, ``NAME.tar.gz`` or the
  directory ``NAME``; unloading unregisters all its versions.
* Declared tensors have the shapes of one request, so ``max_batch_size`` is 0, as in Triton for
  shapes without a batch dimension. Where requests are cut into rows (``dynamicBatchSize``), that
  dimension is -1; if it is the first, ``max_batch_size`` is the largest batch.
* Statistics count the work of workers. The time of a batch is counted once; ``success`` has, per
  request, the average waiting and running time of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marserve.frontend.errors import BadRequest, ModelNotFound
from marserve.frontend.operations.management import ModelManagement
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.readiness import is_ready
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.version import __version__

Json = dict[str, Any]

NAME = "Torchserve"
_EXTENSIONS = (
    "kserve",  # TorchServe's
    "kubeflow",  # TorchServe's
    "binary_tensor_data",
    "model_repository",
    "model_configuration",
    "statistics",
    "parameters",
)
_SIDES = ("inputs", "outputs")
_ARCHIVES = (".mar", ".tar.gz", "")
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class OpenInferenceModels:
    """The operations of the protocol except inference; they raise `ServeError`."""

    registry: ModelRegistry
    management: ModelManagement | None = None  # None: nothing is loaded or unloaded
    workers: int = 1  # of a loaded model, unless its model-config.yaml sets them

    def server_metadata(self) -> Json:
        """Return the name, version and extensions of the server."""
        return {"name": NAME, "version": __version__, "extensions": list(_EXTENSIONS)}

    def metadata(self, name: str, version: str | None) -> Json:
        """Return the versions of a model, and the tensors that it declares."""
        model = self.registry.find(name, version)
        return {
            "name": name,
            "versions": [each.version for each in self.registry.versions(name)],
            "platform": "",  # as TorchServe answers over gRPC
            "inputs": _declared(model, "inputs"),
            "outputs": _declared(model, "outputs"),
        }

    def config(self, name: str, version: str | None) -> Json:
        """Return the configuration of a model in Triton's format."""
        model = self.registry.find(name, version)
        settings, batching = model.settings, model.settings.batching
        size = model.batcher.size if batching.is_automatic else batching.size
        group = {
            "name": f"{model.name}_0",
            "kind": "KIND_GPU" if model.device_type == "gpu" else "KIND_CPU",
            "count": len(model.workers),
            "gpus": list(settings.device_ids or ()),
        }
        document = {
            "name": model.name,
            "platform": "",
            "backend": "python",
            "version_policy": {"all": {}},
            "max_batch_size": size if _is_cut_at_first(model) else 0,
            "input": _configured(model, "inputs"),
            "output": _configured(model, "outputs"),
            "instance_group": [group],
            "parameters": {"batchSize": {"string_value": str(size)}},
        }
        if size > 1:
            delay = round(batching.delay * 1_000_000)
            document["dynamic_batching"] = {
                "preferred_batch_size": list(batching.compiled_sizes),
                "max_queue_delay_microseconds": delay,
            }
        return document

    def statistics(self, name: str = "", version: str | None = None) -> Json:
        """Return the statistics of a version, of all versions of a model, or of all models."""
        if not name:
            models: Sequence[ModelVersion] = list(self.registry)
        elif version is None:
            models = self.registry.versions(name)
        else:
            models = [self.registry.find(name, version)]
        return {"model_stats": [_statistics(model) for model in models]}

    def index(self, *, only_ready: bool = False) -> list[Json]:
        """Return the models that are registered, or could not be loaded at the start."""
        found = []
        for model in sorted(self.registry, key=lambda model: (model.name, model.version)):
            if model.origin.is_function:  # a part of a workflow
                continue
            ready = is_ready(self.registry, model)
            reason = "" if ready else "no worker is ready"
            state = "READY" if ready else "UNAVAILABLE"
            found.append(_entry(model.name, model.version, state, reason))
        found += [
            _entry(load.name, load.version, "UNAVAILABLE", load.reason)
            for load in self.registry.failed.listed()
        ]
        return [entry for entry in found if entry["state"] == "READY" or not only_ready]

    async def load(self, name: str, parameters: Json) -> None:
        """Register a model from the model store, unless it is registered."""
        management = self._management()
        management.check_model_api()
        if parameters:
            raise BadRequest(
                f"Parameter {next(iter(parameters))!r} is not supported: a model is loaded as it "
                "is in the model store."
            )
        if not name or "/" in name or "://" in name:
            raise BadRequest("A model is loaded by the name of its archive in the model store.")
        if any(model.name == name for model in self.registry):
            return
        for suffix in _ARCHIVES:
            registration = Parameters(
                {"url": name + suffix, "model_name": name, "initial_workers": self.workers}
            )
            try:
                await management.register(registration)
            except ModelNotFound:
                continue
            return
        raise ModelNotFound(f"Model not found in the model store: {name}")

    async def unload(self, name: str) -> None:
        """Unregister all versions of a model, the default one last."""
        management = self._management()
        management.check_model_api()
        default = self.registry.find(name)
        others = [model for model in self.registry.versions(name) if model is not default]
        for model in (*others, default):
            await management.unregister(name, model.version)

    def _management(self) -> ModelManagement:
        if self.management is None:
            raise BadRequest(
                "Models are loaded and unloaded at the management address, with its key."
            )
        return self.management


def _entry(name: str, version: str, state: str, reason: str) -> Json:
    return {"name": name, "version": version, "state": state, "reason": reason}


def _declared(model: ModelVersion, side: str) -> list[Json]:
    batching = model.settings.batching
    found = []
    for each in model.tensors.get(side, ()):
        shape = list(each["shape"])
        dim = batching.batch_dims[_SIDES.index(side)]
        if batching.splits_lists and not model.manifest.envelope and dim < len(shape):
            shape[dim] = -1
        found.append({"name": each["name"], "datatype": each["datatype"], "shape": shape})
    return found


def _configured(model: ModelVersion, side: str) -> list[Json]:
    leave_out = 1 if _is_cut_at_first(model) else 0
    return [
        {
            "name": tensor["name"],
            "data_type": f"TYPE_{tensor['datatype']}".replace("TYPE_BYTES", "TYPE_STRING"),
            "dims": tensor["shape"][leave_out:],
        }
        for tensor in _declared(model, side)
    ]


def _is_cut_at_first(model: ModelVersion) -> bool:
    """Return whether requests are cut along the first dimension; Triton supports only that one.

    Models in an envelope get their requests as they are.
    """
    batching = model.settings.batching
    is_cut = batching.splits_lists and not model.manifest.envelope
    return is_cut and batching.batch_dims == (0, 0)


def _statistics(model: ModelVersion) -> Json:
    totals = model.metrics.totals()
    ran, batches = totals.requests, totals.batches
    per_request = totals.took / batches if batches else 0.0
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.batcher.history.last_closed_ms,
        "inference_count": ran,
        "execution_count": batches,
        "inference_stats": {
            "success": _duration(ran, totals.waited + per_request * ran),
            "fail": _duration(totals.failed, 0.0),
            "queue": _duration(ran, totals.waited),
            "compute_input": _duration(0, 0.0),
            "compute_infer": _duration(batches, totals.took),
            "compute_output": _duration(0, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [],
    }


def _duration(count: int, seconds: float) -> Json:
    return {"count": count, "ns": round(seconds * _NANOSECONDS)}
