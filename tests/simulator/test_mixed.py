"""Resident sub-layers and tiles together."""

from __future__ import annotations

import itertools

import pytest

from cleave.workload.registry import find_model
from simulator.catalogue import methods
from simulator.method import Conditions, Outcome
from simulator.mixed import PieceSearch
from simulator.resident import simulated
from simulator.resident_layouts import ONE_VISIT, TWO_VISITS, LayoutSearch
from simulator.sublayers import Kind, kinds, parameters
from simulator.tiles import tiled_step
from tests.simulator.conditions import alike, paper

pytestmark = pytest.mark.slow

SPEC = find_model("opt-1.3b")


def rows(conditions: Conditions) -> dict[str, Outcome]:
    names = ("cleave", "cleave-resident", "cleave-mixed")
    known = methods()
    return {row.method: row for name in names for row in known[name].outcomes(conditions)}


def with_memory(memory: float, devices: int = 24) -> Conditions:
    return Conditions(SPEC, 16, 256, alike(devices, memory=memory))


def test_without_room_for_any_it_is_cleave() -> None:
    found = rows(with_memory(60e6))
    assert not found["cleave-resident"].fits
    tiles, mixed = found["cleave"], found["cleave-mixed"]
    assert mixed.setting == "all by tiles"
    assert (mixed.step_s, mixed.download_bytes) == (tiles.step_s, tiles.download_bytes)
    assert mixed.memory_needed_bytes == tiles.memory_needed_bytes


def test_with_room_for_all_it_is_resident() -> None:
    found = rows(with_memory(4e9))
    resident, mixed = found["cleave-resident"], found["cleave-mixed"]
    assert mixed.setting == resident.setting
    assert mixed.parts == resident.parts
    assert mixed.download_bytes == resident.download_bytes
    assert mixed.upload_bytes == resident.upload_bytes


@pytest.mark.parametrize("memory", [120e6, 250e6, 1e9])
def test_it_is_never_worse_than_either(memory: float) -> None:
    found = rows(with_memory(memory))
    mixed = found["cleave-mixed"]
    assert mixed.fits
    assert mixed.step_s <= found["cleave"].step_s
    assert mixed.step_s <= found["cleave-resident"].step_s


def test_what_does_not_fit_at_once_is_done_in_stretches() -> None:
    # 24 devices of 250 MB do not hold 1.2e9 parameters with their gradients.
    conditions = with_memory(250e6)
    found = rows(conditions)
    mixed = found["cleave-mixed"]
    assert not found["cleave-resident"].fits
    assert "then" in mixed.setting
    assert mixed.step_s < found["cleave"].step_s / 1.2
    assert mixed.memory_needed_bytes <= 250e6


def test_what_fits_no_device_is_done_by_tiles() -> None:
    # Attention weighs half of an FFN: devices in between hold only one of them.
    conditions = with_memory(1)
    search = LayoutSearch(conditions)
    needs = {
        kind: min(search._residence((kind,), r).memory_bytes for r in (1, 24)) for kind in Kind
    }
    assert needs[Kind.ATTENTION] < needs[Kind.FFN]
    between = with_memory((needs[Kind.ATTENTION] + needs[Kind.FFN]) / 2)
    pieces = PieceSearch(between, dict.fromkeys(Kind, 1e9)).ranked(1)[0]
    assert set(pieces.tiled) == {Kind.FFN}
    assert len(pieces.tiled) == len(pieces.stretches) == SPEC.layers


def test_pieces_are_the_best_of_all_ways() -> None:
    conditions = Conditions(find_model("opt-nano"), 4, 64, alike(6, memory=1e6))
    order, search = kinds(conditions.spec), LayoutSearch(conditions)
    tiles_s = {Kind.ATTENTION: 0.08, Kind.FFN: 0.15}
    pieces = PieceSearch(conditions, tiles_s).ranked(1)[0]
    ways = []
    for marks in itertools.product("tsn", repeat=len(order)):  # tiles, stretch goes on, new stretch
        cost, start = 0.0, 0
        while start < len(order):
            stop = start + 1
            if marks[start] == "t":
                cost += tiles_s[order[start]]
            else:
                while stop < len(order) and marks[stop] == "s":
                    stop += 1
                visits = ONE_VISIT if stop == len(order) else TWO_VISITS
                found = search.best_first(order[start:stop], visits, coarse=True)
                cost += found[0].time_s if found else float("inf")
            start = stop
        ways.append(cost)
    assert pieces.time_s == pytest.approx(min(ways))


def test_bytes_are_those_of_its_pieces() -> None:
    conditions = with_memory(250e6)
    step = conditions.once(tiled_step)
    by_tiles_s = {kind: step.sublayer(kind).seconds for kind in Kind}
    pieces = PieceSearch(conditions, by_tiles_s).ranked(1)[0]
    first = simulated(conditions, pieces.stretches[0], 1)
    assert first is not None
    assert len(first.runs) == 2  # forward, and later backward
    stages = first.stretch.layout.stages
    weights = sum(parameters(SPEC, kind) for held in stages for kind in held.run)
    groups = [len(each) for each in first.assignment.stages]
    assert len(set(groups)) == 1
    r = first.stretch.layout.r
    passes = [load for held in stages for load in (held.forward, held.backward)]
    down, up = first.moved_bytes(conditions.batch)
    # Weights twice for every device; gradients once, each device its part of 4 bytes.
    samples_down = 16 * r * sum(load.download_bytes for load in passes)
    assert down == pytest.approx(2 * 2 * weights * groups[0] * r + samples_down, rel=1e-9)
    samples_up = 16 * r * sum(load.upload_bytes for load in passes)
    assert up == pytest.approx(4 * weights * groups[0] + samples_up, rel=1e-9)


def test_pieces_of_a_step_by_tiles_make_the_whole() -> None:
    for name in ("opt-350m", "llama2-7b"):
        conditions = paper(32, name, batch=8, seq=256)
        step = tiled_step(conditions)
        whole = methods()["cleave"].outcomes(conditions)[0]
        layers = conditions.spec.layers
        shares = [step.sublayer(kind).times(layers) for kind in Kind] + [step.edges()]
        assert sum(share.seconds for share in shares) == pytest.approx(whole.step_s)
        sent = sum(share.download_bytes for share in shares)
        assert sent == pytest.approx(32 * whole.download_bytes, rel=1e-6)


def test_the_same_twice() -> None:
    one, two = (methods()["cleave-mixed"].outcomes(with_memory(250e6)) for _ in range(2))
    assert one == two
