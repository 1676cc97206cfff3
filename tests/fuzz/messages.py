"""Hypothesis strategies that follow the protos: any message of a type, sensible or not."""

from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tests import tiny

M = TypeVar("M", bound=Message)

# Most values are small, so that some messages get past the checks.
SMALL = st.integers(0, 8) | st.integers(0, tiny.VOCABULARY_SIZE + 1)
MAX_ITEMS = 6


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return SMALL | st.sampled_from([low, high, max(low, -1)]) | st.integers(low, high)


_F = FieldDescriptor
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _F.CPPTYPE_INT32: _integers(-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: _integers(-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: _integers(0, 2**32 - 1),
    _F.CPPTYPE_UINT64: _integers(0, 2**64 - 1),
    _F.CPPTYPE_FLOAT: st.sampled_from([0.0, 0.5, 1.0]) | st.floats(width=32),
    _F.CPPTYPE_DOUBLE: st.sampled_from([0.0, 0.5, 1.0]) | st.floats(),
    _F.CPPTYPE_BOOL: st.booleans(),
}


@st.composite
def message(draw: st.DrawFn, kind: type[M]) -> M:
    """Any message of this type; of a oneof at most one field is set."""
    made = kind()
    rivals = {oneof.name for oneof in kind.DESCRIPTOR.oneofs if len(oneof.fields) > 1}
    for name in sorted(rivals):
        field = draw(st.sampled_from([None, *kind.DESCRIPTOR.oneofs_by_name[name].fields]))
        if field is not None:
            _set(draw, made, field)
    for field in kind.DESCRIPTOR.fields:
        alone = field.containing_oneof is None or field.containing_oneof.name not in rivals
        if alone and draw(st.booleans()):
            _set(draw, made, field)
    return made


def _set(draw: st.DrawFn, made: Message, field: FieldDescriptor) -> None:
    kind = cast("type[Message]", field.message_type._concrete_class) if field.message_type is not None else None
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_values(field.message_type.fields_by_name[part]) for part in ("key", "value"))
        getattr(made, field.name).update(draw(st.dictionaries(key, value, max_size=MAX_ITEMS)))
    elif kind is not None and field.is_repeated:
        getattr(made, field.name).extend(draw(st.lists(message(kind), max_size=MAX_ITEMS)))
    elif kind is not None:
        getattr(made, field.name).CopyFrom(draw(message(kind)))
    elif field.is_repeated:
        getattr(made, field.name).extend(draw(st.lists(_values(field), max_size=MAX_ITEMS)))
    else:
        setattr(made, field.name, draw(_values(field)))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=64)
    if field.type == _F.TYPE_STRING:
        return st.text(max_size=16)
    if field.type == _F.TYPE_ENUM:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99])
    return SCALARS[field.cpp_type]
