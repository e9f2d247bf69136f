"""Negotiation of features, which are optional parts of one protocol version.

A new feature needs no new protocol version. A client names its features in `hello`. The PS replies
in `welcome` with the features that both sides support. Neither side sends messages of any other
feature, because the peer would have to refuse them.
"""

from __future__ import annotations

from typing import Final

from cleave.protocol.messages import Feature, Hello, Message, Welcome

ALL: Final = tuple(feature.value for feature in Feature)
"""Names of the features that this code supports."""


def of_device(*, graphs: bool) -> tuple[str, ...]:
    """Return the names of the features that a device lists in `hello`.

    Args:
        graphs: whether the device can run ONNX graphs.
    """
    return tuple(f.value for f in Feature if graphs or f is not Feature.GRAPHS)


def agreed(hello: Hello) -> frozenset[Feature]:
    """Return the features of a session that both the client and the PS support.

    The PS calls this. Feature names in `hello` that the PS does not know are ignored.
    """
    named = {feature for feature in Feature if feature.value in hello.features}
    if hello.measure:  # older clients request the feature in this way
        named.add(Feature.MEASURE)
    return frozenset(named)


def of_session(offered: frozenset[Feature], welcome: Welcome) -> frozenset[Feature]:
    """Return the features of a session that both the device and the PS support.

    The device calls this.

    Args:
        offered: features that the device named in `hello`.
        welcome: the PS's response to `hello`. Features that the device did not offer are ignored.
    """
    return frozenset(feature for feature in offered if feature.value in welcome.features)


def may_send(message: Message, features: frozenset[Feature]) -> bool:
    """Return True if a message belongs to no feature, or to one of the session's `features`."""
    return message.FEATURE is None or message.FEATURE in features
