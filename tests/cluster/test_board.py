"""What servers say on the board, and what comes of it."""

from __future__ import annotations

from cleave.cluster.board import Board
from cleave.energy.account import DeviceUsage
from cleave.energy.run_energy import RunEnergy

USED = RunEnergy(10.0, 5.0, (DeviceUsage("iphone-12", 2, 20.0, 8.0, 3.0, 1e6, 2e5),))


def test_a_server_that_started_twice_used_both_with_the_same_devices() -> None:
    board = Board()
    board.used(0, USED)
    board.used(1, USED)
    board.used(0, USED)
    first, second = board.energy()
    assert (first.duration_s, first.usages[0].devices, first.usages[0].compute_s) == (20.0, 2, 16.0)
    assert second == USED
