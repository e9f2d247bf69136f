"""Create, read and hash join codes and credentials."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: without I, L, O and U, so that no two characters look alike."""

CODE_LENGTH: Final = 12
"""Characters of a join code: 60 bits, enough for a lifetime of minutes."""

CODE_LIFE_S: Final = 600.0
"""Default lifetime of a join code, in seconds."""

CREDENTIAL_BYTES: Final = 32
"""Number of random bytes in a credential."""

_GROUP: Final = 4
_READ_AS: Final = str.maketrans("OIL", "011", "- \t")


def new_code(choose: Callable[[str], str]) -> str:
    """Create a join code, in groups: `7KQ4-MWX2-PDH9`.

    Args:
        choose: picks a random character of a string, as `secrets.choice` does.
    """
    code = "".join(choose(ALPHABET) for _ in range(CODE_LENGTH))
    return "-".join(code[i : i + _GROUP] for i in range(0, CODE_LENGTH, _GROUP))


def read_code(text: str) -> str:
    """Normalize a typed join code; return an empty string if it cannot be one."""
    if len(text) > 4 * CODE_LENGTH:
        return ""
    code = text.upper().translate(_READ_AS)
    return code if len(code) == CODE_LENGTH and set(code) <= set(ALPHABET) else ""


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 hash under which a credential or code is stored.

    These random secrets need no salt or key stretching: codes expire before a search could find
    them. The lookup's timing only reveals something about the hash, which a client cannot choose.
    """
    return hashlib.sha256(secret.encode()).digest()
