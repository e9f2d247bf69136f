"""Open graphs in ONNX Runtime and run them on this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cleave.arrays import DType
from cleave.errors import CleaveError
from cleave.machine.onnx_graph import ProtobufError, read_graph

CPU_PROVIDER: Final = "CPUExecutionProvider"


def additions(model: bytes) -> Mapping[str, str]:
    """Map the name of each graph output that can overwrite an input to the name of that input.

    Each of these outputs, such as a gradient sum, is the result of an addition that is the only use
    of the input. An addition reads each element before it writes the result.

    Raises:
        ProtobufError: if `model` is not a serialized ONNX model.
    """
    graph = read_graph(model)
    found = {}
    for node in graph.nodes:
        if node.operation != "Add" or node.outputs[0] not in graph.outputs:
            continue
        for name in node.inputs:
            if name in graph.inputs and graph.uses(name) == 1:
                found[node.outputs[0]] = name
                break
    return found


Array: TypeAlias = npt.NDArray[Any]

DISABLED_OPTIMIZERS: Final = ["CommonSubexpressionElimination", "ConstantFolding"]
"""Elimination of common subexpressions would merge all casts of a parameter, and keep the upcast
parameter in memory from its first use to its last use. Layers exported by torch have no other
common subexpressions. Constant folding would keep large results in memory for the whole session."""

_NO_MESSAGES: Final = 4  # log level for fatal messages only; failures raise exceptions
_NARROW: Final = {"tensor(bfloat16)": DType.BF16, "tensor(float16)": DType.FP16}
ONNX_ELEMENTS: Final = {DType.BF16: 16, DType.FP16: 10}  # ONNX's codes of element types


def available() -> bool:
    """Return True if ONNX Runtime is installed, without importing it."""
    return importlib.util.find_spec("onnxruntime") is not None


class GraphError(CleaveError):
    """A graph cannot be run on this machine."""


class NoGpuError(GraphError):
    """Raised by a runner that finds no GPU on this machine."""


class OpenGraph(Protocol):
    """A graph that can be run on one processor of this machine.

    Attributes:
        inputs: maps each input's name to its shape, where a string names a dynamic dimension.
        outputs: the outputs' names.
        narrow: maps the name of each 16-bit input to its dtype (see `graph_narrowing`).
        in_place: maps the name of each output that may overwrite an input to the name of that input
            (see `run_into`).
        resident: whether `run_into` takes and returns arrays in the processor's memory, like those
            that `upload` returns.
    """

    inputs: Mapping[str, Sequence[int | str]]
    outputs: tuple[str, ...]
    narrow: Mapping[str, DType]
    in_place: Mapping[str, str]
    resident: bool

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the graph and return outputs by name.

        Args:
            given: input arrays by name, in the graph's shapes.
            wanted: names of the outputs to return; None for all outputs.

        Raises:
            GraphError: if an input is missing or the run fails.
        """

    def run_into(
        self,
        given: Mapping[str, Any],
        into: Mapping[str, Any],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Run the graph, writing some outputs to the memory of inputs.

        Args:
            given: input arrays by name, in the graph's shapes; bf16 elements as uint16.
            into: maps each output to write in place to the array to overwrite, which must be the
                array in `given` for the input `in_place[output]`.
            wanted: names of the outputs to return; None for all outputs.

        Raises:
            GraphError: if the run fails. The arrays in `into` then have undefined elements.
        """

    def upload(self, array: Array) -> Any:
        """Copy an array to the processor's memory; bf16 elements are uint16."""


class GraphSession:
    """A graph that ONNX Runtime runs on the CPU.

    The first session imports ONNX Runtime, which takes 0.25 s and 20 MB of memory.

    Args:
        model: serialized ONNX model. References to external files are blocked.
        threads: number of threads. None uses the value of `OMP_NUM_THREADS`, as numpy and torch do,
            or else the number of cores.
        shares_memory: whether to allocate from the arena that sessions of this process share, which
            is never freed. Otherwise the session keeps the memory of its largest run.

    Attributes:
        inputs, outputs, narrow, in_place, resident: see `OpenGraph`.

    Raises:
        GraphError: if ONNX Runtime is missing or refuses the model.
    """

    resident = False

    def __init__(
        self, model: bytes, threads: int | None = None, *, shares_memory: bool = True
    ) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise GraphError(f"ONNX Runtime is not available: {error}") from None
        options = session_options(threads)
        if shares_memory:
            _make_shared_memory()
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                model, options, [CPU_PROVIDER], disabled_optimizers=DISABLED_OPTIMIZERS
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common base class
            raise GraphError(f"ONNX Runtime refuses the graph: {first_line(error)}") from None
        self.inputs: Mapping[str, Sequence[int | str]] = {
            given.name: tuple(given.shape) for given in self._session.get_inputs()
        }
        self.outputs = tuple(given.name for given in self._session.get_outputs())
        self.narrow: Mapping[str, DType] = {
            given.name: _NARROW[given.type]
            for given in self._session.get_inputs()
            if given.type in _NARROW
        }
        self.in_place: Mapping[str, str] = self._in_place(model)

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the graph and return outputs by name; see `OpenGraph`."""
        feed = {n: np.ascontiguousarray(array) for n, array in inputs_of(self, given).items()}
        try:
            found = self._session.run(wanted, feed)
        except Exception as error:  # noqa: BLE001 - see above
            raise GraphError(f"the graph cannot be run: {first_line(error)}") from None
        return dict(zip(wanted or self.outputs, found, strict=True))

    def run_into(
        self,
        given: Mapping[str, Array],
        into: Mapping[str, Array],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run the graph, writing some outputs to the memory of inputs; see `OpenGraph`."""
        import onnxruntime

        values, binding = {}, self._session.io_binding()
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        make_narrow = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        try:
            for name in self.inputs:
                array, dtype = np.asarray(given[name], order="C"), self.narrow.get(name)
                values[name] = make_narrow(array, ONNX_ELEMENTS[dtype]) if dtype else make(array)
                binding.bind_ortvalue_input(name, values[name])
            for name in wanted or self.outputs:
                if name in into:
                    assert into[name] is given[self.in_place[name]]
                    binding.bind_ortvalue_output(name, values[self.in_place[name]])
                else:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding)
            found = binding.get_outputs()
        except Exception as error:  # noqa: BLE001 - see above
            raise GraphError(f"the graph cannot be run: {first_line(error)}") from None
        return {
            name: into[name] if name in into else value.numpy()
            for name, value in zip(wanted or self.outputs, found, strict=True)
        }

    def upload(self, array: Array) -> Array:
        """Return the array itself, which is already in the processor's memory."""
        return array

    def _in_place(self, model: bytes) -> dict[str, str]:
        """Map each output that may overwrite an fp32 input of equal fixed shape to that input."""
        try:
            found = additions(model)
        except ProtobufError:  # the model is valid, because ONNX Runtime accepted it
            return {}
        inputs = {given.name: given for given in self._session.get_inputs()}
        outputs = {made.name: made for made in self._session.get_outputs()}
        return {
            output: name
            for output, name in found.items()
            if outputs[output].type == inputs[name].type == "tensor(float)"
            and outputs[output].shape == inputs[name].shape
            and all(isinstance(size, int) for size in inputs[name].shape)
        }


