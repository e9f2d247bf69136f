"""The comparison's own parts: settings, rows and their file, faults, memory, stages of a model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from benchmarks.delayed_link import Delay
from benchmarks.side_by_side.contenders.hivemind import loss_file, mean_losses
from benchmarks.side_by_side.faults import AFTER_STEP, STOPPED_S, Disturber
from benchmarks.side_by_side.measure import CONTENDERS
from benchmarks.side_by_side.memory import peak_bytes
from benchmarks.side_by_side.method import VARIANTS, Method, Way
from benchmarks.side_by_side.order import default_order
from benchmarks.side_by_side.processes import Processes
from benchmarks.side_by_side.results import Results, measured_commit, measured_with, saved
from benchmarks.side_by_side.row import Ending, Row, from_json, to_json
from benchmarks.side_by_side.run import LONG_FIRST_S, LONG_STEP_S, Run
from benchmarks.side_by_side.setting import Fault, Link, Setting, usual_seq
from benchmarks.side_by_side.tables import agrees, difference, reference_of, saving
from benchmarks.side_by_side.workers.parts import StageModule, in_line, in_v

SETTING = Setting("opt-125m", 1024, 256, Link(100, 20))
METHODS = [
    Method(way, dtype, variant)
    for way in Way
    for dtype in ("fp32", "bf16")
    for variant in ("", *VARIANTS[way])
]


def row(name: str, seconds: float = 1.0, **more: object) -> Row:
    """Return a row of one method in `SETTING`."""
    made = Row(Method.of(name), SETTING, seconds=[seconds, seconds], losses=[4.0, 3.0, 2.0])
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_newer_row_is_kept_and_found_by_its_commit(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.json")
    for name, seconds, commit in (
        ("ddp:fp32", 1.0, "one"),
        ("plain:fp32", 1.0, "one"),
        ("ddp:fp32", 2.0, "two"),
        ("ddp:bf16", 1.0, "two-with-changes"),
    ):
        results.add(row(name, seconds, commit=commit))
    again = Results(tmp_path / "rows.json")
    assert again.rows == results.rows
    assert [kept.method.name for kept in again.rows] == ["plain:fp32", "ddp:fp32", "ddp:bf16"]
    key = row("ddp:fp32").key
    assert again.find(key, "one") is None
    assert again.find(key, "two") == again.find(key, None) == again.rows[1]
    # A row with changes that no commit has is measured again.
    changed = row("ddp:bf16").key
    assert again.find(changed, "two-with-changes") is again.find(changed, None) is None


@pytest.mark.parametrize("text", ["ddq:fp32", "ddp:fp8", "ddp:fp32:off", "ddp:fp32:halved:more"])
def test_what_is_no_method_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Method.of(text)
    with pytest.raises(ValueError, match="100/0"):
        Link.of("100/0")
    with pytest.raises(ValueError, match="cannot be split 4 ways"):
        Setting("opt-tiny", 300, 100, Link(100, 20))


@given(st.integers(1, 1 << 16), st.integers(1, 64))
def test_a_usual_sequence_leaves_one_to_each_device(tokens: int, devices: int) -> None:
    assert 1 <= usual_seq(tokens, devices) <= max(1, tokens // devices)


def test_the_report_has_each_row_once_and_decides_first() -> None:
    keys = default_order()
    assert len(keys) == len(set(keys))
    first = keys[:5]
    assert {key.method.way for key in first} == {Way.PLAIN, Way.STAGES, Way.DDP, Way.HIVEMIND}
    assert {key.setting.tokens for key in first} == {8192}
    # Everything that is compared with plain PyTorch has it beside it.
    works = {(k.setting.model, k.setting.tokens, k.setting.rank) for k in keys}
    alone = [key for key in keys if key.method == Method(Way.PLAIN, "fp32")]
    assert works == {(k.setting.model, k.setting.tokens, k.setting.rank) for k in alone}


def test_what_changed_in_cleave_leaves_rows_of_others_valid(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    for name in ("benchmarks/side_by_side/run.py", "cleave/plan.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("")
        git("add", ".")
        git("commit", "-m", name)
    others = measured_with(Way.DDP)
    assert measured_commit(tmp_path) != measured_commit(tmp_path, others)
    before = measured_commit(tmp_path, others)
    (tmp_path / "cleave/plan.py").write_text("changed")
    assert not saved(measured_commit(tmp_path))
    git("commit", "-a", "-m", "changed")
    assert measured_commit(tmp_path, others) == before


def test_every_way_has_a_contender_whose_files_are_there() -> None:
    assert set(CONTENDERS) == set(Way)
    root = Path(__file__).parents[2]
    for way in Way:
        assert all((root / path).exists() for path in measured_with(way))


# --- rows and their file ---


@given(st.sampled_from(METHODS), st.sampled_from([*Fault]), st.sampled_from([*Ending]))
def test_a_row_is_the_same_after_json(method: Method, fault: Fault, ending: Ending) -> None:
    made = Row(method, replace(SETTING, fault=fault), seconds=[1.5], losses=[3.0, 2.0])
    made.ending, made.down_bytes, made.reason = ending, [1.0, 2.0], "a reason"
    assert from_json(to_json(made)) == made


@pytest.mark.parametrize(
    ("name", "first_s", "counted"),
    [
        ("ddp:fp32", LONG_FIRST_S, [LONG_FIRST_S]),
        ("ddp:fp32", LONG_FIRST_S - 1, [5.0, 6.0]),
        ("stages:fp32", LONG_FIRST_S, [5.0, 6.0]),
        ("ddp:fp32", 5.0, [LONG_STEP_S]),
    ],
)
def test_steps_are_counted_as_long_as_another_says_more(
    name: str, first_s: float, counted: list[float], tmp_path: Path
) -> None:
    made = Row(Method.of(name), SETTING)
    processes = Processes(tmp_path, 0.0)
    run = Run(made.method, SETTING, "", 2, [], processes, tmp_path, made)
    told = [first_s, *(counted if counted[0] != first_s else [1.0, 1.0])]
    run.follow({"event": "step", "loss": 4.0, "wall_s": seconds} for seconds in told)
    assert run.done
    assert (made.first_s, made.seconds) == (first_s, counted)
    assert made.counts_first == (counted == [first_s])


def test_a_disturbed_step_does_not_count_for_the_step_time() -> None:
    made = row("ddp:fp32", seconds=1.0)
    made.seconds, made.fault_step = [2.0, 60.0, 2.5], 3
    assert made.step_s == 2.0


# --- comparing ---


def test_losses_are_compared_with_plain_fp32_of_the_same_work() -> None:
    plain = row("plain:fp32")
    slower = replace(row("plain:fp32"), setting=replace(SETTING, link=Link(50, 10)))
    other = replace(row("plain:fp32"), setting=replace(SETTING, tokens=2048))
    mine = row("ddp:fp32", losses=[4.0, 3.0, 2.0 * (1 + 1e-3)])
    assert reference_of(mine, [other, slower, mine]) is slower
    assert difference(mine, plain) == pytest.approx(1e-3)
    assert not agrees(mine, plain)
    assert agrees(replace(mine, method=Method.of("ddp:bf16")), plain)


def test_what_coding_saves_is_of_the_time_without() -> None:
    rows = [row("stages:fp32", 7.0), row("stages:fp32:off", 10.0, links_s=10.0)]
    found = saving(rows[0], rows)
    assert found is not None
    assert found.ratio == pytest.approx(0.7)
    assert found.limit == pytest.approx(0.73)
    assert saving(row("ddp:fp32"), rows) is None


# --- faults ---


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.NONE, []),
        (Fault.STOP, [(2.0, signal.SIGSTOP), (2.0 + STOPPED_S, signal.SIGCONT)]),
        (Fault.KILL, [(2.0, signal.SIGKILL)]),
    ],
)
def test_a_fault_comes_once_in_the_middle_of_a_step(
    fault: Fault, expected: list[tuple[float, signal.Signals]]
) -> None:
    now, sent = 0.0, list[tuple[float, signal.Signals]]()
    waiting = list[tuple[float, Callable[[], None]]]()
    disturber = Disturber(
        fault,
        lambda number: sent.append((now, number)),
        lambda seconds, act: waiting.append((now + seconds, act)),
    )
    due = [disturber.step_ended(step, 4.0) for step in range(1, AFTER_STEP + 3)]
    while waiting:
        now, act = waiting.pop(0)
        act()
    assert sent == expected
    assert sum(due) == (fault is not Fault.NONE)


def test_packets_come_late_and_in_their_order() -> None:
    came: list[bytes] = []
    delay = Delay(0.010, came.append)
    delay.take(b"one", 0.0)
    delay.take(b"two", 0.005)
    delay.deliver(0.009)
    assert came == []
    delay.deliver(0.011)
    assert came == [b"one"]
    assert delay.due_s == pytest.approx(0.015)
    delay.deliver(0.015)
    assert came == [b"one", b"two"]
    assert delay.due_s is None


# --- processes ---


def test_a_process_that_runs_has_memory_and_one_that_ended_has_none() -> None:
    mine = peak_bytes([os.getpid()])
    assert mine > 0
    # Other threads of this process may use more or less memory in the meantime.
    assert peak_bytes([os.getpid(), 2**22 + 1]) == pytest.approx(mine, rel=0.1)
    assert peak_bytes([2**22 + 1]) == 0


# --- stages of a pipeline ---


@given(st.integers(0, 100), st.floats(0, 30), st.integers(1, 16))
def test_stages_hold_each_layer_once_and_in_order(layers: int, head: float, ranks: int) -> None:
    for cuts in (in_line(layers, head, ranks), in_v(layers, head, ranks)):
        assert [layer for part in cuts for layer in part] == list(range(layers))
    assert len(in_line(layers, head, ranks)) == ranks
    assert len(in_v(layers, head, ranks)) == 2 * ranks


CONFIGS = {
    "opt": OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2, dropout=0.0,
        word_embed_proj_dim=16, vocab_size=64, max_position_embeddings=32,
    ),
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=32, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("in_turn", [in_line, in_v])
def test_stages_one_after_another_are_the_model(
    family: str, in_turn: Callable[[int, float, int], list[range]]
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    ids = torch.arange(24).reshape(2, 12)
    expected = model(input_ids=ids, use_cache=False).logits
    torch.autograd.backward(expected.square().mean())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cuts = in_turn(3, 1.0, 3)
    stages = [
        StageModule(model, part, first=index == 0, last=index == len(cuts) - 1)
        for index, part in enumerate(cuts)
    ]
    x = ids
    for stage in stages:
        x = stage(x)
    torch.autograd.backward(x.square().mean())
    assert torch.equal(x, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


def test_the_loss_of_peers_is_the_mean_of_those_that_did_the_step(tmp_path: Path) -> None:
    for step, losses in enumerate(([4.0, 2.0], [3.0, 1.0])):
        for worker, loss in enumerate(losses):
            (tmp_path / loss_file(step, worker)).write_text(repr(loss))
    assert mean_losses(tmp_path, 2, 2) == [3.0, 2.0]
