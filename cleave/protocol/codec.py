"""Messages to bytes and back: each is one msgpack array ``[type, fields, payload?]``.

The payload comes last and is a msgpack `bin`. So a sender gives header and payload to the socket
one after the other without joining them, and a receiver views the payload where it lies.
"""

from __future__ import annotations

import math
import reprlib
import struct
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import msgpack

from cleave.errors import ProtocolError, VersionError
from cleave.protocol import limits, messages
from cleave.protocol.messages import Message
from cleave.protocol.texts import clean, clean_plain

Buffer: TypeAlias = bytes | memoryview
_PEEK_BYTES = 512
_PAIR = b"\x92"  # the header of an array of two


class Packable(Protocol):
    """A payload that is not packed yet: it knows its size, and packs itself to be sent."""

    @property
    def nbytes(self) -> int: ...

    def pack(self) -> memoryview: ...


def payload_bytes(payload: Any) -> int:
    """Return the size of a payload, as it was received or as it is held in this process."""
    return len(payload) if isinstance(payload, bytes) else int(payload.nbytes)


def _header(message: Message) -> bytes:
    cls: Any = type(message)
    return _writer(cls)(message)


def encode(message: Message) -> list[Buffer]:
    """Return the message as parts to send in turn: a header and, where there is one, a payload.

    Raises:
        ProtocolError: when the message is larger than the protocol allows.
    """
    try:
        head = _header(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {message.TYPE} message cannot be written: {error}") from None
    if len(head) > limits.MAX_HEADER_BYTES:
        raise ProtocolError(
            f"the fields of a {message.TYPE} message take {len(head)} bytes, over the limit of "
            f"{limits.MAX_HEADER_BYTES}"
        )
    payload = getattr(message, "payload", None)
    if payload is None:
        if type(message) is messages.Run and len(message.inputs) <= limits.MAX_RUN_INPUTS:
            return [head]  # made by our own cores, and many
        decode(head)  # what the other side would refuse is not sent
        return [head]
    parts = [head, payload if isinstance(payload, bytes | memoryview) else payload.pack()]
    size = sum(len(part) for part in parts)
    if size > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {message.TYPE} of {size} bytes is over the limit of "
            f"{limits.MAX_MESSAGE_BYTES} bytes a message"
        )
    return parts


def wire_size(message: Message) -> int:
    """Return the size of the encoded message in bytes, without encoding its payload."""
    cls: Any = type(message)
    return _sizer(cls)(message)


def decode(data: bytes, header_bytes: int = limits.MAX_HEADER_BYTES) -> Message:
    """Read one message. Its payload, if any, is a view into `data`; its texts are cleaned.

    Of a `hello` in another version only the fields that tell this are read: the others may have
    another meaning.

    Args:
        data: the message.
        header_bytes: how long its header may be; some senders are held to less than others.

    Raises:
        ProtocolError: for anything that is not a message of this protocol.
        VersionError: for a `welcome` in another version.
    """
    if len(data) > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is over the limit of {limits.MAX_MESSAGE_BYTES}"
        )
    kind, raw, offset, count = _read_head(data, header_bytes)
    reader = _readers().get(kind)
    if reader is None:
        raise ProtocolError(f"unknown message type {kind[:40]!r}")
    cls, read, has_payload = reader
    if count != (3 if has_payload else 2):
        raise ProtocolError(f"a {kind} message has {count} parts, not {3 if has_payload else 2}")
    if cls is messages.Hello and len(data) > limits.MAX_HELLO_BYTES:
        raise ProtocolError(
            f"a hello of {len(data)} bytes is over the limit of {limits.MAX_HELLO_BYTES}"
        )
    values = read(raw)
    if has_payload:
        values["payload"] = _read_payload(data, offset, kind)
    elif offset != len(data):
        raise ProtocolError(f"{len(data) - offset} bytes follow the end of a {kind} message")
    try:
        message: Message = cls(**values)
    except TypeError:
        raise ProtocolError(f"a {kind} message lacks a required field") from None
    return message


