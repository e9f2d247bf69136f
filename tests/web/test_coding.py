"""A browser and coded arrays: the very same losses, fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.integration.processes import PATIENCE_S, server, started, training
from tests.web.test_join import forced, join, visit
from tests.web.test_stages import by_stages, own_page

pytestmark = [pytest.mark.usefixtures("pages"), pytest.mark.slow]

STEPS = 2


@pytest.mark.parametrize("method", ["tiles", "stages"])
def test_losses_are_the_same_to_the_bit(
    browser: Browser, corpus_file: Path, tmp_path: Path, method: str
) -> None:
    by_tiles = training(corpus_file, STEPS)
    command = by_tiles if method == "tiles" else by_stages(corpus_file)

    def steps(coding: str) -> list[dict[str, Any]]:
        folder = tmp_path / coding
        folder.mkdir()
        with server(folder, "--coding", coding) as place, visit(browser) as page:
            join(page, forced(own_page(place), "wasm"))
            with started(*command, "--server", place["operator_url"]) as (trainer, lines):
                found = [line for line in lines if line["event"] == "step"]
                assert trainer.wait(PATIENCE_S) == 0
        return found

    plain, coded = steps("off"), steps("on")
    assert len(plain) >= STEPS
    assert [step["loss"] for step in coded] == [step["loss"] for step in plain]
    for step, other in zip(coded, plain, strict=True):
        for way in ("down", "up"):
            assert sum(other["saved"][way].values()) == 0
            assert sum(step["saved"][way].values()) > 0
