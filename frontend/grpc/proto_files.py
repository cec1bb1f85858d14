"""Reads .proto files, as descriptors of which protobuf makes classes.

What the files in ``proto/`` use of the language is understood, and nothing else: no extensions,
options of fields, default values or reserved numbers. A test holds the result to that of protoc.
"""

import re
from collections.abc import Iterator

from google.protobuf import descriptor_pb2

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[^\s\w]')
_COMMENT = re.compile(r"//[^\n]*")
_SCALARS = {
    name: number
    for number, name in enumerate(
        (
            *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool"),
            *("string", "group", "message", "bytes", "uint32", "enum", "sfixed32", "sfixed64"),
            *("sint32", "sint64"),
        ),
        start=1,
    )
    if name not in ("group", "message", "enum")
}
_Field = descriptor_pb2.FieldDescriptorProto


def parse_proto(name: str, text: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of a file; its ``name`` is that by which others import it.

    Raises:
        ValueError: It is no such file, or uses what is not understood here.
    """
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
    tokens = _Tokens(text)
    while tokens:
        match tokens.take():
            case "syntax" | "option":
                tokens.statement()
            case "package":
                (file.package,) = tokens.statement()
            case "import":
                file.dependency.append(tokens.statement()[0].strip('"'))
            case "message":
                _read_message(tokens, file.message_type.add())
            case "enum":
                _read_enum(tokens, file.enum_type.add())
            case "service":
                _read_service(tokens, file.service.add())
            case other:
                raise ValueError(f"{name}: {other}")
    return file


class _Tokens:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(_COMMENT.sub("", text))[::-1]

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def take(self, *expected: str) -> str:
        """The next one, which must be one of those expected, if any are."""
        if not self._tokens:
            raise ValueError("the file ends too early")
        token = self._tokens.pop()
        if expected and token not in expected:
            raise ValueError(f"{token!r} instead of {' or '.join(expected)}")
        return token

    def take_if(self, expected: str) -> bool:
        """Whether the next is the one expected, which is then taken."""
        is_next = bool(self._tokens) and self._tokens[-1] == expected
        if is_next:
            self._tokens.pop()
        return is_next

    def statement(self) -> list[str]:
        """All up to the next semicolon."""
        taken = []
        while (token := self.take()) != ";":
            taken.append(token)
        return taken

    def block(self) -> Iterator[str]:
        """The first token of each statement of a block in braces; the caller takes the others."""
        self.take("{")
        while not self.take_if("}"):
            yield self.take()


def _read_message(tokens: _Tokens, message: descriptor_pb2.DescriptorProto) -> None:
    message.name = tokens.take()
    optional = []
    for first in tokens.block():
        match first:
            case "message":
                _read_message(tokens, message.nested_type.add())
            case "enum":
                _read_enum(tokens, message.enum_type.add())
            case "oneof":
                message.oneof_decl.add(name=tokens.take())
                place = len(message.oneof_decl) - 1
                for kind in tokens.block():
                    _read_field(tokens, message.field.add(oneof_index=place), kind)
            case "map":
                _read_map(tokens, message)
            case "repeated":
                field = message.field.add()
                _read_field(tokens, field, tokens.take())
                field.label = _Field.LABEL_REPEATED
            case "optional":
                field = message.field.add(proto3_optional=True)
                _read_field(tokens, field, tokens.take())
                optional.append(field)
            case _:
                _read_field(tokens, message.field.add(), first)
    for field in optional:  # protobuf wants these behind all others
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _read_field(tokens: _Tokens, field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    """Read the rest of ``kind name = number;``."""
    _set_type(field, kind)
    field.label = _Field.LABEL_OPTIONAL
    field.name, _, number = tokens.statement()
    field.number = int(number)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]  # type: ignore[assignment]  # the number of a type is one
    else:
        field.type_name = kind  # a message or an enum; protobuf finds it, as the language has it


def _read_map(tokens: _Tokens, message: descriptor_pb2.DescriptorProto) -> None:
    """Read the rest of ``map<key, value> name = number;``, which is a list of entries."""
    tokens.take("<")
    kinds = [tokens.take()]
    tokens.take(",")
    kinds.append(tokens.take())
    tokens.take(">")
    name, _, number = tokens.statement()
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    for place, (part, kind) in enumerate(zip(("key", "value"), kinds, strict=True), start=1):
        field = entry.field.add(name=part, number=place, label=_Field.LABEL_OPTIONAL)
        _set_type(field, kind)
    message.field.add(
        name=name,
        number=int(number),
        label=_Field.LABEL_REPEATED,
        type=_Field.TYPE_MESSAGE,
        type_name=entry.name,
    )


def _read_enum(tokens: _Tokens, enum: descriptor_pb2.EnumDescriptorProto) -> None:
    enum.name = tokens.take()
    for name in tokens.block():
        _, number = tokens.statement()
        enum.value.add(name=name, number=int(number))


def _read_service(tokens: _Tokens, service: descriptor_pb2.ServiceDescriptorProto) -> None:
    service.name = tokens.take()
    for first in tokens.block():
        if first != "rpc":
            raise ValueError(f"{first!r} instead of rpc")
        method = service.method.add(name=tokens.take())
        method.client_streaming, method.input_type = _read_message_type(tokens)
        tokens.take("returns")
        method.server_streaming, method.output_type = _read_message_type(tokens)
        if tokens.take(";", "{") == "{":
            tokens.take("}")


def _read_message_type(tokens: _Tokens) -> tuple[bool, str]:
    """Read ``(type)`` or ``(stream type)``: whether it is a stream, and of which messages."""
    tokens.take("(")
    is_stream = tokens.take_if("stream")
    name = tokens.take()
    tokens.take(")")
    return is_stream, name
