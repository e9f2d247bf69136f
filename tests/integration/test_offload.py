"""`cleave.offload` against plain PyTorch: same outputs, same gradients, odd operands included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import cleave
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.planner.tiles.planner import TilePlanner


@pytest.fixture(scope="module")
def planner() -> TilePlanner:
    """One for all fleets of three: they are planned for alike."""
    return TilePlanner()


@pytest.fixture(params=[True, False], ids=["whole-tiles", "block-by-block"])
def fleet(request: pytest.FixtureRequest, planner: TilePlanner) -> Iterator[Fleet]:
    with cleave.emulated(3, whole_tiles=request.param) as fleet:
        fleet.planner = planner
        yield fleet


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    model: nn.Module, fleet: Fleet, loss: Callable[[nn.Module], Tensor], tolerance: float = 1e-5
) -> None:
    plain_loss, plain = loss(model), gradients(model, loss)
    cleave.offload(model, fleet)
    ours_loss, ours = loss(model), gradients(model, loss)
    cleave.restore(model)
    torch.testing.assert_close(ours_loss, plain_loss, rtol=tolerance, atol=tolerance)
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance, msg=name)


# Most have 7 rows: shapes that are alike are planned once.
OPERANDS: dict[str, Callable[[], Tensor]] = {
    "two-dimensional": lambda: torch.randn(7, 24),
    "three-dimensional": lambda: torch.randn(1, 7, 24),
    "one-dimensional": lambda: torch.randn(24),
    "one row": lambda: torch.randn(1, 24),
    "prime sizes": lambda: torch.randn(31, 24),
    "transposed": lambda: torch.randn(24, 7).T,
    "transposed in three dimensions": lambda: torch.randn(7, 24, 1).transpose(1, 2),
    "strided": lambda: torch.randn(14, 48)[::2, ::2],
    "expanded": lambda: torch.randn(1, 24).expand(7, 24),
    "empty batch": lambda: torch.randn(0, 24),
    "offset": lambda: torch.randn(9, 30)[2:, 3:27],
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("bias", [True, False])
def test_odd_operands_give_the_plain_result(fleet: Fleet, operand: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 11, bias=bias)
    values = OPERANDS[operand]().requires_grad_()
    expected = layer(values)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    input_grad, weight_grad = values.grad, layer.weight.grad
    values.grad = None
    layer.zero_grad()

    cleave.offload(layer, fleet)
    actual = layer(values)
    (actual * weights).sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(values.grad, input_grad)
    torch.testing.assert_close(layer.weight.grad, weight_grad)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 17), (13, 1)])
def test_sizes_of_one(fleet: Fleet, inputs: int, outputs: int) -> None:
    model = nn.Sequential(nn.Linear(inputs, outputs))
    values = torch.randn(3, inputs)
    assert_same_gradients(model, fleet, lambda m: m(values).square().sum())


def test_an_expanded_gradient_is_taken(fleet: Fleet) -> None:
    model = nn.Sequential(nn.Linear(24, 11))
    values = torch.randn(7, 24)
    assert_same_gradients(model, fleet, lambda m: m(values).sum())  # its gradient has stride 0


def test_weights_changed_between_steps_are_sent_anew(fleet: Fleet) -> None:
    layer = nn.Linear(24, 11, bias=False)
    values = torch.randn(7, 24)
    cleave.offload(layer, fleet)
    layer(values)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(values), values @ layer.weight.T)
    layer.weight.data += 1  # autograd does not see this one
    torch.testing.assert_close(layer(values), values @ layer.weight.T)


def test_activation_checkpointing_gives_the_same_gradients(fleet: Fleet) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    values = torch.randn(6, 16)

    def loss(m: nn.Module) -> Tensor:
        x = values
        for part in m.children():
            x = checkpoint(part, x, use_reentrant=False)
        return x.square().sum()

    assert_same_gradients(model, fleet, loss)


def test_no_grad_and_inference_mode(fleet: Fleet) -> None:
    layer = nn.Linear(24, 11)
    values = torch.randn(7, 24)
    expected = layer(values).detach()
    cleave.offload(layer, fleet)
    with torch.no_grad():
        torch.testing.assert_close(layer(values), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(values).clone(), expected)


def test_a_graph_may_be_used_twice(fleet: Fleet) -> None:
    layer = nn.Linear(24, 11)
    cleave.offload(layer, fleet)
    values = torch.randn(7, 24, requires_grad=True)
    loss = layer(values).square().sum()
    (first,) = torch.autograd.grad(loss, values, retain_graph=True)
    (second,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(first, second)


def test_what_a_layer_returns_may_be_changed_in_place(fleet: Fleet) -> None:
    layer, values = nn.Linear(24, 11), torch.randn(1, 7, 24)
    expected = layer(values).mul_(2).detach()
    cleave.offload(layer, fleet)
    found = layer(values).mul_(2)
    torch.testing.assert_close(found, expected)
    found.sum().backward()


def test_restore_gives_back_the_plain_model(fleet: Fleet) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    parameters, layer = list(model.parameters()), model[0]
    cleave.offload(model, fleet)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model[0] is layer
    assert isinstance(layer, nn.Linear)
    cleave.restore(model)
    assert type(layer) is nn.Linear
    assert cleave.restore(model) is model  # twice does no harm
    copy.deepcopy(model)


def test_what_cannot_be_offloaded_is_said(fleet: Fleet) -> None:
    with pytest.raises(UsageError, match=r"no nn\.Linear"):
        cleave.offload(nn.ReLU(), fleet)
    model = nn.Sequential(nn.Linear(4, 4))
    cleave.offload(model, fleet)
    with pytest.raises(UsageError, match="already offloaded"):
        cleave.offload(model, fleet)
    with pytest.raises(UsageError, match="float64"):
        cleave.offload(nn.Linear(3, 3).double(), fleet)
    with pytest.raises(UsageError, match="meta"):
        cleave.offload(nn.Linear(3, 3, device="meta"), fleet)


def gpt2() -> nn.Module:
    """A model of `Conv1D` layers."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


@pytest.mark.parametrize("fleet", [True], indirect=True)
def test_the_trainer_of_transformers_works_unchanged(fleet: Fleet, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(12)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def losses(model: nn.Module) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = losses(gpt2())
    model = gpt2()
    cleave.offload(model, fleet)
    assert losses(model) == pytest.approx(plain, rel=1e-4)
