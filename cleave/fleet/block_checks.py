"""Verification of result blocks for runtimes that execute `Check` instructions."""

from __future__ import annotations

import numpy as np

from cleave.arrays import Buffer, DType, unpack
from cleave.fleet.product import GemmFuture
from cleave.gemm import wavefront
from cleave.scheduler.tiles.tasks import Task
from cleave.verify import GemmCheck, Judgement, Projector


class BlockChecks:
    """Verifies the result blocks of all running GEMMs. Only one thread may use it at a time.

    Args:
        rng: generates the secret vectors. Its seed must come from the operating system's random
            number source.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._project = Projector()
        self._checks: dict[int, GemmCheck] = {}

    def judge(self, future: GemmFuture, task: Task, payload: object) -> Judgement:
        """Verify one result block.

        Args:
            future: the GEMM to which the block belongs.
            task: the task that computed the block.
            payload: the block, as a `Buffer` or as bytes from the wire.
        """
        check = self._checks.get(future.job.id)
        if check is None:
            plan = future.job.plan
            assert plan is not None
            blocks = (block for tile in plan.tiles for block in wavefront(tile.cut))
            a, b = future.a.matrix, future.b.matrix
            check = GemmCheck(a, b, blocks, self._rng, self._project)
            self._checks[future.job.id] = check
        detail = task.detail
        block = detail.block
        if not isinstance(payload, Buffer):
            assert isinstance(payload, bytes | memoryview)
            payload = unpack(payload, block.m.size, block.n.size, DType(detail.out))
        return check.judge(block, payload)

    def forget(self, job: int) -> None:
        """Free the verification state of a GEMM that has ended.

        Args:
            job: ID of the GEMM.
        """
        self._checks.pop(job, None)
