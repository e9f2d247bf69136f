"""Who codes, by feature, option and link; and what plans count where a device does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import UsageError
from cleave.gemm import Gemm
from cleave.planner.coding import LINK_BYTES_PER_S, CodingPolicy, coded_ratio, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.stages.model import PlannedStage, PsCompute, StagePlan
from cleave.planner.stages.prediction import predict
from cleave.planner.stages.search import plan_stages
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import messages
from cleave.protocol.messages import Feature, Hello, Role
from cleave.scheduler.instructions import Send
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from tests.examples import examples

SLOW, FAST = LINK_BYTES_PER_S, 2 * LINK_BYTES_PER_S


def joined(
    coding: str, down: float, up: float, *features: str
) -> tuple[SessionManager, list[messages.Message]]:
    """A PS that a device has joined, and what it told the device."""
    manager = SessionManager(coding=coding)
    manager.opened(1, 0.0)
    hello = Hello(
        Role.DEVICE,
        ops=("matmul",),
        dtypes=("fp32",),
        memory_bytes=2**30,
        downlink_bytes_per_s=down,
        uplink_bytes_per_s=up,
        features=features,
    )
    done = manager.received(1, hello, 0.0)
    return manager, [one.message for one in done if isinstance(one, Send)]


@pytest.mark.parametrize(
    ("coding", "down", "up", "puts", "results"),
    [
        ("auto", SLOW, FAST, True, False),
        ("auto", FAST, SLOW, False, True),
        ("auto", FAST, FAST, False, False),
        ("on", FAST, FAST, True, True),
        ("off", SLOW, SLOW, False, False),
    ],
)
def test_each_way_by_its_rate(
    coding: str, down: float, up: float, puts: bool, results: bool
) -> None:
    manager, (welcome, *told) = joined(coding, down, up, "coding")
    assert isinstance(welcome, messages.Welcome)
    assert welcome.features == (() if coding == "off" else ("coding",))
    assert manager.sessions[1].codes_puts == puts
    assert told == ([messages.CodeResults()] if results else [])


@pytest.mark.parametrize("coding", CodingPolicy)
def test_a_device_without_the_feature_hears_nothing_of_it(coding: CodingPolicy) -> None:
    manager, told = joined(coding.value, SLOW, SLOW, "measure")
    assert [type(message) for message in told] == [messages.Welcome]
    assert not manager.sessions[1].codes_puts
    assert Feature.CODING not in manager.sessions[1].features


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match="--coding is 'yes'; use auto, on or off"):
        SessionManager(coding="yes")


# --- what plans count ---


@given(
    down=st.floats(1e5, 1e8), up=st.floats(1e5, 1e8), policy=st.sampled_from(CodingPolicy),
    sent=st.sampled_from(["fp32", "bf16", "fp16"]),
)  # fmt: skip
def test_a_link_is_as_much_faster_for_payloads_as_they_get_shorter(
    down: float, up: float, policy: CodingPolicy, sent: str
) -> None:
    device = policy.decided(DeviceRates(1, down, up, 1e9))
    assert (device.codes_downlink, device.codes_uplink) == (policy.pays(down), policy.pays(up))
    (plain,) = payload_rates([device], sent)
    down_s, up_s = 1e6 / plain.downlink_bytes_per_s, 1e6 / plain.uplink_bytes_per_s
    assert down_s == pytest.approx(device.down_bytes(1e6, coded_ratio(sent)) / down)
    assert up_s == pytest.approx(device.up_bytes(1e6, coded_ratio("fp32")) / up)
    assert payload_rates([plain], sent) == [plain]  # what is counted is not counted twice


@given(
    link=st.floats(1e5, 1e9), card=st.floats(1e5, 1e10), devices=st.integers(1, 1000),
    policy=st.sampled_from(CodingPolicy),
)  # fmt: skip
def test_a_link_is_no_faster_than_its_share_of_the_card(
    link: float, card: float, devices: int, policy: CodingPolicy
) -> None:
    decided = policy.decided(DeviceRates(1, link, 1e12, 1e9), PsRates(card), devices)
    assert decided.codes_downlink == policy.pays(min(link, card / devices))
    assert decided.codes_uplink == policy.pays(1e12)


def _step(devices: list[DeviceRates], gradient_bytes: int) -> StagePlan:
    sizes = StageSizes(find_model("opt-tiny"), 64, 2, gradient_bytes)
    model = sizes.costs([256] * 4)
    stages = [
        PlannedStage(0, len(model.layers) - 1, (0,)),
        PlannedStage(len(model.layers) - 1, len(model.layers), (1,)),
    ]
    ps = PsCompute(1e12, 0.0, PsRates(2e6, 2e6))
    return predict(model, stages, {d.device: d for d in devices}, ps)


def _pair(down: float, up: float, policy: CodingPolicy) -> list[DeviceRates]:
    return [policy.decided(DeviceRates(n, down, up, 1e12, 0.01)) for n in range(2)]


@given(down=st.floats(1e4, 1e8), up=st.floats(1e4, 1e8), gradient_bytes=st.sampled_from([2, 4]))
@settings(max_examples=examples(20), deadline=None)
def test_the_same_stages_are_never_slower_coded(
    down: float, up: float, gradient_bytes: int
) -> None:
    plain = _step(_pair(down, up, CodingPolicy.OFF), gradient_bytes)
    coded = _step(_pair(down, up, CodingPolicy.ON), gradient_bytes)
    assert coded.step_s <= plain.step_s * 1.01  # who gets which micro-batch may change
    assert coded.downlink_bytes == pytest.approx(0.675 * plain.downlink_bytes, rel=1e-3)
    assert coded.uplink_bytes < plain.uplink_bytes
    assert coded.memory_bytes == plain.memory_bytes


@pytest.mark.parametrize("by_tiles", [False, True])
def test_on_slow_links_a_step_takes_the_ratio_of_the_time(*, by_tiles: bool) -> None:
    model = StageSizes(find_model("opt-tiny"), 64).costs([256] * 4)

    def planned_s(policy: CodingPolicy) -> float:
        devices = _pair(1e5, 1e5, policy)
        if not by_tiles:
            return plan_stages(model, devices, PsCompute(1e9, 0.0)).step_s
        gemm, rates = Gemm(512, 512, 512), payload_rates(devices, "fp32")
        return TilePlanner(PsRates()).plan(gemm, ElementBytes(4, 4), rates).makespan_s

    ratio = planned_s(CodingPolicy.AUTO) / planned_s(CodingPolicy.OFF)
    assert ratio == pytest.approx(0.837 if by_tiles else 0.675, rel=0.05)
