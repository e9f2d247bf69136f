"""What several commands share."""

from __future__ import annotations

import importlib.util

from cleave.errors import UsageError


def need_train_extra(command: str) -> None:
    """Say how to get what training needs, where it is not installed.

    Raises:
        UsageError: when torch or transformers is missing.
    """
    missing = [
        name
        for name in ("torch", "transformers", "tokenizers", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UsageError(
            f"{command} needs {', '.join(missing)}, which is not installed here; "
            f"install it with: pip install 'cleave[train]'"
        )
