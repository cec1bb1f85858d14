"""Message classes and services of the .proto files in ``proto/``, from their compiled descriptors.

protobuf makes the classes from descriptors. An echo over grpc.aio is as fast as with code generated
by protoc or with codecs of our own (grpcio 1.85; CPU time per call at 1 KB 73 to 170 us, at 1 MB
0.75 to 1.2 ms). Generated code works only with the protobuf of the same major version and the next;
descriptors work with protobuf 3.20 to 7, in a separate pool, so that they do not collide with other
definitions of ``inference.proto``. `tests/proto_descriptors.py` compiles the files.
"""

import functools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from google.protobuf import any_pb2, descriptor_pool, empty_pb2, message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet

#: A message. Its class is made at run time, so static tools cannot check its fields.
Message = Any
MessageClass = Any
#: The result of methods that answer with a stream.
Answers = AsyncGenerator[Message, None]

#: Every definition of the server; tools like grpcurl receive them by reflection.
POOL = descriptor_pool.DescriptorPool()
_COMPILED = files(__package__).joinpath("proto", "descriptors.binpb").read_bytes()
for _file in (
    *(module.DESCRIPTOR.serialized_pb for module in (any_pb2, empty_pb2)),
    *(file.SerializeToString() for file in FileDescriptorSet.FromString(_COMPILED).file),
):
    POOL.AddSerializedFile(_file)


@dataclass(frozen=True)
class ProtoFile:
    """What one file defines."""

    messages: Any  # the classes of its messages, as attributes
    services: Mapping[str, ServiceDescriptor]


@functools.cache
def load_proto(name: str, package: str = "") -> ProtoFile:
    """Return what a file in ``proto/`` defines, for another ``package`` if one is named."""
    found = POOL.FindFileByName(f"{package}/{name}" if package else name)
    messages = {
        message.name: message_class(message) for message in found.message_types_by_name.values()
    }
    return ProtoFile(SimpleNamespace(**messages), found.services_by_name)


def message_class(descriptor: Descriptor) -> MessageClass:
    """The class of a message."""
    factory: Any = message_factory
    if hasattr(factory, "GetMessageClass"):
        return factory.GetMessageClass(descriptor)
    return factory.MessageFactory(POOL).GetPrototype(descriptor)  # before protobuf 4.22
