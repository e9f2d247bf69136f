"""Join URLs in files: unlike a command line, a file can be hidden from other users."""

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
    """Yield `@FILE` for a file with a join URL that only this account can read; delete it after."""
    with private_file(url.encode(), "cleave-join-") as path:
        yield f"@{path}"


def read_url(text: str) -> str:
    """Return a join URL: the text itself, or the content of the file named after an `@`.

    The file may also hold the `cleave join` command that `cleave pair` prints.

    Raises:
        UsageError: when the file cannot be read, or holds no URL. The message does not show the
            content, which may be another secret.
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
