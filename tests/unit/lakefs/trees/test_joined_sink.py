"""The sink of `get -r` for many small files: it stops between two files, also when the thread that stops it is
interrupted."""

from __future__ import annotations

import threading
from unittest import mock

from lakefs.get.opened import Opened, Piece
from lakefs.ids import data_chunk_id
from lakefs.names import Name
from lakefs.trees import get_tree
from lakefs.trees.local_folders import LocalTarget
from tests.interrupts import WAIT_S, Interrupter, ends

PIECE = Piece(data_chunk_id(b"x"), 0, 1)


class Writer:
    """A thread that writes the one file of a sink, when it may."""

    def __init__(self) -> None:
        opened = Opened(Name("bkt", "x"), get_tree.NO_STAT, 1, [PIECE], {}, {})
        self.sink = get_tree._JoinedSink([(LocalTarget.at("/nowhere/x"), opened)], replace=True)
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.deliver, daemon=True)

    def deliver(self) -> None:
        with mock.patch.object(get_tree, "write_whole", self.write_whole):
            self.sink.deliver(PIECE, memoryview(b"x"))

    def write_whole(self, *_: object, **__: object) -> None:
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)


def test_stop_waits_for_a_file_that_is_being_written_and_lets_no_other_begin() -> None:
    writer = Writer()
    writer.thread.start()
    assert writer.has_begun.wait(WAIT_S)
    stopping = threading.Thread(target=writer.sink.stop, daemon=True)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    writer.may_end.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert writer.sink.written == {0}
    writer.sink.written.clear()
    writer.deliver()
    assert not writer.sink.written
    assert ends(writer.sink.stop)


def test_an_interrupt_of_stop_anywhere_leaves_no_writer_wedged() -> None:
    for at in range(1, 1000):
        writer, tracer = Writer(), Interrupter(get_tree, at)
        writer.thread.start()
        assert writer.has_begun.wait(WAIT_S)
        ending = threading.Timer(0.02, writer.may_end.set)
        ending.start()
        was_interrupted = tracer.interrupt(writer.sink.stop)
        writer.thread.join(WAIT_S)
        assert not writer.thread.is_alive(), f"interrupted at {tracer.where}"
        assert ends(writer.sink.stop), f"interrupted at {tracer.where}"
        if not was_interrupted:
            assert at > 2
            return
    raise AssertionError("stop has no end")
