"""What `import cleave` offers to a program of one's own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import cleave
from emulator.virtual import VirtualRuntime


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def test_its_names_are_listed_and_import_nothing_before_they_are_used() -> None:
    assert set(cleave.__all__) == set(dir(cleave))
    for name in cleave.__all__:
        assert getattr(cleave, name) is not None
    said = "import cleave, sys; dir(cleave); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_name_that_is_mistyped_is_answered() -> None:
    library: Any = cleave
    with pytest.raises(AttributeError, match=r"no attribute 'emulate'; did you mean 'emulated'\?"):
        _ = library.emulate
    with pytest.raises(AttributeError, match=r"no attribute 'zebra'$"):
        _ = library.zebra


def test_in_a_with_block_a_model_is_offloaded_and_plain_afterwards() -> None:
    plain, x = model(), torch.randn(5, 4)
    expected = plain(x)
    with cleave.emulated(2) as fleet:
        with cleave.offloaded(plain, fleet) as offloaded:
            assert offloaded is plain
            assert torch.allclose(plain(x), expected, atol=1e-6)
            assert fleet.counters().gemms == 2
        with pytest.raises(KeyError), cleave.offloaded(plain, fleet):
            raise KeyError
    assert all(type(part) in (nn.Linear, nn.ReLU) for part in plain)
    assert torch.equal(plain(x), expected)


def test_arguments_of_the_wrong_kind_are_refused_at_the_call() -> None:
    offload: Any = cleave.offload
    with cleave.emulated(1) as fleet:
        with pytest.raises(cleave.UsageError, match="not a Fleet, as its first argument"):
            offload(fleet, model())
        with pytest.raises(cleave.UsageError, match="is an int, no fleet"):
            offload(model(), 8)
        with pytest.raises(cleave.UsageError, match="audit is 2; give a chance"):
            offload(model(), fleet, audit=2)


def test_a_server_is_no_fleet_but_has_one() -> None:
    offload: Any = cleave.offload
    with (
        cleave.serve() as server,
        pytest.raises(cleave.UsageError, match=r"is a Server, no fleet: give server\.fleet"),
    ):
        offload(model(), server)


def test_devices_are_waited_for() -> None:
    with cleave.emulated(2) as fleet:
        fleet.wait_for(2, timeout=0.0)
        runtime = fleet.runtime
        assert isinstance(runtime, VirtualRuntime)
        with pytest.raises(cleave.FleetError, match="2 of 3 devices are there"):
            fleet.wait_for(3)
        runtime.join(runtime.profiles[0])
        fleet.wait_for(3)
        assert fleet.device_count == 3
    with (
        cleave.serve() as server,
        pytest.raises(cleave.FleetError, match=r"0 of 1 devices are there, after 0\.1 s"),
    ):
        server.fleet.wait_for(1, timeout=0.1)
