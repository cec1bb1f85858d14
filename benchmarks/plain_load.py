"""Builds the model of a model file and loads its weights as everybody does; prints the seconds.

python benchmarks/plain_load.py MODEL_FILE WEIGHTS
"""

import runpy
import sys
import time

import torch


def main() -> None:
    """Load once; imports are not counted, a worker has them from the fork server."""
    names = runpy.run_path(sys.argv[1])
    started = time.perf_counter()
    model = names["ResNet152"]()
    model.load_state_dict(torch.load(sys.argv[2], map_location="cpu", weights_only=True))
    model.eval()
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
