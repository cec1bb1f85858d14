"""Language models on vLLM, or on another engine with its own server, with the routes of OpenAI.

    handler:
        model_path: meta-llama/Llama-3.1-8B-Instruct    # a directory of the archive, or a hub's id
        served_model_name: llama                        # clients' name for it; a text or a list
        vllm_engine_config: {max_num_seqs: 64}          # options of `vllm serve`, by their names
        adapters: {french: adapters/french}             # LoRA: name to path
        chat_template: template.jinja

or, for another engine, its command line instead of the last three; ``{socket}`` or ``{port}`` is
where it must listen, ``{model}`` the model's path:

    handler:
        model_path: model.gguf
        command: llama-server --model {model} --host 127.0.0.1 --port {port}
        health: /health                                 # the default

The worker starts the engine's server and relays requests to it unchanged (`EngineServer`), so that
they are validated by the engine and have its statuses. The route follows that of the model:
``/predictions/<model>/<version>/v1/chat/completions``.
"""

import asyncio
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import OptionRefused, PredictionException
from marserve.backend.manifest import DEFAULT_VERSION, Manifest
from marserve.backend.openai_names import served_names
from marserve.backend.protocol import ENGINE_METRICS
from marserve.handlers.engines.engine_server import EngineServer
from marserve.handlers.engines.llm_handler import LLMHandler, only_value
from marserve.handlers.engines.optional import find_program

# Other routes of engines load adapters or put the engine to sleep.
_METHODS = {
    "v1/models": "GET",
    "v1/chat/completions": "POST",
    "v1/completions": "POST",
    "v1/embeddings": "POST",
    "v1/rerank": "POST",
    "v1/responses": "POST",
}
_OF_VLLM = ("vllm_engine_config", "adapters", "chat_template")
# Where the engine listens, and its keys; adapters have a place of their own.
_OF_SERVER = ("api_key", "host", "lora_modules", "port", "uds")
# Options of vLLM 0.33 that are flags without a form for false.
_FLAGS = frozenset(
    (
        "aggregate_engine_logging",
        "data_parallel_multi_port_external_lb",
        "disable_log_stats",
        "grpc",
        "headless",
    )
)


class VLLMHandler(LLMHandler):
    """Answers OpenAI's requests with a model on an engine."""

    is_relay = True  # bodies are not decoded
    is_cancellable = True
    engine: EngineServer

    def initialize(self, context: Context) -> None:
        """Start the engine and wait until the model is loaded."""
        settings = self.read_settings(context)
        self.engine = EngineServer(self._command(settings), settings.get("health") or "/health")
        self.engine.start(self._environment())
        try:
            asyncio.get_event_loop().run_until_complete(self.engine.wait_until_ready())
        except OptionRefused as error:
            words = str(error).replace("=", " ").split()
            config = settings.get("vllm_engine_config") or {}
            keys = [key for key in config if _option(key) in words]
            if not keys:
                raise
            raise OptionRefused(f"vllm_engine_config has {keys}: {error}") from error
        self.initialized = True

    async def preprocess(self, data: Any, context: Context | None = None) -> Any:
        """Return the body of the only request."""
        del context
        return only_value(self, data)

    async def inference(self, data: Any, context: Context) -> list[Any]:
        """Return a list with the engine's answer; of a stream, with its last piece.

        ``data`` is a body, or a value for JSON.
        """
        if context.get_request_id(0) == ENGINE_METRICS:
            return [await self.engine.relay("GET", "metrics", b"", context)]
        route = str(context.get_request_header(0, "url_path"))
        method = _METHODS.get(route)
        if method is None:
            raise PredictionException(f"Unknown API endpoint: {route}", 404)
        body = data if isinstance(data, bytes | bytearray) else json.dumps(data).encode()
        return [await self.engine.relay(method, route, body if method == "POST" else b"", context)]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("VLLM_API_KEY", None)  # the server checks tokens
        gpu = self.context.system_properties.get("gpu_id")
        # A parallel worker sees only its own GPUs already.
        if gpu is not None and not self.model_yaml_config.get("parallelLevel"):
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        return environment

    def _command(self, settings: Mapping[str, Any]) -> list[str]:
        model = self._model(settings)
        command = settings.get("command")
        if not command:
            manifest = Manifest.read(Path(self.model_dir))
            version = manifest.model_version if manifest is not None else ""
            name, version = self.context.model_name, version or DEFAULT_VERSION
            names = [*served_names(settings), name, f"{name}:{version}"]
            return vllm_command(model, names, settings)
        if given := [key for key in _OF_VLLM if settings.get(key)]:
            raise OptionRefused(f"handler.{given[0]} has no effect beside handler.command")
        words = shlex.split(command) if isinstance(command, str) else map(str, command)
        return [word.replace("{model}", model) for word in words]

    def _model(self, settings: Mapping[str, Any]) -> str:
        model = (settings.get("vllm_engine_config") or {}).get("model")
        if model:
            return str(model)
        path = settings.get("model_path")
        if not path and not settings.get("command"):
            raise OptionRefused(
                "model-config.yaml lacks handler.model_path or handler.vllm_engine_config.model"
            )
        local = Path(self.model_dir, path or "")
        return str(local) if local.exists() else str(path)


def vllm_command(model: str, names: list[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of ``vllm serve`` for a model.

    Args:
        model: Its directory, or its id on the hub.
        names: The values of ``model`` in requests; answers contain the first.
        settings: The section ``handler`` of model-config.yaml.
    """
    program = find_program("vllm")
    if program is None:
        raise ImportError(
            "vllm_handler needs the program vllm, which is not installed: pip install vllm"
        )
    # A client may also name the path.
    command = [program, "serve", model, "--uds", "{socket}"]
    command += ["--served-model-name", *dict.fromkeys([*names, model])]
    options = dict(settings.get("vllm_engine_config") or {})
    options.pop("model", None)
    options.pop("served_model_name", None)
    if refused := [key for key in _OF_SERVER if key in options]:
        raise OptionRefused(f"vllm_engine_config.{refused[0]} is chosen by the server")
    if adapters := settings.get("adapters"):
        options = {"enable_lora": True, **options}
        options["lora_modules"] = [f"{name}={path}" for name, path in adapters.items()]
    if settings.get("chat_template") is not None:
        options["chat_template"] = settings["chat_template"]
    return [*command, *_as_words(options)]


def _as_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options by the names of Python's fields as words of a command line."""
    for key, value in options.items():
        name = _option(key)
        match value:
            case None:
                pass
            case True:
                yield name
            case False:
                if key not in _FLAGS:
                    yield f"--no-{name[2:]}"
            case list() | tuple():
                yield from (name, *(_as_text(item) for item in value))
            case _:
                yield f"{name}={_as_text(value)}"


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
