"""Let real clients talk to TorchServe and marserve, and print where they see something different.

    python tests/compat/clients.py --torchserve /path/to/venv/bin/torchserve \\
        --clients /path/to/venv/bin/python

curl, in every form the documentation of TorchServe shows, and the `requests` library are always
asked; with ``--clients``, an interpreter that has ``tritonclient[http]`` and ``kserve`` installed,
so are these two. Not part of the test run. The exit status is 1 when an outcome differs.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import requests
from archives import pack_all
from masks import masked
from peers import Contestant, file_server
from servers import TORCHSERVE as MARSERVE
from steps import Setting

SETTING = Setting(
    "clients",
    {
        "enable_model_api": "true",
        "disable_token_authorization": "true",
        "ts_open_inference_protocol": "true",
    },
    [],
)
KSERVE = Setting("KServe", {**SETTING.properties, "service_envelope": "kservev2"}, [])
Call = Callable[[Contestant], str]

# {predictions} and {management} are URLs, {file} is a picture and {json} a JSON file.
# Arguments are separated by single spaces.
CURL: Sequence[str] = (
    "-T {file} {predictions}/probe",
    "-X POST -T {file} {predictions}/probe",
    "{predictions}/probe -T {file} -T {json}",
    "-F data=@{file} {predictions}/probe",
    "-F data=@{file};type=image/png {predictions}/probe",
    "-F a=@{file} -F b=@{json} -F c=text {predictions}/probe",
    "-F data=@{json};type=application/json {predictions}/probe",
    "-X POST {predictions}/probe -F data=@{file} -F data=@{json}",
    "-d hello {predictions}/probe",
    "-d a=1&b=2 {predictions}/probe",
    "-d @{json} {predictions}/probe",
    "--data-urlencode text=two+words&more {predictions}/probe",
    "--data-binary @{file} {predictions}/probe",
    "--data-binary @{file} -H Content-Type:application/octet-stream {predictions}/probe",
    "--data-binary @{json} -H Content-Type:application/json {predictions}/probe",
    "-H Content-Type:application/json -d {{\"a\":1}} {predictions}/probe",
    "--json {{\"a\":1}} {predictions}/probe",
    "-H Content-Type:text/plain -d hello {predictions}/probe",
    "-H Transfer-Encoding:chunked --data-binary @{file} {predictions}/probe",
    "-H Expect:100-continue --data-binary @{file} {predictions}/probe",
    "--http1.0 --data-binary @{file} {predictions}/probe",
    "-G -d a=1 {predictions}/probe",
    "-I {predictions}/probe",
    "{predictions}/probe {predictions}/probe",
    "--fail -d x {predictions}/nobody",
    "-X OPTIONS {predictions}/nobody",
    "--no-buffer -H Content-Type:application/json -d {{\"pieces\":3}} {predictions}/stream",
    "-X PUT {management}/models/probe?min_worker=1&synchronous=true",
    "-X POST {management}/models?url=versions-1.0.mar&initial_workers=1&synchronous=true",
    "-d url=versions-2.0.mar {management}/models",
    '-H Content-Type:application/json -d {{"url":"versions-2.0.mar"}} {management}/models',
    "-v -X PUT {management}/models/versions/2.0/set-default",
    "-X DELETE {management}/models/versions/1.0",
    "{management}/models?limit=1&next_page_token=1",
)  # fmt: skip

TRITON = """
import sys
import numpy
import tritonclient.http as triton

client = triton.InferenceServerClient(sys.argv[1])
print("live", client.is_server_live(), "ready", client.is_server_ready())
print("name", client.get_server_metadata()["name"])
for kind, values in (("INT64", [1, 2]), ("FP32", [1.5, 2.5])):
    dtype = {"INT64": numpy.int64, "FP32": numpy.float32}[kind]
    tensor = triton.InferInput("i", [2], kind)
    tensor.set_data_from_numpy(numpy.array(values, dtype), binary_data=False)
    output = triton.InferRequestedOutput("i", binary_data=False)
    answer = client.infer("increase", [tensor], outputs=[output], request_id="mine")
    print(kind, answer.as_numpy("i").tolist(), answer.get_response()["id"])
try:
    client.infer("nobody", [tensor])
except triton.InferenceServerException as error:
    print("refused", error.status())
"""

KSERVE_CLIENT = """
import asyncio
import sys
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    print("live", await client.is_server_live(url), "ready", await client.is_server_ready(url))
    for kind, values in (("INT64", [1, 2]), ("FP32", [1.5, 2.5])):
        tensor = InferInput("i", [2], kind, data=values)
        request = InferRequest("increase", [tensor], request_id="mine")
        answer = await client.infer(url, request, model_name="increase")
        print(kind, answer.outputs[0].data, answer.outputs[0].shape, answer.id)
    try:
        await client.infer(url, InferRequest("nobody", [tensor]), model_name="nobody")
    except Exception as error:
        print("refused", type(error).__name__)

