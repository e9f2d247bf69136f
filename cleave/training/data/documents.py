"""Read training text from files, folders, data sets and Python's standard library."""

import importlib.util
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cleave.errors import UsageError, not_installed, to_install
from cleave.training.data.conversations import FIELDS, FIELDS_TEXT, Document, document_of

# fmt: off
_TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".py", ".pyi", ".c", ".h",
    ".cc", ".cpp", ".hpp", ".cu", ".cs", ".go", ".java", ".js", ".jsx", ".kt", ".lua", ".php",
    ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx",
))
# fmt: on
_SUFFIXES = _TEXT_SUFFIXES | {".jsonl", ".parquet"}
_COMPRESSED = frozenset((".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4"))
_DATASET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Names of files and folders to exclude from the standard library: installed packages, tests, code
# point tables, and files that differ between builds of one Python version.
_NOT_LIBRARY = re.compile(
    r"(site-packages|dist-packages|test|tests|idlelib|lib2to3|encodings|__pycache__|config-.*"
    r"|_sysconfigdata.*)"
)


def read_documents(source: str | None) -> Iterator[Document]:
    """Return an iterator over the non-blank documents of `source`, in a fixed order.

    `source` is one of:

    * None: the source files of Python's standard library, one document per module;
    * a `.jsonl` file: one record per line, with the field "messages", or "prompt" and "completion",
      or "text", or "content"; see `cleave.training.data.conversations`;
    * a `.json` file: a list of records with these fields, or one record per line;
    * a `.parquet` file: one record per row, with the fields as columns;
    * any other file: one document in UTF-8;
    * a folder: all text, `.jsonl` and `.parquet` files in the folder and its subfolders, sorted by
      path. Hidden files and folders, and text files that are not UTF-8, are skipped;
    * otherwise, the name of a data set. Its "train" split is streamed with the package `datasets`.

    Raises:
        UsageError: if the source does not exist, or if the data set cannot be loaded. The iterator
            raises UsageError if the source cannot be read or has no documents.
    """
    if source is None:
        return _nonempty(_standard_library(), "Python's standard library")
    path = _path_of(source)
    if path is None:
        return _nonempty(_read_dataset(source), repr(source))
    return _nonempty(_read_folder(path) if path.is_dir() else _read_file(path), repr(source))


def check_source(source: str) -> None:
    """Raise UsageError if a source is neither an existing path nor a valid data set name.

    The data set itself is not looked up, but a name requires the package `datasets`.
    """
    if _path_of(source) is None and importlib.util.find_spec("datasets") is None:
        raise _no_data_sets(source)


def _path_of(source: str) -> Path | None:
    """Return the path of a source, or None if the source may be the name of a data set."""
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise _unreadable(path, error) from error
    if _DATASET_NAME.fullmatch(source) and path.suffix.lower() not in _SUFFIXES | {".json"}:
        return None
    where = "" if path.is_absolute() else f" in {str(Path.cwd())!r}"
    raise UsageError(f"there is no file or folder {source!r}{where}; check the path")


def _nonempty(documents: Iterable[Document], name: str) -> Iterator[Document]:
    found = False
    for document in documents:
        if not isinstance(document, str) or (document and not document.isspace()):
            found = True
            yield document
    if not found:
        raise UsageError(f"there is no text in {name}; use a source with text")


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root, lambda name: _NOT_LIBRARY.fullmatch(name) is None):
        if path.suffix == ".py" and (text := _decoded(path)) is not None:
            yield text


def _read_folder(folder: Path) -> Iterator[Document]:
    paths = _walk(folder, lambda name: not name.startswith("."))
    chosen = [path for path in paths if path.suffix.lower() in _SUFFIXES]
    if not chosen:
        raise UsageError(
            f"the folder {str(folder)!r} has no text files (.txt, .md, .py, .jsonl, .parquet and "
            "the like); use a folder with text files"
        )
    for path in chosen:
        if path.suffix.lower() in _TEXT_SUFFIXES:
            if (text := _decoded(path)) is not None:
                yield text
        else:
            yield from _read_file(path)


