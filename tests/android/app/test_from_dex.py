"""What is tested is what is shipped: the APK's own code, on a JVM, as a device of a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cleave.training.loop.job import JobSpec
from tests.integration.processes import (
    PATIENCE_S,
    losses,
    printing,
    started,
    training,
    training_job,
    wait_for_event,
)

STEPS = 2


@pytest.mark.nightly
def test_it_serves_the_same_tiles(
    from_dex: Path,
    corpus_file: Path,
    tmp_path: Path,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    plain = plain_losses(training_job(corpus_file, STEPS))
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
            train = (*training(corpus_file, STEPS), "--server", place["operator_url"])
            with started(*train) as (trainer, lines):
                offloaded = losses(lines)
                assert trainer.wait(PATIENCE_S) == 0
            process.terminate()
            assert wait_for_event(told, "left")["blocks"] > 100
    assert offloaded == pytest.approx(plain, rel=1e-4)
