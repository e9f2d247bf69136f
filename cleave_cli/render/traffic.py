"""Text output of the traffic by kind, such as weights or activations."""

from __future__ import annotations

from collections.abc import Mapping

from cleave_cli.options import human_bytes


def by_kind(kinds: Mapping[str, int], between: str = ", ") -> str:
    """Format the bytes of each kind of traffic, largest first; "nothing" if all are 0.

    Args:
        kinds: maps a kind of traffic to its bytes.
        between: separator between two kinds.
    """
    found = sorted(((nbytes, kind) for kind, nbytes in kinds.items() if nbytes), reverse=True)
    return between.join(f"{human_bytes(nbytes)} {kind}" for nbytes, kind in found) or "nothing"
