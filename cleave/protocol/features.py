"""Negotiate features, which are optional parts of a protocol version.

A client names its features in `hello`. The PS replies in `welcome` with the features that both
sides support. Neither side sends messages of any other feature.
"""

from __future__ import annotations

from typing import Final

from cleave.errors import ProtocolError
from cleave.protocol.messages import Feature, Hello, Message, Welcome

ALL: Final = tuple(feature.value for feature in Feature)  # the supported features


def of_device(*, graphs: bool) -> tuple[str, ...]:
    """Return the features for a device's `hello`. `graphs` says whether it can run graphs."""
    return tuple(f.value for f in Feature if graphs or f is not Feature.GRAPHS)


def agreed(hello: Hello) -> frozenset[Feature]:
    """Return the features that both the PS and the sender of `hello` support."""
    named = {feature for feature in Feature if feature.value in hello.features}
    if hello.measure:  # older clients request the feature with this field
        named.add(Feature.MEASURE)
    return frozenset(named)


def of_session(offered: frozenset[Feature], welcome: Welcome) -> frozenset[Feature]:
    """Return the features that a device may use: those in both `offered` and `welcome`."""
    return frozenset(feature for feature in offered if feature.value in welcome.features)


def may_send(message: Message, features: frozenset[Feature]) -> bool:
    """Return True if a message needs no feature, or its feature is one of `features`."""
    return message.FEATURE is None or message.FEATURE in features


def require(message: Message, features: frozenset[Feature]) -> None:
    """Raise ProtocolError for a message whose feature is not in `features` (rule V4)."""
    if not may_send(message, features):
        raise ProtocolError(f"{message.TYPE} belongs to a feature that is not part of this session")
