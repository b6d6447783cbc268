"""One request to each of many members at once: their answers, and the reasons of those that gave none.

Rules kept here:
- A member that fails takes nothing from the others: its reason is kept, with its id.
- One request a member is under way.  An answer is a report of some KiB; that of fsck has at most 1,000 findings,
  300 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord, MemberState
from engine.members.ports import Members
from lakefs.errors import LakeError
from lakefs.ids import MemberId, id_text
from lakefs.wire import messages as m

M = TypeVar("M", bound=m.Message)


class Answers(NamedTuple, Generic[M]):
    """The messages of the members that answered, and why the others did not."""

    messages: dict[MemberId, M]
    away: dict[MemberId, str]


def member_text(member: MemberId) -> str:
    """Return a member as reports name it."""
    return f"member {id_text(member)}"


async def present_members(state: LakeState) -> list[MemberRecord]:
    """Return the members of the lake, without those that were removed.  Errors of the coordinator."""
    return [record for record in await state.members() if record.state is not MemberState.REMOVED]


async def ask_each(
    members: Members, requests: Mapping[MemberId, m.Request], answer: type[M], *, within_s: float = math.inf
) -> Answers[M]:
    """Send each member its request; each has `within_s` seconds to answer."""
    answers: Answers[M] = Answers({}, {})

    async def ask(member: MemberId, request: m.Request) -> None:
        answers.away[member] = f"it did not answer within {within_s:g} s"
        with trio.move_on_after(within_s):
            try:
                reply = await members.call(member, request)
            except LakeError as error:
                answers.away[member] = error.message
                return
            reply.body.release()
            assert isinstance(reply.message, answer), reply.message
            answers.messages[member] = reply.message
            del answers.away[member]

    async with trio.open_nursery() as nursery:
        for member, request in requests.items():
            nursery.start_soon(ask, member, request)
    return answers


async def reports_of(
    members: Members, asked: Iterable[MemberId], request: m.Request
) -> tuple[dict[MemberId, dict[str, Any]], dict[MemberId, str]]:
    """Return the reports of the members that answered, by member, and why the others did not."""
    answers = await ask_each(members, dict.fromkeys(asked, request), m.ReportReply)
    return {member: report_in(message) for member, message in sorted(answers.messages.items())}, answers.away


def report_in(message: m.ReportReply) -> dict[str, Any]:
    """Return the report in a member's answer."""
    return msgspec.json.decode(message.report_json, type=dict[str, Any])


def unchecked(away: Mapping[MemberId, str]) -> Sequence[dict[str, str]]:
    """Return the members that could not be asked, as reports list them."""
    return [{"object": member_text(member), "reason": reason} for member, reason in sorted(away.items())]
