"""The recipe for a classroom, with browsers: scaled down, on a server and with real pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.integration.processes import PATIENCE_S, own_address, page_address, server, started
from tests.test_recipes import FOLDER, SMALL, prepared
from tests.web.test_join import await_count, join, visit

pytestmark = [pytest.mark.usefixtures("pages"), pytest.mark.nightly]


def test_browsers_with_one_code_train_by_stages(browser: Browser, tmp_path: Path) -> None:
    """The code is that of `cleave pair --own --uses`. Both pages compute layers."""
    ours = prepared(tmp_path, "classroom")
    with server(tmp_path) as place:
        url = page_address(own_address(place, "--uses", "2"))
        with visit(browser) as first, visit(browser) as second:
            for page in (first, second):
                join(page, url)
            command = ("train", "--config", str(FOLDER / "classroom.toml"), *ours, *SMALL)
            options = ("--sample-every", "1", "--name", "class", "--json")
            to = ("--server", place["operator_url"])
            with started(*command, *options, *to, cwd=tmp_path) as (trainer, lines):
                seen = list(lines)
                assert trainer.wait(PATIENCE_S) == 0
            for page in (first, second):
                await_count(page, "graphs", 2)
    steps = [record for record in seen if record["event"] == "step"]
    assert [step["method"] for step in steps] == ["stages"] * 2
    assert len([record for record in seen if record["event"] == "sample"]) == 2
