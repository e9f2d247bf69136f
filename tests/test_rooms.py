"""The rooms: what each may import, no circles, and what a device's process does not need."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("cleave", "cleave_cli", "emulator", "profiles", "simulator")


def _table() -> dict[str, set[str]]:
    """Return what each room may import, as the table in docs/architecture.md says."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (.+) \|$", text.split("\n## ")[1], re.M)
    rooms = {room for room, _ in rows}
    assert len(rooms) == len(rows) > 20
    named = {room: set(re.findall(r"`([\w.]+)`", may)) for room, may in rows}
    assert all(may <= rooms for may in named.values())
    return {r: rooms - {r} if may == "every other room" else named[r] for r, may in rows}


MAY_IMPORT = _table()
PURE = (
    "cleave.gemm",
    "cleave.errors",
    "cleave.planner",
    "cleave.protocol",
    "cleave.workload.registry",
    "cleave.workload.stages",
    "cleave.workload.step",
    "cleave.scheduler.tiles.device_memory",
    "cleave.scheduler.events",
    "cleave.scheduler.tiles.gemm_job",
    "cleave.scheduler.tiles.load",
    "cleave.scheduler.tiles.reassignment",
    "cleave.scheduler.tiles.scheduler",
    "cleave.scheduler.tiles.tasks",
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
        if ".".join(parts[:length]) in MAY_IMPORT:
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
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if name in MODULES]
            yield from ((name, node.lineno) for name in modules)
            if len(modules) < len(names) or node.module == "cleave":  # it takes more than modules
                yield node.module, node.lineno


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


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), MODULES[module])


@cache
def _imports_of(module: str) -> list[tuple[str, int]]:
    return list(_imports(_parse(module)))


def test_every_module_has_a_room() -> None:
    homeless = [m for m in MODULES if _room(m) is None and m != "cleave"]
    assert not homeless, f"give these a room in the table of docs/architecture.md: {homeless}"


def test_rooms_import_only_what_they_may() -> None:
    wrong = [fault for module in MODULES if module != "cleave" for fault in _not_allowed(module)]
    assert not wrong, "\n".join(wrong)


def _not_allowed(module: str) -> Iterator[str]:
    """Yield the imports of a module that its room may not have."""
    room = _room(module)
    assert room is not None
    for target, line in _imports_of(module):
        if target.split(".")[0] not in TOP:
            continue
        if target == "cleave":  # the facade: the command line shows its version
            if room != "cleave_cli" and not _names_only_modules(module, line):
                yield f"{module}, line {line}: the facade `cleave`"
            continue
        other = _room(target)
        assert other is not None, f"{module} imports {target}, which has no room"
        if other != room and other not in MAY_IMPORT[room]:
            yield f"{module}, line {line}: {target}"


def test_rooms_are_in_no_circle() -> None:
    assert not _circles(MAY_IMPORT)


def test_files_are_in_no_circle() -> None:
    """Not even by imports inside functions, or for types alone."""
    imports = {
        module: {target for target, _ in _imports_of(module) if target in MODULES} - {module}
        for module in MODULES
        if module != "cleave"
    }
    assert not _circles(imports)


def _circles(imports: dict[str, set[str]]) -> set[str]:
    """What is left when everything whose imports are all gone is taken away, again and again."""
    left = {module: targets & imports.keys() for module, targets in imports.items()}
    while gone := {module for module, targets in left.items() if not targets}:
        left = {m: targets - gone for m, targets in left.items() if m not in gone}
    return set(left)


def _names_only_modules(module: str, line: int) -> bool:
    """Whether a `from cleave import x, y` there imports modules, not what the facade offers."""
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.ImportFrom) and node.lineno == line:
            return all(f"{node.module}.{alias.name}" in MODULES for alias in node.names)
    return False