def inputs_of(graph: OpenGraph, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return those arrays of `given` that are inputs of a graph.

    Raises:
        GraphError: if `given` lacks an input.
    """
    missing = [name for name in graph.inputs if name not in given]
    if missing:
        raise GraphError(f"the graph also needs {', '.join(missing)}")
    return {name: given[name] for name in graph.inputs}


def session_options(threads: int | None = None) -> Any:
    """Return the options of an ONNX Runtime session for graphs from an untrusted PS.

    Args:
        threads: number of threads; None as in `GraphSession`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _NO_MESSAGES
    options.intra_op_num_threads = _threads() if threads is None else threads
    options.inter_op_num_threads = 1
    # ONNX Runtime's memory patterns save no time but need more memory: 750 MB instead of 450 MB
    # for a layer with 4096 tokens.
    options.enable_mem_pattern = False
    # A malicious graph could load local files as constants, so use a folder that cannot exist.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path",
        os.path.join(os.devnull, "nothing"),
    )
    # Refuse ONNX Runtime's own model format, which `check_graph` cannot check.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Spinning threads would slow down other processes of this machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


@cache
def _make_shared_memory() -> None:
    """Create the arena that the sessions of this process share. Later calls do nothing."""
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": 0}))


def _threads() -> int:
    """Return the value of `OMP_NUM_THREADS`, or 0 (one thread per core) if it is not set."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() else 0


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened."""
    return str(error).strip().partition("\n")[0][:300]
