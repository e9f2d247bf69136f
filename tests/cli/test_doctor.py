"""`cleave doctor`: what a machine lacks, and whether a model fits it and its devices."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cleave.errors import to_install
from cleave.machine.graph_choice import examined, runners
from cleave.planner.forecast import Forecast, refused
from cleave.planner.plan import Method
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from cleave_cli import machine_checks as machine_checks_of
from cleave_cli.machine_checks import Verdict, fit, machine_checks
from tests.integration.processes import here

SIZES = StageSizes(find_model("opt-125m"), 128, 2, 2)
PARAMETERS = SIZES.spec.parameters
DEVICE = ("--dtype", "bf16", "--batch", "2", "--seq", "128")


def document(*arguments: str, code: int = 0) -> Any:
    done = here("doctor", *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def lines(*arguments: str, code: int = 0) -> str:
    """What people see, which is never wider than 80 columns."""
    done = here("doctor", *arguments)
    assert done.returncode == code, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def _measured_once() -> Iterator[None]:
    """Measure each runner once for all tests, which takes a second."""
    # A runner equals itself only, so the runners are listed once, too.
    with mock.patch.multiple(machine_checks_of, runners=cache(runners), examined=cache(examined)):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_measured_once")
def test_this_machine_has_what_the_suite_needs(tmp_path: Path) -> None:
    found = document("--runs", str(tmp_path / "runs"))
    assert found["good"]
    assert not (tmp_path / "runs").exists()
    said = " ".join(check["what"] for check in found["checks"])
    for what in ("Python 3", "torch 2", "peft", "ONNX Runtime", "free for runs", "free for cache"):
        assert what in said
    assert "for computing stages" in said
    for runner in (" cpu", "torch:cpu"):
        assert f"{runner} runs layers at " in said
    assert "ok" in lines()


@pytest.mark.slow
@pytest.mark.usefixtures("_measured_once")
def test_what_is_missing_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10, 10))
    checks = list(machine_checks(tmp_path / "a" / "b", has=lambda name: name != "peft"))
    without = [check for check in checks if check.what.startswith("no peft")]
    assert [check.verdict for check in without] == [Verdict.WITHOUT]
    assert without[0].advice == to_install("lora")
    full = [check for check in checks if "free for" in check.what]
    assert [check.verdict for check in full] == [Verdict.FAILED] * 2
    assert full[0].what.startswith("10 B free for runs")


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of the machine, which take a second."""
    monkeypatch.setattr(machine_checks_of, "machine_checks", lambda *given, **named: [])


@pytest.mark.usefixtures("_unmeasured")
def test_a_model_that_fits(tmp_path: Path) -> None:
    options = ("--model", "opt-125m", "--fleet", "paper-3", *DEVICE, "--runs", str(tmp_path))
    found = document(*options, "--server-memory", "64")
    assert [each["method"] for each in found["fits"]] == ["stages", "tiles", "local"]
    assert all(each["fits"] and not each["options"] for each in found["fits"])
    assert found["fits"][0]["server_bytes"] >= 16 * PARAMETERS
    said = lines(*options, "--server-memory", "64")
    assert "opt-125m, 2 x 128 tokens in bf16, on paper-3" in said
    assert "does not fit" not in said


@pytest.mark.usefixtures("_unmeasured")
def test_a_server_that_is_too_small_is_told_what_would_help(tmp_path: Path) -> None:
    options = ("--model", "opt-125m", "--fleet", "paper-3", *DEVICE, "--runs", str(tmp_path))
    found = document(*options, "--server-memory", "2.0")
    assert {each["method"]: each["options"] for each in found["fits"]} == {
        "stages": ["--state-dir"], "tiles": ["--memory lean"], "local": ["--memory lean"],
    }  # fmt: skip
    assert "fits with --state-dir" in lines(*options, "--server-memory", "2.0")
    found = document(*options, "--server-memory", "0.1", code=1)
    assert not found["good"]
    assert not any(each["fits"] for each in found["fits"])
    said = lines(*options, "--server-memory", "0.1", code=1)
    assert "even with --memory lean and --state-dir, but has only 100.0 MB" in said


def test_each_option_saves_what_it_says() -> None:
    for method, least in ((Method.STAGES, 8), (Method.LOCAL, 4)):
        each = Forecast(method, 1.0, server_bytes=16 * PARAMETERS + 10**9)
        whole = fit(each, SIZES, 2, 2, each.server_bytes)
        assert whole.fits
        assert not whole.options
        small = fit(each, SIZES, 2, 2, each.server_bytes - 1)
        assert small.fits
        assert small.server_bytes <= each.server_bytes - (8 if least == 8 else 4) * PARAMETERS
        none = fit(each, SIZES, 2, 2, 0)
        assert not none.fits
        assert none.server_bytes <= 10**9 + least * PARAMETERS
    assert not fit(refused(Method.STAGES, "no room"), SIZES, 2, 2, 10**12).fits


@pytest.mark.usefixtures("_unmeasured")
def test_devices_that_are_too_small_are_named(tmp_path: Path) -> None:
    fleet = tmp_path / "small.toml"
    fleet.write_text(
        '[[group]]\nprofile = "iphone-13-pro"\ncount = 2\n'
        'network = "wifi-lan"\nmemory_bytes = 20e6\n'
    )
    options = ("--model", "opt-125m", *DEVICE, "--fleet", str(fleet), "--server-memory", "0.1")
    stages = document(*options, "--runs", str(tmp_path), code=1)["fits"][0]
    assert not stages["fits"]
    assert "memory" in stages["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "opt-126m"), "opt-126m"),
        (("--model", "opt-125m", "--dtype", "fp16"), "--dtype is 'fp16'; use one of bf16, fp32"),
        (
            ("--model", "opt-125m", "--server-memory", "-1"),
            "--server-memory must be 0 or more GB, not -1.0",
        ),
        (("--model", "opt-125m", "--lora-bits", "4"), "add --lora RANK"),
        (("--model", "opt-125m", "--fleet", "no-such"), "no-such"),
        (("--model", "opt-125m", "--batch", "9999999"), "use 131,072 sequences or fewer"),
        (("--model", "opt-125m", "--lora", "9999"), "exceeds the width of opt-125m"),
        (("--model", "opt-125m", "--batch", "0"), "--batch must be 1 or more, not 0"),
    ],
)
def test_what_people_get_wrong_is_said_before_anything_is_measured(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks_of, "machine_checks", None)
    done = here("doctor", *arguments, "--json")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
