"""A model offloaded by stages trains in a loop of one's own as it does alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import cleave
from cleave.errors import UsageError
from cleave.training import staged_forward
from tests.graphs.models import plain_gradients, small_model, trained, with_lora
from tests.planner.test_stage_search import large_head
from tests.training.test_staged import TOKENS, assert_close, batches

pytestmark = pytest.mark.slow


def test_a_loop_of_ones_own_has_the_losses_of_plain_pytorch() -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    with cleave.emulated(3, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages", audit=1.0)
        found = trained(model, lambda ids: plain_gradients(model, ids), batches(6), clip=1.0)
        assert fleet.counters().uplink_bytes > 0
        cleave.restore(model)
        assert "forward" not in vars(model)
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(6), clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4)


def test_labels_padding_and_adapters_work_as_in_the_model() -> None:
    model: Any = with_lora(small_model("llama"))
    plain: Any = copy.deepcopy(model)
    (ids,) = batches(1)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    labels = torch.where(mask > 0, ids, -100)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        for given in (None, mask):
            model.zero_grad()
            plain.zero_grad()
            found = model(input_ids=ids, attention_mask=given, labels=labels).loss
            expected = plain(input_ids=ids, attention_mask=given, labels=labels).loss
            assert float(found) == pytest.approx(float(expected), rel=1e-6)
            found.backward()
            expected.backward()
            assert_close(model, plain, 3e-6)


def test_what_needs_no_gradient_frees_what_was_kept() -> None:
    model: Any = small_model("opt")
    plain: Any = copy.deepcopy(model)
    (ids,) = batches(1)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        with torch.no_grad():
            found: Tensor = model(ids).logits
            torch.testing.assert_close(found, plain(ids).logits, rtol=1e-5, atol=1e-6)
        found = model(ids).logits  # its backward pass never comes
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        plain(input_ids=ids, labels=ids).loss.backward()
        assert_close(model, plain, 3e-6)
        with pytest.raises(UsageError, match="followed by its backward pass"):
            torch.autograd.backward(found.sum())


def test_what_stages_cannot_do_is_refused_and_says_why() -> None:
    model: Any = small_model("opt")
    ids = torch.arange(TOKENS)[None]
    with cleave.emulated(1, seed=1) as fleet:
        with pytest.raises(UsageError, match="method is 'magic'"):
            cleave.offload(model, fleet, method="magic")
        cleave.offload(model, fleet, method="stages")
        with pytest.raises(UsageError, match="offloaded already"):
            cleave.offload(model, fleet, method="stages")
        with pytest.raises(UsageError, match="output_hidden_states"):
            model(input_ids=ids, output_hidden_states=True)
        with pytest.raises(UsageError, match="inputs_embeds"):
            model(inputs_embeds=torch.zeros(1, TOKENS, 32))


def test_no_device_is_planned_for_a_loss_that_the_caller_computes() -> None:
    plan = staged_forward._plan_layers(*large_head())
    assert plan.slices == ()
