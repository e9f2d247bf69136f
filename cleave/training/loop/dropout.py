"""Dropout that depends only on the seed, the step, the sequence and the module.

Resumed runs, repeated steps and runs on several servers therefore drop the same values as an
uninterrupted run on one server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Chance:
    """Seeds for the dropout in a model's passes.

    `rows` contains one string for each sequence of the current pass. The sequence's seeds are
    derived from this string. Between passes, `rows` is empty.
    """

    seed: int
    rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> Self:
        """Replace a model's dropout modules with `SeededDropout` and return their shared seeds."""
        chance = cls(seed)
        for parent_name, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout and child.p:
                    drops = SeededDropout(child.p, chance, f"{parent_name}.{name}")
                    setattr(parent, name, drops.train(child.training))
        return chance

    @contextmanager
    def of_pass(self, step: int, first: int, count: int) -> Iterator[None]:
        """Seed dropout and torch's random number generator for the pass in a `with` block.

        The pass computes `count` sequences of the step, starting at index `first`.
        """
        self.rows = tuple(f"{self.seed} {step} {first + row}" for row in range(count))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed_of(f"{self.seed} {step} {first}"))
                yield
        finally:
            self.rows = ()


class SeededDropout(nn.Dropout):
    """Dropout with a separately seeded random number generator for each sequence.

    `chance` contains the current pass's seeds. Differently named modules drop different values.
    """

    def __init__(self, p: float, chance: Chance, name: str) -> None:
        super().__init__(p)
        self._chance = chance
        self._name = name

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to `input`, with separate random numbers for each sequence of the pass.

        Between passes, or if the first dimension of `input` is not a multiple of the number of
        sequences, use torch's random number generator instead.
        """
        rows = self._chance.rows
        if not (self.training and rows) or input.shape[0] % len(rows):
            return super().forward(input)
        kept = torch.empty((len(rows), input.numel() // len(rows)), dtype=input.dtype)
        generator = torch.Generator()
        for row, values in zip(rows, kept, strict=True):
            generator.manual_seed(_seed_of(f"{row} {self._name}"))
            values.bernoulli_(1 - self.p, generator=generator)
        return input * (kept / (1 - self.p)).view(input.shape).to(input.device)


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
