"""What `import cleave` offers to a program of one's own."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import cleave
from tests.emulator.fleets import virtual
from tests.log_lines import logged


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
        with pytest.raises(cleave.UsageError, match="is an int, not a fleet"):
            offload(model(), 8)
        with pytest.raises(
            cleave.UsageError, match="audit must be a probability from 0 to 1, not 2"
        ):
            offload(model(), fleet, audit=2)

        with pytest.raises(cleave.UsageError, match="min_flops must be a number, not 'a'"):
            offload(model(), fleet, min_flops="a")
        emulated: Any = cleave.emulated
        for wrong in ("3", 2.5):
            with pytest.raises(cleave.UsageError, match="a number of devices or a list of devices"):
                emulated(wrong)
        with pytest.raises(cleave.UsageError, match="takes 1 device or more, not 0"):
            emulated(0)
        with pytest.raises(cleave.UsageError, match="fallback is 'loca'; use one of wait, local"):
            offload(model(), fleet, fallback="loca")
        with pytest.raises(
            cleave.UsageError, match="fallback_after_s must be 0 or more seconds, not -1"
        ):
            offload(model(), fleet, fallback_after_s=-1)


def trained(one: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a backward pass."""
    one.zero_grad()
    torch.autograd.backward((one(x) ** 2).mean())
    return [p.grad.clone() for p in one.parameters() if p.grad is not None]


def test_without_devices_a_loop_goes_on_here_if_that_is_wanted(notes: list[str]) -> None:
    plain, x = model(), torch.randn(5, 4)
    expected = trained(plain, x)
    with (
        cleave.serve() as server,
        cleave.offloaded(plain, server.fleet, fallback="local", fallback_after_s=0.0),
    ):
        for _ in range(2):
            torch.testing.assert_close(trained(plain, x), expected)
        assert server.fleet.counters().blocks == 0
    assert [line for line in notes if "connected" in line] == [
        "no device is connected; waiting for one",
        "no device is connected; computing products here until one joins",
    ]


def test_a_fleet_whose_devices_are_gone_multiplies_again_when_one_comes(notes: list[str]) -> None:
    plain, x = model(), torch.randn(5, 4)
    expected = trained(plain, x)
    with cleave.emulated(1) as fleet:
        runtime = virtual(fleet)
        with cleave.offloaded(plain, fleet, fallback="local", fallback_after_s=1.0):
            torch.testing.assert_close(trained(plain, x), expected)
            by_fleet = fleet.counters().gemms
            runtime.lose(next(iter(runtime.devices)))
            torch.testing.assert_close(trained(plain, x), expected)
            runtime.join(runtime.profiles[0])
            fleet.wait_for(1)
            torch.testing.assert_close(trained(plain, x), expected)
            assert fleet.counters().gemms >= 2 * by_fleet
    assert notes[-1] == "a device has joined; products run on the fleet again"


def test_that_a_loop_waits_for_devices_is_logged() -> None:
    said = threading.Event()

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "no device is connected; waiting for one":
                said.set()

    ends: list[BaseException] = []

    def loop() -> None:
        try:
            plain(torch.randn(5, 4))
        except cleave.CleaveError as error:
            ends.append(error)

    plain = model()
    with logged(Said()), cleave.serve() as server, cleave.offloaded(plain, server.fleet):
        thread = threading.Thread(target=loop)
        thread.start()
        assert said.wait(60)
        server.close()
        thread.join(60)
    assert len(ends) == 1


def test_threads_share_an_emulated_fleet() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with cleave.emulated(3) as fleet:

            def loop(seed: int) -> bool:
                torch.manual_seed(seed)
                plain, x = model(), torch.randn(5, 4)
                expected = trained(plain, x)
                with cleave.offloaded(plain, fleet):
                    for _ in range(20):
                        torch.testing.assert_close(trained(plain, x), expected)
                return True

            with ThreadPoolExecutor(4) as pool:
                assert list(pool.map(loop, range(4))) == [True] * 4
            assert fleet.counters().gemms == 4 * 20 * 5
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_a_compiled_model_multiplies_on_the_fleet() -> None:
    plain = model()
    with cleave.emulated(2) as fleet:
        compiled: Any = torch.compile(plain, backend="aot_eager")
        for rows in (5, 6, 6):  # another shape is compiled anew, and an equal one is not
            x = torch.randn(rows, 4)
            expected = trained(plain, x)
            before = fleet.counters().gemms
            with cleave.offloaded(plain, fleet):
                torch.testing.assert_close(trained(compiled, x), expected)
            assert fleet.counters().gemms == before + 5
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.add_(0.1)


def test_what_offloaded_layers_cannot_do_is_said() -> None:
    plain, x = model(), torch.randn(5, 4, requires_grad=True)
    dual: Any = forward_ad.make_dual
    with cleave.emulated(1) as fleet, cleave.offloaded(plain, fleet):
        transforms: list[Any] = [
            lambda: torch.func.vmap(plain)(x),
            lambda: torch.func.grad(lambda given: plain(given).sum())(x),
            lambda: torch.func.jvp(plain, (x,), (x,)),
        ]
        for transform in transforms:
            with pytest.raises(cleave.UsageError, match=r"torch\.func is not supported by"):
                transform()
        with (
            forward_ad.dual_level(),
            pytest.raises(cleave.UsageError, match="forward-mode AD is not supported by"),
        ):
            plain(dual(x.detach(), torch.ones(5, 4)))
        (dx,) = torch.autograd.grad((plain(x) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.backward((dx**2).sum())
        assert plain(x).shape == (5, 2)


def test_a_server_is_no_fleet_but_has_one() -> None:
    offload: Any = cleave.offload
    with (
        cleave.serve() as server,
        pytest.raises(cleave.UsageError, match=r"is a Server, not a fleet; pass server\.fleet"),
    ):
        offload(model(), server)


def test_devices_are_waited_for() -> None:
    with cleave.emulated(2) as fleet:
        fleet.wait_for(2, timeout=0.0)
        runtime = virtual(fleet)
        with pytest.raises(cleave.FleetError, match="2 of 3 devices are connected"):
            fleet.wait_for(3)
        runtime.join(runtime.profiles[0])
        fleet.wait_for(3)
        assert fleet.device_count == 3
    with (
        cleave.serve() as server,
        pytest.raises(cleave.FleetError, match=r"0 of 1 devices are connected, after 0\.1 s"),
    ):
        server.fleet.wait_for(1, timeout=0.1)
