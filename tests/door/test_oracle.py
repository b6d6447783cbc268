"""The door answers as Python does: the same bytes to a gateway with the door and to one without have the same answer.

Only the date and the ids of the request and the host may differ.  More: `python -m tests.door.oracle`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from tests.door.corpus import ODD, PLAIN, odd_requests, plain_asks
from tests.door.oracle import compare
from tests.door.world import SETTINGS, World, door, repeated, world
from tests.served_devices import DEVICES

pytestmark = pytest.mark.slow
EXAMPLES = 400
EXAMPLES_OF_ENGINE = 100
EXAMPLES_TO_NOTICE = 3000
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")
SHARE_MIN = 0.4
"""Part of the requests that the door must have answered; of the requests drawn some half are plain, and of three times
that each is sent the first teaches the door."""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world("--s3", "127.0.0.1:0", *SETTINGS, *door("on")) as made:
        yield made


def test_requests_of_every_form_have_the_same_answer_with_and_without_the_door(made: World) -> None:
    before, sent = repeated(made.with_door), made.sent
    compare(made, EXAMPLES)
    share = (repeated(made.with_door) - before) / (made.sent - sent)
    assert share >= SHARE_MIN or (DEVICES and not share), f"only {share:.2f} of the requests were repeated by the door"


def test_the_engine_answers_as_a_gateway_does(made: World) -> None:
    compare(made.by_engine(), EXAMPLES_OF_ENGINE)


@pytest.mark.parametrize("bug", ["stale", "stale-after-removal", "any-range", "any-condition", "any-signature"])
def test_a_gateway_with_a_planted_bug_is_noticed(made: World, bug: str) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises(AssertionError, match="they differ from byte"):
        compare(planted, EXAMPLES_TO_NOTICE, shrink=False)


@pytest.mark.parametrize("name", ODD)
def test_odd_http_has_the_same_answer_with_and_without_the_door(made: World, name: str) -> None:
    for requests in odd_requests(made, name):
        made.agree(requests)


def what_one_request_taught(made: World, name: str) -> None:
    """Send all plain requests for one target."""
    for asks in plain_asks(name, random.Random(name)):
        signed = {ask: made.raw(ask) for ask in asks}
        made.agree([signed[ask] for ask in asks])


@pytest.mark.parametrize("name", PLAIN)
def test_what_one_request_taught_is_not_the_answer_to_another(made: World, name: str) -> None:
    what_one_request_taught(made, name)


@pytest.mark.parametrize("bug", ["any-bucket", "any-range", "any-query"])
def test_an_answer_to_another_request_is_noticed(made: World, bug: str) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises(AssertionError, match="they differ from byte"):
        what_one_request_taught(planted, PLAIN[1])


def test_plain_entries_of_the_corpus_are_good(made: World) -> None:
    """Else the others would be refused for another reason than their oddity."""
    for name in ("a plain request", "a plain HEAD", "signed", "presigned", "no space behind the colon"):
        for requests in odd_requests(made, name):
            assert all(answer[9:12] in (b"200", b"206") for answer in made.agree(requests) if answer)
