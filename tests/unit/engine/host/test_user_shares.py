"""A bound that users share: one user gets a quarter, and the engine's own user what nobody else takes."""

from __future__ import annotations

import os

import pytest

from engine.host.user_shares import OWN, Shares, user_of
from lakefs.errors import EngineBusy

TCP = user_of(None)


def take(shares: Shares, user: str, count: int) -> None:
    for _ in range(count):
        shares.take(user)


def test_root_and_the_engines_user_are_one_and_so_is_everybody_over_tcp() -> None:
    assert user_of(0) == user_of(os.geteuid()) == OWN
    assert len({OWN, TCP, user_of(4711), user_of(4712)}) == 4


@pytest.mark.parametrize("user", [OWN, TCP, user_of(4711)])
def test_one_user_has_a_quarter_and_is_told_so(user: str) -> None:
    shares = Shares(16, "puts")
    take(shares, user, 4)
    with pytest.raises(EngineBusy, match=f"4 puts already, of {user}, the most that one user.*try again"):
        shares.take(user)
    shares.give_back(user)
    shares.take(user)
    take(shares, user_of(1), 4)
    assert len(shares) == 8


def test_all_others_together_leave_a_quarter_to_the_engines_own_user() -> None:
    shares = Shares(16, "puts")
    for user in (TCP, user_of(1), user_of(2)):
        take(shares, user, 4)
    with pytest.raises(EngineBusy, match="12 puts already, of all users but root and the engine's own"):
        shares.take(user_of(3))
    take(shares, OWN, 4)
    assert len(shares) == 16


def test_the_engines_own_user_leaves_a_quarter_to_others_where_it_has_three() -> None:
    shares = Shares(16, "connections", own_quarters=3)
    take(shares, OWN, 12)
    with pytest.raises(EngineBusy, match="12 connections already, of root and the engine's own user"):
        shares.take(OWN)
    take(shares, TCP, 3)
    shares.take(user_of(1))
    with pytest.raises(EngineBusy, match="16 connections already, of all users together"):
        shares.take(user_of(1))


def test_what_is_given_back_is_forgotten() -> None:
    shares = Shares(16, "puts")
    take(shares, TCP, 3)
    shares.give_back(TCP, 3)
    assert len(shares) == 0
    assert not shares.users
