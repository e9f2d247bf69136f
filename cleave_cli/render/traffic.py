"""Traffic by kind, as text."""

from __future__ import annotations

from collections.abc import Mapping

from cleave_cli.options import human_bytes


def by_kind(kinds: Mapping[str, int], between: str = ", ") -> str:
    """Return bytes by kind, largest first; "nothing" if all are 0."""
    found = sorted(((nbytes, kind) for kind, nbytes in kinds.items() if nbytes), reverse=True)
    return between.join(f"{human_bytes(nbytes)} {kind}" for nbytes, kind in found) or "nothing"
