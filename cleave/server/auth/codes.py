"""Join codes and credentials: how they are made, read and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: without I, L, O and U, so that nothing looks like something else."""

CODE_LENGTH: Final = 12
"""Characters of a join code: 60 bits, for minutes."""

CODE_LIFE_S: Final = 600.0
"""How long a join code is valid unless its maker says otherwise."""

CREDENTIAL_BYTES: Final = 32
"""Random bytes of a credential."""

_GROUP: Final = 4
_READ_AS: Final = str.maketrans("OIL", "011", "- \t")


def new_code(choose: Callable[[str], str]) -> str:
    """Make a join code, in groups: `7KQ4-MWX2-PDH9`.

    Args:
        choose: picks a random character of a string, as `secrets.choice` does.
    """
    code = "".join(choose(ALPHABET) for _ in range(CODE_LENGTH))
    return "-".join(code[i : i + _GROUP] for i in range(0, CODE_LENGTH, _GROUP))


def read_code(text: str) -> str:
    """Normalize a join code that somebody typed; return the empty string if it cannot be one."""
    if len(text) > 4 * CODE_LENGTH:
        return ""
    code = text.upper().translate(_READ_AS)
    return code if len(code) == CODE_LENGTH and set(code) <= set(ALPHABET) else ""


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 hash under which a credential or code is stored.

    It has no salt and is not stretched: these secrets are random, not chosen by people. Nobody can
    try 2^256 credentials, and a code of 60 bits expires before its hash could be searched. A plain
    hash can also be looked up in the store: the time of that reveals something about the hash only,
    and a client cannot choose the hash.
    """
    return hashlib.sha256(secret.encode()).digest()
