"""Read and write files that contain a join URL.

Other users of a machine can see command lines, but cannot read a private file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cleave.errors import UsageError
from cleave.files import private_file
from cleave.transport.connect import plain_reason

_COMMAND: Final = re.compile(r"cleave join '([^']+)'")


@contextmanager
def url_file(url: str) -> Iterator[str]:
    """Write a join URL to a temporary file that only this user can read, and yield `@FILE`.

    The file is deleted when the `with` block ends.
    """
    with private_file(url.encode(), "cleave-join-") as path:
        yield f"@{path}"


def read_url(text: str) -> str:
    """Return the join URL from a command-line argument.

    Args:
        text: a join URL, or `@FILE` for a file that contains a join URL. The file may also contain
            the whole `cleave join` command that `cleave pair` prints.

    Raises:
        UsageError: when the file is unreadable or contains no URL. The error message omits the
            file's content, which may be a different secret.
    """
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the join URL cannot be read from {path} ({plain_reason(error)}); "
            f"write it there, or give the URL itself"
        ) from None
    command = _COMMAND.search(text)
    found = command[1] if command else text
    if "://" not in found:
        raise UsageError(
            f"{path} holds no URL; name a file with what `cleave pair` or `cleave serve` printed"
        )
    return found
