"""The error tree and its one table."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from lakefs import errors
from lakefs.errors import ERROR_TABLE, LakeError, from_wire


def _leaves(error: type[LakeError]) -> list[type[LakeError]]:
    children = [child for child in error.__subclasses__() if child.__module__ == errors.__name__]
    return [leaf for child in children for leaf in _leaves(child)] or [error]


LEAVES: list[type[LakeError]] = [*_leaves(LakeError), errors.KeyNotFound, errors.EngineUnreachable]
"""Errors that are raised: the leaves, and those that may have a more exact leaf below them."""


def test_every_error_that_is_raised_has_exactly_one_row() -> None:
    rows = [row.error for row in ERROR_TABLE]
    assert len(rows) > 30
    assert sorted(error.__name__ for error in rows) == sorted(error.__name__ for error in LEAVES)


def test_wire_codes_are_unique_and_never_zero() -> None:
    codes = [row.wire_code for row in ERROR_TABLE]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


@pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.error.__name__)
def test_a_row_s_codes_are_on_its_class_and_fit_their_protocols(row: errors.ErrorRow) -> None:
    assert (row.error.wire_code, row.error.exit_code, row.error.http_status, row.error.errno) == (
        row.wire_code,
        row.exit_code,
        row.http_status,
        row.errno,
    )
    assert 0 < row.wire_code < 1 << 15
    assert row.exit_code in {1, 2} or 64 <= row.exit_code <= 78  # sysexits.h
    assert 400 <= row.http_status <= 599
    assert row.errno in errno.errorcode
    assert row.errno not in (errno.EAGAIN, errno.EINTR)  # a blocking caller must not see them


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_an_error_comes_back_from_the_wire_as_it_was_sent(leaf: type[LakeError]) -> None:
    sent = leaf("bucket is gone", subject="models")
    received = from_wire(sent.wire_code, sent.message, sent.subject)
    assert type(received) is leaf
    assert (received.message, received.subject, str(received)) == ("bucket is gone", "models", "bucket is gone")


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_only_what_operation_can_mend_is_worth_another_try(leaf: type[LakeError]) -> None:
    assert not leaf.retryable or issubclass(leaf, errors.OperationalError)


def test_an_unknown_wire_code_is_told_and_loses_no_message() -> None:
    received = from_wire(31_999, "the moon is full", "models")
    assert type(received) is errors.InternalError
    assert "31999" in received.message
    assert "the moon is full" in received.message
    assert received.subject == "models"


def test_damage_exits_with_one_and_a_user_s_mistake_never_does() -> None:
    for leaf in LEAVES:
        assert (leaf.exit_code == 1) == issubclass(leaf, errors.CorruptionError)


@pytest.mark.parametrize("kind", [errors.KeyNotFound, errors.KeyDeleted, errors.VersionNotFound])
def test_a_missing_key_is_also_the_error_that_python_has_for_files_and_mappings(kind: type[errors.KeyNotFound]) -> None:
    error = kind("models/x does not exist", subject="models/x")
    for caught in (LakeError, errors.UserError, FileNotFoundError, OSError, KeyError, LookupError):
        assert isinstance(error, caught)
    order = kind.__mro__
    assert order.index(LakeError) < order.index(FileNotFoundError) < order.index(KeyError)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(one) is kind
        assert str(one) == "models/x does not exist"
        assert (one.errno, one.strerror, one.filename) == (errno.ENOENT, "models/x does not exist", "models/x")
        assert (one.message, one.subject, one.args) == (error.message, error.subject, error.args)
    assert kind("gone").filename is None
