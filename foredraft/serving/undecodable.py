"""What is wrong with bytes that protobuf refuses to decode. Only the error path comes here."""

import functools

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from foredraft.errors import Violation


def undecodable(descriptor: Descriptor, data: bytes) -> Violation:
    """Names the first string of `data` that is no UTF-8, or says that `data` is no message of this type at all."""
    twin = _twin(descriptor.full_name, descriptor.file)()
    try:
        twin.ParseFromString(data)
        path = _bad_string(twin, descriptor)
    except DecodeError:
        path = None
    if path is None:
        return Violation("request", f"must be a serialized {descriptor.full_name}; these bytes are none")
    return Violation(path, "must be valid UTF-8, and is not")


@functools.cache
def _twin(full_name: str, file: FileDescriptor) -> type[Message]:
    """The same message with bytes where it has strings, so that every string gets through."""
    pool = descriptor_pool.DescriptorPool()
    _add(pool, file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        for field in message.field:
            if field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
    pool.Add(proto)


def _bad_string(twin: Message, original: Descriptor) -> str | None:
    """Path of the first bytes of `twin` that are a string in `original` and no UTF-8."""
    for twin_field, value in twin.ListFields():
        field = original.fields_by_number[twin_field.number]
        is_string = field.type == FieldDescriptor.TYPE_STRING
        repeated, inside = field.is_repeated, field.message_type
        if not is_string and (inside is None or inside.GetOptions().map_entry):
            continue
        for index, item in enumerate(value if repeated else [value]):
            path = f"{field.name}[{index}]" if repeated else field.name
            if inside is None:
                if not _is_utf8(item):
                    return path
            elif (inner := _bad_string(item, inside)) is not None:
                return f"{path}.{inner}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
