"""Encode and decode messages. A message is one msgpack array ``[type, fields, payload?]``.

The payload is the last item, a msgpack `bin`. This order lets a sender write the header and the
payload separately, and lets a receiver read the payload as a view of the message.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from cleave.errors import ProtocolError, VersionError
from cleave.protocol import limits, messages
from cleave.protocol.messages import Message, clean, clean_plain

Buffer: TypeAlias = bytes | memoryview
_PARTS = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(min_length=2, max_length=3)]
)
_KIND = msgspec.msgpack.Decoder(str)
_PAYLOAD = msgspec.msgpack.Decoder(memoryview)
_PACK = msgspec.msgpack.Encoder().encode
_BAD_BYTES = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Packable(Protocol):
    """A payload of known size in bytes that is serialized only when its message is sent."""

    @property
    def nbytes(self) -> int: ...

    def pack(self) -> memoryview: ...


def payload_bytes(payload: Any) -> int:
    """Return a payload's size in bytes, without packing a `Packable` payload."""
    return len(payload) if isinstance(payload, bytes) else int(payload.nbytes)


def encode(message: Message) -> list[Buffer]:
    """Encode a message. Return the header and, if the message has a payload, the payload.

    Raises:
        ProtocolError: if a field cannot be encoded, the peer would reject the fields, or the
            message exceeds a size limit of the protocol.
    """
    cls: Any = type(message)
    try:
        head = _writer(cls)(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {message.TYPE} message cannot be encoded: {error}") from None
    if len(head) > limits.MAX_HEADER_BYTES:
        raise ProtocolError(
            f"the fields of a {message.TYPE} message take {len(head)} bytes; the limit is "
            f"{limits.MAX_HEADER_BYTES}"
        )
    payload = getattr(message, "payload", None)
    if payload is None:
        if type(message) is messages.Run and len(message.inputs) <= limits.MAX_RUN_INPUTS:
            return [head]  # `run` is too frequent to validate, and our own code builds it
        decode(head)  # never send a message that the peer would reject
        return [head]
    parts = [head, payload if isinstance(payload, bytes | memoryview) else payload.pack()]
    size = sum(len(part) for part in parts)
    if size > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {message.TYPE} of {size} bytes is over the "
            f"limit of {limits.MAX_MESSAGE_BYTES} bytes per message"
        )
    return parts


def wire_size(message: Message) -> int:
    """Return the encoded size of a message in bytes without encoding the payload."""
    cls: Any = type(message)
    return _sizer(cls)(message)


def decode(data: bytes, header_bytes: int = limits.MAX_HEADER_BYTES) -> Message:
    """Decode one message and sanitize its strings (see `cleave.protocol.messages`).

    The message's payload is a view into `data`. For a `hello` in another protocol version, only
    `role`, `version` and `versions` are read.

    Args:
        header_bytes: maximum size of the message without its payload, in bytes. Devices have a
            lower limit than other senders.

    Raises:
        ProtocolError: if `data` is not a valid message of this protocol.
        VersionError: for a `welcome` in another protocol version.
    """
    if len(data) > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is over the limit of {limits.MAX_MESSAGE_BYTES}"
        )
    try:
        # A decoder would first allocate an array's declared length. Splitting the message does not
        # allocate, and checks that all items are present.
        kind_part, fields_part, *payload_part = _PARTS.decode(data)
        kind = _KIND.decode(kind_part)
    except _BAD_BYTES as error:
        raise ProtocolError(f"not a message: {_shown(error)}") from None
    reader = _readers().get(kind)
    if reader is None:
        raise ProtocolError(f"unknown message type {kind[:40]!r}")
    if len(payload_part) != reader.has_payload:
        raise ProtocolError(
            f"a {kind} message has {2 + len(payload_part)} parts, not {2 + reader.has_payload}"
        )
    payload = _read_payload(data, payload_part[0], kind) if payload_part else None
    if len(data) - (0 if payload is None else len(payload)) > header_bytes:
        raise ProtocolError(f"the fields of a message are over the limit of {header_bytes} bytes")
    if reader.cls is messages.Hello and len(data) > limits.MAX_HELLO_BYTES:
        raise ProtocolError(
            f"a hello of {len(data)} bytes is over the limit of {limits.MAX_HELLO_BYTES}"
        )
    message: Any = reader.read(fields_part)
    if payload is not None:
        message.payload = payload
    read: Message = message
    return read


def _read_payload(data: bytes, part: msgspec.Raw, kind: str) -> memoryview:
    """Return a view of a message's payload, which is the last part of the message."""
    try:
        size = len(_PAYLOAD.decode(part))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the payload of a {kind} message is not valid: {error}") from None
    return memoryview(data)[len(data) - size :]


def _shown(error: Exception) -> str:
    return clean(str(error))[:100] or type(error).__name__


