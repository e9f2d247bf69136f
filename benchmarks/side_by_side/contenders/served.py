"""Cleave: a job on a server on this machine, with a `cleave join` in each namespace."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.side_by_side.method import Way
from benchmarks.side_by_side.run import Run
from benchmarks.side_by_side.setting import SCHEDULE, WARMUP_STEPS


def training(run: Run, *options: str) -> list[str]:
    """Return the command that trains."""
    setting = run.setting
    return [
        sys.executable, "-m", "cleave_cli", "train", "--json", "--checkpoint-every", "0",
        "--model", run.model, "--dtype", run.method.dtype, "--steps", str(run.steps),
        "--batch", str(setting.batch), "--seq", str(setting.seq),
        "--schedule", SCHEDULE, "--warmup-steps", str(WARMUP_STEPS),
        *(["--lora", f"r={setting.rank}"] if setting.rank else []), *options,
    ]  # fmt: skip


def coding(run: Run) -> str:
    """Return the value of `cleave serve --coding`."""
    return run.method.variant if run.method.variant in ("off", "on") else "auto"


def run(run: Run) -> None:
    """Train with devices in the namespaces; the server runs outside and is no device."""
    processes, namespaces = run.processes, run.namespaces
    run.row.best = f"coding {coding(run)}, one thread a device, the server on all cores"
    server = processes.start(
        "serve",
        [
            sys.executable, "-m", "cleave_cli", "serve", "--json", "--host", namespaces[0].host,
            "--port", "0", "--insecure-lan", "--data", "none", "--stages-on", "any",
            "--coding", coding(run), "--runs", str(run.logs / "runs"),
            "--compute", "off" if run.method.variant == "apart" else "auto",
        ],
        CLEAVE_CREDENTIAL=secrets.token_urlsafe(16),
        CLEAVE_OPERATOR_CREDENTIAL=secrets.token_urlsafe(16),
    )  # fmt: skip
    listening = processes.await_record(server, lambda record: record["event"] == "listening")
    devices = [
        processes.start(
            f"device-{number}",
            namespace.inside(
                sys.executable, "-m", "cleave_cli", "join", listening["url"], "--json",
                "--memory", run.setting.memory, "--name", f"device-{number}",
            ),
            OMP_NUM_THREADS="1",
        )
        for number, namespace in enumerate(namespaces, 1)
    ]  # fmt: skip
    for device in devices:
        processes.await_record(server, _has_joined(device.name))
    resident = run.method.way is Way.RESIDENT
    by = "stages" if resident else run.method.way.value
    way = ("--method", by, *(("--state", "devices") if resident else ()))
    job = processes.start("train", training(run, *way, "--server", listening["operator_url"]))
    run.follow(processes.records(job), devices, server)
    run.row.lost = sum(" left (" in line for line in server.out.read_text().splitlines())
    plans = [line for line in job.err.read_text().splitlines() if line.startswith("stages: ")]
    run.row.plan = plans[-1].removeprefix("stages: ") if plans else ""


def _has_joined(device: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: str(record.get("text", "")).startswith(f"{device} joined")
