"""Errors a user can meet: one sentence that says what is wrong and what to do."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeVar

Choice = TypeVar("Choice", bound=Enum)

DISTRIBUTION: Final = "cleave-train"
"""What pip calls this package. On PyPI the name `cleave` belongs to another project."""


class CleaveError(Exception):
    """Something failed for a reason the user can act on. The CLI prints it and exits with 1."""

    exit_code = 1


class UsageError(CleaveError):
    """The request itself is wrong (a value, a name, a combination). The CLI exits with 2."""

    exit_code = 2


class ProtocolError(CleaveError):
    """A peer broke the protocol. It ends that session and nothing else."""


class VersionError(ProtocolError):
    """A peer speaks another version of the protocol."""


class PlanError(CleaveError):
    """No plan exists for this job on this fleet."""


class DeviceMemoryError(PlanError):
    """No plan exists because devices offer too little memory."""


class FleetError(CleaveError):
    """The fleet cannot finish a job that it was given."""


def to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def not_installed(what: str, library: str, extra: str) -> UsageError:
    """Return the error for something that needs a library which only an extra installs."""
    return UsageError(
        f"{what} needs {library}, which is not installed here; install it with: {to_install(extra)}"
    )


def choice_of(kind: type[Choice], option: str, value: Choice | str) -> Choice:
    """Return the member of an enum that an option names.

    Args:
        kind: the enum; its values are those of the option.
        option: its name, as it is written.
        value: what was given.

    Raises:
        UsageError: when it is none of them.
    """
    try:
        return kind(value)
    except ValueError:
        *others, last = (str(member.value) for member in kind)
        raise UsageError(f"{option} is {value!r}; use {', '.join(others)} or {last}") from None
