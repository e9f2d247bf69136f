"""One number that is not finite, or absurdly large, harms nothing, and blames nobody honest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import cleave
from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.device.core import Order
from cleave.fleet.fleet import Fleet
from cleave.machine.graph_run import FetchRun
from cleave.planner.stages.model import StagePlanner
from cleave.scheduler.stages.work import RequestKind, StageOrder
from cleave.training.stages.staged import NotByStages
from emulator.deferred import default_backend
from emulator.virtual import VirtualRuntime, _VirtualDevice
from profiles.fleets import paper_fleet
from tests.examples import thorough
from tests.graphs.models import plain_gradients, small_model, trained
from tests.training.runs import nightly
from tests.training.test_staged import (
    KEPT,
    EvenStages,
    SlicedLoss,
    assert_close,
    batches,
    gradients_of,
    rows,
    staged,
)

pytestmark = pytest.mark.slow

MOST = {DType.FP32: 1e-5, DType.BF16: 2e-2}
MILLION = 1e6


def output(order: StageOrder) -> bool:
    return order.request.kind is RequestKind.FORWARD


def loss(order: StageOrder) -> bool:
    return bool(order.name == names.LOSS)


def dx(order: StageOrder) -> bool:
    return (
        order.request.kind in (RequestKind.BACKWARD, RequestKind.LAST) and order.name != names.LOSS
    )


def sums(order: StageOrder) -> bool:
    return order.request.kind is RequestKind.SUMS


Place = Callable[[StageOrder], bool]


class Lie:
    """What one device returns instead of the truth, once.

    Args:
        place: of which answers one is false.
        value: an element of it; `MILLION` makes all elements so many times too large.
        after: how many of these answers are right before.
        device: which device lies.

    Attributes:
        told: how often it has lied.
    """

    def __init__(self, place: Place, value: float, after: int = 0, device: int = 1) -> None:
        self.place, self.value, self.after, self.device = place, value, after, device
        self.told = 0

    def falsified(self, device: int, order: StageOrder, values: Array) -> Array:
        if device != self.device or self.told or not self.place(order):
            return values
        if self.after:
            self.after -= 1
            return values
        self.told += 1
        if self.value == MILLION:
            return values * np.float32(MILLION)
        values = values.copy()
        values[0, values.size // 2] = self.value
        return values


def activation(order: StageOrder) -> bool:
    return output(order) or dx(order)


class Scaled(Lie):
    """Device 1 multiplies half of each array by a factor, again and again."""

    def falsified(self, device: int, order: StageOrder, values: Array) -> Array:
        if device == self.device and self.place(order):
            values = values.copy()
            values.reshape(-1)[: values.size // 2] *= self.value
        return values


class Lying(VirtualRuntime):
    """Devices lie now and then."""

    lies: Sequence[Lie]

    def _product(self, device: _VirtualDevice, order: Order) -> Any:
        found = super()._product(device, order)
        session = self.manager.sessions.get(device.id)
        task = session.expected.get(order.run) if session is not None else None
        if not isinstance(order, FetchRun) or task is None:
            return found
        assert isinstance(task.detail, StageOrder)
        dtype = DType(task.detail.out)
        values = arrays.unpack(found, 1, len(found) // dtype.itemsize, dtype).float32()
        for lie in self.lies:
            values = lie.falsified(device.id, task.detail, values)
        return memoryview(arrays.narrow(values, dtype).tobytes())


def fleet_of(*lies: Lie, devices: int = 4) -> Fleet:
    runtime = Lying(paper_fleet(devices), default_backend(), verify="off")
    runtime.lies = lies
    return Fleet(runtime)


def there(fleet: Fleet) -> set[int]:
    return set(fleet.runtime.stage_devices())


def assert_liars_are_set_aside(lies: Sequence[Lie], planner: StagePlanner, dtype: DType) -> None:
    """Assert that each liar is named once and leaves, and that losses are those of PyTorch."""
    model = small_model("llama")
    plain = copy.deepcopy(model)
    notes: list[str] = []
    liars = {lie.device for lie in lies}
    with fleet_of(*lies) as fleet:
        found = staged(model, fleet, dtype=dtype, planner=planner, note=notes.append)
        mine = trained(model, gradients_of(found), batches(4), clip=1.0)
        assert all(lie.told == 1 for lie in lies)
        assert there(fleet) == {1, 2, 3, 4} - liars
    named = [note.split(": ")[0] for note in notes if "quarantined" in note]
    assert sorted(named) == [f"device {liar} is quarantined" for liar in sorted(liars)]
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(4), clip=1.0)
    assert mine == pytest.approx(expected, rel=MOST[dtype])


# Each pair of a place and a value; `make test` has each value, and NaN and MILLION at each place.
@pytest.mark.parametrize(
    ("dtype", "place", "value", "after"),
    [
        (DType.FP32, output, math.nan, 0),
        (DType.BF16, output, math.inf, 7),
        nightly(DType.FP32, output, -math.inf, 7),
        nightly(DType.BF16, output, 1e30, 0),
        (DType.BF16, output, MILLION, 7),
        (DType.BF16, loss, math.nan, 7),
        nightly(DType.FP32, loss, math.inf, 0),
        nightly(DType.BF16, loss, -math.inf, 0),
        (DType.FP32, loss, 1e30, 7),
        (DType.FP32, loss, MILLION, 0),
        (DType.FP32, dx, math.nan, 7),
        nightly(DType.BF16, dx, math.inf, 0),
        (DType.BF16, dx, -math.inf, 7),
        nightly(DType.FP32, dx, 1e30, 0),
        (DType.BF16, dx, MILLION, 0),
        (DType.BF16, sums, math.nan, 0),
        nightly(DType.FP32, sums, math.inf, 7),
        nightly(DType.FP32, sums, -math.inf, 0),
        nightly(DType.BF16, sums, 1e30, 7),
        (DType.FP32, sums, MILLION, 7),
    ],
)
def test_a_liar_is_named_and_set_aside_and_harms_nothing(
    dtype: DType, place: Place, value: float, after: int
) -> None:
    lie = Lie(place, value, after, 2 if place is loss else 1)
    assert_liars_are_set_aside([lie], EvenStages(loss=True), dtype)


@pytest.mark.parametrize(
    "lies",
    [
        [(output, MILLION, 0, 1)],
        nightly([(dx, math.nan, 0, 1)]),
        nightly([(sums, MILLION, 0, 1)]),
        [(output, math.inf, 0, 1), (sums, math.nan, 3, 2)],
    ],
)
def test_liars_are_named_where_a_device_has_a_slice_of_the_loss(lies: list[Any]) -> None:
    """Device 1 has a slice."""
    told = [Lie(*each) for each in lies]
    assert_liars_are_set_aside(told, SlicedLoss(2, KEPT, first=True), DType.FP32)


class Doubling(Lie):
    """Doubles all elements, which stands out in no way."""

    def falsified(self, device: int, order: StageOrder, values: Array) -> Array:
        before = self.told
        lied = super().falsified(device, order, values)
        return values * np.float32(2) if self.told > before else lied


def test_what_a_liar_returned_before_in_a_step_is_not_used() -> None:
    """In its third step it doubles an output, and then returns NaN."""
    model = small_model("opt")
    plain = copy.deepcopy(model)
    notes: list[str] = []
    with fleet_of(devices=3) as fleet:
        runtime = fleet.runtime
        assert isinstance(runtime, Lying)
        found = staged(model, fleet, loss=False, note=notes.append)
        first = trained(model, gradients_of(found), batches(2), clip=1.0)
        runtime.lies = Doubling(output, 1.0, 0, 1), Lie(dx, math.nan, 0, 1)
        plain_first = trained(plain, lambda ids: plain_gradients(plain, ids), batches(2), clip=1.0)
        assert first == pytest.approx(plain_first, rel=1e-5)
        model.zero_grad()
        plain.zero_grad()
        (ids,) = batches(1)
        loss = found.gradients(rows(ids))
        assert loss == pytest.approx(plain_gradients(plain, ids), rel=1e-5)
        assert all(lie.told == 1 for lie in runtime.lies)
        assert there(fleet) == {2, 3}
    assert sum("quarantined" in note for note in notes) >= 2


@pytest.mark.parametrize(("dtype", "factor"), [(DType.FP32, 1e25), (DType.BF16, math.inf)])
def test_where_the_model_diverges_nobody_is_blamed(dtype: DType, factor: float) -> None:
    model: Any = small_model("llama")
    notes: list[str] = []
    with fleet_of() as fleet:
        planner = EvenStages(loss=True)
        found = staged(model, fleet, dtype=dtype, note=notes.append, planner=planner)
        ids, then = batches(2)
        found.gradients(rows(ids))
        model.zero_grad()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(factor)
            model.model.layers[1].mlp.down_proj.weight.mul_(factor)
        loss = found.gradients(rows(then))
        assert isinstance(loss, float)
        finite = [bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None]
        assert not math.isfinite(loss) or not all(finite)
        assert there(fleet) == {1, 2, 3, 4}
    assert not [note for note in notes if "quarantined" in note]


@pytest.mark.parametrize(("family", "factor"), [("llama", 1e-3), ("opt", 1e3), ("llama", 1e5)])
def test_a_spike_costs_time_and_accuses_nobody(family: str, factor: float) -> None:
    """Weights that are suddenly so many times as large: gradients are as well."""
    model = small_model(family)
    plain = copy.deepcopy(model)
    notes: list[str] = []
    with fleet_of() as fleet:
        found = staged(model, fleet, loss=False, note=notes.append)
        for number, ids in enumerate(batches(3)):
            for each in (model, plain):
                each.zero_grad()
                if number == 1:
                    with torch.no_grad():
                        for parameter in each.parameters():
                            parameter.mul_(factor)
            loss = found.gradients(rows(ids))
            expected = plain_gradients(plain, ids)
            assert loss == pytest.approx(expected, rel=1e-3)
        assert there(fleet) == {1, 2, 3, 4}
    assert not [note for note in notes if "quarantined" in note]


def test_a_liar_that_is_alone_leaves_the_step_to_the_caller() -> None:
    with fleet_of(Lie(sums, math.nan), devices=1) as fleet:
        found = staged(small_model("opt"), fleet, loss=False, local_after_s=1.0)
        assert isinstance(found.gradients(rows(batches(1)[0])), NotByStages)
        assert not there(fleet)


@pytest.mark.parametrize(("place", "value"), [(dx, MILLION), (sums, math.nan)])
def test_a_loop_of_ones_own_goes_on_without_the_liar(place: Place, value: float) -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    lie = Lie(place, value, 5)
    with fleet_of(lie, devices=3) as fleet:
        cleave.offload(model, fleet, method="stages", audit=0.0)
        mine = trained(model, lambda ids: plain_gradients(model, ids), batches(6), clip=1.0)
        assert lie.told == 1
        assert there(fleet) == {2, 3}
        cleave.restore(model)
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(6), clip=1.0)
    assert mine == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("value", [nightly(1e30), MILLION])
def test_every_sum_is_held_to_its_own_size(value: float) -> None:
    """Also that of a key's bias, whose gradient consists of rounding alone."""
    model = small_model("opt")
    plain = copy.deepcopy(model)
    (ids,) = batches(1)
    plain_gradients(plain, ids)
    # An OPT's layer has 16 parameters; the second one is the key's bias.
    for number in range(16) if thorough() else (1, 8):
        lie = Lie(sums, value, number)
        notes: list[str] = []
        with fleet_of(lie, devices=2) as fleet:
            model.zero_grad()
            staged(model, fleet, loss=False, note=notes.append).gradients(rows(ids))
            assert lie.told == 1
            assert there(fleet) == {2}, number
        assert_close(model, plain, 3e-6)
        assert any("device 1 is quarantined: the sum of gradients of" in note for note in notes)
