"""Check that an offloaded model matches a plain one after changes between passes.

    python -m benchmarks.model_changes [--sequences 5000] [--seed 0] [--methods tiles,stages]
        [--emulated]

Each sequence makes a small Llama, half of them with two adapters. It applies up to eight changes of
`tests.training.model_changes` to it and to a plain copy: freezing, changes in place and through
`.data`, load_state_dict, adapters switched, scaled, merged and disabled, autocast, dtypes, copies,
hooks, wrappers. After each change, loss and all gradients must equal plain PyTorch's. Two `cleave
join` processes do the work, or, with `--emulated`, two emulated devices, which is faster.

Prints a line for each sequence that differs, and the counts. Ends with 1 if one differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from contextlib import ExitStack

from rich.progress import track

import cleave
from tests.integration.processes import started
from tests.training.model_changes import Subject, check, drawn, made, on_fleet


def main() -> None:
    """Try sequences and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    parser.add_argument("--methods", default="tiles,stages")
    parser.add_argument("--emulated", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # changes may trigger warnings about conversions
    wrong = changes = 0
    methods = given.methods.split(",")
    with ExitStack() as stack:
        if given.emulated:
            fleet = stack.enter_context(cleave.emulated(2, seed=1))
        else:
            server = stack.enter_context(cleave.serve())
            for _ in range(2):
                stack.enter_context(started("join", server.url))
            fleet = server.fleet
            fleet.wait_for(2)
        seeds = range(given.seed, given.seed + given.sequences)
        for seed in track(seeds, description="sequences", disable=not sys.stderr.isatty()):
            adapted, sequence = drawn(seed)
            changes += len(sequence)
            for method in methods:
                plain = made(adapted=adapted)
                other = Subject(copy.deepcopy(plain.model))
                try:
                    with on_fleet(other, fleet, method):
                        check(sequence, plain, other)
                except (AssertionError, cleave.CleaveError) as error:
                    wrong += 1
                    print(f"sequence {seed} by {method}: {error}", flush=True)
    print(
        f"{given.sequences} sequences of {changes} changes by {' and '.join(methods)}: "
        f"{wrong} differ from plain PyTorch"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
