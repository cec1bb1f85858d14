import pytest

from marserve.frontend.archives.download import check_allowed
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.platforms.choice import choose_platform
from marserve.frontend.configuration.platforms.platform import Surroundings
from marserve.frontend.configuration.platforms.vertex import VERTEX
from marserve.frontend.errors import ModelNotFound

TOLD = {
    "AIP_HTTP_PORT": "7080",
    "AIP_PREDICT_ROUTE": "/predictions/m",
    "AIP_HEALTH_ROUTE": "/ping",
}
STORED = {**TOLD, "AIP_STORAGE_URI": "gs://b.c/models/7/"}


def changes(environ, **settings):
    return {each.key: each.text for each in VERTEX.set_up(Surroundings(environ, settings)).changes}


def test_vertex_is_recognised_by_what_it_tells_containers():
    found = choose_platform(None, Surroundings(TOLD, {}))
    assert (found.name, found.setup.predict_route) == ("vertex", "/predictions/m")
    assert found.texts["inference_address"] == "http://0.0.0.0:7080"


@pytest.mark.parametrize("missing", TOLD)
def test_all_three_are_needed(missing):
    environ = {name: text for name, text in TOLD.items() if name != missing}
    assert VERTEX.evidence(Surroundings(environ, {})) == ""


def test_what_is_stored_is_the_model_where_nobody_names_one():
    found = changes(STORED)
    assert found["load_models"] == "model=gs://b.c/models/7/model.mar"
    assert found["service_envelope"] == "json"
    allowed = KEYS["allowed_urls"].from_text(found["allowed_urls"])
    check_allowed("gs://b.c/models/7/model.mar", allowed)
    with pytest.raises(ModelNotFound):
        check_allowed("gs://b-c/models/7/model.mar", allowed)


def test_a_directory_is_the_model_store():
    found = changes({**TOLD, "AIP_STORAGE_URI": "/mnt/model"})
    assert (found["model_store"], found["load_models"]) == ("/mnt/model", "model=model.mar")
    assert "allowed_urls" not in found


@pytest.mark.parametrize("key", ["load_models", "model_snapshot", "model_catalog"])
def test_whoever_names_models_is_left_alone(key):
    assert "load_models" not in changes(STORED, **{key: "x"})
    assert "service_envelope" not in changes(STORED, **{key: "x"})
