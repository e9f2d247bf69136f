"""`cleave plan` as users run it: a table, a JSON document, a picture, and what they get wrong."""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cleave.gemm import Span, Tile
from tests.integration.processes import here

STEP = ("--model", "opt-tiny", "--fleet", "paper-4", "--batch", "4", "--seq", "128")
SMALL = (*STEP, "--ps-gflops", "1", "--dtype", "bf16")
GEMM = ("--gemm", "700,900,1100", "--fleet", "paper-8")
ADAPTERS = (*SMALL, "--lora", "8")
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


@cache
def document(*arguments: str) -> Any:
    """What a run prints on stdout: one JSON document, and nothing else.

    A plan takes seconds, and is the same again.
    """
    done = here("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tile(entry: dict[str, Any]) -> Tile:
    return Tile(Span(*entry["m"]), Span(*entry["n"]), Span(*entry["k"]))


@cache
def shown(*arguments: str) -> str:
    """What people see, which is never wider than 80 columns."""
    done = here("plan", *arguments)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return done.stdout


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (SMALL, ["4 devices", "the server computes 1 GFLOP/s", "Using stages: a step takes"]),
        ((*SMALL, "--method", "tiles"), ["lm_head fwd", "limits most of the step: "]),
        (GEMM, ["700 x 900 x 1100", "no plan beats", "limited by", " of 8, "]),
        ((*STEP, "--method", "local"), ["GFLOP/s, measured here"]),  # which is measured
    ],
)
def test_plans_as_people_see_them(arguments: tuple[str, ...], said: list[str]) -> None:
    text = words(shown(*arguments))
    assert all(each in text for each in said)


def test_the_fastest_method_is_chosen() -> None:
    for speed, chosen in (("1", "stages"), ("1e6", "local")):
        found = document(*SMALL, "--ps-gflops", speed)
        seconds = {each["method"]: each["step_s"] for each in found["methods"]}
        assert set(seconds) == {"stages", "tiles", "diloco", "local"}
        assert found["chosen"] == chosen
        assert all(each["refused"] == "" for each in found["methods"])
        (inexact,) = [each for each in found["methods"] if each["method"] == "diloco"]
        assert inexact["bound_by"].startswith("not exact")
        del seconds["diloco"]
        assert seconds[chosen] == min(seconds.values())


@pytest.mark.parametrize("method", ["stages", "tiles", "diloco", "local"])
def test_a_method_that_is_asked_for_is_taken(method: str) -> None:
    found = document(*SMALL, "--method", method)
    assert found["chosen"] == method
    assert found["why"] == f"Using {method}, as requested."
    weighed = {each["method"] for each in found["methods"]}
    assert weighed == {method, "local"}
    assert (found["stages"] is not None) == (method == "stages")
    assert (found["tiles"] is not None) == (method == "tiles")


def test_a_plan_of_stages_as_json() -> None:
    found = document(*SMALL, "--method", "stages", "--gradients", "fp32")
    plan, (weighed, _) = found["stages"], found["methods"]
    assert sum(plan["micro_batches"]) == 4 * 128
    layers = [(stage["first_layer"], stage["stop_layer"]) for stage in plan["stages"]]
    assert layers[0][0] == 0
    assert layers[-1][1] == 4
    assert all(stop == first for (_, stop), (first, _) in pairwise(layers))
    memory = [device["memory_bytes"] for stage in plan["stages"] for device in stage["devices"]]
    assert weighed["device_memory_bytes"] == max(memory)
    assert weighed["step_s"] == plan["step_s"]
    bf16 = document(*SMALL, "--method", "stages")["methods"][0]
    assert weighed["uplink_bytes"] > bf16["uplink_bytes"]


def test_adapters_alone_travel_up() -> None:
    found = document(*ADAPTERS)
    stages, tiles, *_ = found["methods"]
    assert found["chosen"] == "stages"
    assert tiles["step_s"] is None
    assert "not for adapters" in tiles["refused"]
    assert stages["uplink_bytes"] < document(*SMALL)["methods"][0]["uplink_bytes"]


def test_weights_in_four_bits_take_less_of_a_device() -> None:
    adapters = (*ADAPTERS, "--method", "stages")
    plain = document(*ADAPTERS)["methods"][0]
    coded = document(*adapters, "--lora-bits", "4")["methods"][0]
    assert coded["device_memory_bytes"] < plain["device_memory_bytes"]
    said = words(shown(*adapters, "--lora-bits", "4"))
    assert "LoRA of rank 8 on weights in 4 bits" in said


