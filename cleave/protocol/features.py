"""Features: optional abilities of peers within one protocol version.

They need no new version. A client names its features in `hello`, and the PS names in `welcome`
those that it also has. A peer never receives messages of a feature that was not agreed on, because
it would have to refuse them.
"""

from __future__ import annotations

from typing import Final

from cleave.protocol.messages import Feature, Hello, Message, Welcome

ALL: Final = tuple(feature.value for feature in Feature)
"""Names of the features that this code supports."""


def of_device(*, graphs: bool) -> tuple[str, ...]:
    """Return the features that a device names in `hello`.

    Args:
        graphs: whether it can run graphs.
    """
    return tuple(f.value for f in Feature if graphs or f is not Feature.GRAPHS)


def agreed(hello: Hello) -> frozenset[Feature]:
    """Return the features agreed on for a client's session; unknown names are ignored."""
    named = {feature for feature in Feature if feature.value in hello.features}
    if hello.measure:  # the older way to request this feature
        named.add(Feature.MEASURE)
    return frozenset(named)


def of_session(offered: frozenset[Feature], welcome: Welcome) -> frozenset[Feature]:
    """Return the features of a session, for its device.

    Args:
        offered: features that the device named in `hello`.
        welcome: the PS's answer; names that were not offered are ignored.
    """
    return frozenset(feature for feature in offered if feature.value in welcome.features)


def may_send(message: Message, features: frozenset[Feature]) -> bool:
    """Return whether a peer with these agreed features understands a message."""
    return message.FEATURE is None or message.FEATURE in features
