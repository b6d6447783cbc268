"""The generated reference is that of the code as it is."""

from __future__ import annotations

from lakefs.config.settings import SETTING_NAMES
from scripts.reference import PAGE, SETTINGS, reference


def test_the_reference_page_is_what_make_docs_writes_today() -> None:
    assert PAGE.read_text() == reference() + "\n", "run: make docs"


def test_every_setting_is_described() -> None:
    assert tuple(SETTINGS) == SETTING_NAMES
