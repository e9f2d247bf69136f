"""Profile files: what is written reads back, and what is wrong is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from profiles.availability import Availability, AvailabilityFamily, Durations
from profiles.device_profile import (
    ComputeProfile,
    DeviceKind,
    DeviceProfile,
    Embodied,
    Host,
    LinkProfile,
    MemoryProfile,
    Origin,
    Power,
    Provenance,
    Quantiles,
    Sustained,
)
from profiles.library import read_profile, write_profile
from profiles.performance import FitReport, Layout, PerformanceModel
from profiles.thermal import ThermalModel, ThrottlePoint

GOOD = """\
schema = 1
name = "box"
title = "A box"
kind = "laptop"
[provenance]
origin = "published"
source = "nobody"
date = "2026-11-21"
[compute.fp32]
flops_per_s = 2e12
[compute.bf16]
flops_per_s = 4e12
[memory]
bytes = 1_000_000_000
[link]
downlink_bytes_per_s = { p10 = 1e6, p50 = 2e6, p90 = 3e6 }
uplink_bytes_per_s = { p10 = 1e5, p50 = 2e5, p90 = 3e5 }
round_trip_s = { p10 = 0.01, p50 = 0.02, p90 = 0.1 }
[sustained.thermal]
rise = 1.0
time_constant_s = 60.0
points = [[0.45, 1.0], [0.5, 0.5]]
[power]
compute_w = 30.0
[availability]
hours = [22.0, 7.0]
"""

MODEL = PerformanceModel(1e-6, 1e-12, 1e-10, 2e-10, 3e-10, (0.0,) * 6, (1e-11,) * 6)
FULL = DeviceProfile(
    schema=1,
    name="box-2.1",
    title='A "box", über',
    kind=DeviceKind.SBC,
    provenance=Provenance(
        Origin.MEASURED,
        "us",
        "2026-11-21",
        notes="cold,\nquiet",
        assumed=("memory: none", "power: a, b"),
    ),
    compute={
        "fp32": ComputeProfile(
            2e12,
            models={Layout.NN: MODEL, Layout.TN: PerformanceModel.saturated(1e12)},
            samples=((64, 128, 256, Layout.NN, 0.25, 3), (1, 2, 3, Layout.TN, 1e-6, 1)),
            fits={Layout.NN: FitReport(80, 20, 0.05, 0.2)},
        ),
        "bf16>fp32": ComputeProfile(5e12, source="them"),
    },
    memory=MemoryProfile(10**9, 4 * 10**9, "us"),
    year=2024,
    link=LinkProfile(
        Quantiles(1e7, 1e7, 1e7), Quantiles(1e5, 1e6, 1e7), Quantiles(0.0, 0.01, 0.2), "us"
    ),
    sustained=Sustained(
        ThermalModel(40.0, 120.0, 25.0, (ThrottlePoint(50.0, 1.0), ThrottlePoint(60.0, 0.5))),
        speeds=((0.0, 1.0), (600.0, 0.5)),
        temperatures=((0.0, 25.0), (600.0, 60.0)),
    ),
    power=Power(idle_w=2.0, compute_w=8.0),
    embodied=Embodied(50_000.0, 3.0),
    availability=Availability(
        Durations(3600.0, AvailabilityFamily.WEIBULL, 0.6),
        Durations(600.0),
        (22.0, 7.0),
        source="us",
    ),
    host=Host("a CPU", 4, 8, "numpy", "Linux"),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "box.toml"
    path.write_text(text, encoding="utf-8")
    return path


# --- what is right ---


def test_everything_that_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    write_profile(FULL, path)
    assert read_profile(path) == FULL


def test_what_is_left_out_is_unknown(tmp_path: Path) -> None:
    begin, end = GOOD.index("[link]"), len(GOOD)
    profile = read_profile(write(tmp_path, GOOD[:begin] + GOOD[end:]))
    for table in ("link", "sustained", "power", "embodied", "availability", "host"):
        assert getattr(profile, table) is None
    assert profile.year == profile.memory.installed_bytes == 0


# --- what is wrong ---

ENTRY = "flops_per_s = 2e12"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        # missing
        ("bytes = 1_000_000_000\n", "", r"memory of profile .*box\.toml lacks bytes"),
        ("flops_per_s = 4e12\n", "", r"compute\.bf16 of .* lacks flops_per_s"),
        ('source = "nobody"', "", "provenance of .* lacks source"),
        # negative, absurd, not a number
        ("2e12", "-2e12", r"compute\.fp32\.flops_per_s of .* is -2000000000000\.0; expected .*>="),
        ("2e12", "nan", r"compute\.fp32\.flops_per_s of .* must be a finite number, not nan"),
        (
            "0.5, 0.5",
            "0.5, nan",
            r"sustained\.thermal\.points\[1\]\[1\] of .* must be a finite number, not nan",
        ),
        (
            "1_000_000_000",
            "1" + 40 * "0",
            r"memory\.bytes of .* has 41 digits; integers must fit in 64 bits",
        ),
        ("30.0", "-1.0", r"power\.compute_w of .* is -1\.0; expected float >= 0"),
        ("p10 = 1e6", "p10 = 5e6", r"link\.downlink_bytes_per_s of .*must rise.*5e\+06, 2e\+06"),
        (
            "p10 = 1e5",
            "p10 = 1",
            r"link of .* uplink_bytes_per_s must be within .*bytes per second, not 1 to",
        ),
        ("p90 = 0.1", "p90 = 100.0", r"round_trip_s\.p90 must be at most 60 seconds, not 100"),
        ("22.0, 7.0", "22.0, 27.0", "availability of .* hours are 22 to 27"),
        ("0.5, 0.5", "0.4, 0.5", r"\[0\.45, 1\.0\] is followed by \[0\.4, 0\.5\]"),
        # unknown
        ('title = "A box"', 'titel = "A box"', "has the unknown field 'titel'; check its spelling"),
        ('"laptop"', '"toaster"', "kind of .*'toaster'; use one of phone, tablet, laptop, "),
        (
            "hours = [22.0, 7.0]",
            'gap = { mean_s = 3600.0, family = "normal" }',
            "availability.gap.family of .*'normal'; use one of exponential, weibull, lognormal",
        ),
        ("compute.fp32", "compute.fp64", "compute has the dtype 'fp64'; use fp32, bf16"),
        (ENTRY, ENTRY + "\nmodels.xx = {}", r"compute\.fp32\.models of .*'xx'; use .* nn, nt"),
        # wrong types
        ("2e12", '"fast"', r"compute\.fp32\.flops_per_s of .* is 'fast'; expected float, got str"),
        ("1_000_000_000", "1e9", r"memory\.bytes of .* is 1000000000\.0; expected int"),
        ("[22.0, 7.0]", "[7.0]", r"availability\.hours of .* is \[7\.0\]; expected array of"),
        ('"2026-11-21"', '"yesterday"', r"provenance\.date of .* is 'yesterday'; expected"),
        ('"box"', '"Big Box"', "name of .* is 'Big Box'; expected"),
        (
            ENTRY,
            ENTRY + '\nsamples = [[1, 2, 3, "nn", -1.0, 1]]',
            r"fp32\.samples\[0\]\[4\] .* -1\.0",
        ),
        (
            ENTRY,
            ENTRY + "\nmodels.nn = { startup_s = 1.0, volume_s = -1.0 }",
            r"compute\.fp32\.models\.nn\.volume_s of .* is -1\.0; expected float > 0",
        ),
        # other versions
        ("schema = 1", "schema = 2", r"box\.toml has schema 2; this version .* reads schema 1"),
        ("schema = 1\n", "", r"box\.toml has no `schema` key; add: schema = 1"),
        # not TOML
        ("[memory]", "[memory", r"profile .*box\.toml cannot be read: .*at line"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(ValueError, match=said) as caught:
        read_profile(write(tmp_path, GOOD.replace(before, after, 1)))
    assert "\n" not in str(caught.value)


def test_no_dtype_at_all(tmp_path: Path) -> None:
    begin, end = GOOD.index("[compute.fp32]"), GOOD.index("[memory]")
    with pytest.raises(ValueError, match=r"compute of .* is \{\}; expected"):
        read_profile(write(tmp_path, GOOD[:begin] + "[compute]\n" + GOOD[end:]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile .*nowhere\.toml cannot be read: No such file"):
        read_profile(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_profile(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml cannot be read"):
        read_profile(binary)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"profile .*box\.toml cannot be written: the folder .* does not exist",
    ):
        write_profile(FULL, tmp_path / "nowhere" / "box.toml")


def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile holds minutes of measuring, which a full disk must not cost."""
    path = tmp_path / "box.toml"
    write_profile(FULL, path)
    before = path.read_bytes()

    def full(file: IO[bytes], data: bytes) -> None:
        file.write(data[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cleave.files.write_all", full)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        write_profile(FULL, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["box.toml"]
