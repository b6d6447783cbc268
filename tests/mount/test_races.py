"""Programs that do things in quick succession on one mount, and several programs at once."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest

from tests.mount.tools import catch_up, content

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]


def _save(lock: Path, target: Path, text: bytes) -> None:
    """Save like git: a new lock file, written in pieces, renamed over the file."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    for start in range(0, len(text), 400):
        os.write(descriptor, text[start : start + 400])
    os.close(descriptor)
    os.rename(lock, target)


def test_a_lock_file_renamed_over_another_is_read_whole_at_once(here: Path, there: Path) -> None:
    for number in range(500):
        text = content(500 + number, number)
        _save(here / "index.lock", here / "index", text)
        with (here / "index").open("rb") as file:
            assert os.fstat(file.fileno()).st_size == len(text)
            assert file.read() == text, f"round {number}"
    catch_up(here, there)


def test_a_file_that_was_unlinked_after_its_close_stays_away(here: Path, there: Path) -> None:
    for number in range(300):
        descriptor = os.open(here / "file", os.O_CREAT | os.O_WRONLY)
        if number % 2:
            os.write(descriptor, b"x" * number)
        os.close(descriptor)
        os.unlink(here / "file")
        assert os.listdir(here) == []
    catch_up(here, there)


def test_a_listing_under_change_shows_every_file_that_stays(here: Path) -> None:
    stay = {f"stay {number}" for number in range(400)}
    for name in stay:
        (here / name).touch()
    ended = threading.Event()

    def change() -> None:
        number = 0
        while not ended.is_set():
            path = here / f"other {number % 20}"
            path.write_bytes(b"x")
            path.rename(here / "one name")
            (here / "one name").unlink()
            number += 1

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(15):
            names = [entry.name for entry in os.scandir(here)]
            assert stay <= set(names)
            kept = [name for name in names if name in stay]
            assert len(kept) == len(stay), "a file is listed twice"
    finally:
        ended.set()
        changer.join()


def test_many_threads_work_in_one_folder(here: Path, there: Path) -> None:
    failed: list[str] = []

    def work(worker: int) -> None:
        for number in range(40):
            path = here / f"w{worker} {number % 7}"
            text = content(100 + 977 * (number % 5), 100 * worker + number)
            path.write_bytes(text)
            path.rename(path.with_suffix(".moved"))
            if path.with_suffix(".moved").read_bytes() != text:
                failed.append(f"{worker} {number}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(os.listdir(here)) == 6 * 7
    catch_up(here, there)


def test_threads_append_to_one_file_and_no_line_is_lost(here: Path, there: Path) -> None:
    def append(worker: int) -> None:
        descriptor = os.open(here / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in range(100):
            os.write(descriptor, f"{worker} {number}\n".encode())
        os.close(descriptor)

    threads = [threading.Thread(target=append, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    catch_up(here, there)
    lines = (there / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{worker} {number}" for worker in range(4) for number in range(100))


def test_hundreds_of_handles_are_open_at_once(here: Path, there: Path) -> None:
    descriptors = [os.open(here / f"{n}", os.O_RDWR | os.O_CREAT) for n in range(900)]
    for number, descriptor in enumerate(descriptors):
        os.write(descriptor, f"{number}".encode())
    for number, descriptor in enumerate(descriptors):
        assert os.pread(descriptor, 10, 0) == f"{number}".encode()
        os.close(descriptor)
    catch_up(here, there)


def test_what_a_handle_that_only_writes_has_written_is_read_and_mapped_at_once(here: Path) -> None:
    """The writer does not fill the kernel's pages; readers of the same bytes have them fetched all the time."""
    path = here / "counter"
    path.write_bytes(bytes(8))
    writer, reader = os.open(path, os.O_WRONLY), os.open(path, os.O_RDONLY)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            os.pread(reader, 8, 0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with mmap.mmap(reader, 8, prot=mmap.PROT_READ) as mapping:
            for number in range(3000):
                written = number.to_bytes(8, "little")
                os.pwrite(writer, written, 0)
                assert os.pread(reader, 8, 0) == written
                assert mapping[:] == written
    finally:
        ended.set()
        looking.join()
        os.close(reader)
        os.close(writer)
    assert path.read_bytes() == written
