"""One number that is not finite, or absurdly large, harms nothing, and blames nobody honest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import DType
from cleave.device.core import Order
from cleave.fleet.fleet import Fleet
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.machine.graph_run import FetchRun
from cleave.scheduler.stage_work import StageOrder, UnitKind
from cleave.training.stage_work import ModelWork
from cleave.training.staged import StagedModel
from emulator.deferred import default_backend
from emulator.virtual import VirtualRuntime, _VirtualDevice
from profiles.fleets import paper_fleet
from tests.graphs.models import TOKENS, plain_gradients, small_model, trained
from tests.training.test_staged import (
    PS,
    EvenStages,
    batches,
    gradients_of,
)

pytestmark = pytest.mark.slow

MOST = {DType.FP32: 1e-5, DType.BF16: 2e-2}
MILLION = 1e6


@pytest.fixture(scope="module")
def cache() -> GraphCache:
    return GraphCache.of_user()


def output(order: StageOrder) -> bool:
    return order.unit.kind is UnitKind.FORWARD


def loss(order: StageOrder) -> bool:
    return bool(order.name == names.LOSS)


def dx(order: StageOrder) -> bool:
    return order.unit.kind in (UnitKind.BACKWARD, UnitKind.LAST) and order.name != names.LOSS


def sums(order: StageOrder) -> bool:
    return order.unit.kind is UnitKind.SUMS


Place = Callable[[StageOrder], bool]


@dataclass
class Lie:
    """What one device returns instead of the truth, once.

    Attributes:
        place: of which answers one is false.
        value: an element of it; `MILLION` makes all elements so many times too large.
        after: how many of these answers are right before.
        device: which device lies.
        told: how often it has.
    """

    place: Place
    value: float
    after: int = 0
    device: int = 1
    told: int = 0


class Lying(VirtualRuntime):
    """One device lies once."""

    lie: Lie

    def _product(self, device: _VirtualDevice, order: Order) -> Any:
        found = super()._product(device, order)
        lie = self.lie
        session = self.manager.sessions.get(device.id)
        if not isinstance(order, FetchRun) or device.id != lie.device or session is None:
            return found
        task = session.expected.get(order.run)
        if task is None or not lie.place(task.detail) or lie.told:
            return found
        if lie.after:
            lie.after -= 1
            return found
        lie.told += 1
        dtype = DType(task.detail.out)
        size = len(found) // dtype.itemsize
        values = arrays.unpack(found, 1, size, dtype).float32().copy()
        if lie.value == MILLION:
            values *= np.float32(MILLION)
        else:
            values[0, size // 2] = lie.value
        return memoryview(arrays.narrow(values, dtype).tobytes())


def fleet_of(lie: Lie, devices: int = 4) -> Fleet:
    runtime = Lying(paper_fleet(devices), default_backend(), verify="off")
    runtime.lie = lie
    return Fleet(runtime)


def staged(fleet: Fleet, model: Any, cache: GraphCache, **settings: Any) -> StagedModel:
    dtype = settings.pop("dtype", DType.FP32)
    work = ModelWork(model, model_graphs(model, TOKENS, cache), dtype)
    planner = settings.pop("planner", EvenStages(loss=False))
    return StagedModel(work, fleet.runtime, planner, PS, **settings)


def there(fleet: Fleet) -> set[int]:
    return set(fleet.runtime.stage_devices())


@pytest.mark.parametrize("after", [0, 7], ids=["in the first step", "later"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, MILLION])
@pytest.mark.parametrize("place", [output, loss, dx, sums])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_a_liar_is_named_and_set_aside_and_harms_nothing(
    dtype: DType, place: Place, value: float, after: int, cache: GraphCache
) -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    notes: list[str] = []
    liar = 2 if place is loss else 1
    lie = Lie(place, value, after, liar)
    planner = EvenStages(loss=True)
    with fleet_of(lie) as fleet:
        found = staged(fleet, model, cache, dtype=dtype, planner=planner, note=notes.append)
        mine = trained(model, gradients_of(found), batches(4), clip=1.0)
        assert lie.told == 1
        assert there(fleet) == {1, 2, 3, 4} - {liar}
    named = [note for note in notes if "quarantined" in note]
    assert len(named) == 1
    assert named[0].startswith(f"device {liar} is quarantined: ")
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(4), clip=1.0)
    assert mine == pytest.approx(expected, rel=MOST[dtype])
