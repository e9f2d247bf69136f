"""Model a device's compute time from its profile, its temperature and its owner's load."""

from __future__ import annotations

from cleave.device.core import Order
from cleave.machine.backends import Compute
from profiles.fleet_device import FleetDevice
from profiles.performance import Layout
from profiles.thermal import ThermalState


class EmulatedProcessor:
    """Model of a device's processor. Orders run in sequence, and the last one ends at `free_s`."""

    __slots__ = ("_device", "_share", "_thermal", "free_s")

    def __init__(self, device: FleetDevice, now_s: float = 0.0) -> None:
        self._device = device
        self._share = 1 - device.load
        thermal = device.thermal
        self._thermal = ThermalState(thermal, thermal.ambient, now_s) if thermal else None
        self.free_s = now_s

    def run(self, order: Order, now_s: float) -> tuple[float, float]:
        """Queue an order at `now_s`; return the times in seconds at which it begins and ends."""
        begin_s = self.free_s if self.free_s > now_s else now_s
        woken = now_s > self.free_s
        if isinstance(order, Compute):
            work_s = self.full_speed_s(order, woken) / self._share
        else:
            work_s = order.flops / self._device.stated_graph_flops_per_s
        if self._thermal is not None:
            work_s = self._thermal.busy(begin_s, work_s)
        self.free_s = begin_s + work_s
        return begin_s, self.free_s

    def full_speed_s(self, order: Compute, woken: bool = False) -> float:
        """Return the seconds that a multiplication takes on a cool device without other load.

        Also mark the operands as used, because only the first use of an operand takes longer.
        `woken` is True if the processor was idle before this order.
        """
        model = self._device.compute
        if model is None:
            return order.flops / self._device.flops_per_s
        layout = Layout.of(order.transpose_a, order.transpose_b)
        out = order.out.value if len(order.pairs) == 1 else "fp32"
        total_s = 0.0
        rows, columns = order.rows, order.columns
        for left, right in order.pairs:
            depth = left.rows if order.transpose_a else left.columns
            fresh = not left.used, not right.used
            dtype = left.dtype.value
            total_s += model.seconds(dtype, out, layout, rows, columns, depth, *fresh, woken)
            left.used = right.used = True
            woken = False
        return total_s
