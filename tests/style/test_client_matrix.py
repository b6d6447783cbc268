"""The documents of S3 clients say what the tests of clients prove, no more and no less."""

from __future__ import annotations

import re

from tests.clients.declared import OPERATIONS, rows
from tests.clients.matrix import PAGE, with_table
from tests.clients.page import sections


def test_the_matrix_in_the_documents_is_what_the_tests_declare() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run: python -m tests.clients.matrix"


def test_every_client_has_its_set_up_and_every_set_up_its_tests() -> None:
    assert set(sections()) == {row.client.name for row in rows()} | {"What could not be tried"}


def test_every_row_speaks_of_every_operation() -> None:
    assert [row.client.name for row in rows() if set(row.outcomes) != set(OPERATIONS)] == []


def test_no_set_up_holds_a_secret_or_another_address() -> None:
    text = "\n".join(sections().values())
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", text)) == {"127.0.0.1:9000"}
