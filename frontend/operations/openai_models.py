"""The models of OpenAI's API: their list, and the model of a request.

A model offers the API with ``openai`` in model-config.yaml. Clients address it by its registered
name (the default version), by ``name:version``, or by a name of `backend.openai_names`.
"""

from typing import Any

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.configuration.model_schema import NO_OPENAI
from marserve.frontend.errors import RouteNotFound
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry

#: The paths below /v1 for predictions.
PATHS = ("chat/completions", "completions", "embeddings", "responses", "rerank")


def find_model(registry: ModelRegistry, name: str, path: str) -> ModelVersion:
    """Return the model that clients address by a name, for a path below /v1.

    Raises:
        ModelNotFound: There is none.
        RouteNotFound: It does not offer the path.
    """
    model = find_named(registry, name)
    if not _offers(model, path):
        offered = model.settings.openai
        raise RouteNotFound(f"Model {name} does not offer /v1/{path}; it has openai: {offered}.")
    return model


def full_model(registry: ModelRegistry, path: str, priority: Priority) -> ModelVersion | None:
    """Return one of the models that offer a path below /v1 if none has room for a request."""
    models = [model for model in registry.index(_by_name).values() if _offers(model, path)]
    if not models or any(model.has_room(priority) for model in models):
        return None
    return models[0]


def _offers(model: ModelVersion, path: str) -> bool:
    # Of the others each is named after its only path; that of none is no path.
    offered = model.settings.openai
    return path in (PATHS if offered == "server" else (offered,))


def find_named(registry: ModelRegistry, name: str) -> ModelVersion:
    """Return the model of a name that clients may use; raises ModelNotFound."""
    return registry.default(name) or registry.index(_by_name).get(name) or registry.find(name)


def model_document(name: str, model: ModelVersion) -> dict[str, Any]:
    """Return the description of a model under one of its names, as OpenAI's clients read it."""
    return {"id": name, "object": "model", "created": model.created, "owned_by": "marserve"}


def list_models(registry: ModelRegistry) -> dict[str, Any]:
    """Return the document of ``/v1/models``, in the shapes of KServe and of OpenAI."""
    names = [model.name for model in registry.defaults() if not model.origin.is_function]
    data = [model_document(*each) for each in registry.index(_by_name).items()]
    return {"models": names, "object": "list", "data": data}


def _by_name(registry: ModelRegistry) -> dict[str, ModelVersion]:
    offered = (model for model in registry if model.settings.openai != NO_OPENAI)
    models = [model for model in offered if not model.origin.is_function]
    models.sort(key=lambda model: registry.default(model.name) is not model)
    names = [(text, each) for each in models for text in (each.name, f"{each.name}:{each.version}")]
    names += [(text, each) for each in models for text in each.archive.contents.openai_names]
    found: dict[str, ModelVersion] = {}
    for name, model in names:
        if registry.default(name) in (None, model):  # else the name is another model's
            found.setdefault(name, model)
    return found