def _walk(root: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Return the sorted paths of all files below `root`; skip names that are not `wanted`."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    found = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = filter(wanted, subfolders)
        found += [Path(folder, name) for name in files if wanted(name)]
    return sorted(found)


def _read_file(path: Path) -> Iterator[Document]:
    match path.suffix.lower():
        case ".jsonl":
            yield from _read_jsonl(path)
        case ".json":
            yield from _read_json(path)
        case ".parquet":
            yield from _read_parquet(path)
        case _:
            if (text := _decoded(path)) is None:
                raise _not_utf8(path)
            yield text


def _decoded(path: Path) -> str | None:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_jsonl(path: Path) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                where = f"line {number} of {str(path)!r}"
                record = _parsed(line.rstrip("\r\n"), where, "each line must be a JSON object")
                yield _document_of(where, record)
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_json(path: Path) -> Iterator[Document]:
    if (text := _decoded(path)) is None:
        raise _not_utf8(path)
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    records = _parsed(text, repr(str(path)), "write a list of objects, or one object per line")
    for number, record in enumerate(records, start=1):
        yield _document_of(f"item {number} of {str(path)!r}", record)


def _parsed(text: str, where: str, advice: str) -> Any:
    """Parse JSON. On failure, raise UsageError with the place `where`, the error and `advice`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            # In one line, the decoder's own line number would be confused with that of the file.
            column = f"column {error.colno}"
            line = f"line {error.lineno}, " if "\n" in text else ""
            what = f"{error.msg} at {line}{column}"
        raise UsageError(f"{where} is not valid JSON ({what}); {advice}") from None


def _document_of(where: str, record: Any) -> Document:
    if not isinstance(record, dict):
        raise UsageError(f'{where} is not a JSON object; write it as {{"text": ...}}')
    try:
        return document_of(record, where)
    except UsageError as error:
        raise UsageError(f"{where} {error}") from None


def _read_parquet(path: Path) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise not_installed(f"Reading {str(path)!r}", "pyarrow", "train") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            fields = [name for f in FIELDS if set(f) <= set(columns) for name in f]
            if not fields:
                raise UsageError(
                    f"{str(path)!r} has none of the columns {FIELDS_TEXT}; it has "
                    f"{', '.join(map(repr, columns)) or 'none'}; rename the column with the text "
                    "to one of the supported names"
                )
            chosen = fields + [name for name in ("tools",) if name in columns]
            row = 0
            for rows in file.iter_batches(columns=chosen, batch_size=1024):
                for record in rows.to_pylist(maps_as_pydicts="strict"):
                    row += 1
                    yield from _documents_of_row(f"row {row} of {str(path)!r}", record)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read as Parquet ({_first_line(error)}); check the file"
        ) from error


def _read_dataset(name: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise _no_data_sets(name) from None
    # Loaders of `datasets` raise exceptions of any class.
    try:
        rows = iter(datasets.load_dataset(name, split="train", streaming=True))
    except Exception as error:
        raise _unreachable(name, error) from error
    return _documents_of_rows(rows, name)


def _no_data_sets(name: str) -> UsageError:
    return UsageError(
        f"there is no file or folder {name!r}; check the path, or, if it is the name of a data "
        f"set, {to_install('datasets')}"
    )


def _documents_of_row(where: str, row: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the document of a table row, or nothing if all fields of the document are null.

    In a table, null stands for a missing field, because all rows have the same columns.
    """
    held = [row[name] for names in FIELDS if set(names) <= row.keys() for name in names]
    if not held or any(value is not None for value in held):
        yield _document_of(where, {name: _without_nulls(value) for name, value in row.items()})


def _without_nulls(value: Any) -> Any:
    """Remove null fields of objects at any depth, but keep the null contents of messages."""
    match value:
        case dict():
            held = value.items()
            kept = "content" if "role" in value else None
            return {n: _without_nulls(each) for n, each in held if each is not None or n == kept}
        case list():
            return [_without_nulls(each) for each in value]
    return value


def _documents_of_rows(rows: Iterator[dict[str, Any]], name: str) -> Iterator[Document]:
    for number in itertools.count(1):
        try:
            row = next(rows, None)
        except Exception as error:
            raise _unreachable(name, error) from error
        if row is None:
            return
        yield from _documents_of_row(f"row {number} of the data set {name!r}", row)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{str(path)!r} cannot be read ({error.strerror}); check the path and its permissions"
    )


def _not_utf8(path: Path) -> UsageError:
    if path.suffix.lower() in _COMPRESSED:
        return UsageError(f"{str(path)!r} is compressed; decompress it, and use the result")
    return UsageError(f"{str(path)!r} is not UTF-8 text; convert it, or use another file")


def _unreachable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"there is no file or folder {name!r}, and it cannot be loaded as a data set "
        f"({_first_line(error)}); check the name and the network, or use a local file"
    )
