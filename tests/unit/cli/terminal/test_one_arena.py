"""A serving process has one heap, however many threads allocate; and its garbage collections are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.style.source_tree import ROOT

PROGRAM = """
import ctypes, sys, threading
from cli.terminal.process import keep_one_arena
if sys.argv[2] == "one":
    keep_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
started = threading.Barrier(4)
def take():
    started.wait()
    for _ in range(100):
        libc.malloc(5000)
    started.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.parametrize(("wanted", "is_one"), [("one", True), ("many", False)])
def test_threads_share_one_heap(wanted: str, is_one: bool, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "info", wanted], check=True, cwd=ROOT)
    assert ((tmp_path / "info").read_text().count("<heap ") == 1) is is_one


WALKED = """
import gc, sys
import cli.serve.faces, engine.process.engine_process
from cli.terminal.process import run_loop
async def main():
    return len(gc.get_objects()), gc.get_freeze_count()
print(*run_loop(main))
"""


def test_a_full_collection_does_not_walk_what_was_there_before_the_loop() -> None:
    done = subprocess.run([sys.executable, "-c", WALKED], check=True, cwd=ROOT, capture_output=True, text=True)
    walked, left_alone = map(int, done.stdout.split())
    assert walked * 10 < left_alone
