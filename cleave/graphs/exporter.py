"""Patches that make torch's ONNX exporter faster without changing the exported graphs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache
from typing import Any, Final

_TABLES: Final = "torch.onnx._internal.exporter._registration"


_RULES: Final = "onnxscript.rewriter._rewrite_rule"


_TYPES: Final = "torch.onnx._internal.fx.passes.type_promotion"


_SIGNATURES: Final = "onnx_ir.schemas"


@contextmanager
def without_repetition() -> Iterator[None]:
    """Return a context manager in which torch's ONNX exporter is about twice as fast.

    The exported graphs are the same. The exporter caches its translation table (which takes 0.25 s
    to build) and the signatures of operations. It tries each rewrite rule only on operations that
    the rule can match. It skips type promotion for operations without a promotion rule. A patch is
    skipped if the installed version of torch or onnxscript does not have the patched function.
    """
    with ExitStack() as changes:
        for module, owner, name, change in (
            (_TABLES, "ONNXRegistry", "from_torchlib", _kept_table),
            (_SIGNATURES, "OpSignature", "from_op_schema", _kept_signatures),
            (_RULES, "RewriteRule", "try_rewrite", _where_it_can_match),
            (_TYPES, "_TypePromotionInterpreter", "run_node", _where_types_matter),
        ):
            changes.enter_context(_changed(module, owner, name, change))
        yield


@contextmanager
def _changed(
    module: str, owner: str, name: str, change: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """Within the context, replace a class attribute, if it exists, with `change(class, value)`."""
    try:
        changed: Any = getattr(importlib.import_module(module), owner)
        made = vars(changed)[name]
    except (ImportError, AttributeError, KeyError):
        yield
        return
    setattr(changed, name, change(changed, made))
    try:
        yield
    finally:
        setattr(changed, name, made)


def _kept_table(tables: Any, made: Any) -> Any:
    def from_torchlib(**version: int) -> Any:
        table = copy(_table(made.__get__(None, tables), **version))
        table.functions = {name: list(found) for name, found in table.functions.items()}
        return table

    return staticmethod(from_torchlib)


@cache
def _table(made: Callable[..., Any], **version: int) -> Any:
    return made(**version)


def _kept_signatures(signatures: Any, made: Any) -> Any:
    kept: dict[Any, Any] = {}

    def from_op_schema(schema: Any) -> Any:
        key = schema.domain, schema.name, schema.since_version
        if key not in kept:
            kept[key] = made.__get__(None, signatures)(schema)
        return kept[key]

    return staticmethod(from_op_schema)


def _where_it_can_match(_: Any, made: Callable[..., Any]) -> Any:
    """Return a `try_rewrite` that skips operations that cannot match the end of a pattern."""
    ends: dict[Any, Any] = {}

    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **how: Any) -> Any:
        if rule not in ends:
            ends[rule] = _last_operation(rule)
        if ends[rule] not in (None, (node.domain, node.op_type)):
            return None
        return made(rule, model, graph, node, **how)

    return try_rewrite


def _last_operation(rule: Any) -> Any:
    """Return the domain and name of a pattern's last operation, or None if it is not fixed."""
    try:
        named = rule._target_pattern.output_nodes[0].op_identifier()
    except (AttributeError, IndexError):
        return None
    return named and named[:2]


def _where_types_matter(_: Any, made: Callable[..., Any]) -> Any:
    def run_node(interpreter: Any, node: Any) -> Any:
        packet = getattr(node.target, "overloadpacket", None)
        known = node.op == "call_function" and packet is not None and "val" in node.meta
        if known and interpreter.type_promotion_table.get_rule(packet) is None:
            return node.meta["val"]
        return made(interpreter, node)

    return run_node
