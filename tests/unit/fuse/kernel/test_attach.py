"""The end of a FUSE session, as the loop over the kernel's requests meets it."""

from __future__ import annotations

import errno

import pyfuse3
import pytest
import trio

from fuse.kernel.attach import answer_kernel


def ending_with(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
    """Let the loop end as it does when one of its tasks has raised each error."""

    async def main(max_tasks: int) -> None:
        raise ExceptionGroup("tasks of the loop", list(errors))

    monkeypatch.setattr(pyfuse3, "main", main)


def test_a_session_aborted_while_a_request_is_taken_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ending_with(monkeypatch, ConnectionAbortedError(errno.ECONNABORTED, "fuse_session_receive_buf failed"))
    trio.run(answer_kernel)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "failed"), ValueError("escaped")], ids=["read", "handler"])
def test_other_errors_of_the_loop_are_raised(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    ending_with(monkeypatch, error, ConnectionAbortedError(errno.ECONNABORTED, "aborted"))
    with pytest.raises(ExceptionGroup) as raised:
        trio.run(answer_kernel)
    assert raised.value.subgroup(lambda found: found is error) is not None
    assert raised.value.subgroup(ConnectionAbortedError) is None
