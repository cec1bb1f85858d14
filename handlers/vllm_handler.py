"""Language models on vLLM, with the routes of OpenAI's API.

    handler:
        model_path: meta-llama/Llama-3.1-8B-Instruct    # a directory of the archive, or a hub's id
        vllm_engine_config: {max_num_seqs: 64}          # vLLM's options, by their names
        adapters: {french: adapters/french}             # LoRA: name to path
        chat_template: template.jinja

The route follows that of the model: ``/predictions/<model>/<version>/v1/chat/completions``. Events
of a stream arrive one by one, ``data: [DONE]`` last.

vLLM moves Python classes in nearly every release and keeps its HTTP interface. So this handler
builds vLLM's web application without a socket and calls it (`handlers.engines.asgi`): requests are
validated by vLLM and have its statuses.
"""

import asyncio
import inspect
import json
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.engines.asgi import ask
from marserve.handlers.engines.llm_handler import LLMHandler
from marserve.handlers.engines.optional import need

logger = logging.getLogger(__name__)

# Other routes of vLLM load adapters or put the engine to sleep.
_METHODS = {"v1/models": "GET", "v1/completions": "POST", "v1/chat/completions": "POST"}


class VLLMHandler(LLMHandler):
    """Answers OpenAI's requests with a model on vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_engine: Any = None
        self.adapters: dict[str, str] = {}  # of LoRA: name to path
        self._application: Any = None

    def initialize(self, context: Context) -> None:
        """Start the engine and wait until the model is loaded."""
        settings = self.read_settings(context)
        self.adapters = dict(settings.get("adapters") or {})
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.pop("VLLM_API_KEY", None)  # the server checks tokens
        options = self._options(settings)
        asyncio.get_event_loop().run_until_complete(self._start(options))
        self.initialized = True

    async def inference(self, data: Any, context: Context) -> list[Any]:
        """Return a list with vLLM's answer, parsed; of a stream, with the last event."""
        route = context.get_request_header(0, "url_path")
        method = _METHODS.get(route)
        if method is None:
            raise PredictionException(f"Unknown API endpoint: {route}", 404)

        body = b"" if method == "GET" else json.dumps(data).encode()
        answer = await ask(self._application, method, f"/{route}", body, context)
        if answer.content_type.startswith("application/json"):
            return [json.loads(answer.body)]
        return [answer.body.decode()]

    def _options(self, settings: dict[str, Any]) -> Any:
        """Return the configuration as vLLM's command line parses it: an `argparse.Namespace`."""
        # The other names are those before or after vLLM moved the modules.
        command_line = _vllm("entrypoints.openai.cli_args", "entrypoints.launchers.cli_args")
        parser = _vllm("utils.argparse_utils", "utils")
        words = [f"{name}={path}" for name, path in self.adapters.items()]
        options = command_line.make_arg_parser(parser.FlexibleArgumentParser()).parse_args(
            ["--lora-modules", *words] if words else []
        )
        engine_options = dict(settings.get("vllm_engine_config") or {})
        engine_options["model"] = self._model(settings)
        if settings.get("chat_template") is not None:
            engine_options["chat_template"] = settings["chat_template"]
        set_known(options, engine_options)
        if isinstance(options.served_model_name, str):
            options.served_model_name = [options.served_model_name]
        return options

    def _model(self, settings: dict[str, Any]) -> str:
        model = (settings.get("vllm_engine_config") or {}).get("model")
        if model:
            return str(model)
        path = settings.get("model_path")
        if not path:
            raise ValueError(
                "model-config.yaml lacks handler.model_path or handler.vllm_engine_config.model"
            )
        local = Path(self.model_dir, path)
        return str(local) if local.exists() else str(path)

    async def _start(self, options: Any) -> None:
        vllm = need("vllm", "vllm", "vllm_handler")
        engine_args = vllm.AsyncEngineArgs.from_cli_args(options)
        self.vllm_engine = vllm.AsyncLLMEngine.from_engine_args(engine_args)
        self._application = await _web_application(self.vllm_engine, options)


def _vllm(module: str, other_name: str) -> ModuleType:
    return need(f"vllm.{module}", "vllm", "vllm_handler", f"vllm.{other_name}")


def set_known(target: Any, values: dict[str, Any]) -> None:
    """Set the attributes that the target has; log the others."""
    for name, value in values.items():
        if hasattr(target, name):
            setattr(target, name, value)
        else:
            logger.warning("This vLLM has no option %r; it is ignored.", name)


async def _web_application(engine: Any, options: Any) -> Any:
    server = _vllm("entrypoints.openai.api_server", "entrypoints.launchers.api_server")
    known = {
        "args": options,
        "engine_client": engine,
        "model_config": await _of_engine(engine, "model_config"),
        "vllm_config": await _of_engine(engine, "vllm_config"),
        "supported_tasks": await _of_engine(engine, "supported_tasks"),
    }
    application = server.build_app(**_taken_by(server.build_app, known))
    known["state"] = application.state
    await server.init_app_state(**_taken_by(server.init_app_state, known))
    return application


async def _of_engine(engine: Any, name: str) -> Any:
    """Return an engine's property: an attribute, or in older releases a coroutine's result."""
    getter = getattr(engine, f"get_{name}", None)
    return getattr(engine, name, None) if getter is None else await getter()


def _taken_by(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes, which differ between releases."""
    names = inspect.signature(function).parameters
    return {name: known[name] for name in names if known.get(name) is not None}
