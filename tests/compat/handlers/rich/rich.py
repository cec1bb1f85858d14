"""A class handler with everything around it that an archive can bring."""

import json
from pathlib import Path

import beside
from package.inner import deep


class Rich:
    """Answers with what it found."""

    def initialize(self, context):
        directory = Path(context.system_properties["model_dir"])
        self.found = {
            "beside": beside.VALUE,
            "deep": deep.VALUE,
            "weights": (directory / "weights.bin").read_text(),
            "labels": json.loads(Path("index_to_name.json").read_text()),
            "yaml": context.model_yaml_config,
            "manifest": {
                key: value
                for key, value in context.manifest.items()
                if key not in ("createdOn", "archiverVersion")
            },
            "model_name": context.model_name,
            "same directory": Path.cwd().resolve() == directory.resolve(),
            "files": sorted({path.name for path in directory.iterdir()} - {"__pycache__"}),
            "gpu_id": context.system_properties["gpu_id"],
            "batch_size": context.system_properties["batch_size"],
            "properties": sorted(context.system_properties),
        }

    def handle(self, data, context):
        return [self.found] * len(data)
