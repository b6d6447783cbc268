"""Flipped bits anywhere in a store: nothing wrong is served, and what matters is reported.  More: `make torture`."""

from __future__ import annotations

import pytest

import engine.medium_check
import engine.segment_reader
from tests.flips.campaign import run_campaign

JOBS = 2


def test_no_flipped_bit_makes_a_store_serve_anything_wrong_and_live_ones_are_reported() -> None:
    tally = run_campaign(100, seed=1, jobs=JOBS)
    assert not tally.failures, "\n".join([*tally.failures, *tally.lines()])
    assert len(tally.flips) > 15


def test_reads_that_skip_the_checksum_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.segment_reader, "check_payload", lambda *_: True)
    tally = run_campaign(8, seed=2, jobs=JOBS, only="payload")
    assert any("wrong" in failure for failure in tally.failures)


def test_a_scrub_and_an_fsck_that_believe_everything_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.medium_check, "_compared", lambda *_: None)
    monkeypatch.setattr(engine.segment_reader, "check_payload", lambda *_: True)
    monkeypatch.setattr("engine.chunks.chunk_id_of", lambda *_: None)
    assert run_campaign(8, seed=2, jobs=JOBS, only="payload").failures
