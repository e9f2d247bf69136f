"""Android's public classes, as the type stubs of `chaquopy-stubs-android` list them.

These are generated from Android itself. They say of every class its bases, fields and methods, with
the types of parameters; what they do not say: whether a result is an int or a long, what is an
interface, what is protected, and the values of constants.
"""

from __future__ import annotations

import ast
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

_WORDS: Final = {
    "java.jint": "I",
    "java.jlong": "J",
    "java.jshort": "S",
    "java.jbyte": "B",
    "java.jchar": "C",
    "java.jfloat": "F",
    "java.jdouble": "D",
    "java.jboolean": "Z",
    "bool": "Z",
    "str": "Ljava/lang/String;",
    "typing.Type": "Ljava/lang/Class;",
    "float": "float",
    "int": "int",
    "None": "V",
}
"""What stands for a type of Java, as a class file writes it; `int` and `float` for several."""

_ARRAYS: Final = {
    f"JavaArrayJ{name}": f"[{letter}"
    for name, letter in zip(
        ("Int", "Long", "Short", "Byte", "Char", "Float", "Double", "Boolean"),
        "IJSBCFDZ",
        strict=True,
    )
}

INEXACT: Final = {"int": frozenset("IJSB"), "float": frozenset("FD")}
"""What a result or a field may be where the stubs say just this."""


@dataclass(frozen=True)
class Method:
    """One overload: its parameters' types as class files write them, and its result's."""

    parameters: tuple[str, ...]
    result: str
    static: bool


@dataclass
class Class:
    """A class or interface; names as class files write them, `android/os/Build$VERSION`."""

    name: str
    bases: list[str] = field(default_factory=list)
    fields: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Type, and whether it is static."""
    methods: dict[str, list[Method]] = field(default_factory=dict)


class AndroidClasses:
    """All of them, read from the wheel as they are asked for."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self._modules: dict[str, _Module] = {}

    def find(self, name: str) -> Class | None:
        """A class by its name in class files; None where Android has none."""
        package = name.rpartition("/")[0]
        module = self._module(package)
        return module.classes.get(name) if module else None

    def with_bases(self, name: str) -> list[Class]:
        """A class and all that it inherits from, nearest first."""
        found = self.find(name)
        if found is None:
            return []
        inherited = [found]
        for base in found.bases:
            inherited += self.with_bases(base)
        return inherited

    def _module(self, package: str) -> _Module | None:
        if package not in self._modules:
            top, *rest = package.split("/")
            path = "/".join([f"{top}-stubs", *rest, "__init__.pyi"])
            try:
                text = self._archive.read(path).decode()
            except KeyError:
                return None
            self._modules[package] = _Module(package, ast.parse(text))
        return self._modules[package]


class _Module:
    """One package."""

    def __init__(self, package: str, tree: ast.Module) -> None:
        self._package = package
        self._tree = tree

    @cached_property
    def classes(self) -> dict[str, Class]:
        found: dict[str, Class] = {}
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                self._read(node, f"{self._package}/{node.name}", found)
        return found

    @cached_property
    def _bounds(self) -> dict[str, ast.expr | None]:
        """What type variables are bound to."""
        bounds: dict[str, ast.expr | None] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                words = {word.arg: word.value for word in node.value.keywords}
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        bounds[target.id] = words.get("bound")
        return bounds

    @cached_property
    def _nested(self) -> set[str]:
        """Names of all classes in the package, with dots."""
        names: set[str] = set()

        def walk(body: list[ast.stmt], prefix: str) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef):
                    names.add(prefix + node.name)
                    walk(node.body, f"{prefix}{node.name}.")

        walk(self._tree.body, "")
        return names

    def _read(self, node: ast.ClassDef, name: str, found: dict[str, Class]) -> None:
        read = found[name] = Class(name)
        read.bases = [
            self._type(base)[1:-1] for base in node.bases if not _is_generic(ast.unparse(base))
        ]
        for inner in node.body:
            if isinstance(inner, ast.ClassDef):
                self._read(inner, f"{name}${inner.name}", found)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                static = ast.unparse(inner.annotation).startswith("typing.ClassVar")
                kind = inner.annotation
                if static and isinstance(kind, ast.Subscript):
                    kind = kind.slice
                read.fields[inner.target.id] = (self._type(kind), static)
            elif isinstance(inner, ast.FunctionDef):
                self._read_method(inner, read)

    def _read_method(self, node: ast.FunctionDef, read: Class) -> None:
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        static = "staticmethod" in decorators
        given = [*node.args.posonlyargs, *node.args.args][0 if static else 1 :]
        parameters = [self._type(argument.annotation) for argument in given]
        if node.args.vararg is not None:
            parameters.append("[" + self._type(node.args.vararg.annotation))
        result = "V" if node.name == "__init__" else self._type(node.returns)
        name = "<init>" if node.name == "__init__" else node.name
        read.methods.setdefault(name, []).append(Method(tuple(parameters), result, static))

    def _type(self, node: ast.expr | None) -> str:
        """A type as class files write it."""
        if node is None:
            raise ValueError(f"something in {self._package} has no type")
        parts = _alternatives(node)
        plain = [part for part in parts if ast.unparse(part) != "None"] or parts
        # `int | java.jint | java.lang.Integer`: the one in the middle tells.
        exact = [part for part in plain if ast.unparse(part).startswith("java.j")]
        exact = [part for part in exact if ast.unparse(part) in _WORDS]
        return self._one(exact[0] if exact else plain[0])

    def _one(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value)
            if outer == "java.chaquopy.JavaArray":
                return "[" + self._type(node.slice)
            node = node.value
        text = ast.unparse(node)
        if text in _WORDS:
            return _WORDS[text]
        if text.startswith("java.chaquopy.JavaArrayJ"):
            return _ARRAYS[text.rpartition(".")[2]]
        if text in self._bounds:
            bound = self._bounds[text]
            return "Ljava/lang/Object;" if bound is None else self._type(bound)
        if text in self._nested:
            return f"L{self._package}/{text.replace('.', '$')};"
        return "L" + _qualified(text) + ";"


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]


def _is_generic(base: str) -> bool:
    return base.startswith(("typing.", "java.chaquopy."))


def _qualified(text: str) -> str:
    """`android.view.View.OnClickListener` as class files write it: packages are in lower case."""
    words = text.split(".")
    first = next((i for i, word in enumerate(words) if word[:1].isupper()), len(words) - 1)
    return "/".join([*words[:first], "$".join(words[first:])])