def _bin_header(length: int) -> bytes:
    if length < 2**8:
        return struct.pack(">BB", 0xC4, length)
    if length < 2**16:
        return struct.pack(">BH", 0xC5, length)
    return struct.pack(">BI", 0xC6, length)


# --- encoders and decoders, derived from the dataclasses once per message type -----------------


@cache
def _writer(cls: type[Any]) -> Callable[[Any], bytes]:
    names, has_payload = _fields(cls)
    # A msgpack array is its header followed by its items.
    prefix = bytes([0x93 if has_payload else 0x92]) + _PACK(cls.TYPE)

    def write(message: Any) -> bytes:
        head = prefix + _PACK({name: getattr(message, name) for name in names})
        if has_payload:
            payload = message.payload
            head += _bin_header(0 if payload is None else payload_bytes(payload))
        return head

    return write


@cache
def _sizer(cls: type[Any]) -> Callable[[Any], int]:
    """Return a fast function that computes the encoded size of a `cls` message in bytes."""
    names, has_payload = _fields(cls)
    # A map and an array with the same number of items have headers of the same size. The keys are
    # fixed.
    fixed_bytes = 1 + len(_PACK(cls.TYPE)) + sum(len(_PACK(name)) for name in names)
    values = attrgetter(*names) if len(names) > 1 else lambda m: [getattr(m, n) for n in names]

    def size(message: Any) -> int:
        nbytes = fixed_bytes + len(_PACK(values(message)))
        if has_payload:
            payload = 0 if message.payload is None else payload_bytes(message.payload)
            nbytes += len(_bin_header(payload)) + payload
        return nbytes

    return size


def _fields(cls: type[Any]) -> tuple[list[str], bool]:
    """Return a message type's field names except `payload`, and whether the type has a payload."""
    names = [f.name for f in fields(cls) if f.name != "payload"]
    return names, len(names) < len(fields(cls))


@dataclass(frozen=True)
class _Reader:
    """The decoder of one message type. `read` returns the message without its payload."""

    cls: type[Any]
    has_payload: bool
    read: Callable[[msgspec.Raw], Any]


@cache
def _readers() -> dict[str, _Reader]:
    return {
        cls.TYPE: _Reader(cls, _fields(cls)[1], _reader(cls))
        for cls in typing.get_args(messages.Message)
    }


class _AnyVersion(msgspec.Struct):
    """Fields of a `hello` that have the same meaning in every protocol version."""

    role: Any
    versions: messages.Ids = ()

    def hello(self, version: int) -> messages.Hello:
        """Return a `hello` with these fields and `version`. An unknown role becomes DEVICE."""
        operates = self.role == messages.Role.OPERATOR.value
        role = messages.Role.OPERATOR if operates else messages.Role.DEVICE
        return messages.Hello(role, version, versions=self.versions)


def _reader(cls: type[Any]) -> Callable[[msgspec.Raw], Any]:
    decoder = msgspec.msgpack.Decoder(cls)
    hints = typing.get_type_hints(cls)
    to_check = [f.name for f in fields(cls) if typing.get_args(hints[f.name])[1:] == (Any,)]
    to_clean = [
        f.name
        for f in fields(cls)
        if not f.metadata.get("verbatim")
        and (hints[f.name] is str or str in typing.get_args(hints[f.name]))
    ]
    versions = _version_decoder(cls)

    def read(part: msgspec.Raw) -> Any:
        try:
            if versions is not None:  # check the version before all other fields
                version = versions.decode(part).version
                if version != limits.VERSION:
                    if cls is messages.Hello:
                        return msgspec.msgpack.decode(part, type=_AnyVersion).hello(version)
                    raise VersionError(
                        f"the server uses protocol version {version}, but this client uses "
                        f"{limits.VERSION}; install the same version of cleave on both"
                    )
            message = decoder.decode(part)  # ignores unknown fields, which newer peers may send
            for name in to_check:
                _check_plain(getattr(message, name))
        except (*_BAD_BYTES, ValueError) as error:
            # Show no value, because it may be a secret.
            raise ProtocolError(f"a {cls.TYPE} message is not valid: {_shown(error)}") from None
        for name in to_clean:
            setattr(message, name, clean_plain(getattr(message, name)))
        return message

    return read


def _version_decoder(cls: type[Any]) -> msgspec.msgpack.Decoder[Any] | None:
    """Return a decoder of the `version` field alone; None if the message type has no version."""
    for f in fields(cls):
        if f.name == "version":
            default = () if f.metadata.get("required") else (f.default,)
            return msgspec.msgpack.Decoder(
                msgspec.defstruct("_Version", [("version", messages.Count, *default)])
            )
    return None


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raise ValueError for types that JSON does not have, long map keys, or deep nesting."""
    if depth > limits.MAX_NESTING:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or len(key) > limits.MAX_TEXT:
                raise ValueError("a key in a map is not a string, or is too long")
            _check_plain(item, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"a map contains a value of type {type(value).__name__}")
