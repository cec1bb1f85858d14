"""Models that DeepSpeed distributes over the processes of a worker.

    handler: {model_path: model/}           # the weights, in the archive or elsewhere
    deepspeed: {config: ds-config.json, checkpoint: checkpoints.json}

``config`` is DeepSpeed's JSON file. `get_ds_engine` writes ``checkpoint``, the list of the files of
weights, for models that are built without weights.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.engines.optional import need

logger = logging.getLogger(__name__)


class BaseDeepSpeedHandler(BaseHandler):
    """A handler in each process of a worker; `initialize` of the subclass calls `get_ds_engine`."""

    device: Any

    def initialize(self, context: Context) -> None:
        """Set the device: the GPU of this process's rank."""
        del context
        self.device = int(os.environ.get("LOCAL_RANK", "0"))


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """Return a ``deepspeed.InferenceEngine`` of a model; ValueError without its configuration."""
    yaml = ctx.model_yaml_config or {}
    settings = yaml.get("deepspeed")
    if not settings:
        raise ValueError(f"{ctx.model_name} has no deepspeed config in model config yaml file")
    model_dir = Path(str(ctx.system_properties["model_dir"]))
    config = model_dir / settings["config"] if settings.get("config") else None
    if config is not None and not config.exists():
        raise ValueError(f"{ctx.model_name} has no deepspeed config file {config}")
    weights = (yaml.get("handler") or {}).get("model_path")
    checkpoint = model_dir / settings["checkpoint"] if settings.get("checkpoint") else None
    if checkpoint is not None:
        if weights is None:
            raise ValueError(f"deepspeed.checkpoint of {ctx.model_name} needs handler.model_path")
        _write_checkpoint_list(model_dir / weights, checkpoint)
    deepspeed = need("deepspeed", "deepspeed", "get_ds_engine")
    return deepspeed.init_inference(
        model,
        config=None if config is None else str(config),
        base_dir=weights,
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def _write_checkpoint_list(weights: Path, target: Path) -> None:
    files = sorted(str(path) for path in weights.rglob("*") if path.suffix in (".bin", ".pt"))
    logger.info("Writing the list of %d checkpoint files to %s", len(files), target)
    content = {"type": "ds_model", "checkpoints": files, "version": 1.0}
    target.write_text(json.dumps(content), encoding="utf-8")
