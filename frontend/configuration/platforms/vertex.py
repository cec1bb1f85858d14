"""Vertex AI: the port and the routes that it tells by variables ``AIP_...``, and no tokens.

Containers made for TorchServe often tell Vertex the routes that they have anyway
(``/predictions/NAME``, ``/ping``); where nobody told it any, Vertex makes some up. Google's own
containers had no configuration: they served ``model.mar`` of the directory that the model was
uploaded from, under the name ``model``, and took requests apart by the JSON envelope. So does a
server that is told that directory and no model.
"""

import re
from collections.abc import Iterator, Mapping

from marserve.frontend.configuration.platforms.platform import (
    Change,
    Platform,
    Setup,
    Surroundings,
)

_PORT, _PREDICT, _HEALTH = "AIP_HTTP_PORT", "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
_STORAGE = "AIP_STORAGE_URI"
_MODELS = ("load_models", "model_snapshot", "model_catalog")


def _evidence(surroundings: Surroundings) -> str:
    told = [name for name in (_PORT, _PREDICT, _HEALTH) if surroundings.environ.get(name)]
    return f"{', '.join(told)} are set" if len(told) == 3 else ""


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
    if storage.startswith("/"):  # a directory of the container: nothing is to be fetched
        yield Change("model_store", storage, why)
        yield Change("load_models", "model=model.mar", why, "default")
        return
    archive = f"{storage}/model.mar"
    allowed = f"file://.*|http(s)?://.*,{re.escape(archive)}"
    yield Change("load_models", f"model={archive}", why, "default")
    yield Change("allowed_urls", allowed, why, "default")


VERTEX = Platform("vertex", "Vertex AI", _evidence, _set_up)
