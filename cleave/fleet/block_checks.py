"""Checks of running GEMMs, for runtimes that carry out `Check` instructions."""

from __future__ import annotations

import numpy as np

from cleave.arrays import Buffer, DType, unpack
from cleave.fleet.product import GemmFuture
from cleave.gemm import wavefront
from cleave.scheduler.tiles.tasks import Task
from cleave.verify import GemmCheck, Judgement, Projector


class BlockChecks:
    """The checks of running GEMMs. Only one thread may call it at a time.

    Args:
        rng: draws all secret vectors; seed it from the system's randomness.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._project = Projector()
        self._checks: dict[int, GemmCheck] = {}

    def judge(self, future: GemmFuture, task: Task, payload: object) -> Judgement:
        """Check a result. The payload is a `Buffer` or bytes."""
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
        """Forget the check of an ended GEMM."""
        self._checks.pop(job, None)
