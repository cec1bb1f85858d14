"""``python -m ts.llm_launcher``: a server for one language model, without writing an archive.

The launcher writes a model directory with a manifest and model-config.yaml into the model store and
starts the server in the foreground. When the server ends, the directory is removed. The exit status
is the server's.

For TensorRT-LLM, TorchServe cloned the repository of a release into /tmp and ran its scripts. Here
the engine receives the Hugging Face model, and the library builds it at the load.
"""

import argparse
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from marserve.handlers.engines.hugging_face import download_model
from marserve.handlers.engines.optional import find_program, need
from marserve.tools.archiver.archiver import (
    generate_model_archive,
)
from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.archiver.members import ModelArchiverError

ENGINES = ("vllm", "trt_llm")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of TorchServe's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m ts.llm_launcher", description="Serve one language model."
    )
    add = parser.add_argument
    add("--model_name", default="model", help="name of the model in URLs")
    add("--model_store", default="model_store", help="directory for the model; it is created")
    add("--model_id", default="meta-llama/Meta-Llama-3.1-8B-Instruct", help="id on the hub")
    add("--disable_token_auth", action="store_true", help="serve without tokens")
    add("--startup_timeout", type=int, default=1200, help="seconds until the model must be loaded")
    add("--engine", choices=ENGINES, default="vllm", help="what runs the model")
    add("--dtype", default="bfloat16", help="type of the weights (trt_llm)")
    vllm = "--vllm_engine."
    add(f"{vllm}max_num_seqs", type=int, default=256, help="most sequences at a time")
    add(f"{vllm}max_model_len", type=int, help="longest context; by default the model's")
    add(f"{vllm}download_dir", help="directory for downloads")
    trt_llm = "--trt_llm_engine."
    add(f"{trt_llm}max_batch_size", type=int, default=4, help="most sequences at a time")
    add(
        f"{trt_llm}kv_cache_free_gpu_memory_fraction",
        type=float,
        default=0.1,
        help="share of the free GPU memory for the cache",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it ends; return its exit status."""
    options = build_parser().parse_args(argv)
    try:
        settings = model_config(options, _gpus())
        with _model_directory(options, settings):
            return _run(_command(options))
    except (ModelArchiverError, ImportError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def model_config(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Return the content of model-config.yaml.

    Args:
        options: The parsed command line.
        gpus: Number of GPUs that the model may use; 0 means CPU.
    """
    engine = {"vllm": _vllm_settings, "trt_llm": _trt_llm_settings}[options.engine]
    return {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": options.startup_timeout,
        "deviceType": "gpu" if gpus else "cpu",
        "asyncCommunication": True,
        **engine(options, gpus),
    }


def _vllm_settings(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    arguments = vars(options)
    download_dir = arguments["vllm_engine.download_dir"]
    engine = {
        "max_num_seqs": arguments["vllm_engine.max_num_seqs"],
        "max_model_len": arguments["vllm_engine.max_model_len"],
        "download_dir": download_dir and str(Path(download_dir).resolve()),
        "tensor_parallel_size": max(gpus, 1),
    }
    handler = {
        "model_path": options.model_id,
        "vllm_engine_config": {key: value for key, value in engine.items() if value is not None},
    }
    return {"parallelLevel": max(gpus, 1), "handler": handler}


def _trt_llm_settings(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    del gpus
    arguments = vars(options)
    snapshot = str(Path(download_model(options.model_id)).resolve())
    fraction = arguments["trt_llm_engine.kv_cache_free_gpu_memory_fraction"]
    handler = {
        "engine_dir": snapshot,
        "tokenizer_dir": snapshot,
        "kv_cache_config": {"free_gpu_memory_fraction": fraction},
        "llm_config": {
            "dtype": options.dtype,
            "max_batch_size": arguments["trt_llm_engine.max_batch_size"],
        },
    }
    return {"handler": handler}


@contextmanager
def _model_directory(options: argparse.Namespace, settings: dict[str, Any]) -> Iterator[Path]:
    """Write the model's directory. An existing one gets new files and is kept at the end."""
    store = Path(options.model_store)
    existed = (store / options.model_name).exists()
    with TemporaryDirectory() as folder:
        config = Path(folder, "model-config.yaml")
        config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        directory = generate_model_archive(
            ModelArchiverConfig(
                options.model_name,
                f"{options.engine}_handler",
                "1.0",
                export_path=str(store),
                archive_format="no-archive",
                force=True,
                config_file=str(config),
            )
        )
    try:
        yield directory
    finally:
        if not existed:
            shutil.rmtree(directory)


def _command(options: argparse.Namespace) -> list[str]:
    words = [find_program("torchserve") or "torchserve", "--foreground", "--ncs"]
    words += ["--model-store", options.model_store, "--models", options.model_name]
    return words + ["--disable-token-auth"] * options.disable_token_auth


def _run(command: list[str]) -> int:
    """Run the server, pass SIGINT and SIGTERM on to it, and wait for its end."""
    server = subprocess.Popen(command)  # noqa: S603 - the console script of this installation
    before = [
        signal.signal(number, lambda number, _: server.send_signal(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    ]
    try:
        return server.wait()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _gpus() -> int:
    return int(need("torch", "torch", "ts.llm_launcher").cuda.device_count())


if __name__ == "__main__":
    sys.exit(main())
