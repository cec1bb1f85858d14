"""The handler around a stand-in for vLLM: its parser, engine and web application, by two layouts.

The real library was never run with these tests; its interface is taken from its documentation and
sources (0.6.3 to 0.29).
"""

import argparse
import asyncio
import json
import sys
import types
from types import SimpleNamespace

import pytest

from marserve.backend.errors import PredictionException
from marserve.handlers.vllm_handler import VLLMHandler


def parser_with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default="facebook/opt-125m")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--chat-template")
    return parser


class Engine:
    def __init__(self, options) -> None:
        self.options = options

    @classmethod
    def from_engine_args(cls, engine_args):
        asyncio.get_running_loop()  # as the real one, it may start tasks
        return cls(engine_args)


class OldEngine(Engine):
    async def get_model_config(self):
        return "the model's configuration"


class NewEngine(Engine):
    model_config = "the model's configuration"
    vllm_config = "all of the configuration"

    async def get_supported_tasks(self):
        return ("generate",)


class WebApplication:
    """Has vLLM's routes; answers contain the request."""

    def __init__(self) -> None:
        self.state = SimpleNamespace()
        self.asked: list[tuple] = []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        request = json.loads(body) if body else None
        self.asked.append((scope["method"], scope["path"], request))
        if isinstance(request, dict) and request.get("stream"):
            await self.stream(send)
        elif isinstance(request, dict) and "model" not in request:
            await self.say(send, 400, {"error": {"message": "model is missing", "code": 400}})
        else:
            await self.say(send, 200, {"path": scope["path"], "request": request})

    async def say(self, send, status, content) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def stream(self, send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in ("Hel", "lo", "[DONE]"):
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})


def old_server(made):
    def build_app(args):
        made.app_options = args
        return WebApplication()

    async def init_app_state(engine_client, model_config, state, args):
        state.known = (engine_client, model_config, args)

    return SimpleNamespace(build_app=build_app, init_app_state=init_app_state)


def new_server(made):
    def build_app(args, supported_tasks=None, model_config=None):
        made.app_options = args
        assert supported_tasks == ("generate",)
        return WebApplication()

    async def init_app_state(engine_client, state, args, supported_tasks=None):
        assert supported_tasks == ("generate",)
        state.known = (engine_client, engine_client.model_config, args)

    return SimpleNamespace(build_app=build_app, init_app_state=init_app_state)


LAYOUTS = {
    "0.6": (OldEngine, old_server, "vllm.entrypoints.openai", "vllm.utils"),
    "now": (NewEngine, new_server, "vllm.entrypoints.launchers", "vllm.utils.argparse_utils"),
}


