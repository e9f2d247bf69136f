"""Exceptions that users see. Each message is one sentence that states a problem and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

Choice = TypeVar("Choice", bound=Enum)

DISTRIBUTION: Final = "cleave-train"
"""Cleave's package name on PyPI. The package `cleave` on PyPI is another project."""


class CleaveError(Exception):
    """A failure that the user can act on. The CLI prints the message and exits with code 1."""

    exit_code = 1


class UsageError(CleaveError):
    """The user's request is invalid, for example because of a wrong value or an unknown name.

    The CLI prints the message and exits with code 2.
    """

    exit_code = 2


class ProtocolError(CleaveError):
    """A peer violated the protocol. The session with the peer ends, and other sessions continue."""


class VersionError(ProtocolError):
    """A peer uses an incompatible version of the protocol."""


class PlanError(CleaveError):
    """No plan exists for the GEMM or model on the fleet."""


class DeviceMemoryError(PlanError):
    """No plan exists because the devices offer too little memory."""


class FleetError(CleaveError):
    """The fleet cannot complete the requested computation."""


def unknown(what: str, value: object, known: Iterable[object]) -> UsageError:
    """Return the error for an unknown ID or name. The message lists all known values.

    Args:
        what: the kind of thing, such as "job".
    """
    there = ", ".join(str(each) for each in known)
    advice = f"use one of {there}" if there else "there are none yet"
    return UsageError(f"there is no {what} {value!r}; {advice}")


def to_install(extra: str, clone: Path = Path(__file__).parents[1]) -> str:
    """Return the pip command that installs what an extra of Cleave, such as "train", needs.

    No release is on PyPI, so Cleave's name would not be found there.

    Args:
        clone: the folder that contains the package, which is a clone if it has a `pyproject.toml`.
    """
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    return " ".join(["pip install", *(f"'{needed}'" for needed in _requirements(extra))])


def _requirements(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the extras that it includes."""
    from importlib import metadata  # lazily, because this module is loaded at every start

    for line in metadata.requires(DISTRIBUTION) or ():
        needed, _, condition = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{extra}['\"]", condition):
            continue
        if included := re.fullmatch(rf"{DISTRIBUTION}\[(.+)\]", needed):
            for other in included[1].split(","):
                yield from _requirements(other)
        else:
            yield needed


def not_installed(what: str, library: str, extra: str) -> UsageError:
    """Return the error for a feature whose library is not installed.

    Args:
        extra: the extra of Cleave's package that installs the library.
    """
    return UsageError(
        f"{what} needs {library}, which is not installed here; install it with: {to_install(extra)}"
    )


def choice_of(kind: type[Choice], option: str, value: Choice | str) -> Choice:
    """Convert the value of a command-line option to an enum member.

    Args:
        kind: the enum, whose values are the allowed values of the option.
        option: name of the option, such as "--method".
        value: the value that the user gave, or a member of the enum.

    Raises:
        UsageError: if the value is not allowed. The message lists the allowed values.
    """
    try:
        return kind(value)
    except ValueError:
        *others, last = (str(member.value) for member in kind)
        raise UsageError(f"{option} is {value!r}; use {', '.join(others)} or {last}") from None


class LayerGraphError(PlanError):
    """A layer cannot be exported as a graph. The message is a clause that can follow "because"."""
