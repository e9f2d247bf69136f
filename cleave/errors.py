"""Errors for users: one sentence that says what is wrong and what to do."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeVar

Choice = TypeVar("Choice", bound=Enum)

DISTRIBUTION: Final = "cleave-train"
"""The package's name on PyPI, where the name `cleave` belongs to another project."""


class CleaveError(Exception):
    """A failure that the user can act on. The CLI prints it and exits with 1."""

    exit_code = 1


class UsageError(CleaveError):
    """A wrong request (a value, a name, a combination). The CLI exits with 2."""

    exit_code = 2


class ProtocolError(CleaveError):
    """A peer broke the protocol. Only that session ends."""


class VersionError(ProtocolError):
    """A peer speaks another version of the protocol."""


class PlanError(CleaveError):
    """No plan exists for this job on this fleet."""


class DeviceMemoryError(PlanError):
    """No plan exists because devices offer too little memory."""


class FleetError(CleaveError):
    """The fleet cannot finish a job."""


def to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def not_installed(what: str, library: str, extra: str) -> UsageError:
    """Return the error for a feature that needs a library which only an extra installs."""
    return UsageError(
        f"{what} needs {library}, which is not installed here; install it with: {to_install(extra)}"
    )


def choice_of(kind: type[Choice], option: str, value: Choice | str) -> Choice:
    """Return the enum member that an option's value names.

    Args:
        kind: the enum; its values are those of the option.
        option: the option as the user writes it.

    Raises:
        UsageError: when no member has this value.
    """
    try:
        return kind(value)
    except ValueError:
        *others, last = (str(member.value) for member in kind)
        raise UsageError(f"{option} is {value!r}; use {', '.join(others)} or {last}") from None
