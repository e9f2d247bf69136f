"""Dropout that depends on the seed, the step and the sequence only.

So resumed runs, repeated steps and runs over several servers drop the same values.
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
    """Seeds the random draws of a model's passes.

    Attributes:
        seed: the seed of the run.
        rows: seed texts of the current pass's sequences; empty between passes.
    """

    seed: int
    rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> Self:
        """Replace a model's dropout modules by ones that are seeded per sequence."""
        chance = cls(seed)
        for parent_name, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout and child.p:
                    drops = SeededDropout(child.p, chance, f"{parent_name}.{name}")
                    setattr(parent, name, drops.train(child.training))
        return chance

    @contextmanager
    def of_pass(self, step: int, first: int, count: int) -> Iterator[None]:
        """Return a context that seeds a pass, forward and backward; restores torch's generator.

        Args:
            step: number of steps done before this one.
            first: number of the first sequence within the step.
            count: number of sequences.
        """
        self.rows = tuple(f"{self.seed} {step} {first + row}" for row in range(count))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed_of(f"{self.seed} {step} {first}"))
                yield
        finally:
            self.rows = ()


class SeededDropout(nn.Dropout):
    """Dropout that draws each sequence's values from its own generator.

    Args:
        p: the probability that a value is dropped.
        chance: seeds of the current pass's sequences.
        name: name of the module, so that no two modules drop alike.
    """

    def __init__(self, p: float, chance: Chance, name: str) -> None:
        super().__init__(p)
        self._chance = chance
        self._name = name

    def forward(self, input: Tensor) -> Tensor:
        """Drop values; use torch's generator if the rows cannot be divided among the sequences."""
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
