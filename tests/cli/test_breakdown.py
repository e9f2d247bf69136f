"""What `cleave train` says of where the time of a step by stages went."""

from __future__ import annotations

from typing import Any

import pytest

from cleave_cli.render.training import bottleneck, make_display

DEVICES = [
    {"name": f"laptop {n} with a name that is long", "compute_s": 20.0 + n, "down_s": 5.0 * n,
     "up_s": 30.0, "timeline": [1.0] * 20 + [0.5] * 5 + [0.0] * 15}
    for n in range(3)
]  # fmt: skip
STEP: dict[str, Any] = {
    "event": "step", "step": 2, "loss": 10.9, "tokens": 2048, "clock": "wall", "wall_s": 40.0,
    "fleet_s": 32.0, "ps_s": 8.0, "loss_s": 4.5, "sums_s": 1.0, "optimizer_s": 2.0, "audit_s": 0.0,
    "planning_s": 0.0, "downlink_bytes": 1, "uplink_bytes": 1, "tiles": 0, "reissued": 0,
    "devices": DEVICES,
}  # fmt: skip


def test_the_part_that_takes_longest_is_named() -> None:
    assert bottleneck(STEP)[1] == "the uplink of laptop 0 with a name that is long takes 30 of 40 s"
    assert (
        bottleneck(STEP | {"ps_s": 36.0, "loss_s": 33.0})[1]
        == "the server's own work takes 36 of 40 s (the loss: 33 s)"
    )
    assert "no part takes most of the step" in bottleneck(STEP | {"wall_s": 80.0})[1]


def test_on_a_virtual_clock_only_virtual_times_are_compared() -> None:
    """The server's own work takes real time, in which the devices' clock stands still."""
    found = bottleneck(STEP | {"clock": "virtual", "wall_s": 1.0, "ps_s": 99.0, "fleet_s": 33.0})
    assert found[1].endswith("takes 30 of 33 simulated s")


def test_a_bottleneck_that_changes_with_every_step_is_not_said_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = make_display(as_json=False, log_every=1)
    for step in range(6):
        display.plain(STEP | {"step": step, "ps_s": 36.0 * (step % 2)})
    assert capsys.readouterr().err.count("bottleneck") == 1


@pytest.mark.parametrize("verbose", [False, True])
def test_train_says_it_after_each_step(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(as_json=False, verbose=verbose)
    display.plain(STEP)
    display.plain({key: value for key, value in STEP.items() if key != "devices"})
    said = capsys.readouterr().err
    assert said.count("bottleneck: the uplink of laptop 0") == 1
    if not verbose:
        display.plain(STEP)
        assert "bottleneck" not in capsys.readouterr().err  # it is still the same
        display.plain(STEP | {"ps_s": 36.0})
        display.plain(STEP | {"ps_s": 36.0})
        assert "bottleneck: the server's own work takes 36" in capsys.readouterr().err
    assert ("server 8 of 40 s" in said) is verbose
