from collections.abc import Mapping
from pathlib import Path

import pytest

from marserve.frontend.configuration.platforms.choice import choose_platform
from marserve.frontend.configuration.platforms.platform import Surroundings

FILE = Path("/etc/sagemaker-ts.properties")


def chosen(
    environ: Mapping[str, str], settings: Mapping[str, str] | None = None, file: Path | None = None
) -> Mapping[str, str]:
    return choose_platform("sagemaker", Surroundings(environ, settings or {}, file)).texts


@pytest.mark.parametrize(
    ("environ", "file", "why"),
    [
        ({}, FILE, f"{FILE} is what its toolkit writes"),
        ({"SAGEMAKER_BIND_TO_PORT": "1"}, None, "SAGEMAKER_BIND_TO_PORT is set"),
        ({"SAGEMAKER_MULTI_MODEL": "true"}, None, "SAGEMAKER_MULTI_MODEL is set"),
    ],
)
def test_sagemaker_is_recognised_by_its_toolkit_or_its_variables(environ, file, why):
    found = choose_platform(None, Surroundings(environ, {}, file))
    assert found.name == "sagemaker"
    assert f"Platform: SageMaker ({why})." in found.note
    assert found.setup.server_argument == "org.pytorch.serve.ModelServer"
    assert found.setup.when_ready


@pytest.mark.parametrize("environ", [{}, {"SAGEMAKER_REGION": "eu-west-1", "SM_MODEL_DIR": "/m"}])
def test_a_notebook_or_a_training_job_is_no_endpoint(environ):
    found = choose_platform(None, Surroundings(environ, {}, Path("config.properties")))
    assert found.name == "none"
    assert not found.setup.server_argument


def test_one_port_is_taken_the_one_that_is_given():
    texts = chosen({"SAGEMAKER_BIND_TO_PORT": "8123"})
    address = "http://0.0.0.0:8123"
    names = ("inference_address", "management_address", "metrics_address")
    assert [texts[name] for name in names] == [address] * 3
    assert texts["enable_grpc"] == "false"


def test_the_address_of_the_toolkit_stays_and_metrics_join_it():
    address = "http://0.0.0.0:9"
    texts = chosen({}, {"inference_address": address, "management_address": address})
    assert texts["metrics_address"] == address
    assert not {"inference_address", "management_address"} & texts.keys()


@pytest.mark.parametrize(
    ("environ", "mebibytes"),
    [
        ({}, 25),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "100"}, 100),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "much"}, 25),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "9" * 5000}, 25),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "\u0663"}, 25),
    ],
)
def test_what_may_be_sent_is_taken(environ, mebibytes):
    texts = chosen(environ)
    assert texts["max_request_size"] == texts["max_response_size"] == str(mebibytes << 20)
    assert "max_request_size" not in chosen(environ, {"max_request_size": "7"})


def test_one_model_is_loaded_and_many_are_registered():
    one, many = chosen({}), chosen({"SAGEMAKER_MULTI_MODEL": "true"})
    assert (one["model_store"], one["load_models"]) == ("/opt/ml/model", "all")
    assert not {"enable_model_api", "min_free_memory_percent"} & one.keys()
    assert many["model_store"] == "/"
    assert (many["enable_model_api"], many["min_free_memory_percent"]) == ("true", "5")
    assert "load_models" not in many


def test_a_stop_is_over_before_the_container_is_killed():
    texts = chosen({})
    assert int(texts["drain_timeout"]) + int(texts["stop_grace"]) < 30


def test_what_the_toolkit_imports_is_shared_by_its_workers():
    handlers = "sagemaker_pytorch_serving_container.default_pytorch_inference_handler"
    assert handlers in chosen({}, file=FILE)["preload_modules"].split(",")
    assert "preload_modules" not in chosen({})
    assert "preload_modules" not in chosen({}, {"preload_modules": "torch"}, FILE)
