"""Honest results of real training are called wrong by no path of the check.

The short form of `benchmarks.false_alarms`, which does this for models of 125M parameters.
"""

from __future__ import annotations

import pytest

from benchmarks.false_alarms import BACKENDS, Judge, Training
from cleave.verify.projection import compiled_pass, numpy_pass
from cleave.workload.registry import find_model


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", ["opt-tiny", "llama-tiny"])
def test_nobody_is_accused_of_the_products_of_real_training(model: str) -> None:
    pytest.importorskip("numba")
    judge = Judge({"numpy": numpy_pass, "compiled": compiled_pass()}, BACKENDS, every=9)
    training = Training(find_model(model), judge, batch=2, seq=64)
    training.steps(2)
    for dtype in ("fp32", "bf16", "fp16"):
        training.steps(1, dtype, judged=True)
    kinds = {kind for kind, _, _ in judge.tallies}
    assert kinds >= {"fp32>fp32", "bf16>bf16", "fp16>fp16"}
    for tally in judge.tallies.values():
        assert tally.blocks
        assert not tally.accused, tally.reasons
        assert not tally.recomputed
        assert not tally.misrounded
        assert tally.largest < 1
