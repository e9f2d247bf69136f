"""Run graphs on a GPU through WebGPU: ONNX Runtime with the plugin `onnxruntime-ep-webgpu`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from cleave.arrays import Array, DType
from cleave.machine.graph_session import (
    DISABLED_OPTIMIZERS,
    GraphError,
    NoGpuError,
    first_line,
    inputs_of,
    session_options,
)

NAME: Final = "webgpu"  # name on the command line, and of the GPU's memory in ONNX Runtime


def installed() -> bool:
    """Return True if the plugin is installed, without importing it."""
    return importlib.util.find_spec("onnxruntime_ep_webgpu") is not None


class WebgpuArray:
    """An array in the memory of the GPU.

    Attributes:
        value: ONNX Runtime's handle of the array.
        dtype: ONNX Runtime's name of its type.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.shape: tuple[int, ...] = tuple(value.shape())
        self.nbytes: int = value.tensor_size_in_bytes()
        self.dtype: str = value.data_type()
        self._host: Array | None = None

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def numpy(self) -> Array:
        """Return a copy in the host's memory. Only the first call copies."""
        if self._host is None:
            self._host = self.value.numpy()
        return self._host

    def reshape(self, sizes: Sequence[int]) -> WebgpuArray | Array:
        """Return the array in another shape. If the shape differs, the result is in host memory."""
        known = self.numel() // max(1, math.prod(size for size in sizes if size >= 0))
        if tuple(known if size < 0 else size for size in sizes) == self.shape:
            return self
        return self.numpy().reshape(sizes)


class WebgpuSession:
    """A graph that ONNX Runtime runs on a GPU (see `cleave.machine.graph_session.OpenGraph`).

    Results of `run_into` stay on the GPU. Operations that WebGPU lacks run on the CPU. An output
    never shares memory with an input, because WebGPU forbids that.

    Args:
        model: serialized ONNX model, which passed `check_graph`.

    Attributes:
        inputs, outputs, narrow, in_place, resident: see `OpenGraph`.

    Raises:
        GraphError: if the plugin or a GPU is missing, or ONNX Runtime refuses the model.
    """

    resident = True

    def __init__(self, model: bytes) -> None:
        device = _device()
        import onnxruntime

        options = session_options()
        try:
            options.add_provider_for_devices([device], {})
            self._session = onnxruntime.InferenceSession(
                model, options, disabled_optimizers=DISABLED_OPTIMIZERS
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common base class
            raise GraphError(f"WebGPU refuses the graph: {first_line(error)}") from None
        if self._session.get_providers()[0] != device.ep_name:
            raise NoGpuError("WebGPU finds no GPU here that it can use")
        self.inputs: Mapping[str, Sequence[int | str]] = {
            given.name: tuple(given.shape) for given in self._session.get_inputs()
        }
        self.outputs = tuple(given.name for given in self._session.get_outputs())
        self.narrow: Mapping[str, DType] = {}
        self.in_place: Mapping[str, str] = {}

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the graph; return the `wanted` outputs by name (None: all), or raise GraphError."""
        arrays = {name: self.upload(array) for name, array in inputs_of(self, given).items()}
        return {name: value.numpy() for name, value in self.run_into(arrays, {}, wanted).items()}

    def run_into(
        self,
        given: Mapping[str, WebgpuArray],
        into: Mapping[str, WebgpuArray],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, WebgpuArray]:
        """Run the graph on arrays in the GPU's memory; see `OpenGraph`. `into` must be empty."""
        assert not into, "WebGPU writes no output to the memory of an input"
        names = self.outputs if wanted is None else wanted
        try:
            binding = self._session.io_binding()
            for name in self.inputs:
                binding.bind_ortvalue_input(name, given[name].value)
            for name in names:
                binding.bind_output(name, NAME)
            self._session.run_with_iobinding(binding)
            found = [WebgpuArray(value) for value in binding.get_outputs()]
            if found:  # a copy is the only way to wait until the GPU has finished
                min(found, key=lambda array: array.nbytes).value.numpy()
        except Exception as error:  # noqa: BLE001 - see above
            raise GraphError(f"the graph cannot be run: {first_line(error)}") from None
        return dict(zip(names, found, strict=True))

    def upload(self, array: Array) -> WebgpuArray:
        """Copy an array to the memory of the GPU."""
        import onnxruntime

        array = np.ascontiguousarray(array)
        return WebgpuArray(onnxruntime.OrtValue.ortvalue_from_numpy(array, NAME, 0))


@cache
def _device() -> Any:
    """Return the plugin's device; the first call loads the plugin.

    Raises:
        GraphError: if the plugin cannot be loaded, or finds no GPU.
    """
    try:
        import onnxruntime
        import onnxruntime_ep_webgpu as plugin

        onnxruntime.register_execution_provider_library(NAME, plugin.get_library_path())
        devices = onnxruntime.get_ep_devices()
    except Exception as error:  # noqa: BLE001 - see above
        raise GraphError(f"WebGPU cannot be loaded: {first_line(error)}") from None
    found = [device for device in devices if device.ep_name == plugin.get_ep_name()]
    if not found:
        onnxruntime.unregister_execution_provider_library(NAME)  # a later call may find one
        raise NoGpuError(
            "WebGPU finds no GPU here; on Linux, install the Vulkan loader (libvulkan1) and the "
            "GPU's Vulkan driver"
        )
    return found[0]