def _read_head(data: bytes, header_bytes: int) -> tuple[str, dict[Any, Any], int, int]:
    """Return the type, the fields, the offset behind them and the number of parts."""
    for window in (min(_PEEK_BYTES, header_bytes), header_bytes):
        unpacker = msgpack.Unpacker(
            max_buffer_size=limits.MAX_HEADER_BYTES,
            read_size=max(1, min(window, len(data))),  # else it sets a megabyte aside
        )
        unpacker.feed(data[:window])
        try:
            count = unpacker.read_array_header()
            begin = unpacker.tell()
            # An array takes the memory that it declares before its items are read. So it is seen
            # first, without making anything, that as many items as are declared are there.
            unpacker.skip()
            unpacker.skip()
            end = unpacker.tell()
            kind, raw = msgpack.unpackb(_PAIR + data[begin:end], strict_map_key=True, raw=False)
        except msgpack.OutOfData:
            if len(data) <= window:
                raise ProtocolError("a message ends before it is complete") from None
            continue
        except Exception as error:  # noqa: BLE001 - msgpack raises a dozen types for bad bytes
            raise ProtocolError(f"not a message: {str(error)[:100] or type(error).__name__}") from (
                None
            )
        if not isinstance(kind, str) or not isinstance(raw, dict) or not _all_text(raw):
            raise ProtocolError("a message is an array of a type name and a map of fields")
        return kind, raw, end, count
    raise ProtocolError(f"the fields of a message are over the limit of {header_bytes} bytes")


def _all_text(fields: dict[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in fields)


def _read_payload(data: bytes, offset: int, kind: str) -> memoryview:
    view = memoryview(data)
    tag = data[offset] if offset < len(data) else 0
    layouts = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
    layout = layouts.get(tag)
    size_bytes = struct.calcsize(layout) if layout else 0
    begin = offset + 1 + size_bytes
    if layout is None or begin > len(data):
        raise ProtocolError(f"the payload of a {kind} message is not of msgpack's bin type")
    (length,) = struct.unpack_from(layout, data, offset + 1)
    if begin + length != len(data):
        raise ProtocolError(
            f"the payload of a {kind} message states {length} bytes, {len(data) - begin} came"
        )
    return view[begin:]


def _bin_header(length: int) -> bytes:
    if length < 2**8:
        return struct.pack(">BB", 0xC4, length)
    if length < 2**16:
        return struct.pack(">BH", 0xC5, length)
    return struct.pack(">BI", 0xC6, length)


# --- fields, derived from the dataclasses once per type ---------------------------------------


@cache
def _writer(cls: type[Any]) -> Callable[[Any], bytes]:
    names, has_payload = _fields(cls)
    pack = _packer()
    # msgpack concatenates: an array is its header followed by its items.
    prefix = bytes([0x93 if has_payload else 0x92]) + pack(cls.TYPE)

    def write(message: Any) -> bytes:
        head: bytes = prefix + pack({name: getattr(message, name) for name in names})
        if has_payload:
            payload = message.payload
            head += _bin_header(0 if payload is None else payload_bytes(payload))
        return head

    return write


@cache
def _sizer(cls: type[Any]) -> Callable[[Any], int]:
    """Return a function for the size of an encoded message; emulators call it all the time."""
    names, has_payload = _fields(cls)
    pack = _packer()
    # A map has the header of an array of as many items, and its keys are always the same.
    fixed_bytes = 1 + len(pack(cls.TYPE)) + sum(len(pack(name)) for name in names)
    values = attrgetter(*names) if len(names) > 1 else lambda m: [getattr(m, n) for n in names]

    def size(message: Any) -> int:
        nbytes = fixed_bytes + len(pack(values(message)))
        if has_payload:
            payload = 0 if message.payload is None else payload_bytes(message.payload)
            nbytes += len(_bin_header(payload)) + payload
        return nbytes

    return size


def _fields(cls: type[Any]) -> tuple[list[str], bool]:
    """Return the names of a message's fields, and whether a payload follows them."""
    names = [f.name for f in fields(cls) if f.name != "payload"]
    return names, len(names) < len(fields(cls))


def _packer() -> Callable[[Any], bytes]:
    pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True, default=_enum_value).pack
    return pack


def _enum_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a message cannot carry {type(value).__name__}")


@cache
def _readers() -> dict[str, tuple[type[Any], Callable[[dict[Any, Any]], dict[str, Any]], bool]]:
    table = {}
    for cls in typing.get_args(messages.Message):
        names = {f.name for f in fields(cls)}
        table[cls.TYPE] = (cls, _reader(cls), "payload" in names)
    return table


