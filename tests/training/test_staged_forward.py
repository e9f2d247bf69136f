"""A model offloaded by stages trains in a loop of one's own as it does alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

import cleave
from cleave.errors import UsageError
from cleave.training.stages import staged_forward
from emulator.virtual import VirtualRuntime
from tests.emulator.fleets import virtual
from tests.examples import thorough
from tests.graphs.models import TOKENS, plain_gradients, small_model, trained, with_lora
from tests.planner.test_stage_search import large_head
from tests.training.runs import nightly
from tests.training.test_staged import assert_close, batches

pytestmark = pytest.mark.slow


def test_a_loop_of_ones_own_has_the_losses_of_plain_pytorch() -> None:
    model = small_model("llama")
    plain = copy.deepcopy(model)
    with cleave.emulated(3, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages", audit=1.0)
        found = trained(model, lambda ids: plain_gradients(model, ids), batches(4), clip=1.0)
        assert fleet.counters().uplink_bytes > 0
        cleave.restore(model)
        assert type(model) is type(plain)
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(4), clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4)


def test_what_needs_no_gradient_frees_what_was_kept() -> None:
    model, plain, ids = twice(small_model("opt"))
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        with torch.no_grad():
            found: Tensor = model(ids).logits
            torch.testing.assert_close(found, plain(ids).logits, rtol=1e-5, atol=1e-6)
        found = model(ids).logits  # its backward pass never comes
        loss = model(input_ids=ids, labels=ids).loss
        torch.autograd.backward(loss)
        plain(input_ids=ids, labels=ids).loss.backward()
        assert_close(model, plain, 3e-6)
        with pytest.raises(UsageError, match="backward pass right after its forward pass"):
            torch.autograd.backward(found.sum())


def test_what_stages_cannot_do_is_refused_and_says_why() -> None:
    model: Any = small_model("opt")
    ids = torch.arange(TOKENS)[None]
    with cleave.emulated(1, seed=1) as fleet:
        with pytest.raises(
            UsageError, match="is on meta, but stages need the model in host memory"
        ):
            cleave.offload(small_model("opt").to("meta"), fleet, method="stages")
        tiled = small_model("opt")
        cleave.offload(tiled, fleet)
        with pytest.raises(UsageError, match="already offloaded"):
            cleave.offload(tiled, fleet, method="stages")
        dropping: Any = small_model("gpt2", attn_pdrop=0.1)
        with (
            cleave.offloaded(dropping, fleet, method="stages"),
            pytest.raises(UsageError, match="GPT2LMHeadModel cannot be trained by stages: its att"),
        ):
            dropping(input_ids=ids)
        with pytest.raises(UsageError, match="transformers causal language model, not a Linear"):
            cleave.offload(torch.nn.Linear(2, 2), fleet, method="stages")
        with pytest.raises(UsageError, match="method is 'magic'"):
            cleave.offload(model, fleet, method="magic")
        cleave.offload(model, fleet, method="stages")
        with pytest.raises(UsageError, match="already offloaded"):
            cleave.offload(model, fleet, method="stages")
        with pytest.raises(UsageError, match="output_hidden_states"):
            model(input_ids=ids, output_hidden_states=True)
        with pytest.raises(UsageError, match="inputs_embeds"):
            model(inputs_embeds=torch.zeros(1, TOKENS, 32))


def losing(fleet: cleave.Fleet) -> VirtualRuntime:
    """Take all of a fleet's devices away."""
    runtime = virtual(fleet)
    for device in list(runtime.devices):
        runtime.lose(device)
    return runtime


