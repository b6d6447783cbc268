"""`lake fsck --rebuild` with LMDB gone: everything that a store holds is restored, not only names and chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cli.main import run
from lakefs.errors import SessionLost
from lakefs.wire import messages as m
from tests.flips.samples import opened
from tests.repair.damaged import copy_store, make_killed, make_stopped, seen_in
from tests.store_rig import ask, change, session_of, store_chunks

pytestmark = pytest.mark.usefixtures("quiet")
TAGGED = m.ObjectAttributes(tags={"kind": "weights", "epoch": "7"}, user_metadata={"by": "a test"})


@pytest.mark.parametrize("make", [make_stopped, make_killed])
def test_names_versions_uploads_keys_and_settings_come_back(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "store"
    make(data)
    copy_store(data, tmp_path / "whole")
    before = seen_in(tmp_path / "whole")
    shutil.rmtree(data / "index")
    capsys.readouterr()
    assert run(["fsck", "--data", str(data), "--rebuild", "--full", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == "clean"
    assert report["rebuilt"]["lost_from_sequence"] == 0
    after = seen_in(data)
    assert after.names == before.names
    assert after.answers == before.answers
    for question in ("keys", "uploads", "versions", "buckets"):
        assert before.answers[question].lines, f"nothing to compare: {question}"
    assert report["checked"]["parts"] == 1
    assert report["checked"]["versions"] == 2


def test_tags_come_back_and_what_was_of_one_boot_has_ended(tmp_path: Path) -> None:
    data = tmp_path / "store"

    async def fill() -> bytes:
        async with opened(data) as (_, client, _lake):
            session = await session_of(client)
            await store_chunks(client, session, [b"of a session" * 10])
            request = m.PutObjects([7], [change("tagged", attributes=TAGGED)])
            await ask(client, request, m.NameResults, b"content")
            await client.call(m.OpenObjects([("bkt", "tagged")], lease=True))
            return session

    session = trio.run(fill)
    shutil.rmtree(data / "index")
    assert run(["fsck", "--data", str(data), "--rebuild"]) == 0

    async def look() -> None:
        async with opened(data) as (store, client, _lake):
            found = await ask(client, m.StatNames([("bkt", "tagged")]), m.NameResults)
            (result,) = found.results
            assert result.stat is not None
            assert result.stat.tags == TAGGED.tags
            assert result.stat.user_metadata == TAGGED.user_metadata
            with pytest.raises(SessionLost):
                await store_chunks(client, session, [b"more"])
            assert store.references.statistics()["leases"] == 0
            assert (await store.collect()).freed_chunks == 1, "the chunk that belonged to a session only"

    trio.run(look)
