"""Features: what peers may do besides what every peer of this version can, without a new version.

A client names those it has in `hello`, the PS answers in `welcome` with those of them that it has
as well. Nobody is sent a message of a feature that was not agreed on so: it would have to refuse
it.
"""

from __future__ import annotations

from typing import Final

from cleave.protocol.messages import Feature, Hello, Message

ALL: Final = tuple(feature.value for feature in Feature)
"""Those that this code has, as `hello` and `welcome` list them."""


def agreed(hello: Hello) -> frozenset[Feature]:
    """The features of the session that a `hello` begins; those that nobody here knows are none."""
    named = {feature for feature in Feature if feature.value in hello.features}
    if hello.measure:  # how it was asked for before there were features
        named.add(Feature.MEASURE)
    return frozenset(named)


def may_send(message: Message, features: frozenset[Feature]) -> bool:
    """Whether a peer with whom these were agreed on understands a message."""
    return message.FEATURE is None or message.FEATURE in features
