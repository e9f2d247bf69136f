"""What is tested is what is shipped: the APK's own code, on a JVM, as a device of a real server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import (
    PATIENCE_S,
    printing,
    records,
    run,
    started,
    wait_for_event,
)

STEPS = 4


def losses(lines: Iterable[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in lines if record["event"] == "step"]


def test_it_serves_the_same_tiles(from_dex: Path, corpus_file: Path, tmp_path: Path) -> None:
    train = (
        "train", "--model", "opt-tiny", "--data", str(corpus_file), "--steps", str(STEPS),
        "--batch", "1", "--seq", "16", "--checkpoint-every", "0", "--json",
    )  # fmt: skip
    plain = losses(records(run(*train, "--devices", "0", cwd=tmp_path).stdout))
    assert len(plain) == STEPS
    serve = ("serve", "--port", "0", "--data", str(tmp_path / "data"), "--tls", "auto", "--json")
    with started(*serve, cwd=tmp_path) as (_, said):
        place = wait_for_event(said, "listening")
        # OkHttp, Okio and msgpack come from the APK, too: nothing else is on the class path.
        # msgpack takes other buffers where it finds itself on Android.
        device = (
            "java", "-Xmx512m", "-Djava.runtime.name=Android Runtime", "-cp", str(from_dex),
            "cleave.core.Main", "--threads", "1", "--state", str(tmp_path / "state"),
            place["page_url"],
        )  # fmt: skip
        with printing(device, cwd=tmp_path) as (process, told):
            wait_for_event(told, "working")
            with started(*train, "--server", place["operator_url"]) as (trainer, lines):
                offloaded = losses(lines)
                assert trainer.wait(PATIENCE_S) == 0
            process.terminate()
            assert wait_for_event(told, "left")["blocks"] > 100
    assert offloaded == pytest.approx(plain, rel=1e-4)
