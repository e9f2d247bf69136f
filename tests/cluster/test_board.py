"""What servers say on the board, and what comes of it."""

from __future__ import annotations

from cleave.cluster.board import Board
from cleave.cluster.ray_errors import Ending
from cleave.energy.account import DeviceUsage
from cleave.energy.run_energy import RunEnergy
from cleave.training.loop.records import NoteRecord

USED = RunEnergy(10.0, 5.0, (DeviceUsage("iphone-12", 2, 20.0, 8.0, 3.0, 1e6, 2e5),))


def test_a_server_that_started_twice_used_both_with_the_same_devices() -> None:
    board = Board()
    board.used(0, USED)
    board.used(1, USED)
    board.used(0, USED)
    first, second = board.energy()
    assert (first.duration_s, first.usages[0].devices, first.usages[0].compute_s) == (20.0, 2, 16.0)
    assert second == USED


def test_servers_that_start_in_vain_are_given_up_with_why_they_were_lost() -> None:
    board = Board()
    board.lost(1, Ending("the memory ran out", "have more"))
    assert [str(record.text) for record in board.take() if isinstance(record, NoteRecord)] == [
        "server 2 was lost, and all start again: the memory ran out"
    ]
    board.give_up(3)
    board.fail("another")
    last = "server 2: the memory ran out; have more"
    assert board.failure() == f"the servers were lost 3 times without a step; the last time, {last}"
