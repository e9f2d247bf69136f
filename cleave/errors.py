"""Errors a user can meet: one sentence that says what is wrong and what to do."""


class CleaveError(Exception):
    """Something failed for a reason the user can act on. The CLI prints it and exits with 1."""

    exit_code = 1


class UsageError(CleaveError):
    """The request itself is wrong (a value, a name, a combination). The CLI exits with 2."""

    exit_code = 2


class ProtocolError(CleaveError):
    """A peer broke the protocol. It ends that session and nothing else."""


class PlanError(CleaveError):
    """No plan exists for this work on this fleet."""


class FleetError(CleaveError):
    """The fleet cannot finish the work it was given."""
