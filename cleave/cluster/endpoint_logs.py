"""Count the work that devices at endpoints in other processes do for a job.

The counts go into the energy record of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from cleave.cluster.endpoint_calls import EndpointCalls, ask_all
from cleave.cluster.endpoints import ANSWERS_S
from cleave.server.jobs.job_energy import SessionWork


class EndpointLogs:
    """Counts the sessions' work at several endpoints for one job. Implements `Elsewhere`.

    The work at a lost endpoint is not counted.

    Args:
        endpoints: calls to the endpoints, each of which is an `OwnEndpoint`.
        on_one_machine: whether all endpoints run on this machine.
    """

    def __init__(self, endpoints: Sequence[EndpointCalls], on_one_machine: bool) -> None:
        self._endpoints = endpoints
        self.on_one_machine = on_one_machine

    def begin(self) -> None:
        """Start to count each session's work at all endpoints."""
        ask_all(self._endpoints, "begin_log", timeout_s=ANSWERS_S)

    def did(self) -> list[SessionWork]:
        """Return each session's work since `begin`."""
        answers = ask_all(self._endpoints, "did", timeout_s=ANSWERS_S)
        return [work for answer in answers if answer is not None for work in answer]

    def end(self) -> None:
        """Stop counting the sessions' work at all endpoints."""
        ask_all(self._endpoints, "end_log", timeout_s=ANSWERS_S)