def test_a_method_that_is_not_possible_says_why(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(TWO_KINDS.replace("memory_bytes = 1e9", "memory_bytes = 3e7").replace(
        "memory_bytes = 8e9", "memory_bytes = 3e7"))  # fmt: skip
    small = (*SMALL, "--fleet", str(fleet))
    found = document(*small)
    assert found["chosen"] in {"tiles", "local"}
    assert found["stages"] is None
    assert "a layer needs" in found["methods"][0]["refused"]
    done = here("plan", *small, "--method", "stages")
    assert done.returncode == 1
    assert "--method stages is refused: a layer needs" in done.stderr
    fp16 = here("plan", *SMALL, "--method", "stages", "--dtype", "fp16")
    assert "stages support bf16 and fp32" in words(fp16.stderr)


@pytest.mark.nightly  # tests/planner/test_forecast.py tests the search
def test_where_stages_begin_to_win() -> None:
    options = (*STEP, "--seq", "64", "--ps-gflops", "30", "--crossing")
    found = document(*options)["crossing"]
    below, above = found["not_with_tokens"], found["from_tokens"]
    assert below < above <= max(1.1 * below, below + 64)
    tokens = [point["tokens"] for point in found["points"]]
    assert tokens == sorted(tokens)
    for point in found["points"]:
        assert (point["stages_s"] < point["local_s"]) == (point["tokens"] >= above)
    text = words(shown(*options))
    assert f"From about {above:,} tokens per step, stages are faster" in text
    assert [int(row["tokens"]) for row in rows(*options)] == tokens


def test_tiles_as_json() -> None:
    step = document(*SMALL)["tiles"]
    assert {g["kind"] for g in step["gemms"]} == {"forward", "input-gradient", "weight-gradient"}
    for total in ("makespan_s", "fill_s", "bound_s", "overlap_bound_s"):
        assert step[total] == pytest.approx(sum(g[total] * g["count"] for g in step["gemms"]))
    assert step["ingress_bytes"] == sum(g["ingress_bytes"] * g["count"] for g in step["gemms"])
    # Siblings are not sent their input again.
    assert step["egress_bytes"] < sum(g["egress_bytes"] * g["count"] for g in step["gemms"])
    assert step["predicted_s"] < step["apart_s"]
    for g in step["gemms"]:
        assert g["gap"] == pytest.approx(g["makespan_s"] / g["bound_s"] - 1)
        assert 1 <= g["devices_used"] <= 4
    assert step["bottleneck"] in step["advice"]


def test_siblings_are_apart_as_in_training_unless_told() -> None:
    siblings = {"q_proj", "k_proj", "v_proj"}
    tiles = (*SMALL, "--method", "tiles")
    apart, fused = ({g["name"] for g in document(*tiles, *option)["tiles"]["gemms"]}
                    for option in ((), ("--fused",)))  # fmt: skip
    assert siblings <= apart
    assert "qkv_proj" not in apart
    assert "qkv_proj" in fused
    assert not siblings & fused


def test_every_tile_of_one_gemm() -> None:
    plan = document(*GEMM, "--tiles")
    assert (plan["m"], plan["n"], plan["k"]) == (700, 900, 1100)
    boxes = [tile(entry) for entry in plan["tiles"]]
    assert sum(box.volume for box in boxes) == 700 * 900 * 1100
    assert [d["id"] for d in plan["devices"]] == list(range(8))  # the idle ones too
    memory = {d["id"]: d["memory_bytes"] for d in plan["devices"]}
    for entry in plan["tiles"]:
        assert entry["memory_bytes"] <= memory[entry["device"]]
    assert plan["egress_bytes"] == sum(entry["download_bytes"] for entry in plan["tiles"])
    assert plan["ingress_bytes"] == sum(entry["upload_bytes"] for entry in plan["tiles"])
    assert plan["makespan_s"] == pytest.approx(max(entry["time_s"] for entry in plan["tiles"]))
    assert plan["slabs"] == [region["slabs"] for region in plan["regions"]]
    assert document(*GEMM, "--stragglers", "0.5")["makespan_s"] > 1.3 * plan["makespan_s"]


@pytest.mark.parametrize(
    "arguments",
    [
        GEMM,
        (*SMALL, "--method", "stages"),
        *(
            pytest.param((*SMALL, *arguments), marks=pytest.mark.nightly)
            for arguments in (
                ("--method", "tiles"),
                ("--method", "stages", "--fleet", "paper-48"),
                ("--method", "stages", "--crossing"),
                ("--ps-gflops", "1e6"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_plan_is_drawn(arguments: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    done = here("plan", *arguments, "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@cache
def rows(*arguments: str) -> list[dict[str, str]]:
    """What a run prints as CSV."""
    done = here("plan", *arguments, "--csv")
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def test_rows_say_what_the_document_does() -> None:
    methods = document(*SMALL)["methods"]
    assert [row["method"] for row in rows(*SMALL)] == [each["method"] for each in methods]
    assert [float(row["step_s"]) for row in rows(*SMALL)] == [each["step_s"] for each in methods]
    tiles = document(*GEMM, "--tiles")["tiles"]
    assert [int(row["upload_bytes"]) for row in rows(*GEMM)] == [t["upload_bytes"] for t in tiles]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--model or --gemm"),
        (("--model", "opt-125m", "--gemm", "1,1,1"), "--model or --gemm"),
        (("--model", "opt-13"), "'opt-13'"),
        (("--gemm", "1,2"), "'1,2'"),
        (("--gemm", "1,2,three"), "'1,2,three'"),
        (("--gemm", "4,0,4"), "N of --gemm must be between 1 and"),
        (("--gemm", "4,4,4", "--dtype", "int8"), "'int8'"),
        (("--gemm", "4,4,4", "--tiling", "4d"), "'4d'"),
        (("--gemm", "4,4,4", "--method", "2d"), "use --tiling 2d"),
        (("--gemm", "4,4,4", "--method", "stages"), "--method stages is for whole steps"),
        (("--gemm", "4,4,4", "--crossing"), "--crossing is for whole steps"),
        ((*SMALL, "--method", "pipeline"), "'pipeline'"),
        ((*SMALL, "--gradients", "fp8"), "'fp8'"),
        ((*SMALL, "--lora", "-1"), "--lora must be a rank, or 0 to train the whole model, not -1"),
        (
            (*SMALL, "--lora", "8", "--lora-bits", "5"),
            "--lora-bits must be 4 or 8, or 0 for weights in --dtype, not 5",
        ),
        (
            (*SMALL, "--lora-bits", "4"),
            "--lora-bits is 4, but no weights are frozen; add --lora RANK",
        ),
        ((*SMALL, "--method", "tiles", "--crossing"), "--crossing needs forecasts of stages"),
        ((*SMALL, "--method", "local", "--plot", "a.png"), "omit --method local"),
        ((*SMALL, "--json", "--csv"), "--json and --csv cannot be combined"),
        (("--gemm", "4,4,4", "--ps-gflops", "inf"), "--ps-gflops must be 0 or more, not inf"),
        (("--gemm", "4,4,4", "--ps-gbit", "-1"), "--ps-gbit must be 0 or more, not -1"),
        (("--gemm", "4,4,4", "--ps-memory", "nan"), "--ps-memory must be 0 or more, not nan"),
        (("--gemm", "4,4,4", "--tiles"), "--json"),
        (("--gemm", "4,4,4", "--fleet", "kampus"), "'kampus'"),
        (("--gemm", "4,4,4", "--fleet", "paper-0"), "0 devices"),
        (("--gemm", "4,4,4", "--fleet", "nowhere.toml"), "nowhere.toml"),
        (
            ("--gemm", "4,4,4", "--stragglers", "2"),
            "share of stragglers must be between 0 and 1, not 2.0",
        ),
        ((*SMALL, "--batch", "0"), "batch must be 1 or more, not 0"),
        (("--gemm", f"1,{10**30},1"), "N of --gemm must be between 1 and"),
        (("--gemm", "4,4,4", "--fleet", "paper-2", "--plot", "no/where.png"), "no/where.png"),
        ((*SMALL, "--plot", "no/where.png"), "the folder no does not exist"),
        ((*SMALL, "--plot", "plan.banana"), "'banana' is no format of figures; use one of"),
        ((*SMALL, "--plot", "."), "cannot write .: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_users_get_wrong_is_said_in_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = here("plan", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("cleave: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_plan_says_with_which_ratio_it_reckoned() -> None:
    coded = document(*SMALL)
    plain = document(*SMALL, "--coding", "off", "--method", "stages")
    assert coded["coding"]["ratios"] == {"bf16": 0.675}
    assert coded["coding"]["uplinks"] == 4
    assert plain["coding"]["uplinks"] == plain["coding"]["downlinks"] == 0
    assert "0.675 of the bytes" in " ".join(shown(*SMALL).split())
    (coded_s, plain_s) = (found["methods"][0]["step_s"] for found in (coded, plain))
    assert coded_s < plain_s


def test_numbers_of_servers_side_by_side() -> None:
    stages = (*SMALL, "--method", "stages", "--ps-gbit", "1")  # planning tiles takes longer
    found = document(*stages, "--servers", "1,2,4")["servers"]
    assert [(each["servers"], each["devices_each"], each["rows_each"]) for each in found] == [
        (1, 4, 4),
        (2, 2, 2),
        (4, 1, 1),
    ]
    assert [each["exchange_s"] > 0 for each in found] == [False, True, True]
    assert found[0]["step_s"] == document(*stages)["methods"][0]["step_s"]
    text = words(shown(*stages, "--servers", "1,2"))
    assert "time of the exchange between servers" in text
    assert "2 servers" in text.rpartition("devices.")[2]  # whether they pay


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--servers", "1,x"), "--servers is '1,x'"),
        (("--servers", "1,5"), "use 4 or fewer"),
        (("--servers", "2", "--crossing"), "--servers cannot be combined with --gemm"),
        (("--memory", "sharded"), "--memory sharded needs --servers"),
        (("--servers", "2", "--memory", "lean"), "use plain or sharded"),
        (("--servers", "2", "--memory", "sharded", "--method", "stages"), "tiles of whole models"),
    ],
)
def test_servers_that_cannot_be_are_refused(options: tuple[str, ...], said: str) -> None:
    done = here("plan", *SMALL, *options)
    assert done.returncode == 2
    assert said in words(done.stderr)
