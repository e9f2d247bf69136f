"""Nothing that is read, from a file or a peer, can run code: no pickle, in whatever disguise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for top in ("cleave", "cleave_cli", "emulator", "profiles", "benchmarks")
    for path in (ROOT / top).rglob("*.py")
)
UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BUILT_IN = {"eval", "exec"}


def _faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {n.name}" for n in names if n.name.split(".")[0] in UNPICKLES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNPICKLES:
                yield f"from {module} import"
            case ast.ImportFrom(module="torch", names=names):
                yield from ("from torch import load" for n in names if n.name == "load")
            case ast.Call(func=ast.Name(id=str(name))) if name in BUILT_IN:
                yield f"{name}()"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=k):
                if not _states(k, "weights_only", True):
                    yield "torch.load without weights_only=True"
            case ast.Call(keywords=k) if any(
                _states(k, word, True)
                for word in ("allow_pickle", "trust_remote_code", "allow_dangerous_deserialization")
            ):
                yield f"line {node.lineno} allows code in data"


def _states(keywords: list[ast.keyword], name: str, value: bool) -> bool:
    return any(
        word.arg == name and isinstance(word.value, ast.Constant) and word.value.value is value
        for word in keywords
    )


def test_nothing_is_unpickled() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in FILES
        for fault in _faults(ast.parse(path.read_text(encoding="utf-8"), path))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "eval('1')",
    ],
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert list(_faults(ast.parse(code)))


def test_the_search_lets_safe_loading_be() -> None:
    assert not list(_faults(ast.parse("torch.load('x', weights_only=True)\nmodel.eval()")))
