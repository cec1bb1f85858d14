"""What the server adds to an engine of language models: one engine, asked directly and through it.

    python benchmarks/llm.py [--rounds 5] [--hidden-size 256] [--layers 4] [--tokens 64] …

The engine is the one of `make llm`, a child of marserve's worker; its unix socket is the other
address. Requests of both take turns. vLLM binds its computing thread to the first processor; its
server, marserve and the clients of this program share the others. So on two processors each
millisecond of marserve's and of the clients is taken from vLLM's server: a limit from below.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from processes import Marserve, pack
from report import Row, table

_CACHE = Path(os.environ.get("MARSERVE_LLM", Path.home() / ".cache" / "marserve-llm"))
_MAKE_MODEL = Path(__file__).parents[1] / "tests" / "llm" / "make_model.py"
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_OPTIONS = {"enforce_eager": True, "distributed_executor_backend": "uni"}
_ADDED_MS = 2.0
_THROUGHPUT = 0.97


@dataclass(frozen=True)
class _Address:
    """Where the model is asked; a session keeps its connections."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, tokens: int, *, stream: bool) -> float:
        """Return the seconds to the first bytes of an answer of this number of tokens."""
        body = {
            "model": "llm",
            "messages": [{"role": "user", "content": "How long does it take?"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        started = time.perf_counter()
        async with self.session.post(self.url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            await answer.content.readany()
            seconds = time.perf_counter() - started
            async for _ in answer.content.iter_any():
                pass
        return seconds

    async def rate(self, clients: int, tokens: int, *, stream: bool) -> float:
        """Return the tokens per second of this number of clients, each with one request."""
        started = time.perf_counter()
        await asyncio.gather(*(self.ask(tokens, stream=stream) for _ in range(clients)))
        return clients * tokens / (time.perf_counter() - started)


async def _measure(ours: _Address, bare: _Address, options: argparse.Namespace) -> list[Row]:
    for address in (ours, bare):  # connections, and what the engine does once
        await address.rate(options.clients, options.tokens, stream=True)
    first: dict[_Address, list[list[float]]] = {ours: [], bare: []}
    for _ in range(options.rounds):
        for times in first.values():
            times.append([])
        for n in range(options.requests):
            for address in (ours, bare)[:: -1 if n % 2 else 1]:
                first[address][-1].append(1000 * await address.ask(2, stream=True))
    rows = [
        Row("first token, median ms", _medians(first[ours]), "engine", _medians(first[bare])),
        Row("first token, p90 ms", _p90s(first[ours]), "engine", _p90s(first[bare])),
    ]
    pairs = [
        [ours_ms - bare_ms for ours_ms, bare_ms in zip(*rounds, strict=True)]
        for rounds in zip(first[ours], first[bare], strict=True)
    ]
    rows.append(Row("added, median ms", _medians(pairs), "limit", [_ADDED_MS], at_most=1.0))
    for stream in (True, False):
        rates: dict[_Address, list[float]] = {ours: [], bare: []}
        for n in range(options.rounds):
            for address in (ours, bare)[:: -1 if n % 2 else 1]:
                rates[address].append(
                    await address.rate(options.clients, options.tokens, stream=stream)
                )
        name = f"{options.clients} {'streams' if stream else 'whole answers'}, tokens/s"
        rows.append(Row(name, rates[ours], "engine", rates[bare], at_least=_THROUGHPUT))
    return rows


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(times) for times in rounds]


def _p90s(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.quantiles(times, n=10)[-1] for times in rounds]


def _engine_socket(pid: int) -> str:
    """Return the unix socket of the only engine below a server."""
    lines = [each.cmdline() for each in psutil.Process(pid).children(recursive=True)]
    (words,) = [words for words in lines if "--uds" in words]
    return words[words.index("--uds") + 1]


async def _compare(server: Marserve, options: argparse.Namespace) -> list[Row]:
    timeout = aiohttp.ClientTimeout(600)
    connector = aiohttp.UnixConnector(_engine_socket(server.pid))
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as bare_session,
    ):
        ours = _Address(session, f"http://127.0.0.1:{server.inference_port}{options.path}")
        bare = _Address(bare_session, "http://engine/v1/chat/completions")
        return await _measure(ours, bare, options)


def _pack(directory: Path, python: Path, options: argparse.Namespace) -> None:
    model = directory / "model"
    sizes = [str(options.hidden_size), str(options.layers)]
    subprocess.run([python, _MAKE_MODEL, model, directory / "adapter", *sizes], check=True)
    config: dict[str, Any] = {
        "asyncCommunication": True,
        "startupTimeout": 600,
        "handler": {"model_path": str(model), "vllm_engine_config": _OPTIONS},
    }
    file = directory / "model-config.yaml"
    file.write_text(json.dumps(config))
    arguments: dict[str, str | Path] = {"handler": "vllm_handler", "config-file": file}
    pack(directory / "store", {"model-name": "llm", **arguments})


def _main() -> None:
    parser = argparse.ArgumentParser(description="What marserve adds to an engine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="for first tokens, in a round")
    parser.add_argument("--clients", type=int, default=20, help="for the throughput")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, for the throughput")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--path", default="/v1/chat/completions", help="of marserve")
    options = parser.parse_args()
    found = sorted(_CACHE.glob("vllm-*/bin/python"))
    if not found:
        parser.error(f"{_CACHE} has no engine: run `make llm` first")
    os.environ |= _ENVIRONMENT
    os.environ["PATH"] = f"{found[-1].parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _pack(directory, found[-1], options)
        with Marserve(directory).running() as server, server.model("llm.mar"):
            print(table(asyncio.run(_compare(server, options))))


if __name__ == "__main__":
    _main()