_OF_ALL_VERSIONS = ("version", "versions")
"""The fields of `hello`, besides its role, that mean the same in every version of the protocol."""


def _role_of_any_version(raw: dict[Any, Any]) -> messages.Role:
    """Return the role in a `hello` of another version; an unknown role counts as a device's."""
    operates = raw["role"] == messages.Role.OPERATOR.value
    return messages.Role.OPERATOR if operates else messages.Role.DEVICE


def _reader(cls: type[Any]) -> Callable[[dict[Any, Any]], dict[str, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: f for f in fields(cls) if f.name != "payload"}
    required = [name for name, f in known.items() if f.metadata.get("required")]
    secret = {name for name, f in known.items() if f.metadata.get("secret")}
    checks = {
        name: _check(hints[name], verbatim=f.metadata.get("verbatim", False))
        for name, f in known.items()
    }
    kind, has_version = cls.TYPE, "version" in known

    def pick(raw: dict[Any, Any], names: Iterable[str]) -> dict[str, Any]:
        values = {}
        for name in names:
            if name in raw:
                try:
                    values[name] = checks[name](raw[name])
                except (ValueError, TypeError):
                    shown = reprlib.repr(raw[name])  # of deep and long values, only the beginning
                    if name in secret:
                        shown = "a secret is not shown"
                    raise ProtocolError(
                        f"field {name!r} of a {kind} message is not valid: {shown}"
                    ) from None
        return values  # unknown fields are ignored: they are how the protocol grows

    def read(raw: dict[Any, Any]) -> dict[str, Any]:
        for name in required:
            if name not in raw:
                raise ProtocolError(f"a {kind} message lacks its {name!r}")
        if has_version:  # before all other fields
            version = pick(raw, ("version",)).get("version", limits.VERSION)
            if version != limits.VERSION:
                if cls is messages.Hello:
                    return {"role": _role_of_any_version(raw)} | pick(raw, _OF_ALL_VERSIONS)
                raise VersionError(
                    f"the server goes on in protocol version {version} and this client speaks "
                    f"{limits.VERSION}; install the same version of cleave on both"
                )
        return pick(raw, checks)

    return read


def _check(hint: Any, *, verbatim: bool = False) -> Callable[[Any], Any]:
    """Return a function that returns a value in the type of `hint`, or raises ValueError.

    Args:
        hint: a field's type.
        verbatim: leave texts as they are.
    """
    text = _check_text if verbatim else _check_clean_text
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (lambda value: hint(text(value))) if issubclass(hint, str) else hint
    simple: dict[Any, Callable[[Any], Any]] = {
        int: _check_int,
        float: _check_float,
        str: text,
        bool: _check_bool,
    }
    if hint in simple:
        return simple[hint]
    most = limits.MAX_IDS
    if typing.get_origin(hint) is typing.Annotated:
        hint, most = typing.get_args(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        item = _check(arguments[0])
        return lambda value: _check_tuple(value, item, most)
    if origin is dict:
        item = _check_finite if arguments[1] is float else _check_plain
        tidy: Callable[[Any], Any] = (lambda value: value) if verbatim else clean_plain
        return lambda value: tidy(_check_map(value, item))
    raise TypeError(f"no check for {hint}")


def _check_plain(value: Any, depth: int = 1) -> Any:
    """Return an untyped value if it is what JSON can hold and not nested too deep."""
    if depth > limits.MAX_NESTING:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_check_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_check_text(k): _check_plain(v, depth + 1) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(value)


def _check_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**limits.OBJECT_ID_BITS:
        raise ValueError(value)
    return value


def _check_float(value: Any) -> float:
    number = _check_finite(value)
    if number < 0:
        raise ValueError(value)
    return number


def _check_finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _check_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > limits.MAX_TEXT:
        raise ValueError(value)
    return value


def _check_clean_text(value: Any) -> str:
    return clean(_check_text(value))


def _check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _check_tuple(value: Any, item: Callable[[Any], Any], most: int) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(value)
    return tuple(item(v) for v in value)


def _check_map(value: Any, item: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(value)
    return {_check_text(k): item(v) for k, v in value.items()}
