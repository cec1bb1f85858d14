from collections.abc import Mapping
from pathlib import Path

import pytest

from marserve.frontend.configuration.platforms.choice import choose_platform
from marserve.frontend.configuration.platforms.kserve import KSERVE
from marserve.frontend.configuration.platforms.platform import Surroundings

FILE = Path("/mnt/models/config/config.properties")
STORE = {"model_store": "/mnt/models/model-store"}
ENVELOPE = {"TS_SERVICE_ENVELOPE": "kserve"}


def addresses(settings: Mapping[str, str]) -> tuple[str, str]:
    changes = {
        change.key: change.text for change in KSERVE.set_up(Surroundings({}, settings)).changes
    }
    return (
        changes["inference_address"].removeprefix("http://"),
        changes["management_address"].removeprefix("http://"),
    )


def test_kserve_is_recognised_by_its_mount_and_its_variables():
    found = choose_platform(None, Surroundings(ENVELOPE, STORE, FILE))
    assert found.name == "kserve"
    assert f"{FILE} lies where KServe mounts models, and TS_SERVICE_ENVELOPE is set" in found.note
    assert "--platform none" in found.note


@pytest.mark.parametrize(
    ("environ", "settings", "file"),
    [
        (ENVELOPE, {"model_store": "/mnt/models-of-mine"}, Path("config.properties")),
        (ENVELOPE, {}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, STORE, FILE),
    ],
)
def test_half_of_it_is_not_enough(environ, settings, file):
    assert KSERVE.evidence(Surroundings(environ, settings, file)) == ""


@pytest.mark.parametrize(
    ("inference", "management", "became"),
    [
        # KServe's examples: both at one address
        ("0.0.0.0:8085", "0.0.0.0:8085", ("127.0.0.1:8085", "127.0.0.1:8085")),
        # TorchServe's: management where KServe has gRPC
        ("0.0.0.0:8085", "0.0.0.0:8081", ("0.0.0.0:8085", "127.0.0.1:8086")),
        ("0.0.0.0:8080", "0.0.0.0:8090", ("127.0.0.1:8085", "127.0.0.1:8090")),
        ("0.0.0.0:8085", "[::]:8085", ("127.0.0.1:8085", "127.0.0.1:8085")),
        ("127.0.0.1:8085", "localhost:8095", ("127.0.0.1:8085", "localhost:8095")),
    ],
)
def test_listeners_make_room_for_those_of_kserve_and_management_stays_inside(
    inference, management, became
):
    settings = {
        "inference_address": f"http://{inference}",
        "management_address": f"http://{management}",
    }
    assert addresses(settings) == became


def test_the_defaults_of_torchserve_make_room_too():
    assert addresses({}) == ("127.0.0.1:8085", "127.0.0.1:8086")


@pytest.mark.parametrize("port", [8080, 8081])
def test_metrics_make_room_too_and_open_no_port_of_kserve_before_the_models_are_ready(port):
    settings = {"metrics_address": f"http://0.0.0.0:{port}"}
    found = choose_platform("kserve", Surroundings({}, settings, decided=frozenset(settings)))
    assert found.texts["metrics_address"] == "http://0.0.0.0:8082"


def test_without_grpc_nothing_is_said_of_it():
    found = choose_platform("kserve", Surroundings({}, {"enable_grpc": "false"}))
    assert not found.setup.grpc_inference
    assert "grpc:" not in found.note


def test_a_unix_socket_stays():
    settings = {"inference_address": "unix:/run/a", "management_address": "unix:/run/b"}
    assert addresses(settings) == ("unix:/run/a", "unix:/run/b")


def test_an_address_that_cannot_be_read_is_left_to_whoever_says_so():
    changes = KSERVE.set_up(Surroundings({}, {"inference_address": "8085"})).changes
    assert "inference_address" not in {change.key for change in changes}


def test_an_operator_may_have_management_outside_but_nothing_at_the_ports_of_kserve():
    settings = {
        "inference_address": "http://0.0.0.0:8080",
        "management_address": "http://0.0.0.0:8085",
        "grpc_inference_port": "8081",
    }
    texts = choose_platform("kserve", Surroundings({}, settings, decided=frozenset(settings))).texts
    assert {key: text for key, text in texts.items() if key in settings} == {
        "inference_address": "http://0.0.0.0:8085",
        "grpc_inference_port": "7070",
    }