asyncio.run(main(sys.argv[1]))
"""


def main() -> int:
    """Ask both, print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torchserve", type=_absolute, required=True)
    parser.add_argument("--marserve", type=_absolute, default=MARSERVE)
    parser.add_argument("--clients", type=_absolute, help="python with tritonclient and kserve")
    options = parser.parse_args()
    theirs, ours = (
        dict(_ask(program, options.clients)) for program in (options.torchserve, options.marserve)
    )
    different = [name for name in theirs if theirs[name] != ours[name]]
    for name in different:
        print(f"\n{name}")
        changes = difflib.unified_diff(theirs[name].splitlines(), ours[name].splitlines(), n=0)
        print(*(f"    {line}" for line in [*changes][2:] if line[:2] != "@@"), sep="\n")
    print(f"\n{len(theirs)} calls, {len(different)} with another outcome")
    return bool(different)


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _ask(program: Path, python: Path | None) -> Iterator[tuple[str, str]]:
    yield from _asked(program, SETTING, ("probe", "stream"), {**_curl_calls(), **REQUESTS})
    if python is not None:
        calls = {
            "tritonclient": _program(python, TRITON, "127.0.0.1:{port}"),
            "kserve": _program(python, KSERVE_CLIENT, "http://127.0.0.1:{port}"),
        }
        yield from _asked(program, KSERVE, ("increase",), calls)


def _asked(
    program: Path, setting: Setting, models: Sequence[str], calls: Mapping[str, Call]
) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="cmp") as folder:
        archives = Path(folder) / "archives"
        pack_all(program.with_name("torch-model-archiver"), archives)
        with file_server(archives) as files:
            peer = Contestant(program, archives, setting, files)
            try:
                peer.start()
                for model in models:
                    peer.server.register(f"{model}.mar", initial_workers=1)
                for name, call in calls.items():
                    yield name, masked(peer, call(peer))
            finally:
                peer.close()


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    return f"{done.returncode}: {done.stdout.decode('utf-8', 'backslashreplace')}"


def _program(python: Path, source: str, address: str) -> Call:
    def call(peer: Contestant) -> str:
        url = address.format(port=peer.server.ports["inference"])
        return _run([python, "-W", "ignore", "-c", source, url])

    return call


def _curl_calls() -> dict[str, Call]:
    return {f"curl {line}": _curl(line) for line in CURL}


def _curl(line: str) -> Call:
    def call(peer: Contestant) -> str:
        picture, document = peer.directory / "cat.png", peer.directory / "cat.json"
        picture.write_bytes(b"\x89PNG\r\n" * 3)
        document.write_text('{"instances": [1, 2]}')
        names = {
            "file": picture,
            "json": document,
            "predictions": f"http://127.0.0.1:{peer.server.ports['inference']}/predictions",
            "management": f"http://127.0.0.1:{peer.server.ports['management']}",
        }
        written = ["-w", "\n%{http_code} %{content_type}"]
        arguments = [word.format(**names) for word in line.split(" ")]
        return _run(["curl", "-s", "--max-time", "20", *written, *arguments])

    return call


def _posted(**how: object) -> Call:
    def call(peer: Contestant) -> str:
        answer = peer.server.predict("probe", **how)
        return f"{answer.status_code} {answer.encoding}: {answer.text}"

    return call


def _streamed(peer: Contestant) -> str:
    with peer.server.predict("stream", json={"pieces": 3}, stream=True) as answer:
        return " | ".join(chunk.decode() for chunk in answer.iter_content(None))


def _with_session(peer: Contestant) -> str:
    """One connection for several requests, an error among them."""
    url = f"http://127.0.0.1:{peer.server.ports['inference']}/predictions"
    with requests.Session() as session:
        paths = ("probe", "probe", "nobody", "probe")
        return str([session.post(f"{url}/{path}", b"x").status_code for path in paths])


REQUESTS: Mapping[str, Call] = {
    "requests: bytes": _posted(data=b"x"),
    "requests: json": _posted(json={"a": [1, None]}),
    "requests: text": _posted(data="x", headers={"Content-Type": "text/plain"}),
    "requests: form": _posted(data={"a": "1", "b": ["2", "3"]}),
    "requests: files": _posted(files={"data": ("cat.png", b"\x89PNG", "image/png")}),
    "requests: files and fields": _posted(files={"data": b"x"}, data={"a": "1"}),
    "requests: generator": lambda peer: _posted(data=iter([b"one", b"two"]))(peer),
    "requests: stream": _streamed,
    "requests: session": _with_session,
}

if __name__ == "__main__":
    sys.exit(main())
