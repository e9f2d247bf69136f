"""What people do to a model between passes, and whether an offloaded one then does as a plain one.

Each change is done to a plain model and to the same model on a fleet. After each, both do a forward
and a backward pass: the loss, which parameters have a gradient, and every gradient must agree.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

import cleave
from cleave.fleet.fleet import Fleet
from tests.graphs.models import ADAPTED, TOKENS, small_model

MOST_CHANGES: Final = 8
_MOST_OFF: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the norm of all gradients
_LAYERS: Final = 2


@dataclass
class Subject:
    """One of the models, with all that a training loop has beside it.

    Attributes:
        model: the model, as the user calls it.
        autocast: whether passes go under autocast in bf16.
    """

    model: Any
    autocast: bool = False
    handles: list[Any] = field(default_factory=list)

    @property
    def inner(self) -> Any:
        """Return the causal language model within a wrapper of peft."""
        adapted = hasattr(self.model, "get_base_model")
        return self.model.get_base_model() if adapted else self.model

    def layer(self, number: int) -> Any:
        """Return a layer, by any number."""
        return self.inner.model.layers[number % _LAYERS]

    def parameter(self, number: int) -> nn.Parameter:
        """Return a parameter of a layer, by any number."""
        those = list(self.layer(number).parameters())
        found: nn.Parameter = those[number % len(those)]
        return found

    def adapters(self) -> list[Any]:
        """Return the modules that have adapters."""
        from peft.tuners.lora import LoraLayer

        return [m for m in self.model.modules() if isinstance(m, LoraLayer)]


Change = Callable[[Subject, int], None]


def freeze(subject: Subject, number: int) -> None:
    subject.layer(number).requires_grad_(requires_grad=False)


def unfreeze(subject: Subject, number: int) -> None:
    """Let a layer be trained; with adapters these alone."""
    if adapters := subject.adapters():
        active = set(adapters[0].active_adapters)
        for name, parameter in subject.layer(number).named_parameters():
            if any(f".{one}." in name for one in active):
                parameter.requires_grad_()
    else:
        subject.layer(number).requires_grad_()


def freeze_attention(subject: Subject, number: int) -> None:
    subject.layer(number).self_attn.requires_grad_(requires_grad=False)


@torch.no_grad()
def change_in_place(subject: Subject, number: int) -> None:
    subject.parameter(number).mul_(1.1)


def change_data_in_place(subject: Subject, number: int) -> None:
    """Change a parameter as autograd does not notice."""
    subject.parameter(number).data.mul_(0.9)


def change_through_numpy(subject: Subject, number: int) -> None:
    parameter = subject.parameter(number).detach()
    if parameter.dtype is torch.float32:
        parameter.numpy()[...] *= 1.05


def replace_data(subject: Subject, number: int) -> None:
    parameter = subject.parameter(number)
    parameter.data = parameter.data * 0.95


def replace_parameter(subject: Subject, number: int) -> None:
    norm = subject.layer(number).input_layernorm
    before = norm.weight
    norm.weight = nn.Parameter(before.detach() * 1.2, requires_grad=before.requires_grad)


def load_state(subject: Subject, number: int) -> None:
    state = {name: tensor * 1.02 for name, tensor in subject.model.state_dict().items()}
    subject.model.load_state_dict(state, assign=bool(number % 2))


def tie_layers(subject: Subject, number: int) -> None:
    first, second = subject.layer(0).post_attention_layernorm, subject.layer(1)
    second.post_attention_layernorm.weight = first.weight


def disable_adapters(subject: Subject, number: int) -> None:
    for module in subject.adapters():
        module.enable_adapters(enabled=False)


def enable_adapters(subject: Subject, number: int) -> None:
    for module in subject.adapters():
        module.enable_adapters(enabled=True)


def switch_adapters(subject: Subject, number: int) -> None:
    if subject.adapters():
        subject.model.set_adapter(("default", "other")[number % 2])


def scale_adapters(subject: Subject, number: int) -> None:
    for module in subject.adapters():
        module.scaling = dict.fromkeys(module.scaling, (1.0, 2.0)[number % 2])


def merge_adapters(subject: Subject, number: int) -> None:
    for module in subject.adapters():
        if not module.merged:
            module.merge()


def unmerge_adapters(subject: Subject, number: int) -> None:
    for module in subject.adapters():
        if module.merged:
            module.unmerge()


def toggle_autocast(subject: Subject, number: int) -> None:
    subject.autocast = not subject.autocast


def train(subject: Subject, number: int) -> None:
    subject.model.train()


def evaluate(subject: Subject, number: int) -> None:
    subject.model.eval()


def to_bf16(subject: Subject, number: int) -> None:
    subject.model.to(torch.bfloat16)


def to_fp32(subject: Subject, number: int) -> None:
    subject.model.to(torch.float32)


def accumulate(subject: Subject, number: int) -> None:
    """Change nothing: the next pass adds to the gradients."""


def zero_grad(subject: Subject, number: int) -> None:
    subject.model.zero_grad(set_to_none=bool(number % 2))


@torch.no_grad()
def step(subject: Subject, number: int) -> None:
    for parameter in subject.model.parameters():
        if parameter.grad is not None:
            parameter -= 0.05 * parameter.grad
    zero_grad(subject, 1)


@torch.no_grad()
def look(subject: Subject, number: int) -> None:
    """Do a pass that needs no gradients, as a reference pass or an evaluation."""
    ids = _batch(number)
    subject.model(input_ids=ids, labels=ids, use_cache=False)


def copy_and_spoil(subject: Subject, number: int) -> None:
    """Copy the model, use the copy and spoil it: nothing of that reaches the model."""
    other = copy.deepcopy(subject.model)
    ids = _batch(number)
    other(input_ids=ids, labels=ids, use_cache=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()


def other_activation(subject: Subject, number: int) -> None:
    subject.layer(number).mlp.act_fn = (nn.GELU(), nn.SiLU())[number // 2 % 2]


def wrap_module(subject: Subject, number: int) -> None:
    """Let a module within a layer compute something else, and again what it did."""
    norm = subject.layer(number).input_layernorm
    if "forward" in vars(norm):
        del vars(norm)["forward"]
    else:
        plainly = norm.forward
        norm.forward = lambda x: plainly(x) * 0.5


def hook_module(subject: Subject, number: int) -> None:
    """Let a hook change what a module within a layer returns, or remove those that do."""
    if subject.handles:
        while subject.handles:
            subject.handles.pop().remove()
    else:
        module = subject.layer(number).mlp
        subject.handles.append(module.register_forward_hook(lambda *given: given[2] * 0.5))


CHANGES: Final[Sequence[Change]] = (
    freeze, unfreeze, freeze_attention, change_in_place, change_data_in_place,
    change_through_numpy, replace_data, replace_parameter, load_state, tie_layers,
    disable_adapters, enable_adapters, switch_adapters, scale_adapters, merge_adapters,
    unmerge_adapters, toggle_autocast, train, evaluate, to_bf16, to_fp32, accumulate, zero_grad,
    step, look, copy_and_spoil, other_activation, wrap_module, hook_module,
)  # fmt: skip

Sequence_ = Sequence[tuple[Change, int]]


def drawn(seed: int) -> tuple[bool, list[tuple[Change, int]]]:
    """Return whether the model has adapters, and the changes to it, by chance."""
    chance = random.Random(seed)
    count = chance.randint(1, MOST_CHANGES)
    return chance.random() < 0.5, [
        (chance.choice(CHANGES), chance.randrange(16)) for _ in range(count)
    ]


def made(*, adapted: bool) -> Subject:
    """Return a model."""
    model: Any = small_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if not adapted:
        return Subject(model)
    import peft

    how = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ADAPTED), init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(model, how)
    wrapped.add_adapter("other", how)
    return Subject(wrapped)


@contextmanager
def on_fleet(subject: Subject, fleet: Fleet, method: str) -> Iterator[Subject]:
    """Offload a model for a while."""
    with cleave.offloaded(subject.model, fleet, method=method, audit=0.2):
        yield subject


def check(changes: Sequence[tuple[Change, int]], plain: Subject, offloaded: Subject) -> None:
    """Do changes to both models, with a pass after each, and compare.

    Raises:
        AssertionError: when they differ.
    """
    done = ["as made"]
    _compare(plain, offloaded, done)
    for change, number in changes:
        done.append(f"{change.__name__}({number})")
        for subject in (plain, offloaded):
            with _autocast(subject):
                change(subject, number)
        _compare(plain, offloaded, done)


def _compare(plain: Subject, offloaded: Subject, done: Sequence[str]) -> None:
    losses = [_pass(subject, len(done)) for subject in (plain, offloaded)]
    narrow = plain.autocast or any(p.dtype is torch.bfloat16 for p in plain.model.parameters())
    most = _MOST_OFF[torch.bfloat16 if narrow else torch.float32]
    said = f"after {', '.join(done)}"
    assert abs(losses[0] - losses[1]) <= 0.1 * most * abs(losses[0]), f"losses {losses} {said}"
    both = list(zip(plain.model.named_parameters(), offloaded.model.parameters(), strict=True))
    scale = sum(float(p.grad.float().norm()) ** 2 for (_, p), _ in both if p.grad is not None)
    for (name, mine), other in both:
        assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient or not {said}"
        assert mine.requires_grad == other.requires_grad
        if mine.grad is not None and other.grad is not None:
            off = float((mine.grad.float() - other.grad.float()).norm())
            near = max(float(mine.grad.float().norm()), 0.01 * scale**0.5)
            assert off <= most * near, f"the gradient of {name} is {off / near:.1e} off {said}"
            other.grad = mine.grad.clone()  # later changes begin alike


def _pass(subject: Subject, number: int) -> float:
    ids = _batch(number)
    mask = torch.ones_like(ids)
    if number % 3 == 2:
        mask[1, TOKENS // 2 :] = 0
    with _autocast(subject):
        loss: Tensor = subject.model(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100),
            use_cache=False,
        ).loss  # fmt: skip
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return float(loss.detach())


def _batch(number: int) -> Tensor:
    chance = torch.Generator().manual_seed(number)
    return torch.randint(3, 96, (3, TOKENS), generator=chance)


def _autocast(subject: Subject) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if subject.autocast else nullcontext()
