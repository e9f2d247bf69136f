"""Training on a device whose connection is cut on the server's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from cleave.planner.stages.resident import Protection
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.server.fleet_server import Server
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.training.stages.stage_plans import StagePlans
from cleave.transport.listener import GuardedConnection
from tests.integration.processes import PATIENCE_S

# By step: which array that layers return is the last before the cut; 0 for no cut.
_CUTS: Final = (0, 1, 2, 2)
STEPS: Final = len(_CUTS)


@contextmanager
def cutting(manager: SessionManager) -> Iterator[Callable[[int], None]]:
    """Yield a function that cuts all devices' connections once layers return the n-th next array.

    Devices must join inside the context.
    """
    sockets: list[GuardedConnection] = []
    admitted, received, due = GuardedConnection.admitted, manager.received, -1

    def noting(socket: GuardedConnection, least_bytes: int) -> None:
        sockets.append(socket)
        admitted(socket, least_bytes)

    def counting(*message: Any) -> Any:
        nonlocal due
        decisions = received(*message)
        if manager.stages.results == due:
            due = -1
            while sockets:
                sockets.pop().transport.abort()
        return decisions

    def cut(after: int) -> None:
        nonlocal due
        due = manager.stages.results + after

    with (
        mock.patch.object(GuardedConnection, "admitted", noting),
        mock.patch.object(manager, "received", counting),
    ):
        yield cut


def losses_with_cuts(
    served: Server, cut: Callable[[int], None], job: JobSpec, folder: Path
) -> list[float]:
    """Train on one device that keeps the state, and return the losses.

    The connection is cut in each step but the first. Assert that the device returns each time, and
    receives no weights again.

    Args:
        cut: see `cutting`.
        job: what to train in `STEPS` steps.
        folder: of the run.
    """
    losses: list[float] = []
    weights_bytes: list[int] = []

    def heard(record: Record) -> None:
        if isinstance(record, StepRecord):
            losses.append(record.loss)
            weights_bytes.append(served.fleet.counters().traffic.down.weights)
            if len(losses) < STEPS:
                cut(_CUTS[len(losses)])

    served.fleet.wait_for(1, PATIENCE_S)
    job = replace(job, method="stages", state="devices")
    # A snapshot returns arrays at times that depend on the machine's speed.
    with mock.patch.object(StagePlans, "protection", return_value=Protection(STEPS, 9)):
        train(job, RunFolder(folder), TrainContext(served.fleet, heard))
    assert weights_bytes == weights_bytes[:1] * STEPS
    assert max(served.live.manager.sessions) >= STEPS  # the number of the last session
    return losses
