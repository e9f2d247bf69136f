"""Create and normalize join codes, and hash join codes and credentials."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Alphabet of Crockford's base 32. It omits I, L, O and U, which are easily confused."""

CODE_LENGTH: Final = 12
"""Number of characters in a join code. Its 60 random bits are safe for a lifetime of minutes."""

CODE_LIFE_S: Final = 600.0  # default lifetime of a join code, in seconds

CREDENTIAL_BYTES: Final = 32  # number of random bytes in a credential

_GROUP: Final = 4
_READ_AS: Final = str.maketrans("OIL", "011", "- \t")


def new_code(choose: Callable[[str], str]) -> str:
    """Create a join code such as `7KQ4-MWX2-PDH9`. `choose` picks a character of a string."""
    code = "".join(choose(ALPHABET) for _ in range(CODE_LENGTH))
    return "-".join(code[i : i + _GROUP] for i in range(0, CODE_LENGTH, _GROUP))


def read_code(text: str) -> str:
    """Normalize a join code that a user typed. Return an empty string if it is malformed."""
    if len(text) > 4 * CODE_LENGTH:
        return ""
    code = text.upper().translate(_READ_AS)
    return code if len(code) == CODE_LENGTH and set(code) <= set(ALPHABET) else ""


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 hash of a credential or join code, under which the store finds it.

    Credentials and join codes are random, so they need neither salt nor key stretching. A join code
    expires before a search could find it. The timing of a lookup only reveals information about the
    hash.
    """
    return hashlib.sha256(secret.encode()).digest()
