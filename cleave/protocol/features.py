"""Features: what peers may do besides what every peer of this version can.

They need no new version. A client names its features in `hello`, and the PS answers in `welcome`
with those that it has as well. A peer is sent no message of a feature that was not agreed on,
because it would have to refuse it.
"""

from __future__ import annotations

from typing import Final

from cleave.protocol.messages import Feature, Hello, Message, Welcome

ALL: Final = tuple(feature.value for feature in Feature)
"""The features that this code has, as `welcome` lists those that were agreed on."""


def of_device(*, graphs: bool) -> tuple[str, ...]:
    """Return the features that a device names in `hello`.

    Args:
        graphs: whether it can run graphs.
    """
    return tuple(f.value for f in Feature if graphs or f is not Feature.GRAPHS)


def agreed(hello: Hello) -> frozenset[Feature]:
    """Return the features agreed on for the session of a `hello`; unknown names are ignored."""
    named = {feature for feature in Feature if feature.value in hello.features}
    if hello.measure:  # how it was asked for before there were features
        named.add(Feature.MEASURE)
    return frozenset(named)


def of_session(offered: frozenset[Feature], welcome: Welcome) -> frozenset[Feature]:
    """Return the features of a session, for its device.

    Args:
        offered: what the device named in `hello`.
        welcome: the PS's answer; names that were not offered mean nothing.
    """
    return frozenset(feature for feature in offered if feature.value in welcome.features)


def may_send(message: Message, features: frozenset[Feature]) -> bool:
    """Say whether a peer with which these features were agreed on understands a message."""
    return message.FEATURE is None or message.FEATURE in features
