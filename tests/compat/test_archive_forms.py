"""Archives in the forms that users have, from registration to the handler's view of its files."""

import json

import pytest

pytestmark = pytest.mark.integration

FOUND = {
    "beside": "a module beside the handler",
    "deep": "a module two folders down",
    "weights": "weights\n",
    "labels": {"0": "cat"},
    "yaml": {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 2,
        "maxBatchDelay": 10,
        "responseTimeout": 60,
        "handler": {"own": [1, "two"]},
    },
    "model_name": "rich",
    "same directory": True,
    "files": [
        "MAR-INF",
        "beside.py",
        "index_to_name.json",
        "model-config.yaml",
        "package",
        "requirements.txt",
        "rich.py",
        "weights.bin",
    ],
    "gpu_id": None,
    "batch_size": 2,
    "properties": [
        "batch_size",
        "gpu_id",
        "limit_max_image_pixels",
        "model_dir",
        "server_name",
        "server_version",
    ],
}
MODEL = {
    "serializedFile": "weights.bin",
    "handler": "rich.py",
    "modelVersion": "1.0",
    "requirementsFile": "requirements.txt",
    "configFile": "model-config.yaml",
}


@pytest.mark.parametrize(
    ("url", "original"),
    [
        ("rich-default.mar", "rich-default"),
        ("rich-zip-store.mar", "rich-zip-store"),
        ("rich-tgz.tar.gz", "rich-tgz"),
        ("rich-no-archive", "rich-no-archive"),
        ("{store}/rich-no-archive", "rich-no-archive"),
        ("renamed.tgz", "rich-no-archive"),
        ("renamed.bin", "rich-no-archive"),
    ],
)
def test_a_rich_archive(ask, server, url, original):
    url = url.format(store=server.store)
    answer = ask(f"POST /models?url={url}&model_name=rich", to="management")
    text = 'Model \\"rich\\" Version: 1.0 registered with 1 initial workers'
    assert (answer.status, answer.body.decode()) == (200, f'{{\n  "status": "{text}"\n}}\n')
    found = json.loads(ask("POST /predictions/rich", b"x").body)
    ask("DELETE /models/rich", to="management")
    assert found.pop("manifest") == {
        "runtime": "python",
        "model": {"modelName": original, **MODEL},
    }
    assert found == FOUND


@pytest.fixture(scope="module")
def sagemaker(start_compat_server):
    """A server as SageMaker's toolkit configures it."""
    properties = {
        "default_service_handler": "service.py:handle",
        "load_models": "sagemaker,mine=nested",
        "default_workers_per_model": "1",
    }
    with start_compat_server(**properties) as server:
        yield server


@pytest.mark.parametrize("name", ["sagemaker", "mine"])
def test_a_directory_without_a_manifest(ask_of, sagemaker, name):
    answer = ask_of(sagemaker)(f"POST /predictions/{name}", b"x")
    assert (answer.status, json.loads(answer.body)) == (
        200,
        {"name": name, "manifest": None, "files": ["model.pth", "service.py"]},
    )


def test_an_invocation_of_one_of_two(ask_of, sagemaker):
    answer = ask_of(sagemaker)("POST /invocations", b"x")
    assert json.loads(answer.body)["message"] == "Parameter model_name is required."
    assert ask_of(sagemaker)("POST /invocations?model_name=mine", b"x").status == 200


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("manifest-no-version.mar", "odd"),
        ("manifest-no-runtime.mar", "odd"),
        ("manifest-no-handler.mar", "odd"),
        ("manifest-no-archiver.mar", "odd"),
        ("manifest-none.mar&handler=versions.py:handle&model_name=bare", "bare"),
    ],
)
def test_a_manifest_from_which_something_is_missing(ask, url, name):
    answer = ask(f"POST /models?url={url}", to="management")
    text = f'Model \\"{name}\\" Version: 1.0 registered with 0 initial workers. '
    text += "Use scale workers API to add workers for the model."
    assert answer.body.decode() == f'{{\n  "status": "{text}"\n}}\n'
    assert ask(f"DELETE /models/{name}", to="management").status == 200
