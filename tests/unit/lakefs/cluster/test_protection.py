"""Protection: five pairs, printed as they are parsed."""

from __future__ import annotations

import pytest

from lakefs.cluster.protection import PROTECTIONS, WIDTH_MAX, Protection
from lakefs.errors import InvalidArgument


def test_protections_are_printed_as_they_are_parsed() -> None:
    assert [str(protection) for protection in PROTECTIONS] == ["1+0", "1+1", "2+1", "4+2", "8+2"]
    assert [Protection.parse(str(protection)) for protection in PROTECTIONS] == list(PROTECTIONS)


def test_width_and_the_fewest_members_follow_from_k_and_m() -> None:
    assert [protection.width for protection in PROTECTIONS] == [1, 2, 3, 6, 10]
    assert [protection.members_min for protection in PROTECTIONS] == [1, 2, 3, 3, 5]
    assert WIDTH_MAX == 10


@pytest.mark.parametrize("text", ["", "4", "4+", "+2", "4+3", "3+1", "0+0", "04+2", " 4+2", "4+2 ", "٤+٢", "6+2"])
def test_another_protection_is_refused_and_the_message_lists_those_offered(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"1\+0, 1\+1, 2\+1, 4\+2, 8\+2"):
        Protection.parse(text)


def test_a_pair_that_is_not_offered_cannot_be_made() -> None:
    with pytest.raises(InvalidArgument, match=r'"5\+2"'):
        Protection(5, 2)
