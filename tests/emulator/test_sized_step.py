"""Steps by sizes alone: the GEMMs of training, reused timelines, bytes in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Side
from cleave.gemm import Gemm, Span, gemm_of
from cleave.planner.plan import PS_BLOCK_S, PS_BYTE_S, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import messages
from cleave.protocol.codec import wire_size
from cleave.scheduler.tiles import gemm_job
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from emulator import sized_step
from emulator.activity import Transfer
from emulator.sized_step import SizedStep, SizedStepper
from emulator.virtual import VirtualRuntime, emulated
from profiles.availability import Availability, Durations
from profiles.fleet_device import FleetDevice, SharedBottleneck
from profiles.fleets import paper_fleet
from tests.emulator.fleets import submit_zeros, virtual, watched

pytestmark = pytest.mark.slow

FEW = 12  # devices that keep what they hold: planning for the 64 of real fleets takes minutes
MANY = FEW + 6  # a fleet in which timelines are reused
TOKENS = 64


@pytest.fixture(autouse=True, scope="module")
def _few_keep_what_they_hold() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_job, "RESIDENCY_DEVICES", FEW)
        patch.setattr(sized_step, "RESIDENCY_DEVICES", FEW)
        yield


def stepper(
    devices: Sequence[FleetDevice] | int,
    model: str = "opt-nano",
    *,
    tokens: int = TOKENS,
    reuse: bool = True,
    ps: PsRates | None = None,
) -> tuple[SizedStepper, VirtualRuntime]:
    members = paper_fleet(devices) if isinstance(devices, int) else list(devices)
    fleet = emulated(members, compute=False, ps=ps, coding="off")
    fleet.planner = planner(ps)
    made = SizedStepper(fleet, find_model(model), tokens, DType.FP32, reuse=reuse)
    return made, virtual(fleet)


@cache
def planner(ps: PsRates | None) -> TilePlanner:
    """One for all tests: planning for such a fleet is most of their time."""
    if ps is None:
        return TilePlanner()
    # A card alone: plans spare the PS's loop all the same, as in `cleave emulate`.
    card = (ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
    return TilePlanner(PsRates(*card, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S))


def count_gemms(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Counter[Gemm]:
    """What a fleet is given from now on, by shape, whatever the dtypes."""
    counted: Counter[Gemm] = Counter()
    submit = fleet.submit

    def counting(a: Side, b: Side, out: Buffer) -> GemmFuture:
        counted[gemm_of(a.shape, b.shape)] += 1
        return submit(a, b, out)

    monkeypatch.setattr(fleet, "submit", counting)
    return counted


# --- the GEMMs of training ---


@pytest.mark.parametrize(
    "model", ["opt-nano", pytest.param("llama-nano", marks=pytest.mark.nightly)]
)
def test_a_step_submits_what_training_submits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import cleave
    from cleave.workload.build import build_model

    batch, seq = 2, 16
    spec = find_model(model)
    trained = emulated(4)
    trained.planner = planner(None)
    in_training = count_gemms(trained, monkeypatch)
    module = build_model(spec, seed=0)
    cleave.offload(module, trained)
    tokens = torch.randint(0, spec.vocabulary, (batch, seq))
    module(input_ids=tokens, labels=tokens).loss.backward()

    sized = emulated(4, compute=False)
    sized.planner = planner(None)
    by_sizes = count_gemms(sized, monkeypatch)
    SizedStepper(sized, spec, batch * seq, DType.FP32).step()
    assert by_sizes == in_training


@pytest.mark.parametrize(
    "model", ["opt-125m", "opt-350m", pytest.param("llama2-7b", marks=pytest.mark.nightly)]
)
def test_a_step_submits_what_the_workload_lists(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_model(model)
    listed: Counter[Gemm] = Counter()
    for one in step_gemms(spec, 1, 8):
        listed[one.gemm] += one.count
    fleet = emulated(2, compute=False)
    submitted = count_gemms(fleet, monkeypatch)
    SizedStepper(fleet, spec, 8, DType.BF16).step()
    assert submitted == listed


@pytest.mark.parametrize("model", ["opt-nano", "opt-350m"])  # the second has more than a head
def test_a_model_of_one_layer_has_a_layer(model: str) -> None:
    spec = replace(find_model(model), layers=1)
    made = SizedStepper(emulated(2, compute=False), spec, 8, DType.FP32)
    assert made.layer(0).counters.gemms == 18


# --- reused timelines ---


def same(reused: SizedStep, emulated_all: SizedStep) -> None:
    ours, theirs = reused.counters, emulated_all.counters
    for name in (
        "downlink_bytes", "uplink_bytes", "blocks", "tiles", "gemms", "reissued", "late",
        "floor_down_bytes", "floor_up_bytes",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert reused.events + reused.reused_events == emulated_all.events
    assert reused.fleet_s == pytest.approx(emulated_all.fleet_s, rel=1e-9)
    assert ours.fleet_s == pytest.approx(theirs.fleet_s, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "change", "card"),
    [
        ("opt-nano", {}, None),
        pytest.param(
            "llama-nano",
            {
                "bottleneck": SharedBottleneck("line", 1e9, 1e8, MANY),
                "latency_s": 0.02,
                "load": 0.3,
            },
            1.25e8,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["paper", "line and card"],
)
def test_reuse_changes_nothing(model: str, change: dict[str, Any], card: float | None) -> None:
    fleet = [replace(d, **change) for d in paper_fleet(MANY)]
    ps = PsRates(card, card) if card else None
    (once, runtime), (anew, other) = (stepper(fleet, model, reuse=r, ps=ps) for r in (True, False))
    for _ in range(2):
        reused, whole = once.step(), anew.step()
        assert whole.reused_events == 0
        same(reused, whole)
    assert reused.reused_events > 0
    assert runtime.now_s == pytest.approx(other.now_s, rel=1e-9)
    for number, device in runtime.devices.items():
        assert device.core.blocks == other.devices[number].core.blocks
        assert device.core.flops == other.devices[number].core.flops


def test_real_gemms_after_reuse_take_the_same_course() -> None:
    (once, runtime), (anew, other) = (stepper(MANY, reuse=r) for r in (True, False))
    same(once.step(), anew.step())
    runtime.observers.append(lambda _: None)  # from now on event by event
    ours, theirs = once.step(), anew.step()
    assert ours.reused_events == 0
    same(ours, theirs)
    assert runtime.now_s == pytest.approx(other.now_s, rel=1e-9)


CHURN = Availability(Durations(1e4), Durations(10.0))


@pytest.mark.parametrize(
    "change",
    [{"jitter_s": 0.001}, {"drift_sigma": 0.2}, {"availability": CHURN}],
    ids=lambda c: next(iter(c)),
)
def test_what_is_random_is_not_reused(change: dict[str, Any]) -> None:
    first, *others = paper_fleet(MANY)
    made, _ = stepper([replace(first, **change), *others])  # one such device is enough
    assert made.step().reused_events == 0


@pytest.mark.nightly
def test_losses_end_reuse_until_the_fleet_is_known_again() -> None:
    made, runtime = stepper(MANY)
    made.step()
    runtime.lose(3)
    changed = made.step()
    assert changed.events > 0
    assert made.step().reused_events > changed.reused_events


@pytest.mark.nightly
def test_small_fleets_keep_what_they_hold_and_reuse_nothing() -> None:
    made, _ = stepper(FEW)
    assert made.layer(0).reused_events == 0


# --- bytes in closed form ---


@pytest.mark.parametrize("devices", [1, 5, pytest.param(MANY, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", [(64, 96, 80), (33, 47, 500)], ids=str)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_payloads_are_those_of_the_plan(
    devices: int, shape: tuple[int, int, int], dtype: DType
) -> None:
    """Payloads are the strips and blocks of the plan; headers are tested below."""
    fleet = emulated(devices, compute=False, coding="off")
    virtual(fleet).settle()
    seen = watched(fleet)
    m, n, k = shape
    future = submit_zeros(fleet, m, n, k, dtype)
    future.result()
    plan = future.job.plan
    assert plan is not None

    strips: set[tuple[int, str, Span, Span]] = set()  # a device is sent each of them once
    up = 0
    for tile in plan.tiles:
        cut = tile.cut
        for piece in cut.k_cuts:
            strips |= {(tile.device, "a", rows, piece) for rows in cut.m_cuts}
            strips |= {(tile.device, "b", piece, columns) for columns in cut.n_cuts}
        each = 4 if cut.tile.is_partial(plan.gemm) else dtype.itemsize
        up += cut.tile.m.size * cut.tile.n.size * each
    down = sum(s[2].size * s[3].size for s in strips) * dtype.itemsize

    sent: Counter[str] = Counter()
    payloads: Counter[str] = Counter()
    for message in (t.message for t in seen if isinstance(t, Transfer)):
        sent[message.TYPE] += 1
        if isinstance(message, messages.Put | messages.Result):
            payloads[message.TYPE] += message.payload.nbytes
    blocks = sum(len(t.cut.m_cuts) * len(t.cut.n_cuts) for t in plan.tiles)
    assert sent == {"put": len(strips), "run": blocks, "result": blocks}
    assert payloads == {"put": down, "result": up}


def v(number: int) -> int:
    """Bytes of a number in msgpack."""
    return next((w for bits, w in ((7, 1), (8, 2), (16, 3), (32, 5)) if number < 2**bits), 9)


def b(nbytes: int) -> int:
    """Bytes of a payload's length in msgpack."""
    return 2 if nbytes < 2**8 else 3 if nbytes < 2**16 else 5


@given(
    st.integers(0, 2**40),
    st.integers(1, 300),
    st.integers(1, 300),
    st.lists(st.integers(0, 2**40), min_size=2, max_size=15),
    st.sampled_from(["fp32", "bf16"]),
)
def test_the_overhead_that_the_documentation_states(
    name: int, rows: int, columns: int, ids: list[int], dtype: str
) -> None:
    """docs/emulation.md, Bytes."""
    payload = bytes(rows * columns * DType(dtype).itemsize)
    box = v(name) + v(rows) + v(columns) + b(len(payload)) + len(payload)
    assert wire_size(messages.Put(name, rows, columns, dtype, payload)) == 33 + box
    assert wire_size(messages.Result(name, rows, columns, dtype, 0.25, payload)) == 55 + box
    some = tuple(ids)
    listed = sum(v(i) for i in ids)
    run = messages.Run(name, "matmul", some, True, False, dtype)
    assert wire_size(run) == 62 + v(name) + listed
    assert wire_size(messages.Drop(some)) == 12 + listed
    assert wire_size(messages.Cancel(some)) == 14 + listed