@pytest.fixture(params=LAYOUTS)
def vllm(request, monkeypatch):
    engine, server, entrypoints, parsers = LAYOUTS[request.param]
    made = SimpleNamespace()
    modules = {
        "vllm": {
            "AsyncEngineArgs": SimpleNamespace(from_cli_args=lambda options: options),
            "AsyncLLMEngine": engine,
        },
        "vllm.entrypoints": {},
        entrypoints: {},
        f"{entrypoints}.cli_args": {"make_arg_parser": parser_with_options},
        f"{entrypoints}.api_server": vars(server(made)),
        "vllm.utils": {},
        parsers: {"FlexibleArgumentParser": argparse.ArgumentParser},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    return made


@pytest.fixture
def make(vllm, make_context, tmp_path):
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    def make(**handler):
        made = VLLMHandler()
        made.initialize(make_context(yaml={"handler": handler}))
        return made

    make.loop = loop
    yield make
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def ask(make, make_context, begin_batch):
    def ask(handler, route, *rows):
        context = begin_batch(make_context(), *([{"url_path": route}] * len(rows)))
        sent = []
        context.on_intermediate = lambda *what: sent.append(what)
        answers = make.loop.run_until_complete(handler.handle(list(rows), context))
        return answers, context, sent

    return ask


def options_of(handler):
    return handler.vllm_engine.options


def test_the_engine_gets_the_options_of_the_yaml(make, caplog) -> None:
    handler = make(
        vllm_engine_config={"model": "org/llm", "max_num_seqs": 64, "warp_speed": 9},
        adapters={"french": "adapters/fr", "german": "adapters/de"},
        chat_template="template.jinja",
    )
    options = options_of(handler)
    assert (options.model, options.max_num_seqs) == ("org/llm", 64)
    assert options.lora_modules == ["french=adapters/fr", "german=adapters/de"]
    assert options.chat_template == "template.jinja"
    assert "no option 'warp_speed'" in caplog.text
    assert handler.initialized


def test_the_web_application_is_built_around_the_engine(make, vllm) -> None:
    handler = make(model_path="org/llm")
    known = handler._application.state.known
    assert known == (handler.vllm_engine, "the model's configuration", options_of(handler))
    assert vllm.app_options is options_of(handler)


def test_vllm_does_not_require_its_api_key(make, monkeypatch) -> None:
    make(model_path="org/llm")
    with pytest.raises(KeyError):
        monkeypatch.delenv("VLLM_API_KEY")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_path_is_a_directory_of_the_archive_or_an_id(make, tmp_path, is_there) -> None:
    if is_there:
        (tmp_path / "org" / "llm").mkdir(parents=True)
    expected = str(tmp_path / "org" / "llm") if is_there else "org/llm"
    assert options_of(make(model_path="org/llm")).model == expected


@pytest.mark.parametrize(("name", "names"), [("llm", ["llm"]), (["a", "b"], ["a", "b"])])
def test_names_that_clients_use(make, name, names) -> None:
    handler = make(vllm_engine_config={"model": "org/llm", "served_model_name": name})
    assert options_of(handler).served_model_name == names


def test_a_configuration_without_a_model(make) -> None:
    with pytest.raises(ValueError, match=r"handler\.model_path or .*vllm_engine_config\.model"):
        make()


@pytest.mark.parametrize(
    ("route", "row", "asked"),
    [
        ("v1/models", {}, ("GET", "/v1/models", None)),
        (
            "v1/completions",
            {"body": {"model": "llm", "prompt": "Hi"}},
            ("POST", "/v1/completions", {"model": "llm", "prompt": "Hi"}),
        ),
        (
            "v1/chat/completions",
            {"data": b'{"model": "llm"}'},
            ("POST", "/v1/chat/completions", {"model": "llm"}),
        ),
    ],
)
def test_routes(make, ask, route, row, asked) -> None:
    handler = make(model_path="org/llm")
    [answer], context, sent = ask(handler, route, row)
    assert handler._application.asked == [asked]
    assert answer["path"] == asked[1]
    assert context.get_response_status(0)[0] == 200
    assert context.get_response_content_type(0) == "application/json"
    assert sent == []
    [[_, name, *_]] = context.metrics.drain()
    assert name == "HandlerTime"


@pytest.mark.parametrize("route", [None, "", "v1/load_lora_adapter", "v1/embeddings"])
def test_other_routes_are_not_found(make, ask, route) -> None:
    handler = make(model_path="org/llm")
    with pytest.raises(PredictionException, match=f"Unknown API endpoint: {route} : 404"):
        ask(handler, route, {"body": {"model": "llm"}})
    assert handler._application.asked == []


def test_refusals_of_vllm_keep_their_status(make, ask) -> None:
    [answer], context, _ = ask(make(model_path="m"), "v1/completions", {"body": {"prompt": "Hi"}})
    assert answer["error"]["message"] == "model is missing"
    assert context.get_response_status(0)[0] == 400


def test_a_stream_arrives_event_by_event(make, ask) -> None:
    row = {"body": {"model": "llm", "stream": True}}
    answers, context, sent = ask(make(model_path="m"), "v1/completions", row)
    assert sent == [
        (["data: Hel\n\n"], {0: "id-0"}, "Result", 200),
        (["data: lo\n\n"], {0: "id-0"}, "Result", 200),
    ]
    assert answers == ["data: [DONE]\n\n"]
    assert context.get_response_content_type(0).startswith("text/event-stream")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"body": b"{"}], "The request is not JSON"),
        ([{"body": {}}, {"body": {}}], "set batchSize to 1 and asyncCommunication to true"),
    ],
)
def test_requests_that_cannot_be_used(make, ask, rows, reason) -> None:
    with pytest.raises(PredictionException, match=f"{reason}.* : 400"):
        ask(make(model_path="m"), "v1/completions", *rows)


def test_without_vllm(monkeypatch, make_context) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs the package vllm, .*pip install vllm"):
        VLLMHandler().initialize(make_context(yaml={"handler": {"model_path": "m"}}))
