"""Sends requests as a user does: with curl, or with Python's requests if curl is missing.

The curl command is printed in both cases, without options for programs such as --silent.
"""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from terminal import DemoFailed, readable, say, show

_TIMEOUT = 300.0  # seconds; the slowest request loads a large model
_PARALLEL_SINCE = (7, 68)  # curl --parallel-immediate
_STATUS_FORMAT = "\n%{http_code}"


class Client:
    """Sends requests; each method prints its command and raises `DemoFailed` for other than 200."""

    def __init__(self) -> None:
        version = _curl_version()
        self._has_curl = version is not None
        self._is_parallel = version is not None and version >= _PARALLEL_SINCE
        if version is None:
            say("curl is not installed: Python's requests sends what curl would.")
        elif not self._is_parallel:
            say("This curl cannot send in parallel: Python's requests sends the eight photographs.")

    def get(self, url: str) -> str:
        """Send GET and return the answer's text."""
        # curl interprets the brackets of name[]= as a pattern of URLs.
        literally = ["--globoff"] if "[" in url else []
        return self._request([url, *literally], lambda: requests.get(url, timeout=_TIMEOUT))

    def post(self, url: str) -> str:
        """Send POST without a body and return the answer's text."""
        return self._request(["-X", "POST", url], lambda: requests.post(url, timeout=_TIMEOUT))

    def upload(self, photograph: Path, url: str) -> str:
        """PUT a file and return the answer's text."""
        return self._request(["-T", readable(photograph), url], lambda: _put(photograph, url))

    def upload_together(self, photographs: Sequence[Path], url: str) -> list[Any]:
        """PUT files of one folder at the same time; return the parsed answers as they arrive."""
        names = ",".join(photograph.name for photograph in photographs)
        together = f"{readable(photographs[0].parent)}/{{{names}}}"
        command = ["curl", "--parallel", "--parallel-immediate", "-T", together, url]
        show(command)
        if not self._is_parallel:
            return _put_together(photographs, url)
        return parse_answers(_run_quietly(command))

    def _request(self, arguments: list[str], send: Callable[[], requests.Response]) -> str:
        command = ["curl", *arguments]
        show(command)
        if self._has_curl:
            text, _, status = _run_quietly([*command, "--write-out", _STATUS_FORMAT]).rpartition(
                "\n"
            )
        else:
            response = send()
            text, status = response.text, str(response.status_code)
        if status != "200":
            raise DemoFailed(f"The server answered with status {status}: {text.strip()}")
        return text.strip()


def parse_answers(text: str) -> list[Any]:
    """Parse consecutive JSON documents."""
    decoder = json.JSONDecoder()
    answers, rest = [], text.lstrip()
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].lstrip()
    return answers


def _curl_version() -> tuple[int, int] | None:
    if shutil.which("curl") is None:
        return None
    version = re.match(r"curl (\d+)\.(\d+)", _run_quietly(["curl", "--version"]))
    return (int(version[1]), int(version[2])) if version else (0, 0)


def _run_quietly(command: list[str]) -> str:
    quiet = [*command, "--silent", "--show-error", "--max-time", f"{_TIMEOUT:g}"]
    done = subprocess.run(quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(f"curl failed: {done.stderr.strip()}")
    return done.stdout


def _put(photograph: Path, url: str) -> requests.Response:
    return requests.put(url, data=photograph.read_bytes(), timeout=_TIMEOUT)


def _put_together(photographs: Sequence[Path], url: str) -> list[Any]:
    gate = threading.Barrier(len(photographs), timeout=_TIMEOUT)

    def send(photograph: Path) -> Any:
        gate.wait()
        return _put(photograph, url).json()

    with ThreadPoolExecutor(len(photographs)) as threads:
        return list(threads.map(send, photographs))
