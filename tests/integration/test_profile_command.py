"""`cleave profile` as users run it: real processes, a real server, and what they get wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from cleave.arrays import DType
from cleave.errors import FleetError, UsageError, to_install
from cleave.server.fleet_server import Server
from cleave_cli.main import app
from profiles.device_profile import DeviceKind, Origin
from profiles.library import profile_names, read_profile, write_profile
from profiles.measuring.gemm_timer import SessionTimer
from profiles.performance import Layout
from tests.integration.processes import PATIENCE_S, here, run, started

BRIEF = (
    "--quick", "--budget", "0.4", "--sustained", "0.2", "--backend", "numpy", "--threads", "1",
)  # fmt: skip


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `cleave profile` in this process."""
    return here("profile", *arguments)


def document(*arguments: str) -> Any:
    """What a run prints on stdout: one JSON document, and nothing else."""
    shown = profile(*arguments, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def refused(*arguments: str, code: int = 2) -> str:
    """The one sentence of a run that must fail."""
    shown = profile(*arguments)
    assert shown.returncode == code, shown.stdout + shown.stderr
    assert shown.stdout == ""
    assert "Traceback" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    return shown.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine, measured for a moment."""
    path = tmp_path_factory.mktemp("profiles") / "here.toml"
    shown = run("profile", "device", *BRIEF, "--name", "here", "-o", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "error of the model on held-out shapes" in shown.stdout
    for words in ("bf16>fp32", "95th percentile", "numpy, threads: 1"):
        assert words in shown.stdout
    assert "runs layers at" in shown.stderr
    return path


@pytest.fixture
def copy(measured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(measured, tmp_path / "copy.toml"))


# --- measuring this machine ---


def test_what_was_measured(measured: Path) -> None:
    found = read_profile(measured)
    assert found.name == "here"
    assert found.provenance.origin is Origin.MEASURED
    assert set(found.compute) == {"fp32", "bf16", "bf16>fp32"}
    for entry in found.compute.values():
        assert set(entry.models) == set(entry.fits) == {Layout.NN, Layout.NT, Layout.TN}
        assert 1e7 < entry.flops_per_s < 1e15
        layouts = [layout for _, _, _, layout, *_ in entry.samples]
        assert all(layouts.count(layout) >= 15 for layout in entry.models)
    assert found.host is not None
    assert (found.host.executor, found.host.threads) == ("numpy", 1)
    assert found.sustained is not None
    assert found.sustained.thermal is None
    assert found.graphs is not None
    assert found.graphs.source.startswith("measured, a layer's graph, by cpu")
    assert found.memory.bytes == found.memory.installed_bytes // 2
    assert found.power is None or found.power.source


@pytest.mark.nightly  # measures this machine a second time
def test_options_and_json(tmp_path: Path) -> None:
    output = tmp_path / "x.toml"
    shown = run(
        "profile", "device", *BRIEF, "--sustained", "0", "--name", "pi-5", "--title", "Pi",
        "--kind", "sbc", "--memory", "500", "-o", str(output), "--json",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["file"] == str(output)
    written = read_profile(output)
    assert found["profile"]["compute"]["fp32"]["flops_per_s"] == written.compute["fp32"].flops_per_s
    assert (written.name, written.title, written.kind) == ("pi-5", "Pi", DeviceKind.SBC)
    assert written.memory.bytes == 500_000_000
    assert written.sustained is None
    assert written.host is not None
    assert written.provenance.assumed == ()


def test_a_profile_is_not_overwritten_unasked(measured: Path) -> None:
    before = measured.read_bytes()
    assert "--force" in refused("device", *BRIEF, "-o", str(measured))
    assert measured.read_bytes() == before


BAD_DEVICES: dict[str, tuple[tuple[str, ...], str]] = {
    "threads": (("--threads", "-1"), "--threads must be between 0 (for all cores)"),
    "memory": (("--memory", "3"), "--memory 3"),
    "negative memory": (("--memory", "-3"), "--memory '-3'"),
    "more memory than there is": (("--memory", "99999999"), "is more than the"),
    "budget": (
        ("--budget", "-2"),
        "--budget must be more than 0 seconds and at most a day, not -2",
    ),
    "no budget": (
        ("--budget", "0"),
        "--budget must be more than 0 seconds and at most a day, not 0",
    ),
    "no number": (
        ("--budget", "nan"),
        "--budget must be more than 0 seconds and at most a day, not nan",
    ),
    "sustained": (
        ("--sustained", "-5"),
        "--sustained must be from 0 (to skip the test) to one day in seconds, not -5",
    ),
    "kind": (("--kind", "toaster"), "toaster"),
    "name": (("--name", "My Laptop"), "my-laptop"),
    "backend": (("--backend", "abacus"), "abacus"),
    "suffix": (("-o", "x.json"), ".toml"),
    "folder": (("-o", "nowhere/x.toml"), "nowhere"),
    "seed": (("--seed", "-1"), "--seed"),
    "too many threads": (("--threads", "4000"), "--threads must be between 0 (for all cores)"),
    "a folder": (("-o", "folder.toml", "--force"), "folder.toml is a folder"),
}


@pytest.mark.parametrize(("arguments", "text"), BAD_DEVICES.values(), ids=BAD_DEVICES)
def test_wrong_requests_are_told_at_once(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    with pytest.raises(UsageError) as refused:  # in this process: a new one takes a second
        CliRunner().invoke(
            app, ["profile", "device", "--quick", *arguments], catch_exceptions=False
        )
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.toml"]


def test_a_device_that_ends_is_not_waited_for(served: Server) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(FleetError, match="exited before it joined"):
        SessionTimer(served, rng, ended=lambda: True)
    with started("join", served.url, "--backend", "numpy") as (process, _):
        timer = SessionTimer(served, rng, ended=lambda: process.poll() is not None)
        process.kill()
        process.wait()
        with pytest.raises(FleetError, match="exited during the measurement"):
            timer.block_s((8, 8, 8), 1, Layout.NN, DType.FP32, DType.FP32)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['scipy.optimize'] = None\n"
        "sys.argv[1:] = ['profile', 'device', '--quick']\n"
        "from cleave_cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "scipy" in done.stderr
    assert to_install("profile") in done.stderr


# --- the library ---


def test_the_list() -> None:
    shown = profile("list")
    assert shown.returncode == 0, shown.stderr
    for name in profile_names():
        assert name in shown.stdout
    entries = document("list", "--kind", "phone")["profiles"]
    assert entries
    assert {entry["kind"] for entry in entries} == {"phone"}
    assert all(entry["memory_bytes"] > 0 and entry["flops_per_s"] for entry in entries)
    assert "toaster" in refused("list", "--kind", "toaster")


def test_profiles_can_be_shown(measured: Path) -> None:
    for name in (profile_names()[0], profile_names()[-1]):
        shown = profile("show", name)
        assert shown.returncode == 0, shown.stderr
        assert name in shown.stdout
        assert "published" in shown.stdout
        assert "assumed: " in shown.stdout
        assert document("show", name)["profile"]["name"] == name
    assert "measured" in profile("show", str(measured)).stdout


def test_unknown_profiles(tmp_path: Path) -> None:
    assert "iphone-99" in refused("show", "iphone-99")
    assert "nowhere.toml" in refused("show", "nowhere.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("schema = 1\nname = 3\n")
    assert "bad.toml" in refused("show", str(bad))


# --- fitting again ---


def test_fitting_again_gives_the_same_models(copy: Path, tmp_path: Path) -> None:
    output = tmp_path / "fitted.toml"
    shown = profile("fit", str(copy), "-o", str(output))
    assert shown.returncode == 0, shown.stderr
    assert "held-out" in shown.stdout
    assert read_profile(output) == read_profile(copy)
    assert "--force" in refused("fit", str(copy), "-o", str(output))
    assert profile("fit", str(copy)).returncode == 0  # in place


def test_a_bad_fit_is_told(copy: Path) -> None:
    """Of samples to which something else on the machine was added, now and then."""
    found = read_profile(copy)
    entry = found.compute["fp32"]
    noise = random.Random(0)
    samples = tuple(
        (*sample[:4], sample[4] * noise.choice((1, 20)), *sample[5:]) for sample in entry.samples
    )
    noisy = msgspec.structs.replace(entry, samples=samples)
    write_profile(msgspec.structs.replace(found, compute={**found.compute, "fp32": noisy}), copy)
    shown = profile("fit", str(copy))
    assert shown.returncode == 0
    assert re.search(r"do not rely on fp32 in this profile: .* median error of \d+%", shown.stderr)


def test_nothing_to_fit(tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text(
        'schema = 1\nname = "bare"\ntitle = "Bare"\nkind = "phone"\n'
        '[provenance]\norigin = "published"\nsource = "x"\ndate = "2026-11-21"\n'
        "[compute.fp32]\nflops_per_s = 1e9\n[memory]\nbytes = 1_000_000_000\n"
    )
    assert "no samples" in refused("fit", str(bare))
    assert "nowhere.toml" in refused("fit", str(tmp_path / "nowhere.toml"))


# --- links ---


def test_a_link_over_loopback(served: Server, copy: Path) -> None:
    found = document("link", "--server", served.url, "--repeats", "3", "--into", str(copy))
    assert len(found["measured"]) == 3
    for one in found["measured"]:
        assert one["downlink_bytes_per_s"] > 1e6
        assert one["uplink_bytes_per_s"] > 1e6
        assert 0 < one["round_trip_s"] < 1
    link = read_profile(copy).link
    assert link is not None
    assert link.downlink_bytes_per_s.p50 == found["link"]["downlink_bytes_per_s"]["p50"]
    assert "3 times" in link.source
    shown = profile("link", "--server", served.url, "--repeats", "1")
    assert shown.returncode == 0, shown.stderr
    assert all(words in shown.stdout for words in ("downlink", "uplink", "round trip"))
    assert served.fleet.device_count == 0


def test_links_that_cannot_be_measured(served: Server, copy: Path) -> None:
    bare = served.url.partition("#")[0]
    assert "credential" in refused("link", "--server", bare, code=1)
    assert "no server answers" in refused("link", "--server", "ws://127.0.0.1:1/ws#c=x", code=1)
    assert "join URL" in refused("link", "--server", "http://127.0.0.1:1/")
    assert "must be 1 or more, not 0" in refused("link", "--server", served.url, "--repeats", "0")
    missing = str(copy.parent / "nowhere.toml")
    assert "nowhere.toml" in refused("link", "--server", served.url, "--into", missing)
