"""Damage to a store's files, done on purpose: reads that touch it fail by name, all else is served, no bytes are wrong.

Each test stops an engine, changes bytes on disk, and checks what a user sees from then on.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import ChunkDamaged, CorruptionError, EngineUnreachable
from tests.e2e.served import Finished, Served, lake, segments_of, serving

MIB = 1 << 20
KIB = 1 << 10
Contents = dict[str, bytes]


@pytest.fixture
def engine() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as served:
        yield served


def tcp_of(engine: Served) -> str:
    (address,) = [line.split()[1] for line in engine.printed if "tcp://" in line]
    return address


def store_some(engine: Served) -> Contents:
    """Store objects of every kind of place: packed, of one granule, with a vector, with a manifest."""
    sizes = {"packed": 1000, "packed too": 30_000, "granule": 64 * KIB, "vector": 300 * KIB, "large": 9 * MIB}
    generator = random.Random(7)
    stored = {f"bkt/folder/{name}": generator.randbytes(size) for name, size in sizes.items()}
    with connect(engine.server) as client:
        for name, content in stored.items():
            client.put(name, content, create_bucket=True)
        client.copy("bkt/folder/large", "bkt/copied")
    return {**stored, "bkt/copied": stored["bkt/folder/large"]}


def place_of(data: Path, content: bytes) -> tuple[Path, int]:
    """Return segment file and offset of some stored bytes."""
    for path in segments_of(data):
        offset = path.read_bytes().find(content)
        if offset >= 0:
            return path, offset
    raise AssertionError("the bytes are in no segment")


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def reading_fails(client: Lake, name: str, content: bytes) -> bool:
    """Return whether a read fails with an error that has the name.  Otherwise it must return the right bytes."""
    try:
        found = client.get(name)
    except ChunkDamaged as error:
        return error.subject == name and name in error.message
    assert found == content
    return False


def damaged_names(engine: Served, stored: Contents) -> set[str]:
    """Return the names whose reads fail, over the socket and over TCP alike; all others must give the right bytes."""
    found: list[set[str]] = []
    token = engine.token()
    for address in (engine.server, tcp_of(engine)):
        damaged = set()
        with connect(address, token=token) as client:
            for name, content in stored.items():
                if reading_fails(client, name, content):
                    damaged.add(name)
        found.append(damaged)
    assert found[0] == found[1]
    return found[0]


def fsck(engine: Served) -> dict[str, Any]:
    with connect(engine.server) as client:
        return client.fsck(full=True)


def objects_in(report: dict[str, Any]) -> set[str]:
    return {f["object"] for f in report["findings"] if f["object"].startswith("bkt/")}


def codes_in(report: dict[str, Any]) -> set[str]:
    return {f["code"] for f in report["findings"] if f["severity"] == "damage"}


def test_flipped_bits_fail_their_objects_by_name_until_they_are_put_again(engine: Served) -> None:
    stored = store_some(engine)
    whole = "bkt/folder/packed too"
    engine.stop()
    for name, start, where in (
        ("packed", 0, 500),
        ("granule", 0, 64 * KIB - 1),
        ("vector", 0, 100),
        ("large", 4 * MIB, 5 * MIB),
    ):
        path, offset = place_of(engine.data, stored[f"bkt/folder/{name}"][start : start + 512])
        flip(path, offset + where - start)
    engine.start()

    harmed = set(stored) - {whole}
    assert damaged_names(engine, stored) == harmed
    told = engine("get", "bkt/folder/large", engine.data.parent / "out")
    assert told.code == 1
    assert "bkt/folder/large" in told.err
    assert "lake put FILE" in told.err
    assert not (engine.data.parent / "out").exists()
    shown = engine("fsck", "--full")
    assert shown.code == 1
    assert all(f"damage: {name}: " in shown.text for name in harmed), shown.text
    assert f"damage: {whole}" not in shown.text
    scrubbed = engine("scrub")
    assert scrubbed.code == 1
    assert all(line.endswith(" [chunk-damaged]") for line in scrubbed.lines if line.startswith("damage: "))

    with connect(engine.server) as client:
        for name in harmed - {"bkt/copied"}:
            client.put(name, stored[name], create_bucket=True)
    assert damaged_names(engine, stored) == set()
    assert objects_in(fsck(engine)) == set()
    assert engine("fsck", "--full").code == 0


def test_damaged_checksums_fail_whoever_relies_on_them_and_nobody_else(engine: Served) -> None:
    stored = store_some(engine)
    content = stored["bkt/folder/vector"]
    engine.stop()
    path, offset = place_of(engine.data, content[:512])
    flip(path, offset + len(content) + 1)
    engine.start()
    # For a whole chunk that the client reads itself, only the digest counts.
    assert engine.good("cat", "bkt/folder/vector").out == content
    part = engine("cat", "--offset", "5", "--length", "10", "bkt/folder/vector")
    assert part.code == 1
    assert "bkt/folder/vector" in part.err
    report = fsck(engine)
    assert objects_in(report) == {"bkt/folder/vector"}
    assert codes_in(report) == {"chunk-quarantined", "content-chunk-damaged"}
    engine.good("put", "-", "bkt/folder/vector", stdin=content)
    assert damaged_names(engine, stored) == set()
    # The old place is garbage now, and is given back without harm to the new one.
    engine.good("gc")
    assert damaged_names(engine, stored) == set()
    assert fsck(engine)["damage"] == 0


def test_a_range_that_damage_does_not_touch_is_served(engine: Served) -> None:
    stored = store_some(engine)
    content = stored["bkt/folder/vector"]
    engine.stop()
    path, offset = place_of(engine.data, content[:512])
    flip(path, offset + 250 * KIB)
    engine.start()
    good = engine.good("cat", "--offset", "10", "--length", "1000", "bkt/folder/vector")
    assert good.out == content[10:1010]
    bad = engine("cat", "--offset", str(249 * KIB), "--length", "2000", "bkt/folder/vector")
    assert bad.code == 1
    assert "bkt/folder/vector" in bad.err


@pytest.mark.parametrize("how", ["missing", "truncated", "zeroed", "other header"])
def test_a_segment_that_is_gone_or_spoilt_takes_only_its_own_objects_along(engine: Served, how: str) -> None:
    stored = store_some(engine)
    # Packed into one small segment: two payloads, and the manifest that two names share.
    small = {"bkt/folder/packed", "bkt/folder/packed too", "bkt/folder/large", "bkt/copied"}
    engine.stop()
    path, offset = place_of(engine.data, stored["bkt/folder/packed"])
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, offset + 10)
    elif how == "zeroed":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        with path.open("r+b") as file:
            file.write(os.urandom(60))
    engine.start()
    harmed = set() if how == "other header" else small
    assert damaged_names(engine, stored) == harmed
    report = fsck(engine)
    assert objects_in(report) == harmed
    told = {"missing": "segment-missing", "truncated": "chunk-past-end", "zeroed": "chunk-quarantined"}
    assert told[how] in codes_in(report) if harmed else not codes_in(report)
    new = os.urandom(20_000)
    with connect(engine.server) as client:
        client.put("bkt/new", new, create_bucket=True)
        for name in harmed:
            client.put(name, stored[name], create_bucket=True)
    assert damaged_names(engine, stored | {"bkt/new": new}) == set()
    assert engine.stop() == 0


def test_a_tree_with_a_damaged_file_comes_out_but_for_that_file(engine: Served, tmp_path: Path) -> None:
    stored = store_some(engine)
    engine.stop()
    path, offset = place_of(engine.data, stored["bkt/folder/vector"][:512])
    flip(path, offset)
    engine.start()
    done = engine("get", "-r", "bkt/folder", tmp_path / "out")
    assert done.code == 1
    assert "bkt/folder/vector" in done.err
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(
        name.rpartition("/")[2] for name in stored if "folder/" in name and "vector" not in name
    )


# --- the index -----------------------------------------------------------------------------------------


def spoil_index(index: Path, how: str) -> None:
    data = index / "data.mdb"
    size = data.stat().st_size
    if how == "deleted":
        shutil.rmtree(index)
    elif how == "no data file":
        data.unlink()
    elif how == "truncated":
        os.truncate(data, size // 2 + 123)
    elif how == "empty":
        os.truncate(data, 0)
    elif how == "noise":
        data.write_bytes(os.urandom(size))
    else:
        content = bytearray(data.read_bytes())
        for page in range(2, size // 4096):
            if how == "zeroed pages" and page % 3 == 0:
                content[page * 4096 : (page + 1) * 4096] = bytes(4096)
            elif how == "flipped bits":
                content[page * 4096 + 4000] ^= 4
        data.write_bytes(content)


def start_at_last(engine: Served) -> int:
    """Start until it serves and answers, as a service manager would; return the number of starts."""
    for attempt in range(1, 5):
        if engine.process is not None and engine.process.poll() is None:
            engine.kill()
        try:
            engine.start()
        except AssertionError:
            continue  # LMDB ended the process, and the engine has left a note of that
        # The damage may be noticed now, and repaired after start-up; or it ends the process.
        for _ in range(2):
            try:
                if not fsck(engine)["damage"]:
                    return attempt
            except (CorruptionError, EngineUnreachable):
                continue
    raise AssertionError("the engine does not get over it")


@pytest.mark.parametrize(
    "how", ["deleted", "no data file", "truncated", "empty", "noise", "zeroed pages", "flipped bits"]
)
def test_an_index_that_is_lost_or_spoilt_is_made_anew_with_every_name(engine: Served, how: str) -> None:
    stored = store_some(engine)
    with connect(engine.server) as client:
        many = [(f"bkt/many/{number}", number.to_bytes(4, "big")) for number in range(2000)]
        client.put_many(many, create_bucket=True)
    stored |= {name: bytes(content) for name, content in many[::100]}
    engine.stop()
    spoil_index(engine.data / "index", how)
    assert start_at_last(engine) <= 3
    assert damaged_names(engine, stored) == set()
    with connect(engine.server) as client:
        assert len(list(client.ls("bkt/many/"))) == 2000


def test_rebuild_restores_names_and_chunks_with_the_index_deleted(engine: Served) -> None:
    stored = store_some(engine)
    refused = lake("fsck", "--data", engine.data, "--rebuild")
    assert refused.code == 2, refused
    assert "open in another process" in refused.err
    engine.kill()
    shutil.rmtree(engine.data / "index")
    done = lake("fsck", "--data", engine.data, "--rebuild", "--full")
    assert done.code == 0, done
    assert "rebuilt the index" in done.text
    engine.start()
    assert damaged_names(engine, stored) == set()
    assert fsck(engine)["damage"] == 0


# --- the journal, checkpoints and the superblock -------------------------------------------------------


def journal_files(engine: Served) -> list[Path]:
    return sorted((engine.data / "journal").glob("*.journal"))


def wait_indexed(engine: Served) -> None:
    """Wait until the index has all that the journal has: it then knows what the journal must not lack."""
    with connect(engine.server) as client:
        while client.status()["metadata"]["overlay_entries"]:
            pass


def start_fails(engine: Served) -> Finished:
    return lake("serve", "--data", engine.data, "--socket", engine.socket, "--admin", "off", "--s3", "off")


def test_a_damaged_journal_refuses_the_start_and_gives_up_only_what_it_must(engine: Served) -> None:
    stored = store_some(engine)
    engine.kill()
    (journal,) = journal_files(engine)
    content = journal.read_bytes()
    groups = [at for at in range(4096, len(content), 4096) if content[at : at + 4] == b"LGRP"]
    flip(journal, groups[-3] + 60)
    shutil.rmtree(engine.data / "index")

    refused = start_fails(engine)
    assert refused.code == 1, refused
    assert str(journal.name) in refused.err
    assert "--rebuild --accept-loss" in refused.err
    strict = lake("fsck", "--data", engine.data, "--rebuild")
    assert strict.code == 1, strict
    assert journal.name in strict.err
    lenient = lake("fsck", "--data", engine.data, "--rebuild", "--accept-loss")
    assert lenient.code == 0, lenient
    assert "gave up" in lenient.text

    engine.start()
    with connect(engine.server) as client:
        left = {f"bkt/{entry.key}" for entry in client.ls("bkt/")}
    assert left < set(stored)
    assert damaged_names(engine, {name: stored[name] for name in left}) == set()
    assert "bkt/folder/packed" in left


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped header"])
def test_a_journal_file_that_is_gone_or_spoilt_is_told_by_its_name(engine: Served, how: str) -> None:
    store_some(engine)
    wait_indexed(engine)
    engine.kill()
    (journal,) = journal_files(engine)
    if how == "missing":
        journal.unlink()
    elif how == "truncated":
        os.truncate(journal, 4096)
    else:
        flip(journal, 20)
    refused = start_fails(engine)
    assert refused.code == 1, refused
    assert "journal" in refused.err
    assert "group" in refused.err
    assert (engine.data / "index").exists()  # nothing that may still help is removed


def test_a_torn_tail_of_the_journal_is_no_damage(engine: Served) -> None:
    stored = store_some(engine)
    engine.kill()
    (journal,) = journal_files(engine)
    content = journal.read_bytes()
    end = len(content.rstrip(b"\0"))
    with journal.open("r+b") as file:
        file.seek(-(-end // 4096) * 4096)
        file.write(b"LGRP" + os.urandom(300))
    engine.start()
    assert damaged_names(engine, stored) == set()
    assert fsck(engine)["damage"] == 0


def test_a_damaged_checkpoint_matters_only_with_the_index_gone(engine: Served) -> None:
    stored = store_some(engine)
    engine.stop()
    (checkpoint,) = (engine.data / "checkpoints").iterdir()
    flip(checkpoint, checkpoint.stat().st_size // 2)
    engine.start()
    assert damaged_names(engine, stored) == set()
    report = fsck(engine)
    assert any("checkpoint" in f["object"] + f["message"] for f in report["findings"]), report
    assert codes_in(report) == {"checkpoint-damaged"}
    engine.kill()
    shutil.rmtree(engine.data / "index")
    refused = start_fails(engine)
    assert refused.code == 1, refused
    assert "checkpoint" in refused.err


def test_a_spoilt_superblock_is_mended_from_its_copy_by_the_next_start(engine: Served) -> None:
    stored = store_some(engine)
    engine.stop()
    flip(engine.data / "superblock", 40)
    told = lake("ls", "bkt", "--data", engine.data)
    assert told.code == 0, told
    assert "the superblock does not match its checksum: the store is opened from superblock.copy" in told.err
    assert lake("ls", "bkt", "--data", engine.data).err == ""
    engine.start()
    assert damaged_names(engine, stored) == set()


@pytest.mark.parametrize("how", ["missing", "both flipped"])
def test_a_superblock_that_cannot_be_told_is_refused_and_nothing_is_begun_over_it(engine: Served, how: str) -> None:
    store_some(engine)
    engine.stop()
    superblock = engine.data / "superblock"
    whole = superblock.read_bytes()
    if how == "missing":
        superblock.unlink()
    else:
        flip(superblock, 40)
        flip(engine.data / "superblock.copy", 50)
    refused = start_fails(engine)
    assert refused.code == 1, refused
    assert ("lake fsck --data DIR --repair" if how == "missing" else "put one of them back") in refused.err
    superblock.write_bytes(whole)
    engine.start()
    assert engine.good("ls", "-r", "bkt").lines
