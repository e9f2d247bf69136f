"""The house of the design (section 3): imports go down only, and devices need no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("cleave", "cleave_cli", "emulator", "profiles")
FLOORS = {
    "cleave.errors": 0,
    "cleave.gemm": 1,
    "profiles": 1,
    "cleave.protocol": 2,
    "cleave.planner": 2,
    "cleave.workload": 2,
    "cleave.arrays": 2,
    "cleave.verify": 2,
    "cleave.dispatch": 3,
    "cleave.device": 3,
    "cleave.fleet": 4,
    "cleave.transport": 5,
    "emulator": 5,
    "cleave.server": 6,
    "cleave.training": 6,
    "cleave.models": 6,
    "cleave.simulation": 6,
    "cleave.footprint": 6,
    "cleave_cli": 7,
}
NEIGHBOURS = {  # the exceptions: same floor, one way
    ("cleave.training", "cleave.models"),
    ("emulator", "cleave.transport"),
    ("cleave.server", "cleave.footprint"),
    ("cleave.footprint", "cleave.simulation"),
    ("cleave.verify", "cleave.arrays"),
}
PURE = (
    "cleave.gemm",
    "cleave.errors",
    "cleave.planner",
    "cleave.protocol",
    "cleave.workload",
    "cleave.dispatch",
)


def _modules() -> dict[str, Path]:
    found = {}
    for top in TOP:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _room(module: str) -> str | None:
    """The room a module is in; None for `cleave` itself and what is not ours."""
    parts = module.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in FLOORS:
            return ".".join(parts[:length])
    return None


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module imported anywhere in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module
            yield node.module, node.lineno
            for alias in node.names:  # `from cleave import arrays` imports a room, too
                name = f"{node.module}.{alias.name}"
                if name in MODULES:
                    yield name, node.lineno


def _only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING`."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), MODULES[module])


def test_every_module_has_a_floor() -> None:
    homeless = [m for m in MODULES if _room(m) is None and m != "cleave"]
    assert not homeless, f"give these a floor in FLOORS and in the design: {homeless}"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "cleave"])
def test_imports_go_down_only(module: str) -> None:
    room = _room(module)
    assert room is not None
    wrong = []
    for target, line in _imports(_parse(module)):
        if target.split(".")[0] not in TOP:
            continue
        if target == "cleave":  # the facade: the command line shows its version
            if room != "cleave_cli" and not _names_only_modules(module, line):
                wrong.append(f"line {line}: the facade `cleave`")
            continue
        other = _room(target)
        assert other is not None, f"{module} imports {target}, which has no floor"
        if other != room and FLOORS[other] >= FLOORS[room] and (room, other) not in NEIGHBOURS:
            wrong.append(f"line {line}: {target} (floor {FLOORS[other]})")
    assert not wrong, f"{module} is on floor {FLOORS[room]} and imports {wrong}"


def _names_only_modules(module: str, line: int) -> bool:
    """Whether a `from cleave import x, y` there imports modules, not what the facade offers."""
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.ImportFrom) and node.lineno == line:
            return all(f"{node.module}.{alias.name}" in MODULES for alias in node.names)
    return False


def test_the_facade_imports_nothing_by_itself() -> None:
    tree = _parse("cleave")
    allowed = _only_for_types(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            allowed |= set(ast.walk(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in allowed:
            names = {target.split(".")[0] for target, _ in _imports(node)}
            assert names <= {"__future__", "typing"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(PURE)])
def test_pure_rooms_know_no_arrays(module: str) -> None:
    heavy = {"numpy", "torch", "scipy", "transformers"}
    if module.startswith("cleave.planner"):
        heavy.remove("numpy")  # it calculates with arrays of rates; matrices it never sees
    found = [f"line {n}: {t}" for t, n in _imports(_parse(module)) if t.split(".")[0] in heavy]
    assert not found, f"{module} imports {found}"


def _run_without(blocked: tuple[str, ...], code: str) -> None:
    """Run code in a new interpreter in which the blocked packages are not installed."""
    guard = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
"""
    done = subprocess.run(
        [sys.executable, "-c", guard + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


TRAINING_ONLY = (
    "accelerate",
    "cryptography",
    "datasets",
    "ifaddr",
    "matplotlib",
    "pyarrow",
    "safetensors",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
)


def test_a_device_needs_nothing_that_only_training_needs() -> None:
    _run_without(
        TRAINING_ONLY,
        "import cleave\n"
        "import cleave.transport.join, cleave.device.executors, cleave_cli.main\n"
        "import cleave.planner.planner, cleave.workload.step, cleave.fleet.coordinator\n"
        "import emulator.virtual, cleave.transport.serve\n"
        "assert cleave.device.executors.choose('auto').executor.name == 'numpy'\n"
        "assert cleave.__version__\n",
    )


def test_a_device_can_be_emulated_without_torch() -> None:
    _run_without(
        TRAINING_ONLY,
        "import numpy as np, cleave\n"
        "from cleave.arrays import Buffer, DType, empty\n"
        "from cleave.fleet.fleet import Side\n"
        "fleet = cleave.emulated(2)\n"
        "ones = fleet.operand(Buffer(np.ones((3, 3), np.float32), DType.FP32))\n"
        "out = fleet.submit(Side(ones), Side(ones), empty(3, 3, DType.FP32)).result()\n"
        "assert (out.array == 3).all()\n",
    )


def test_pure_rooms_run_without_numpy() -> None:
    pure = [m for m in MODULES if m.startswith(PURE) and not m.startswith("cleave.planner")]
    _run_without(("numpy", *TRAINING_ONLY), f"import {', '.join(pure)}\n")


def test_the_command_line_starts_without_loading_torch() -> None:
    _run_without(
        (),
        "import cleave, cleave_cli.main\n"
        "heavy = {'torch', 'transformers', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
    )
