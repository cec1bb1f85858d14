"""The .proto files are understood as protoc understands them."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from marserve.frontend import grpc
from marserve.frontend.grpc.messages import POOL, load_proto
from marserve.frontend.grpc.proto_files import parse_proto

FOLDER = Path(grpc.__path__[0]) / "proto"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.proto"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What protoc makes of each file, as a serialized descriptor."""
    output = tmp_path_factory.mktemp("protoc") / "set.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={output}", *FILES], check=True)
    found = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    pool = type(POOL)()
    for file in found.file:
        pool.AddSerializedFile(file.SerializeToString())
    return {name: described(pool, name) for name in FILES}


def described(pool: object, name: str) -> bytes:
    """The definition of a file, complete, without what only Java reads."""
    file = descriptor_pb2.FileDescriptorProto()
    pool.FindFileByName(name).CopyToProto(file)  # type: ignore[attr-defined]
    file.ClearField("options")
    for message in file.message_type:
        clear_json_names(message)
    for service in file.service:
        for method in service.method:
            method.ClearField("options")
            # Only what "false" looks like when it was written down differs.
            method.client_streaming, method.server_streaming = (
                method.client_streaming,
                method.server_streaming,
            )
    return file.SerializeToString(deterministic=True)


def clear_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """Forget what follows from the names of the fields."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        clear_json_names(nested)


@pytest.mark.parametrize("name", FILES)
def test_a_file_means_what_it_means_to_protoc(name: str, compiled: dict[str, bytes]) -> None:
    load_proto(name)
    assert described(POOL, name) == compiled[name]


def test_a_package_can_be_replaced() -> None:
    copy = load_proto("management.proto", "some.where.else")
    assert copy.services["ManagementAPIsService"].full_name == (
        "some.where.else.ManagementAPIsService"
    )
    assert copy.messages.ManagementResponse.DESCRIPTOR.file.name != "management.proto"


@pytest.mark.parametrize(
    "text",
    [
        "extend Foo { int32 x = 1; }",
        "message A {",
        "message A { map<string> x = 1; }",
        "service S { option deprecated = true; }",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a.proto: ext|ends too early|instead of"):
        parse_proto("a.proto", text)
