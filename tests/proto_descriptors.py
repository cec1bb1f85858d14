"""Compiles the .proto files: `python tests/proto_descriptors.py` writes what the server loads.

The Open Inference Protocol is compiled twice, because TorchServe has its service in a package of
its own. What only Java and JSON read is left out.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

FOLDER = Path(__file__).parent.parent / "frontend" / "grpc" / "proto"
DESCRIPTORS = FOLDER / "descriptors.binpb"
TORCHSERVES = "org.pytorch.serve.grpc.openinference"


def compiled() -> bytes:
    """Return the descriptor set of all files, serialized; files follow those that they import."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, TORCHSERVES, "open_inference.proto")
        copy.parent.mkdir()
        text = (FOLDER / "open_inference.proto").read_text()
        copy.write_text(text.replace("package inference;", f"package {TORCHSERVES};"))
        sources = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.proto"))
        output = Path(scratch, "set")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"-I{scratch}"]
        command += [f"--descriptor_set_out={output}", *sources]
        subprocess.run([*command, f"{TORCHSERVES}/open_inference.proto"], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    for file in files.file:
        file.ClearField("options")
        _clear_json_names(file.message_type)
    return files.SerializeToString(deterministic=True)


def _clear_json_names(messages: list[descriptor_pb2.DescriptorProto]) -> None:
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _clear_json_names(message.nested_type)


if __name__ == "__main__":
    DESCRIPTORS.write_bytes(compiled())
