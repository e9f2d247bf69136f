"""`docs/profiles.md` names every field of the schema, and its example is a profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from profiles import device_profile as schema
from profiles.library import read_profile
from profiles.performance import FitReport, Layout, PerformanceModel
from profiles.thermal import ThermalModel

PAGE = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w.>-]+)`", PAGE.split("## The schema")[1]))


@pytest.mark.parametrize(
    "table",
    [
        schema.Provenance, schema.LinkProfile, schema.Quantiles, schema.ComputeProfile,
        schema.MemoryProfile, schema.Sustained, schema.Power, schema.Embodied, schema.Host,
        schema.DeviceProfile,
        PerformanceModel, FitReport, ThermalModel,
    ],
)  # fmt: skip
def test_every_field_is_described(table: Any) -> None:
    described = {name.partition(".")[0] for name in NAMED} | {"schema"}
    missing = [f.name for f in msgspec.structs.fields(table) if f.name not in described]
    assert not missing


def test_every_kind_and_dtype_is_named() -> None:
    assert {kind.value for kind in schema.DeviceKind} <= NAMED
    assert set(schema.DTYPES) <= NAMED


def test_the_example_is_a_profile(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "old-laptop.toml"
    path.write_text(example)
    profile = read_profile(path)
    assert profile.flops_per_s == 60e9
    assert profile.compute_model().seconds(*_TILE) == pytest.approx(2e9 / 60e9)


_TILE: Any = ("bf16", "fp32", Layout.TN, 1000, 1000, 1000)
