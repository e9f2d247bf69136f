"""The two protocol documents state what the code does: every limit, message, field and default."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cleave.arrays import DType
from cleave.coding import decode as decode_array
from cleave.device.session import least_wait_s
from cleave.protocol import features, limits
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Bye, ByeCode, Error, ErrorCode, Put, Role, RunGraph
from cleave.server.jobs.jobs import JobState
from cleave.training.loop import records
from cleave.training.loop.job import JobSpec
from tests.protocol import session_example
from tests.protocol.vectors import HAS_PAYLOAD, TYPES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [(DOCS / name).read_text(encoding="utf-8") for name in ("protocol.md", "operator-api.md")]
DOCUMENT = "\n".join(PAGES)


def _section(heading: str) -> str:
    """The text under a heading, to the next one of any level."""
    begin = DOCUMENT.index(f"\n{heading}\n") + len(heading) + 2
    following = re.search(r"^#+ ", DOCUMENT[begin:], re.MULTILINE)
    return DOCUMENT[begin : begin + following.start()] if following else DOCUMENT[begin:]


def _rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables in a text, by the name in their first cell."""
    rows = {}
    for line in text.splitlines():
        found = re.match(r"\| \[?`(\w+)`.*?\|(.*)\|$", line)
        if found:
            rows[found[1]] = [cell.strip() for cell in found[2].split("|")]
    return rows


def _default(field: Any) -> str:
    """A field's default as the document writes it."""
    if (
        field.name == "payload"
        or field.metadata.get("required")
        or (field.default is MISSING and field.default_factory is MISSING)
    ):
        return "required"
    value = field.default_factory() if field.default is MISSING else field.default
    if isinstance(value, str):
        return f'"{value}"'
    return "[]" if value == () else str(value.value if isinstance(value, Enum) else value)


def test_every_limit_is_stated_with_its_value() -> None:
    stated = {name: int(cells[0]) for name, cells in _rows(_section("## Limits")).items()}
    assert stated == {name: getattr(limits, name) for name in dir(limits) if name.isupper()}


def test_every_message_is_listed() -> None:
    listed = _rows(_section("## Messages"))
    assert set(listed) == set(TYPES)
    for name, cells in listed.items():
        assert (cells[1] == "yes") == (name in HAS_PAYLOAD)


@pytest.mark.parametrize("name", TYPES)
def test_every_field_is_documented_with_its_default(name: str) -> None:
    section = _section(f"### `{name}`").split("\n| Code |")[0]
    stated = {field: cells[1] for field, cells in _rows(section).items()}
    assert stated == {field.name: _default(field) for field in fields(TYPES[name])}


def test_every_value_of_the_enums_is_named() -> None:
    assert {code.value for code in ErrorCode} == set(
        _rows(_section("### `error`").split("| Code |")[1])
    )
    codes = {code.value for code in ByeCode} - {""}
    assert codes == set(_rows(_section("### `bye`").split("| Code |")[1]))
    hello = _section("### `hello`")
    assert all(f"`{role.value}`" in hello for role in Role)
    operators = _section("## Requests")
    assert all(f"`{state.value}`" in operators for state in JobState)


def test_every_setting_of_a_job_is_documented_with_its_default() -> None:
    stated = {name: cells[1] for name, cells in _rows(_section("## Job settings")).items()}
    assert stated == {field.name: _default(field) for field in fields(JobSpec)}


@pytest.mark.parametrize(
    "record",
    [
        records.StepRecord,
        records.EvalRecord,
        records.SampleRecord,
        records.NoteRecord,
        records.PresenceRecord,
        records.DoneRecord,
    ],
)
def test_every_key_of_a_record_is_documented(record: Any) -> None:
    (keys,) = _rows(_section("## Records"))[record.EVENT]
    assert set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", keys))) == {
        field.name for field in fields(record)
    }


_NOTE = re.compile(r"array of .*|map of .*|\".*|bin 8.*|1\.0 =.*")


def test_the_worked_examples_are_right() -> None:
    put = Put(1, 1, 2, "bf16", bytes.fromhex("803f00c0"))
    run = RunGraph(1, 3, (1, 2), (4,), (2048,), 65536)
    blocks = DOCUMENT.split("```hex\n")[1:]
    for data_of, block in zip((encode(put), encode(run)), blocks, strict=True):
        data = bytes.fromhex(_NOTE.sub("", block.split("```")[0]))
        assert data == b"".join(data_of)
        assert f"{len(data)} bytes:" in DOCUMENT


def test_the_coded_array_is_right() -> None:
    block = _section("## Coding").split("```\n")[1]
    data = b"".join(bytes.fromhex(line[:32]) for line in block.splitlines())
    assert decode_array(data, DType.BF16, 4) == bytes.fromhex("803f00c0")


def test_the_session_in_bytes_is_what_ps_and_device_say() -> None:
    """From hello to bye: the very bytes, made anew."""
    block = _section("## A session in bytes").split("```\n")[1]
    assert block == session_example.shown()
    kinds = [decode(data).TYPE for _, data in session_example.session()]
    assert kinds[0] == "hello"
    assert kinds[-2:] == ["drain", "bye"]


def test_every_feature_is_named_with_its_messages() -> None:
    listed = _rows(_section("### How the protocol grows"))
    assert set(listed) == set(features.ALL)
    for name, (cells,) in listed.items():
        for kind, cls in TYPES.items():
            here = cls.FEATURE is not None and cls.FEATURE.value == name
            assert (f"[`{kind}`]" in cells) == here


def test_the_table_of_coming_back_is_what_clients_do() -> None:
    """Every code stands in one row, in the row of its kind."""
    table = DOCUMENT.split("| The session ended with")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    endings: list[Bye | Error] = [Bye(code=code) for code in ByeCode if code]
    endings += [Error(code, "") for code in ErrorCode]
    for end in endings:
        own = [says for what, says in rows if f"`{end.TYPE}`:" in what and f"`{end.code}`" in what]
        assert len(own) == 1, end
        comes_back = "after `retry_after_s` and back-off" in own[0]
        assert comes_back == (least_wait_s(end) is not None), end


def test_rules_have_unique_numbers() -> None:
    numbers = re.findall(r"^- \*\*([A-Z]\d+)\*\*", DOCUMENT, re.MULTILINE)
    assert len(numbers) > 100
    assert len(numbers) == len(set(numbers))
