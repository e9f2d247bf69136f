"""Sums of a stage: exactly once, frozen when taken, void when adding failed half-way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.arrays import Array, Buffer, DType
from cleave.machine import graph_names as names
from cleave.machine.stage import Arrays, Stage, StageError, StageLayer, VoidGenerationError
from tests.examples import examples

SHAPE = (1, 2, 3)


class Scaling:
    """The graphs of a layer y = w x, in numpy; it fails when it is told to."""

    def __init__(self, backward: bool) -> None:
        self.backward = backward
        self.runs = 0
        self.fails = False

    @property
    def inputs(self) -> Mapping[str, Sequence[int | str]]:
        batch = {names.X: ("batch", 2, 3), names.parameter("w"): (1,)}
        return {**batch, names.DY: ("batch", 2, 3), names.total("w"): (1,)}

    def run(self, given: Arrays) -> dict[str, Array]:
        self.runs += 1
        if self.fails:
            raise MemoryError("no memory")
        w, x = given[names.parameter("w")], given[names.X]
        if not self.backward:
            return {names.Y: w * x}
        dy = given[names.DY]
        total = given[names.total("w")] + np.float32((dy * x).sum())
        return {names.DX: w * dy, names.new_total("w"): total}


def layer(weight: float) -> tuple[StageLayer, Scaling, Scaling]:
    forward, backward = Scaling(False), Scaling(True)
    held = {"w": Buffer(np.full((1, 1), weight, np.float32), DType.FP32)}
    return StageLayer(forward, backward, held, ("w",)), forward, backward


def array(value: float) -> Array:
    return np.full(SHAPE, value, np.float32)


NOTHING: list[Arrays] = [{}, {}]


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=20))
def test_every_sample_counts_once_whatever_is_repeated(asked: list[tuple[int, bool]]) -> None:
    stage = Stage([layer(2.0)[0], layer(3.0)[0]])
    for sample, keep in asked:
        x, dy = array(sample + 1.0), array(0.5)
        if keep:
            np.testing.assert_array_equal(stage.forward(sample, x, NOTHING, keep=True), 6 * x)
        np.testing.assert_array_equal(stage.backward(7, sample, x, dy, NOTHING), 6 * dy)
    total = sum(sample + 1.0 for sample in {sample for sample, _ in asked})
    first, second = stage.gradients(7)
    assert first["w"][0] == pytest.approx(6 * 0.5 * 3 * total)
    assert second["w"][0] == pytest.approx(6 * 0.5 * 2 * total)


def test_taking_gradients_freezes_a_generation() -> None:
    stage = Stage([layer(2.0)[0], layer(3.0)[0]])
    stage.backward(1, 1, array(1), array(1), NOTHING)
    before = [dict(sums) for sums in stage.gradients(1)]
    with pytest.raises(StageError, match="frozen"):
        stage.backward(1, 2, array(1), array(1), NOTHING)
    stage.backward(1, 1, array(1), array(1), NOTHING)  # a repeat is answered
    assert [dict(sums) for sums in stage.gradients(1)] == before
    stage.backward(2, 2, array(1), array(1), NOTHING)  # the next one is open
    stage.drop(1)
    stage.drop(1)
    with pytest.raises(StageError, match="no generation 1"):
        stage.gradients(1)


def test_a_failure_half_way_voids_the_generation() -> None:
    first, _, backward = layer(2.0)
    stage = Stage([first, layer(3.0)[0]])
    stage.backward(1, 1, array(1), array(1), NOTHING)
    backward.fails = True  # after the second layer's gradient was added
    with pytest.raises(MemoryError):
        stage.backward(1, 2, array(1), array(1), NOTHING)
    backward.fails = False
    with pytest.raises(VoidGenerationError):
        stage.gradients(1)
    with pytest.raises(VoidGenerationError):
        stage.backward(1, 3, array(1), array(1), NOTHING)
    stage.backward(2, 2, array(1), array(1), NOTHING)
    assert stage.gradients(2)[0]["w"].shape == (1,)


def test_a_repeat_that_fails_voids_nothing() -> None:
    first, _, backward = layer(2.0)
    stage = Stage([first, layer(3.0)[0]])
    stage.backward(1, 1, array(1), array(1), NOTHING)
    backward.fails = True
    with pytest.raises(MemoryError):
        stage.backward(1, 1, array(1), array(1), NOTHING)
    assert stage.gradients(1)[0]["w"].shape == (1,)


def test_what_is_kept_is_not_computed_again_and_can_be_forgotten() -> None:
    first, forward, _ = layer(2.0)
    stage = Stage([first, layer(3.0)[0]])
    for sample in (1, 2):
        stage.forward(sample, array(1), NOTHING, keep=True)
    stage.backward(1, 1, array(1), array(1), NOTHING)
    assert forward.runs == 2
    stage.forget(2)
    stage.backward(1, 2, array(1), array(1), NOTHING)
    assert forward.runs == 3


def test_graphs_of_a_layer_get_the_shapes_that_they_state() -> None:
    unknown = Scaling(True)
    stage = Stage([StageLayer(Scaling(False), unknown, {}, ("other",))])
    with pytest.raises(KeyError):
        stage.backward(1, 1, array(1), array(1), [{}])
