"""The clients of the Open Inference Protocol, in an environment of their own, made once.

They cannot be installed beside ours: they want an older protobuf than the tools of gRPC.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = ["tritonclient[http,grpc]>=2.60", "kserve>=0.15"]


@pytest.fixture(scope="session")
def client_python() -> Path:
    """Python of an environment with the clients."""
    mark = hashlib.sha256(repr((REQUIREMENTS, sys.version_info[:2])).encode()).hexdigest()[:8]
    folder = Path(__file__).parents[1] / "build" / f"clients-{mark}"
    python = folder / "bin" / "python"
    done = folder / "done"
    if not done.exists():
        commands = [
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS],
        ]
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if made.returncode:
                pytest.skip(f"the clients cannot be installed: {made.stderr[-500:]}")
        done.touch()
    return python
