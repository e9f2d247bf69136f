"""`cleave footprint` as users run it: of a run, of a plan, against a GPU, and mistakes."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from tests.integration.processes import here

PLANNED = ("--model", "opt-nano", "--batch", "1", "--seq", "16", "--steps", "2")
AGAINST = (*PLANNED, "--fleet", "laptops-4", "--against", "a5000", "--grid", "USA")


def document(*arguments: str) -> Any:
    shown = here("footprint", *arguments, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def test_rows_are_the_parts_of_both_sides() -> None:
    shown = here("footprint", *AGAINST, "--csv")
    assert shown.returncode == 0, shown.stderr
    found = document(*AGAINST)
    parts = [(of, part) for of in ("fleet", "gpu") for part in found[of]["parts"]]
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert [(row["of"].lower(), row["name"]) for row in rows] == [
        (of, p["name"]) for of, p in parts
    ]
    assert [row["energy_j"] for row in rows] == [
        "" if part["energy_j"] is None else str(part["energy_j"]) for _, part in parts
    ]
    tables = here("footprint", *AGAINST).stdout
    assert "energy without the network: the fleet's is" in tables
    assert "3 of 4 devices: power of a typical laptop" in tables


@pytest.mark.nightly
def test_a_plan_against_a_gpu() -> None:
    found = document(*AGAINST)
    fleet, gpu, ratios = found["fleet"], found["gpu"], found["ratios"]
    assert ratios["energy"] == pytest.approx(gpu["energy_j"] / fleet["energy_j"])
    assert ratios["attributed"] == pytest.approx(
        gpu["attributed_gco2e"] / fleet["attributed_gco2e"]
    )
    assert ratios["sunk_cost"] == pytest.approx(
        gpu["attributed_gco2e"] / fleet["operational_gco2e"]
    )
    assert ratios["operational"] == pytest.approx(ratios["energy"])  # one grid
    assert {"network", "lifetime", "utilisation", "PUE"} <= {
        b["name"] for b in found["sensitivity"]
    }
    nearer = document(*AGAINST, "--network", "0")
    assert nearer["ratios"]["energy"] > ratios["energy"]
    assert nearer["ratios"] == found["ratios_without_network"]
    wasteful = document(*AGAINST, "--charger", "2.9")
    assert wasteful["fleet"]["energy_j"] > fleet["energy_j"]


def test_a_fleet_whose_power_is_unknown_is_not_compared() -> None:
    found = document(*PLANNED, "--fleet", "paper-4", "--against", "a5000", "--grid", "USA")
    assert set(found["ratios"].values()) == {None}
    assert found["fleet"]["devices_unknown"] == 4
    assert found["sensitivity"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "pass either a run folder or --model"),
        ((*PLANNED, "--against", "l4"), "the power of l4 is unknown"),
        (
            ("--model", "opt-nano", "--pue", "0.5"),
            "--pue must be 1 or more, or 0 for the default, not 0.5",
        ),
        (
            ("--model", "opt-nano", "--network", "nan"),
            "--network must be 0 or more, or -1 for the default, not nan",
        ),
        ((*PLANNED, "--grid", "Narnia"), "no figures for the electricity"),
        (("--model", "opt-nano", "--fleet", "nobody-3"), "there is no fleet"),
        (("nowhere",), "there is no run folder 'nowhere'"),
        (("nowhere", "--against", "a5000"), "--against needs --model and --fleet"),
    ],
)
def test_what_users_get_wrong(arguments: tuple[str, ...], said: str) -> None:
    shown = here("footprint", *arguments)
    assert shown.returncode == 2
    assert said in shown.stderr