def lose_after(fleet: cleave.Fleet, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all devices away whenever a method of the runtime has been called."""
    called = getattr(fleet.runtime, method)

    def lost(*given: Any) -> None:
        called(*given)
        losing(fleet)

    monkeypatch.setattr(fleet.runtime, method, lost)


def gradients(model: Any, ids: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    torch.autograd.backward(loss)
    return loss.detach()


def twice(model: Any) -> tuple[Any, Any, Tensor]:
    """Return a model, a copy, and a batch."""
    return model, copy.deepcopy(model), batches(1)[0]


def assert_same_pass(model: Any, plain: Any, ids: Tensor) -> None:
    expected = gradients(plain, ids)
    torch.testing.assert_close(gradients(model, ids), expected, rtol=1e-6, atol=0)
    assert_close(model, plain, 3e-6)


@pytest.mark.parametrize(
    "when", [nightly("before"), nightly("in the forward pass"), "in the backward pass"]
)
def test_without_devices_a_loop_goes_on_here_if_that_is_wanted(
    when: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, ids = twice(with_lora(small_model("llama")))
    expected = gradients(plain, ids)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages", fallback="local", fallback_after_s=0.0)
        gradients(model, ids)
        assert notes == []
        if when == "before":
            losing(fleet)
        else:
            lose_after(
                fleet, "begin_step" if when == "in the forward pass" else "give", monkeypatch
            )
        for _ in range(2):
            torch.testing.assert_close(gradients(model, ids), expected, rtol=1e-6, atol=0)
            assert_close(model, plain, 3e-6)
        monkeypatch.undo()
        assert [line.endswith("running layers locally until devices join") for line in notes] == [
            True
        ]
        sent = fleet.counters().downlink_bytes
        runtime = losing(fleet)
        for profile in runtime.profiles:
            runtime.join(profile)
        fleet.wait_for(2)
        gradients(model, ids)
        assert_close(model, plain, 3e-6)
        assert fleet.counters().downlink_bytes > sent
    assert notes[-1:] == ["devices have joined; their layers run on the fleet again"]


def test_without_devices_a_loop_that_is_to_wait_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small_model("opt")
    (ids,) = batches(1)
    with cleave.emulated(1, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        lose_after(fleet, "begin_step", monkeypatch)
        with pytest.raises(cleave.FleetError):
            gradients(model, ids)


@pytest.mark.nightly  # the next test has positions, too
@pytest.mark.parametrize(("family", "cached"), [("llama", False), ("llama", True), ("opt", False)])
def test_positions_mean_what_they_mean_to_the_model(family: str, cached: bool) -> None:
    """A Llama tells documents apart by them, unless it keeps keys; an OPT embeds them, no more."""
    model: Any = small_model(family)
    plain: Any = copy.deepcopy(model)
    (ids,) = batches(1)
    plainly = torch.arange(ids.shape[1]).expand(ids.shape)
    packed = torch.cat([plainly[:, :5], plainly[:, :-5]], dim=1)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        for positions in (plainly, packed, packed[:1]):
            losses = []
            for one in (model, plain):
                one.zero_grad()
                given = {"input_ids": ids, "position_ids": positions, "use_cache": cached}
                losses.append(one(**given, labels=ids).loss)
                losses[-1].backward()
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
            assert_close(model, plain, 3e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_positions_is_as_in_the_model(side: str) -> None:
    """Also what is predicted where a token of padding stands, which sees nothing on the left."""
    model, plain, ids = twice(small_model("llama"))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :4] = mask[2, :1] = 0
    else:
        mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    restarted = counted.clone()
    restarted[:, 6:] -= 3
    restarted.clamp_(min=0)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        for masks, positions in (
            (mask, None), (mask, counted), (torch.ones_like(mask), restarted), (mask, restarted),
        ):  # fmt: skip
            found = []
            for one in (model, plain):
                one.zero_grad()
                given = {"attention_mask": masks, "position_ids": positions, "use_cache": False}
                out = one(input_ids=ids, labels=labels, **given)
                torch.autograd.backward(out.loss)
                found.append(out.logits.detach())
            torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)
            assert_close(model, plain, 3e-6)


@pytest.mark.nightly
def test_generation_is_as_in_the_model() -> None:
    """With two new tokens, sequences have two lengths, and so graphs of their own each."""
    model: Any = small_model("llama")
    new = 2 if thorough() else 1
    ids = batches(1)[0][:2, : TOKENS + 1 - new]
    ids[0, 0] = 0
    how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    expected = model.generate(ids, **how)
    with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        assert torch.equal(model.generate(ids, **how), expected)


def test_the_trainer_of_transformers_trains_by_stages(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row, "extra": 1} for row in torch.cat(batches(2))]
    losses = []
    for method in (None, "stages"):
        model: Any = small_model("llama")
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            gradient_checkpointing=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        if method is None:
            trainer.train()
        else:
            with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method=method):
                trainer.train()
                assert fleet.counters().uplink_bytes > 0
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_under_autocast_numbers_travel_in_bf16_and_fp16_is_refused() -> None:
    model, plain, ids = twice(small_model("llama"))
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages")
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = gradients(model, ids), gradients(plain, ids)
        assert found.item() == pytest.approx(expected.item(), rel=1e-2)
        assert_close(model, plain, 3e-2)
        with (
            torch.autocast("cpu", torch.float16),
            pytest.raises(UsageError, match="stages support only bfloat16 and float32"),
        ):
            model(input_ids=ids)


def test_a_pass_without_gradients_leaves_the_fleet_to_others() -> None:
    teacher: Any = small_model("opt")
    model, plain, ids = twice(small_model("llama"))
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(teacher, fleet, method="stages")
        cleave.offload(model, fleet, method="stages")
        with torch.no_grad():
            teacher(input_ids=ids)
        gradients(model, ids)
        gradients(plain, ids)
        assert_close(model, plain, 3e-6)
        teacher(input_ids=ids)  # its backward pass never comes
        with pytest.raises(
            UsageError, match=r"run its backward pass first, or call cleave\.restore"
        ):
            gradients(model, ids)
        cleave.restore(teacher)
        gradients(model, ids)


def test_a_pass_has_one_backward_pass_with_the_same_weights() -> None:
    model: Any = small_model("opt")
    (ids,) = batches(1)
    with cleave.emulated(1, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        with pytest.raises(UsageError, match="allows only one backward pass per forward pass"):
            loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        model.model.decoder.layers[1].fc1.weight.data.mul_(1.5)
        with pytest.raises(UsageError, match="changed between a forward pass and its backward"):
            loss.backward()


def test_a_fleet_without_devices_is_waited_for_once() -> None:
    model: Any = small_model("opt")
    (ids,) = batches(1)
    with cleave.emulated(1, seed=1) as fleet:
        runtime = losing(fleet)
        runtime.lose(1, in_s=1e6)  # something that is still to happen
        with cleave.offloaded(
            model, fleet, method="stages", fallback="local", fallback_after_s=2.0
        ):
            began_s = runtime.now()
            for _ in range(4):
                gradients(model, ids)
            assert 2.0 <= runtime.now() - began_s < 6.0


def test_no_device_is_planned_for_a_loss_that_the_caller_computes() -> None:
    plan = staged_forward._plan_layers(*large_head())
    assert plan.slices == ()


def test_wrappers_of_forward_stay_around_the_passes() -> None:
    """As accelerate makes them: before, autocast was lost from the second step on."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer's, which is the process's
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    (ids,) = batches(1)
    losses = []
    for offloaded in (False, True):
        model: Any = small_model("llama")
        with cleave.emulated(2, seed=1) as fleet:
            if offloaded:
                cleave.offload(model, fleet, method="stages")
            prepared: Any = accelerator.prepare(model)
            losses.append([float(gradients(prepared, ids)) for _ in range(3)])
            assert not offloaded or fleet.counters().uplink_bytes > 0
            cleave.restore(model)
        assert float(gradients(prepared, ids)) == pytest.approx(losses[-1][0], rel=1e-2)
    assert losses[0][0] != pytest.approx(float(gradients(small_model("llama"), ids)), rel=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    with cleave.emulated(1) as fleet, pytest.raises(UsageError, match="before preparing it"):
        cleave.offload(prepared, fleet, method="stages")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_copies_and_pickles_are_plain_models(tmp_path: Path) -> None:
    model: Any = small_model("opt")
    (ids,) = batches(1)
    kind = type(model)
    with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        expected = gradients(model, ids)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        sent = fleet.counters().downlink_bytes
        for other in (copy.deepcopy(model), loaded, averaged.module):
            assert type(other) is kind
            torch.testing.assert_close(gradients(other, ids), expected, rtol=1e-6, atol=0)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
        assert fleet.counters().downlink_bytes == sent
        torch.testing.assert_close(gradients(model, ids), expected, rtol=1e-6, atol=0)
        assert model.save_pretrained(tmp_path / "saved") is None
        assert type(model).from_pretrained(tmp_path / "saved").config.architectures == [
            kind.__name__
        ]


class Scales(torch.nn.Module):
    """Has arrays without dimensions, as Apertus does."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.trained = torch.nn.Parameter(torch.tensor(0.7))
        self.register_buffer("frozen", torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x) * self.trained * self.frozen
        return found


def with_scales() -> Any:
    model: Any = small_model("llama")
    for layer in model.model.layers:
        layer.mlp = Scales(layer.mlp)
    return model


def with_shared_parameters() -> Any:
    model: Any = small_model("llama")
    first, second = model.model.layers
    second.mlp = first.mlp
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    return model


def with_clamping() -> Any:
    """As OLMo's clip_qkv does in place: what was kept for the backward pass was clamped, too."""
    import transformers

    torch.manual_seed(1)
    config = transformers.OlmoConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, clip_qkv=0.05,
    )  # fmt: skip
    return transformers.OlmoForCausalLM(config).train()


def with_positions_that_depend_on_the_length() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return small_model("llama", rope_parameters=rope, max_position_embeddings=8)


@pytest.mark.parametrize(
    "make",
    [
        nightly(with_scales),
        with_shared_parameters,
        nightly(with_clamping),
        nightly(with_positions_that_depend_on_the_length),
    ],
)
def test_odd_models_have_the_gradients_of_plain_pytorch(make: Callable[[], Any]) -> None:
    model, plain, ids = twice(make())
    with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        for _ in range(2):
            assert_same_pass(model, plain, ids)


def with_disabled_adapters(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(enabled=False)


def with_an_unused_parameter(model: Any) -> None:
    model.model.layers[0].mlp.unused = torch.nn.Parameter(torch.ones(4, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("change", [with_disabled_adapters, with_an_unused_parameter])
@pytest.mark.parametrize("here", [False, True])
def test_a_parameter_that_the_loss_does_not_depend_on_gets_no_gradient(
    change: Callable[[Any], None],
    here: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient of zeros is another thing: AdamW would apply weight decay and momentum."""
    model: Any = small_model("llama")
    with_lora(model)
    model.lm_head.weight.requires_grad_()  # the loss always depends on it
    change(model)
    plain = copy.deepcopy(model)
    (ids,) = batches(1)
    gradients(plain, ids)
    with cleave.emulated(2, seed=1) as fleet:
        cleave.offload(model, fleet, method="stages", fallback="local", fallback_after_s=0.0)
        if here:
            lose_after(fleet, "give", monkeypatch)
        gradients(model, ids)
    assert_close(model, plain, 3e-6)


def with_own_attention(model: Any) -> None:
    from transformers import AttentionInterface

    def halved(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, **how: Any) -> Any:
        each = q.shape[1] // k.shape[1]
        made = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), is_causal=True
        )
        return made.transpose(1, 2).contiguous() * 0.5, None

    AttentionInterface.register("halved", halved)
    model.set_attn_implementation("halved")


def with_a_trained_tensor_of_its_own(model: Any) -> None:
    factor = torch.ones(32, requires_grad=True)
    mlp = model.model.layers[0].mlp
    plainly = mlp.forward
    for layer in model.model.layers:
        layer.mlp.forward = lambda x: plainly(x) * factor


def with_trained_positions(model: Any) -> None:
    rotary = model.model.rotary_emb
    plainly = rotary.forward
    rotary.trained = torch.nn.Parameter(torch.ones(1))
    rotary.forward = lambda *given, **how: tuple(x * rotary.trained for x in plainly(*given, **how))


def with_hooked_layers(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *given: None)


def with_an_auxiliary_loss(model: Any) -> None:
    model.config.output_router_logits = True


def with_outputs(model: Any) -> None:
    model.config.output_hidden_states = True


def with_a_layer_left_out(model: Any) -> None:
    model.model.decoder.layerdrop = 1.0  # every layer is left out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_own_attention, r"its attention \(halved\) is not supported in graphs"),
        nightly(
            with_a_trained_tensor_of_its_own, "a trained tensor that is not one of its parameters"
        ),
        (with_trained_positions, r"its layers get position_embeddings\.0"),
        (with_hooked_layers, "its layer LlamaDecoderLayer has hooks"),
        (with_an_auxiliary_loss, r"auxiliary loss of its experts \(config.output_router_logits\)"),
        (with_outputs, "was called with config.output_hidden_states"),
        (with_a_layer_left_out, "did not call all of its layers"),
    ],
)
def test_a_change_that_stages_cannot_follow_is_refused_in_the_next_pass(
    change: Callable[[Any], None], reason: str
) -> None:
    model: Any = small_model("opt" if change is with_a_layer_left_out else "llama")
    (ids,) = batches(1)
    with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        gradients(model, ids)
        change(model)
        with pytest.raises(UsageError, match=reason):
            gradients(model, ids)


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
         r"it is called with an alibi tensor of shape \(8, 1, 12\), whose first dimension is not"),
        ("Mixtral", {"num_local_experts": 4}, r"it has experts \(MixtralExperts\), and tokens"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
         r"its attention takes sinks \(s_aux\)"),
        nightly("Mamba", {"state_size": 8}, "its computation depends on the size of the batch"),
    ],
)  # fmt: skip
def test_models_that_cannot_become_graphs_are_refused_in_words_of_ours(
    family: str, changed: dict[str, Any], reason: str
) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changed})
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).train()
    (ids,) = batches(1)
    with cleave.emulated(2, seed=1) as fleet, cleave.offloaded(model, fleet, method="stages"):
        with pytest.raises(UsageError, match=reason) as refused:
            gradients(model, ids)
        assert "Error" not in str(refused.value)
