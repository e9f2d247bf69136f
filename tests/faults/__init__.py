"""Faults on purpose: a network that loses and spoils messages, and means to see what came of it.

Used by the chaos test (`tests/integration/test_chaos.py`) and the chaos benchmark
(`benchmarks/chaos.py`).
"""
