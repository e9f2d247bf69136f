"""A pipeline as torch runs it: what is added to the formulae of published ones, and how much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.workload.registry import find_model
from simulator.confidant import Confidant
from simulator.method import Conditions
from simulator.pipeline import PipelineJob
from simulator.torch_pipeline import TorchPipeline

SPEC = find_model("opt-125m")
UNTIED = replace(SPEC, tied_head=False)
BATCH, SEQ = 16, 512
ELEMENT = ElementBytes(4, 4)


def conditions(
    devices: int, *, up: float, latency_s: float = 0.0, flops: float = 35e9
) -> Conditions:
    """Four equal devices that train OPT-125M with a weight of the head's own."""
    rates = DeviceRates(0, 5 * up, up, flops, latency_s=latency_s, memory_bytes=1 << 36)
    fleet = [replace(rates, device=number) for number in range(devices)]
    return Conditions(UNTIED, BATCH, SEQ, fleet, ELEMENT)


def test_it_is_what_was_measured() -> None:
    """OPT-125M on four devices of 35 GFLOP/s behind 100/20: 150 and 146 s, docs/side-by-side.md."""
    given_ = replace(conditions(4, up=2.5e6, latency_s=0.01), spec=SPEC)
    (outcome,) = TorchPipeline([4, 4, 4, 0]).outcomes(given_)
    assert outcome.step_s == pytest.approx(148, rel=0.15)
    (published,) = Confidant().outcomes(given_)
    assert published.step_s < 0.5 * outcome.step_s


def test_one_device_computes_all() -> None:
    alone = conditions(1, up=1e6)
    (outcome,) = TorchPipeline([12]).outcomes(alone)
    job = PipelineJob.of(alone)
    assert outcome.step_s == pytest.approx(BATCH * job.flops(12 + job.head_layers) / 35e9)
    assert outcome.upload_bytes == 0


@given(cut=st.integers(1, 11), up=st.floats(1e5, 1e9), latency_s=st.floats(0, 1))
def test_each_micro_batch_waits_for_its_transfers(cut: int, up: float, latency_s: float) -> None:
    two = conditions(2, up=up, latency_s=latency_s)
    (outcome,) = TorchPipeline([cut, 12 - cut]).outcomes(two)
    (fast,) = TorchPipeline([cut, 12 - cut]).outcomes(conditions(2, up=1e18))
    hop_s = SEQ * SPEC.width * 4 / up + 2 * latency_s
    assert outcome.step_s == pytest.approx(fast.step_s + (BATCH + 1) * hop_s, rel=1e-6)


def test_ends_that_share_a_weight_add_up_its_gradients() -> None:
    own = conditions(4, up=2.5e6)
    stages = TorchPipeline([4, 4, 4, 0])
    (apart,), (shared,) = (stages.outcomes(replace(own, spec=s)) for s in (UNTIED, SPEC))
    embedding = SPEC.vocabulary * SPEC.embedding_width * 4
    assert shared.step_s - apart.step_s == pytest.approx(embedding / 2.5e6)
    assert shared.upload_bytes - apart.upload_bytes == pytest.approx(embedding / 2)
