"""Vertex AI: port and routes from variables ``AIP_...``, without keys.

Containers for TorchServe often configure existing routes in Vertex (``/predictions/NAME``,
``/ping``); without a configuration Vertex generates routes. Google's own containers had no
configuration: they served ``model.mar`` of the directory of the upload under the name ``model``,
with the JSON envelope. A server with that directory and no model does the same.
"""

import re
from collections.abc import Iterator, Mapping

from marserve.frontend.configuration.platforms.platform import Change, Platform, Setup, Surroundings

_PORT, _PREDICT, _HEALTH = "AIP_HTTP_PORT", "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
_STORAGE = "AIP_STORAGE_URI"
_MODELS = ("load_models", "model_snapshot", "model_catalog")


def _evidence(surroundings: Surroundings) -> str:
    found = [name for name in (_PORT, _PREDICT, _HEALTH) if surroundings.environ.get(name)]
    return f"{', '.join(found)} are set" if len(found) == 3 else ""


def _set_up(surroundings: Surroundings) -> Setup:
    environ = surroundings.environ
    return Setup(
        tuple(_changes(environ, surroundings.settings)),
        predict_route=environ.get(_PREDICT, ""),
        health_route=environ.get(_HEALTH, ""),
    )


def _changes(environ: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[Change]:
    port = environ.get(_PORT) or "8080"
    yield Change("inference_address", f"http://0.0.0.0:{port}", "where Vertex sends requests")
    yield Change("disable_token_authorization", "true", "for the clients of Vertex have no tokens")
    storage = environ.get(_STORAGE, "").rstrip("/")
    if storage and not any(settings.get(key) for key in _MODELS):
        yield from _stored_model(storage)
        yield Change("service_envelope", "json", "for requests have instances", "default")


def _stored_model(storage: str) -> Iterator[Change]:
    why = f"for {_STORAGE} says where the model lies"
    if storage.startswith("/"):  # a directory of the container: nothing to download
        yield Change("model_store", storage, why)
        yield Change("load_models", "model=model.mar", why, "default")
        return
    archive = f"{storage}/model.mar"
    allowed = f"file://.*|http(s)?://.*,{re.escape(archive)}"
    yield Change("load_models", f"model={archive}", why, "default")
    yield Change("allowed_urls", allowed, why, "default")


VERTEX = Platform("vertex", "Vertex AI", _evidence, _set_up)
