"""SageMaker's endpoints, for one model or for many, with Amazon's toolkit or without it.

The toolkit writes a configuration file, starts ``torchserve``, and finds the server among all
processes by the name of TorchServe's Java class in the command line; so that is an argument of the
server here. All requests use one port, without keys: containers of a pipeline share a network.

Without the toolkit the archives are in ``/opt/ml/model``, where SageMaker unpacks ``model.tar.gz``.
With many models it registers each by its directory.
"""

import re
from collections.abc import Iterator, Mapping

from marserve.frontend.configuration.platforms.platform import Change, Platform, Setup, Surroundings

_TOOLKITS_FILE = "sagemaker-ts.properties"
_PORT, _MANY_MODELS = "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_MULTI_MODEL"
_PAYLOAD = "SAGEMAKER_MAX_PAYLOAD_IN_MB"  # the limit of a batch transform job
_SERVER_CLASS = "org.pytorch.serve.ModelServer"
_MEBIBYTE = 1 << 20
# The modules that all workers with the toolkit import.
_PRELOADED = (
    "torch,torchvision,sagemaker_pytorch_serving_container.default_pytorch_inference_handler"
)
# The limit of requests and answers of an endpoint.
_REAL_TIME_MEBIBYTES = 25


def _evidence(surroundings: Surroundings) -> str:
    if _has_toolkit(surroundings):
        return f"{surroundings.config_file} is what its toolkit writes"
    names = (_PORT, _MANY_MODELS)
    return next((f"{name} is set" for name in names if name in surroundings.environ), "")


def _has_toolkit(surroundings: Surroundings) -> bool:
    file = surroundings.config_file
    return file is not None and file.name == _TOOLKITS_FILE


def _set_up(surroundings: Surroundings) -> Setup:
    changes = [*_changes(surroundings.environ, surroundings.settings)]
    if _has_toolkit(surroundings):
        shared = "for its toolkit's handlers share them"
        changes.append(Change("preload_modules", _PRELOADED, shared, "default"))
    # SageMaker uses a container as soon as /ping is answered.
    return Setup(changes, when_ready=True, server_argument=_SERVER_CLASS)


def _changes(environ: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[Change]:
    def default(key: str, text: str, reason: str) -> Change:
        return Change(key, text, reason, "default")

    has_many_models = environ.get(_MANY_MODELS) == "true"
    port = environ.get(_PORT) or "8080"
    address = settings.get("inference_address") or f"http://0.0.0.0:{port}"
    one_port = "for all requests come to one port"
    yield default("inference_address", address, one_port)
    yield default("management_address", address, one_port)
    yield default("metrics_address", address, "for no other port may be taken")
    yield default("enable_grpc", "false", "for requests come over HTTP")
    no_tokens = "for its clients have no tokens"
    yield default("disable_token_authorization", "true", no_tokens)
    yield default("drain_timeout", "20", "for containers are killed after 30 s")
    yield default("stop_grace", "5", "for containers are killed after 30 s")
    payload = _payload(environ.get(_PAYLOAD))
    for key in ("max_request_size", "max_response_size"):
        yield default(key, payload, "for so much may be sent")
    if has_many_models:
        yield default("model_store", "/", "for models lie anywhere")
        yield default("enable_model_api", "true", "for models come and go")
        yield default("min_free_memory_percent", "5", "for models are unloaded when told so")
    else:
        yield default("model_store", "/opt/ml/model", "for the model lies there")
        yield default("load_models", "all", "for the model lies there")


def _payload(mebibytes: str | None) -> str:
    number = int(mebibytes) if mebibytes and re.fullmatch(r"[0-9]{1,9}", mebibytes) else 0
    return str((number or _REAL_TIME_MEBIBYTES) * _MEBIBYTE)


SAGEMAKER = Platform("sagemaker", "SageMaker", _evidence, _set_up)