def test_the_facade_imports_nothing_that_takes_time() -> None:
    tree = _parse("cleave")
    allowed = _only_for_types(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            allowed |= set(ast.walk(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in allowed:
            names = {target.split(".")[0] for target, _ in _imports(node)}
            assert names <= {"__future__", "logging", "typing"}


def test_pure_rooms_know_no_arrays() -> None:
    found = []
    for module in MODULES:
        heavy = {"numpy", "torch", "scipy", "transformers"}
        if module.startswith("cleave.planner"):
            heavy.remove("numpy")  # it calculates with arrays of rates; matrices it never sees
        if module.startswith(PURE):
            found += [
                f"{module}, line {line}: {target}"
                for target, line in _imports_of(module)
                if target.split(".")[0] in heavy
            ]
    assert not found, "\n".join(found)


def _run_without(blocked: tuple[str, ...], code: str) -> None:
    """Run code in a new interpreter in which the blocked packages are not installed."""
    guard = f"""
import sys

import pytest
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


DEVICE = (
    "import cleave.device.agent, cleave.device.session, cleave.device.credentials\n"
    "import cleave.device.compute_thread, cleave.device.owner, cleave_cli.commands.join\n"
)


def test_a_device_imports_nothing_of_the_server() -> None:
    server = ("scheduler", "fleet", "server", "planner", "verify", "training", "energy")
    rooms = tuple(f"cleave.{room}" for room in server)
    _run_without(
        TRAINING_ONLY,
        DEVICE
        + "import sys\n"
        + f"found = [m for m in sys.modules if m.startswith({rooms!r}) or 'emulator' in m]\n"
        + "assert not found, found\n",
    )


@pytest.mark.slow
def test_what_starts_loads_no_more_than_it_needs() -> None:
    """The command line loads no torch, and a served job no emulator, simulator or cluster."""
    _run_without(
        (),
        "import cleave, cleave_cli.main\n"
        "heavy = {'torch', 'transformers', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import cleave_cli.commands.serve, cleave.server.app, cleave.server.fleet_server\n"
        "import cleave.training.loop.start, cleave.training.loop.trainer\n"
        "others = ('emulator', 'simulator', 'ray')\n"
        "found = [m for m in sys.modules if m.split('.')[0] in others]\n"
        "found += [m for m in sys.modules if m.startswith('cleave.cluster')]\n"
        "assert not found, found\n",
    )


ASKS_FOR_RAY = {
    "cleave.cluster.endpoint_calls",
    "cleave.cluster.endpoints",
    "cleave.cluster.ray_train",
    "cleave.ray_cluster",
}


def test_ray_is_loaded_by_what_asks_for_it_alone() -> None:
    wrong = []
    for module in MODULES:
        tree = _parse(module)
        lines = {line for name, line in _imports_of(module) if name.split(".")[0] == "ray"}
        if lines and module not in ASKS_FOR_RAY:
            wrong.append(f"{module} imports Ray")
        if lines & {node.lineno for node in tree.body}:
            wrong.append(f"{module} imports Ray before it is asked for")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_device_needs_nothing_that_only_training_needs() -> None:
    _run_without(
        TRAINING_ONLY,
        DEVICE
        + "import cleave, cleave.machine.backends, cleave_cli.main\n"
        + "import cleave.planner.tiles.planner, cleave.workload.step\n"
        + "import cleave.scheduler.sessions.session_manager\n"
        + "import emulator.virtual, cleave.server.fleet_server\n"
        + "assert cleave.machine.backends.choose('auto').backend.name == 'numpy'\n"
        + "assert cleave.__version__\n"
        + "import numpy as np\n"
        + "from cleave.arrays import Buffer, DType, empty\n"
        + "from cleave.fleet.fleet import Side\n"
        + "fleet = cleave.emulated(2)\n"
        + "ones = fleet.operand(Buffer(np.ones((3, 3), np.float32), DType.FP32))\n"
        + "out = fleet.submit(Side(ones), Side(ones), empty(3, 3, DType.FP32)).result()\n"
        + "assert (out.array == 3).all()\n",
    )


def test_pure_rooms_run_without_numpy() -> None:
    pure = [m for m in MODULES if m.startswith(PURE) and not m.startswith("cleave.planner")]
    _run_without(("numpy", *TRAINING_ONLY), f"import {', '.join(pure)}\n")
