"""The scheduler's record of the arrays that devices need, hold and should drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cleave.gemm import Span
from cleave.planner.plan import DeviceRates
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.tasks import ArrayRef, Task


@dataclass(slots=True)
class Names:
    """Counters for new array and run IDs. No ID is used twice."""

    arrays: int = 0
    runs: int = 0


class DeviceMemory:
    """Tracks which arrays exist and which devices hold them.

    Args:
        present: returns the rates of the devices that are available for tasks.
    """

    def __init__(self, names: Names, present: Callable[[], Iterable[DeviceRates]]) -> None:
        self._names = names
        self._present = present
        self._arrays: dict[int, dict[tuple[Span, Span], ArrayRef]] = {}  # key: operand
        self._holders: dict[int, set[int]] = {}  # key: array; value: devices

    def array_of(self, operand: int, rows: Span, columns: Span, itemsize: int) -> ArrayRef:
        """Return the array for a region of an operand. The first call for a region assigns its ID.

        Args:
            rows, columns: the region, in the operand's own orientation.
        """
        of_operand = self._arrays.setdefault(operand, {})
        array = of_operand.get((rows, columns))
        if array is None:
            nbytes = rows.size * columns.size * itemsize
            self._names.arrays += 1
            array = ArrayRef(self._names.arrays, operand, rows, columns, nbytes)
            of_operand[rows, columns] = array
        return array

    def holders(self, operand: int) -> Mapping[int, Sequence[ArrayRef]]:
        """Map available devices to the operand's arrays that they hold or will hold."""
        found: dict[int, list[ArrayRef]] = {}
        present = {rates.device for rates in self._present()}
        for array in self._arrays.get(operand, {}).values():
            for device in self._holders.get(array.id, ()):
                if device in present:
                    found.setdefault(device, []).append(array)
        return found

    def retain(self, device: DeviceLoad, task: Task) -> None:
        """Record that a task was assigned to a device, which will hold the task's inputs."""
        for array in task.inputs:
            device.needed[array.id] += 1
            self._holders.setdefault(array.id, set()).add(device.id)

    def release_inputs(self, device: DeviceLoad, task: Task) -> None:
        """Record that a device's finished or abandoned task no longer needs its inputs."""
        for array in task.inputs:
            device.needed[array.id] -= 1
            if not device.needed[array.id]:
                del device.needed[array.id]
                if array.id not in device.held:
                    self._unhold(array.id, device)
                elif array.operand not in self._arrays:
                    self._drop(device, array)

    def make_room(self, device: DeviceLoad, task: Task, room_bytes: int) -> bool:
        """Make room for `room_bytes` more bytes. Return True on success.

        If necessary, drop arrays that `task` does not use.
        """
        limit = device.rates.memory_bytes
        if device.occupied_bytes + room_bytes <= limit:
            return True
        wanted = {array.id for array in task.inputs}
        busy = {array.id for u in device.running.values() for array in u.inputs}
        # First drop arrays that no task needs. If no run is in flight, also drop other arrays.
        rounds: list[Callable[[int], bool]] = [lambda i: not device.needed[i]]
        if not device.running:
            rounds.append(lambda i: i not in busy)
        for evictable in rounds:
            for array in list(device.held.values()):
                if device.occupied_bytes + room_bytes <= limit:
                    return True
                if array.id not in wanted and evictable(array.id):
                    self._drop(device, array)
        return device.occupied_bytes + room_bytes <= limit

    def invalidate(self, device: DeviceLoad, task: Task) -> None:
        """Drop a device's copies of a task's inputs, because the copies may be corrupt."""
        for array in dict.fromkeys(task.inputs):
            if array.id in device.held:
                self._drop(device, array)

    def clear(self, device: DeviceLoad) -> None:
        """Drop the arrays of a device that its queued and running tasks do not need."""
        for array in list(device.held.values()):
            if not device.needed[array.id]:
                self._drop(device, array)

    def leave(self, device: DeviceLoad) -> None:
        """Remove a device that left, and all its arrays, from the record."""
        for array in {*device.held, *device.needed}:
            self._unhold(array, device)

    def forget(self, operand: int, devices: Mapping[int, DeviceLoad]) -> None:
        """Remove an operand from the record. Devices drop its arrays once no task needs them."""
        for array in self._arrays.pop(operand, {}).values():
            for device_id in sorted(self._holders.get(array.id, ())):
                device = devices[device_id]
                if array.id in device.held and not device.needed[array.id]:
                    self._drop(device, array)

    def _drop(self, device: DeviceLoad, array: ArrayRef) -> None:
        device.drop(array)
        if not device.needed[array.id]:
            self._unhold(array.id, device)

    def _unhold(self, array: int, device: DeviceLoad) -> None:
        holders = self._holders.get(array)
        if holders is not None:
            holders.discard(device.id)
            if not holders:
                del self._holders[array]
