"""An offloaded model does as a plain one, whatever its owner does to it between passes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cleave
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from tests.graphs.models import plain_gradients
from tests.integration.processes import started
from tests.training import model_changes as changes
from tests.training.model_changes import CHANGES, MOST_CHANGES, Change, Subject
from tests.training.runs import nightly
from tests.training.test_staged import assert_close, batches

pytestmark = pytest.mark.slow

EVERY: Sequence[tuple[Change, int]] = [
    (changes.freeze, 0), (changes.change_data_in_place, 0), (changes.change_through_numpy, 0),
    (changes.look, 1), (changes.unfreeze, 0), (changes.step, 0), (changes.freeze_attention, 1),
    (changes.change_in_place, 1), (changes.replace_data, 3), (changes.accumulate, 0),
    (changes.toggle_autocast, 0), (changes.zero_grad, 0), (changes.toggle_autocast, 0),
    (changes.load_state, 0), (changes.load_state, 1), (changes.replace_parameter, 0),
    (changes.unfreeze, 1), (changes.tie_layers, 0), (changes.evaluate, 0), (changes.train, 0),
    (changes.copy_and_spoil, 0), (changes.wrap_module, 0), (changes.hook_module, 1),
    (changes.hook_module, 1), (changes.wrap_module, 0), (changes.other_activation, 0),
    (changes.to_bf16, 0), (changes.to_fp32, 0), (changes.step, 1),
]  # fmt: skip
EVERY_OF_ADAPTERS: Sequence[tuple[Change, int]] = [
    (changes.disable_adapters, 0), (changes.look, 2), (changes.enable_adapters, 0),
    (changes.scale_adapters, 0), (changes.step, 0), (changes.switch_adapters, 1),
    (changes.scale_adapters, 1), (changes.merge_adapters, 0), (changes.unmerge_adapters, 0),
    (changes.freeze, 1), (changes.change_data_in_place, 2), (changes.unfreeze, 1),
    (changes.switch_adapters, 0), (changes.copy_and_spoil, 0), (changes.step, 1),
]  # fmt: skip


def two(*, adapted: bool) -> tuple[Subject, Subject]:
    """The same model twice."""
    plain = changes.made(adapted=adapted)
    return plain, Subject(copy.deepcopy(plain.model))


def test_every_change_is_tried() -> None:
    assert {change for change, _ in (*EVERY, *EVERY_OF_ADAPTERS)} == set(CHANGES)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A device process, which holds copies of its own: nothing that is stale goes unnoticed."""
    with cleave.serve() as server, started("join", server.url):
        server.fleet.wait_for(1)
        yield server.fleet


@pytest.mark.parametrize("method", ["tiles", nightly("stages")])
@pytest.mark.parametrize("adapted", [False, True])
def test_with_a_real_device_every_change_is_seen(
    fleet: Fleet, method: str, *, adapted: bool
) -> None:
    plain, other = two(adapted=adapted)
    with changes.on_fleet(other, fleet, method):
        changes.check(EVERY_OF_ADAPTERS if adapted else EVERY, plain, other)


def test_stages_see_changed_weights() -> None:
    """These changes need no other graphs, which would take long to make."""
    some = [
        (changes.change_data_in_place, 0), (changes.change_through_numpy, 1), (changes.step, 0),
        (changes.replace_data, 3), (changes.load_state, 1), (changes.copy_and_spoil, 0),
    ]  # fmt: skip
    plain, other = two(adapted=False)
    (ids,) = batches(1)
    with cleave.emulated(2, seed=1) as fleet, changes.on_fleet(other, fleet, "stages"):
        for change, number in some:
            change(plain, number)
            change(other, number)
            loss = plain_gradients(plain.model, ids)
            assert plain_gradients(other.model, ids) == pytest.approx(loss, rel=1e-5)
            assert_close(other.model, plain.model, 1e-4)


def test_stages_unmerge_disabled_adapters_as_peft_does() -> None:
    """Under autocast, adapters are merged and unmerged with sums that are rounded to bf16."""
    some = [
        (changes.toggle_autocast, 0), (changes.disable_adapters, 0), (changes.merge_adapters, 0),
        (changes.toggle_autocast, 0),
    ]  # fmt: skip
    plain, other = two(adapted=True)
    with cleave.emulated(2, seed=1) as fleet, changes.on_fleet(other, fleet, "stages"):
        with pytest.raises(UsageError, match="already offloaded"):
            cleave.offload(other.model, fleet, method="stages")
        changes.check(some, plain, other)
        assert fleet.counters().uplink_bytes > 0
    assert type(other.inner) is type(plain.inner)
    merged = other.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        assert merged[name].equal(weight), name


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["tiles", "stages"])
@settings(max_examples=4)
@given(
    adapted=st.booleans(),
    sequence=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.integers(0, 15)), max_size=MOST_CHANGES
    ),
)
def test_any_sequence_of_changes_is_seen(
    method: str, *, adapted: bool, sequence: list[tuple[Change, int]]
) -> None:
    with cleave.emulated(2, seed=1) as fleet:
        plain, other = two(adapted=adapted)
        with changes.on_fleet(other, fleet, method):
            changes.check(sequence, plain, other)
