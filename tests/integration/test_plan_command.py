"""`cleave plan` as users run it: a table, a JSON document, a picture, and what they get wrong."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from cleave.gemm import Span, Tile
from tests.integration.processes import run

SMALL = ("--model", "opt-125m", "--fleet", "paper-8", "--batch", "4", "--seq", "128")
TWO_KINDS = """\
[[group]]
name = "phone"
count = 4
flops_per_s = 1e11
downlink_bytes_per_s = 10e6
uplink_bytes_per_s = 5e6
memory_bytes = 1e9
active_power_w = 5

[[group]]
name = "tower"
count = 4
flops_per_s = 1e13
downlink_bytes_per_s = 100e6
uplink_bytes_per_s = 50e6
memory_bytes = 8e9
active_power_w = 200
"""


def document(*arguments: str) -> Any:
    """What a run prints on stdout: one JSON document, and nothing else."""
    shown = run("plan", *arguments, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def tile(entry: dict[str, Any]) -> Tile:
    return Tile(Span(*entry["m"]), Span(*entry["n"]), Span(*entry["k"]))


def test_a_step_as_a_table() -> None:
    shown = run("plan", *SMALL)
    assert shown.returncode == 0, shown.stderr
    assert "opt-125m, batch 4, 128 tokens, bf16, paper-8" in shown.stdout
    for row in ("qkv_proj fwd", "fc1 dX", "fc2 dW", "lm_head fwd"):
        assert row in shown.stdout
    assert "512 x 3072 x 768" in shown.stdout
    assert "One step: " in shown.stdout
    assert "limits most of the step: " in shown.stdout


def test_a_step_as_json() -> None:
    step = document(*SMALL)
    assert {g["kind"] for g in step["gemms"]} == {"forward", "input-gradient", "weight-gradient"}
    for total in ("makespan_s", "fill_s", "bound_s", "overlap_bound_s"):
        assert step[total] == pytest.approx(sum(g[total] * g["count"] for g in step["gemms"]))
    for total in ("egress_bytes", "ingress_bytes"):
        assert step[total] == sum(g[total] * g["count"] for g in step["gemms"])
    for g in step["gemms"]:
        assert g["gap"] == pytest.approx(g["makespan_s"] / g["bound_s"] - 1)
        assert 1 <= g["devices_used"] <= 8
    assert step["bottleneck"] in step["advice"]


def test_siblings_are_fused_unless_told() -> None:
    names = {g["name"] for g in document(*SMALL, "--unfused")["gemms"]}
    assert {"q_proj", "k_proj", "v_proj"} <= names
    assert "qkv_proj" not in names


def test_every_tile_of_one_gemm() -> None:
    plan = document("--gemm", "700,900,1100", "--fleet", "paper-8", "--tiles")
    assert (plan["m"], plan["n"], plan["k"]) == (700, 900, 1100)
    boxes = [tile(entry) for entry in plan["tiles"]]
    assert sum(box.volume for box in boxes) == 700 * 900 * 1100
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert [d["id"] for d in plan["devices"]] == list(range(8))  # the idle ones too
    memory = {d["id"]: d["memory_bytes"] for d in plan["devices"]}
    for entry in plan["tiles"]:
        assert entry["memory_bytes"] <= memory[entry["device"]]
    assert plan["egress_bytes"] == sum(entry["download_bytes"] for entry in plan["tiles"])
    assert plan["ingress_bytes"] == sum(entry["upload_bytes"] for entry in plan["tiles"])
    assert plan["makespan_s"] == pytest.approx(max(entry["time_s"] for entry in plan["tiles"]))
    assert plan["slabs"] == [region["slabs"] for region in plan["regions"]]


def test_one_gemm_for_people() -> None:
    shown = run("plan", "--gemm", "700x900x1100", "--fleet", "paper-8")
    assert shown.returncode == 0, shown.stderr
    assert "700 x 900 x 1100" in shown.stdout
    for row in ("predicted", "bound", "no plan beats", "limited by", " of 8, "):
        assert row in shown.stdout


def test_stragglers_make_it_slower() -> None:
    gemm = ("--gemm", "700,900,1100", "--fleet", "paper-8")
    slow = document(*gemm, "--stragglers", "0.5")
    assert slow["makespan_s"] > 1.3 * document(*gemm)["makespan_s"]


def test_a_picture_of_the_tiling(tmp_path: Path) -> None:
    path = tmp_path / "tiling.png"
    shown = run("plan", "--gemm", "700,900,1100", "--fleet", "paper-8", "--plot", str(path))
    assert shown.returncode == 0, shown.stderr
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_time_against_energy(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(TWO_KINDS)
    small = ("--model", "opt-tiny", "--batch", "2", "--seq", "64", "--fleet", str(fleet))
    front = document(*small, "--objective", "energy")["front"]
    assert front
    for faster, cheaper in pairwise(front):
        assert faster["makespan_s"] < cheaper["makespan_s"]
        assert faster["energy_j"] > cheaper["energy_j"]
    shown = run("plan", *small, "--objective", "energy")
    assert "joules" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--model or --gemm"),
        (("--model", "opt-125m", "--gemm", "1,1,1"), "--model or --gemm"),
        (("--model", "opt-13"), "'opt-13'"),
        (("--gemm", "1,2"), "'1,2'"),
        (("--gemm", "1,2,three"), "'1,2,three'"),
        (("--gemm", "4,0,4"), "N of --gemm is 0"),
        (("--gemm", "4,4,4", "--dtype", "int8"), "'int8'"),
        (("--gemm", "4,4,4", "--method", "4d"), "'4d'"),
        (("--gemm", "4,4,4", "--objective", "money"), "'money'"),
        (("--gemm", "4,4,4", "--objective", "energy"), "--objective energy"),
        (("--gemm", "4,4,4", "--ps-gbit", "-1"), "--ps-gbit is -1"),
        (("--gemm", "4,4,4", "--ps-memory", "nan"), "--ps-memory is nan"),
        (("--gemm", "4,4,4", "--tiles"), "--json"),
        (("--gemm", "4,4,4", "--fleet", "kampus"), "'kampus'"),
        (("--gemm", "4,4,4", "--fleet", "paper-0"), "0 devices"),
        (("--gemm", "4,4,4", "--fleet", "nowhere.toml"), "nowhere.toml"),
        (("--gemm", "4,4,4", "--stragglers", "2"), "2.0 stragglers"),
        ((*SMALL, "--batch", "0"), "batch is 0"),
        ((*SMALL, "--objective", "energy"), "active_power_w of device 'paper-0'"),
        (("--gemm", "4,4,4", "--fleet", "paper-2", "--plot", "no/where.png"), "no/where.png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_users_get_wrong_is_said_in_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    shown = run("plan", *arguments, cwd=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith("cleave: ")
    assert said in shown.stderr
    assert shown.stderr.count("\n") == 1
    assert "Traceback" not in shown.stderr


def test_carbon_needs_to_know_the_grid(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(TWO_KINDS)
    shown = run("plan", "--model", "opt-tiny", "--fleet", str(fleet), "--objective", "carbon")
    assert shown.returncode == 2
    assert "gco2e_per_kwh of device 'phone-0'" in shown.stderr
