"""A device process for chaos: joins with a backend of choice, and again when its session ends.

    python -m tests.faults.device URL [--backend invariant] [--probe] [--failing 0.3]
        [--spoil N --value nan] [--scale 1.05]

The product has no backend for tests, so it is built in here. The process ends when nothing answers
any more. With `--spoil` one element of the Nth array that it returns for stages is `--value`, as
where its memory is bad. With `--scale` it multiplies gradients by that before it updates weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from cleave.device.compute_thread import ComputeThread, Outcome
from cleave.device.core import Order
from cleave.device.session import DeviceSession, Keeping, device_hello
from cleave.errors import CleaveError, ProtocolError
from cleave.machine.backends import MatmulBackend, NumpyBackend, TorchBackend
from cleave.machine.graph_run import FetchRun, GraphRun, Kept
from cleave.machine.sensors import hold_strips_well
from cleave.transport.connection import open_connection
from cleave.transport.join_url import parse_join_url
from tests.faults.exact import InvariantBackend

BACKENDS: dict[str, type[MatmulBackend]] = {
    "invariant": InvariantBackend,
    "numpy": NumpyBackend,
    "torch": TorchBackend,
}
_FLOPS_PER_S = 5e9
_BYTES_PER_S = 100e6
_TRIES = 100
_PAUSE_S = 0.1
_ADAMW = 5  # number of inputs of the graph of AdamW; layers have more


class Flawed(ComputeThread):
    """Answers some orders with `task_error`, drawn by lot, and one array with a wrong element.

    Args:
        backend: what does the others.
        failing: the share that fails.
        spoil: counts down; the array for which it is 0 is spoiled.
        value: the wrong element.
        scale: factor of the gradients of updates.
        seed: of the lots.
    """

    def __init__(
        self,
        backend: MatmulBackend,
        *,
        failing: float = 0.0,
        spoil: Iterator[int],
        value: float,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(backend)
        self.failed = 0
        self._failing = failing
        self._spoil, self._value, self._scale = spoil, value, scale
        self._rng = random.Random(seed)

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        def answered(order: Order, outcome: Outcome) -> None:
            if isinstance(outcome, str) or not isinstance(order, FetchRun):
                pass
            elif next(self._spoil) == 0:
                values = np.frombuffer(bytearray(outcome[0]), np.float32)
                values[values.size // 2] = self._value
                outcome = memoryview(values.tobytes()), outcome[1]
            done(order, outcome)

        if self._scale != 1.0 and isinstance(order, GraphRun) and len(order.inputs) == _ADAMW:
            gradient = order.inputs[1]
            assert isinstance(gradient, Kept)
            gradient.value = gradient.value * np.float32(self._scale)
        if self._rng.random() < self._failing:
            self.failed += 1
            done(order, "no memory for that now")
        else:
            super().start(order, answered)


async def serve(
    url: str,
    backend: MatmulBackend,
    *,
    probe: bool,
    failing: float,
    spoil: int,
    value: float,
    scale: float,
) -> None:
    """Serve one session after the other until the server cannot be reached any more."""
    target = parse_join_url(url)
    rate = 0.0 if probe else _BYTES_PER_S
    hello = device_hello(
        credential=target.credential,
        name=f"process {os.getpid()}",
        memory_bytes=10**9,
        flops_per_s=_FLOPS_PER_S,
        downlink_bytes_per_s=rate,
        uplink_bytes_per_s=rate,
        graphs=True,
    )
    give_back = hold_strips_well()
    failures, keeping = 0, Keeping()
    left = count(-1, -1) if not spoil else count(spoil - 1, -1)  # over all sessions
    while failures < _TRIES:
        try:
            connection = await open_connection(target)
            failures = 0
            computer = Flawed(backend, failing=failing, spoil=left, value=value, scale=scale)
            await DeviceSession(
                connection, computer, hello, on_idle=give_back, keeping=keeping
            ).run()
        except (CleaveError, ProtocolError):
            failures += 1
        await asyncio.sleep(_PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--backend", choices=BACKENDS, default="invariant")
    parser.add_argument("--probe", action="store_true", help="have the link measured at joining")
    parser.add_argument("--failing", type=float, default=0.0, help="the share of failing orders")
    parser.add_argument("--spoil", type=int, default=0, metavar="N")
    parser.add_argument("--value", type=float, default=float("nan"))
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    backend = BACKENDS[options.backend]()
    asyncio.run(
        serve(
            options.url,
            backend,
            probe=options.probe,
            failing=options.failing,
            spoil=options.spoil,
            value=options.value,
            scale=options.scale,
        )
    )


if __name__ == "__main__":
    main()
