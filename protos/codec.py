"""Messages to bytes and back; the only file that knows msgpack. Bad bytes raise DecodeError only.

A message is `[tag, *fields]`, a nested value `[*fields]`, and a tuple of flat values (numbers and
text only) travels as columns, so that a step of a thousand nodes is a few flat lists.
"""

import dataclasses
import math
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any

import msgpack

from protos import messages
from protos.messages import Message

MAX_FRAME_BYTES = 16 * 2**20

# Tags are never reused.
TAGS: dict[int, type] = {
    1: messages.Hello,
    2: messages.Open,
    3: messages.Advance,
    4: messages.Close,
    5: messages.Grow,
    6: messages.Need,
    7: messages.Report,
    8: messages.Step,
    9: messages.Stepped,
    10: messages.Audit,
    11: messages.AuditReply,
    12: messages.Join,
    13: messages.Joined,
}


class DecodeError(Exception):
    """Bytes that are no message of ours; the stream they came on cannot be trusted further."""


Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How values of one type are packed and unpacked."""

    pack: Convert
    unpack: Convert
    flat: bool = False


def _same(value: Any) -> Any:
    return value


def _scalar(kind: type) -> _Form:
    def unpack(value: Any) -> Any:
        if type(value) is not kind:
            raise DecodeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return _Form(_same, unpack, flat=True)


def _unpack_float(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise DecodeError(f"expected a finite float, got {value!r:.40}")
    return value


_SCALARS: dict[type, _Form] = {
    int: _scalar(int),
    str: _scalar(str),
    bool: _scalar(bool),
    bytes: _scalar(bytes),
    float: _Form(float, _unpack_float, flat=True),
}


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise DecodeError(f"expected a list, got {type(value).__name__}")
    return value


def _column(kind: type, values: Any) -> list[Any]:
    """A whole column checked at once."""
    column = _list(values)
    if any(found is not kind for found in set(map(type, column))):
        raise DecodeError(f"expected only {kind.__name__} in a column")
    if kind is float and not all(map(math.isfinite, column)):
        raise DecodeError("expected only finite floats in a column")
    return column


def _tuple_of_scalars(kind: type) -> _Form:
    def pack(values: Any) -> Any:
        return [float(value) for value in values] if kind is float else values

    return _Form(pack, lambda values: tuple(_column(kind, values)))


def _columns(cls: type, kinds: list[type]) -> _Form:
    names = [f.name for f in dataclasses.fields(cls)]
    required = _required(cls)

    def pack(values: Any) -> Any:
        return [[kinds[i](getattr(v, name)) for v in values] for i, name in enumerate(names)]

    def unpack(values: Any) -> Any:
        columns = _list(values)
        if len(columns) < required:
            raise DecodeError(f"{cls.__name__}: {len(columns)} columns, {required} expected")
        checked = [_column(kind, c) for kind, c in zip(kinds, columns, strict=False)]
        if len({len(c) for c in checked}) > 1:
            raise DecodeError(f"{cls.__name__}: columns of unequal length")
        return tuple(map(cls, *checked))

    return _Form(pack, unpack)


def _required(cls: type) -> int:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return sum(f.default is missing and f.default_factory is missing for f in fields)


def _record(cls: type) -> _Form:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    forms = [_form(hints[name]) for name in names]
    required = _required(cls)

    def pack(value: Any) -> list[Any]:
        return [form.pack(getattr(value, name)) for form, name in zip(forms, names, strict=True)]

    def unpack(value: Any) -> Any:
        values = _list(value)
        if len(values) < required:
            raise DecodeError(f"{cls.__name__}: {len(values)} fields, {required} expected")
        return cls(*[form.unpack(v) for form, v in zip(forms, values, strict=False)])

    return _Form(pack, unpack)


def _form(hint: Any) -> _Form:
    """The form of a field's type; a type that must not travel fails here, at import."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if typing.get_origin(hint) is tuple:
        item, dots = typing.get_args(hint)
        assert dots is Ellipsis, f"only homogeneous tuples travel: {hint}"
        return _tuple_form(item)
    assert isinstance(hint, type) and dataclasses.is_dataclass(hint), f"cannot travel: {hint}"
    return _record(hint)


def _tuple_form(item: Any) -> _Form:
    if item in _SCALARS:
        return _tuple_of_scalars(item)
    if isinstance(item, type) and dataclasses.is_dataclass(item):
        kinds = list(typing.get_type_hints(item).values())
        if all(kind in _SCALARS for kind in kinds):
            return _columns(item, kinds)
    form = _form(item)
    return _Form(
        lambda values: [form.pack(v) for v in values],
        lambda values: tuple(form.unpack(v) for v in _list(values)),
    )


_TAG_OF: types.MappingProxyType[type, int] = types.MappingProxyType(
    {cls: tag for tag, cls in TAGS.items()}
)
_FORMS: dict[int, _Form] = {tag: _record(cls) for tag, cls in TAGS.items()}


def encode(message: Message) -> bytes:
    """The frame of a message. Raises ValueError if it is larger than MAX_FRAME_BYTES."""
    tag = _TAG_OF[type(message)]
    frame: bytes = msgpack.packb([tag, *_FORMS[tag].pack(message)])
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(frame)} bytes exceeds a frame")
    return frame


def decode(frame: bytes) -> Message:
    """The message in a frame. Raises DecodeError for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise DecodeError(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        values = _list(msgpack.unpackb(frame, raw=False, max_map_len=0, max_ext_len=0))
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"not msgpack: {error}") from error
    if not values or type(values[0]) is not int or values[0] not in _FORMS:
        raise DecodeError(f"unknown tag {values[:1]!r:.40}")
    message: Message = _FORMS[values[0]].unpack(values[1:])
    return message


def row_hash(
    opens: tuple[messages.StepOpen, ...],
    extends: tuple[messages.Extend, ...],
    closes: tuple[messages.StepClose, ...],
) -> int:
    """What every shard compares before its first collective: the step's rows, whole."""
    return zlib.crc32(
        msgpack.packb([_ROWS[i].pack(v) for i, v in enumerate((opens, extends, closes))])
    )


_ROWS = [_tuple_form(cls) for cls in (messages.StepOpen, messages.Extend, messages.StepClose)]
