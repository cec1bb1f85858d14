"""Models as they lie in SageMaker's containers: directories, and the store is one, or the root."""

import pytest

pytestmark = pytest.mark.integration

SERVICE = """
import os

class HandlerService:
    def initialize(self, context):
        self.files = sorted(os.listdir(context.system_properties["model_dir"]))

    def handle(self, data, context):
        return [",".join(self.files)] * len(data)
"""


def test_a_directory_without_a_manifest_is_a_model_in_the_store_of_everything(
    prepare_server, tmp_path
):
    service = tmp_path / "handler_service.py"
    service.write_text(SERVICE)
    model = tmp_path / "models" / "77af" / "model"
    model.mkdir(parents=True)
    (model / "weights.pth").touch()
    with prepare_server(
        {"SAGEMAKER_HANDLER": f"{service}:handle"},
        model_store="/",
        default_service_handler="$$SAGEMAKER_HANDLER$$",
        enable_model_api="truedefault_workers_per_model=1",  # what the toolkit appends to
    ) as server:
        server.habits = []
        server.start()
        assert server.inference("GET", "/ready").status_code == 200
        for _ in range(2):
            body = {"model_name": "77af", "url": str(model)}
            assert server.management("POST", "/models", json=body).ok
            assert server.management("POST", "/models", json=body).status_code == 409
            answer = server.inference("POST", "/models/77af/invoke", json={})
            assert (answer.status_code, answer.text) == (200, "weights.pth")
            assert server.describe("77af")["modelUrl"] == str(model)
            assert server.management("DELETE", "/models/77af").ok
        assert (model / "weights.pth").exists()
        server.stop()


def test_a_model_store_that_is_a_model_is_loaded(start_server, make_archive, tmp_path):
    handler = "def handle(data, context):\n    return data and ['here'] * len(data)\n"
    store = make_archive(tmp_path, handler, "digits", archive_format="no-archive")
    with start_server(model_store=str(store), load_models="all") as server:
        server.wait_workers("digits", *["READY"] * len(server.describe("digits")["workers"]))
        assert server.predict("digits").text == "here"
