"""Images preprocessed by NVIDIA's DALI on the GPU.

    dali: {batch_size: 8, num_threads: 2, device_id: 0, seed: -1, pipeline_file: preprocess.dali}

Without ``pipeline_file``: shorter side to 256, center crop 224 x 224, ImageNet's normalisation.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.engines.optional import need
from marserve.handlers.explanations import PixelAttributions
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import value_of

_KEYS = ("batch_size", "num_threads", "device_id", "seed")
_MEAN = [0.485 * 255, 0.456 * 255, 0.406 * 255]
_STD = [0.229 * 255, 0.224 * 255, 0.225 * 255]


class DALIHandler(PixelAttributions, BaseHandler):
    """A handler whose requests are image files, decoded by the DALI `pipeline`."""

    def initialize(self, context: Context) -> None:
        """Load the model and build the pipeline."""
        super().initialize(context)
        self.pipeline = get_dali_pipeline(context)

    def sample_input(self) -> Any:
        """Return two image files."""
        # DALI decodes without PIL, which may not be installed.
        from marserve.handlers.inputs.images import sample_image

        return sample_image(), sample_image(1)

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the images as one tensor ``(requests, channels, height, width)``.

        DALI decodes a batch at once: a file that it cannot decode fails the batch.
        """
        [images] = self.pipeline.run(source=self.each_usable(_file_of, data))
        dense = images.as_tensor()
        on_gpu = hasattr(dense, "__cuda_array_interface__")
        tensor = torch.as_tensor(dense if on_gpu else np.asarray(dense), device=self.device)
        return tensor.clone()  # the pipeline reuses its memory


def _file_of(row: Any) -> Any:
    value = value_of(row)
    if not isinstance(value, bytes | bytearray | memoryview) or not value:
        raise UnusableInput("The input is not an image file.")
    return np.frombuffer(value, dtype=np.uint8)


def get_dali_pipeline(ctx: Context) -> Any:
    """Return an ``nvidia.dali.Pipeline``; ValueError without a complete section ``dali``."""
    settings = (ctx.model_yaml_config or {}).get("dali")
    if not settings:
        raise ValueError(f"{ctx.model_name} has no dali config in model config yaml file")
    missing = [key for key in _KEYS if key not in settings]
    if missing:
        raise ValueError(f"The dali config of {ctx.model_name} lacks {', '.join(missing)}")
    dali = need("nvidia.dali", "nvidia-dali-cuda120", "dali_image_classifier")
    options = {key: settings[key] for key in _KEYS}
    if "pipeline_file" not in settings:
        return _default_pipeline(dali, options)
    path = Path(str(ctx.system_properties["model_dir"]), settings["pipeline_file"])
    if not path.is_file():
        raise RuntimeError(f"Missing dali pipeline file: {path}")
    return dali.pipeline.Pipeline.deserialize(filename=str(path), prefetch_queue_depth=1, **options)


def _default_pipeline(dali: Any, options: dict[str, Any]) -> Any:
    fn, types = need("nvidia.dali.fn", "nvidia-dali-cuda120", "dali_image_classifier"), dali.types
    pipeline = dali.pipeline.Pipeline(prefetch_queue_depth=1, **options)
    with pipeline:
        encoded = fn.external_source(name="source", dtype=types.UINT8)
        images = fn.decoders.image(encoded, device="mixed", output_type=types.RGB)
        sized = fn.resize(images, size=[256], mode="not_smaller", antialias=True)
        pipeline.set_outputs(
            fn.crop_mirror_normalize(
                sized, crop=(224, 224), crop_pos_x=0.5, crop_pos_y=0.5, mean=_MEAN, std=_STD
            )
        )
    pipeline.build()
    return pipeline
