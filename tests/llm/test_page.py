"""The first section of docs/llm.md, with a tiny model in place of the one of the page."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from integration.test_pages import Shell, Step, steps_of
from llm.conftest import ENVIRONMENT

pytestmark = pytest.mark.llm

PAGE = Path(__file__).parents[2] / "docs" / "llm.md"


def test_from_nothing_to_an_answer(engine_python, models):
    page = PAGE.read_text(encoding="utf-8").partition("\n## In an archive\n")[0]
    page = page.replace("Qwen/Qwen2.5-0.5B-Instruct", str(models.tiny))
    page = page.replace("\npython ask.py", f"\n{engine_python} ask.py")  # which has the client
    steps = [*steps_of(page), Step("torchserve --stop; wait", ())]
    # The paths of vLLM's sockets have at most 107 characters, and pytest's directories are long.
    with TemporaryDirectory() as directory:
        shell = Shell(Path(directory), preload_modules="")
        path = os.pathsep.join([shell.environment["PATH"], str(engine_python.parent)])
        shell.environment |= {"PATH": path, **ENVIRONMENT}
        # The launcher's options leave torch's compiler on, and a process for the engine.
        for name in ("TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            del shell.environment[name]
        outputs = shell.run(steps)
    assert f"{models.tiny} 32" in outputs[2], outputs
