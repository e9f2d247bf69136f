"""Errors a user can meet: one sentence that says what is wrong and what to do."""


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


class FleetError(CleaveError):
    """The fleet cannot finish a job that it was given."""


def not_installed(what: str, library: str, extra: str) -> UsageError:
    """Return the error for something that needs a library which only an extra installs."""
    return UsageError(
        f"{what} needs {library}, which is not installed here; "
        f"install it with: pip install 'cleave[{extra}]'"
    )
