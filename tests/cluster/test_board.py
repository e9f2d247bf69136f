"""What servers say on the board, and what comes of it."""

from __future__ import annotations

import pytest

from cleave.cluster.room import Board, Ending, ending, lost_servers
from cleave.energy.account import DeviceUsage
from cleave.energy.run_energy import RunEnergy
from cleave.training.loop.records import NoteRecord
from cleave.training.servers.ranks import LostServerError

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
        "server 2 was lost, so all servers restart: the memory ran out"
    ]
    board.give_up(3)
    board.fail("another")
    last = "server 2: the memory ran out; have more"
    assert (
        board.failure()
        == f"the servers were lost 3 times without completing a step; the last time, {last}"
    )


OUT_OF_MEMORY = """Task was killed due to the node running low on memory.
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, \
ID: 92edc4e97e4dac3cee61126133ee7ab6) was 27.69GB used / 28.80GB limit (0.961458)
OOM kill reason: user cgroup memory upper bound was met or exceeded
Object store memory usage: [- objects spillable: 0
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/..."""
KILLED = """A worker health check failed.
The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 5a9a2aae
\tpid: 171
\tip: 10.0.0.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop"""
NODE_GONE = "The actor died unexpectedly.\nThe actor died because its node has died. Node Id: 92e"
SILENT = "The actor is temporarily unavailable: RPC error: Connection reset by peer rpc_code: 14"
RAISED = """The actor died because of an error raised in its creation task, \
\x1b[36mray::RayTrainWorker.__init__()\x1b[39m (pid=171, ip=10.0.0.7)
  File "/x/worker.py", line 1, in <module>
ModuleNotFoundError: No module named 'cleave.cluster'"""


@pytest.mark.parametrize(
    ("text", "why", "advice"),
    [
        (OUT_OF_MEMORY, "the memory of 10.0.0.7 ran out (27.69 of 28.80 GB", "--memory"),
        ("OutOfMemoryError", "the memory of its machine ran out", "RAY_memory_usage_threshold"),
        (KILLED, "its process was killed or crashed", "system's log"),
        (NODE_GONE, "its node left the Ray cluster", ""),
        (SILENT, "its process does not answer", ""),
        (RAISED, "ModuleNotFoundError: No module named 'cleave.cluster'", ""),
        ("\n  Something else.\nmore", "Something else.", ""),
        ("", "Ray does not say why", ""),
    ],
)
def test_what_ended_a_process_is_one_sentence(text: str, why: str, advice: str) -> None:
    found = ending(text)
    assert found.why.startswith(why)
    assert advice in found.advice
    assert "\n" not in str(found)
    assert len(str(found)) < 600


def test_only_servers_whose_process_ended_are_lost() -> None:
    """Others say themselves what failed, or only miss the one that was lost."""
    killed = type("WorkerHealthCheckFailedError", (Exception,), {"__module__": "ray.train"})
    with_failure = killed("A worker health check failed.")
    with_failure.health_check_failure = Exception(NODE_GONE)
    errors = {
        0: LostServerError("gone"),
        1: killed(KILLED),
        2: ValueError("a bug"),
        3: with_failure,
    }
    assert lost_servers(errors) == {1: ending(KILLED), 3: ending(NODE_GONE)}
