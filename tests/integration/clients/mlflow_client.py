"""What a user of MLflow's plugin for TorchServe does, for `test_mlflow`; prints what came back.

Runs where mlflow and mlflow-torchserve are installed; arguments: the weights, the model folder of
MLflow, the code of the model and its handler.
"""

import json
import sys

import pandas as pd
import torch
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException


def text(prediction: object) -> object:
    """0.1.0 of the plugin returns a string, 0.2.0 an object."""
    return prediction if isinstance(prediction, str) else prediction.to_json()


def main() -> None:
    weights, folder, model_file, handler = sys.argv[1:]
    plugin = get_deploy_client("torchserve")
    code = {"MODEL_FILE": model_file, "HANDLER": handler}
    said = {}

    said["create"] = plugin.create_deployment("linear", weights, config=code | {"VERSION": "1.0"})
    # Without a version: the one above the largest that is there, which it asks /models/linear/all.
    said["create again"] = plugin.create_deployment("linear", weights, config=dict(code))
    said["create other"] = plugin.create_deployment(
        "other", folder, config=code | {"initial_workers": 2, "batch_size": 4}
    )

    said["list"] = [next(iter(each)) for each in plugin.list_deployments()]
    said["get"] = json.loads(plugin.get_deployment("linear")["deploy"])
    said["get all"] = json.loads(plugin.get_deployment("linear/all")["deploy"])
    said["get other"] = json.loads(plugin.get_deployment("other")["deploy"])

    rows = pd.DataFrame([[1.0, 2.0]], columns=["a", "b"])
    said["predict frame"] = text(plugin.predict("linear", rows))
    said["predict tensor"] = text(plugin.predict("linear/2.0", torch.tensor([1.0, 2.0])))
    said["predict json"] = text(plugin.predict("other", '{"a": 1, "b": 2}'))
    try:
        said["explain"] = text(plugin.explain("linear", '{"a": 1, "b": 2}'))
    except MlflowException:
        said["explain"] = None  # 0.1.0 does not ask for them

    said["update"] = plugin.update_deployment("linear/2.0", config={"set-default": "true"})
    said["default"] = json.loads(plugin.get_deployment("linear")["deploy"])[0]["modelVersion"]
    plugin.update_deployment("other", config={"min_worker": 1, "synchronous": "true"})
    said["scaled"] = json.loads(plugin.get_deployment("other")["deploy"])

    plugin.delete_deployment("linear/1.0")
    plugin.delete_deployment("other")
    said["left"] = [next(iter(each)) for each in plugin.list_deployments()]
    failures = {
        "get gone": lambda: plugin.get_deployment("other"),
        "delete gone": lambda: plugin.delete_deployment("other"),
        "predict gone": lambda: plugin.predict("other", rows),
    }
    for name, action in failures.items():
        try:
            said[name] = action()
        except Exception as error:  # noqa: BLE001 - of no type of its own
            said[name] = str(error)
    json.dump(said, sys.stdout, default=str)


main()
