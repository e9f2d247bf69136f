"""Join URLs that were copied in part are refused before a use of their code is spent."""

from __future__ import annotations

import pytest

from cleave.errors import UsageError
from cleave.transport.join_url import parse_join_url

WHOLE = "http://192.0.2.1:8765/join#c=7KQ4-MWX2-PDH9&s=ABCDEFGHJK"


def test_a_whole_url_names_its_server() -> None:
    assert parse_join_url(WHOLE).server == "ABCDEFGHJK"
    assert parse_join_url(WHOLE.partition("&")[0]).server == ""  # a server without a store


@pytest.mark.parametrize("lost", range(1, 11))
def test_a_url_that_was_cut_off_is_refused(lost: int) -> None:
    with pytest.raises(UsageError, match=rf"incomplete: .* not {10 - lost}; copy the whole URL"):
        parse_join_url(WHOLE[:-lost])
