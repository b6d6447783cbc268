"""Requests to members that no task waits for, over real sockets: answered, given up, expired, and lost."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from engine.members.begun_request import BegunRequest
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import MemberId, data_chunk_id
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import ReadChunks, ReadChunksReply
from tests.unit.engine.cluster.stripe_rig import payload_of
from tests.unit.engine.cluster.test_lent_payload import GENERATION, Lake, lake

PAYLOAD = payload_of(4096)
READ = ReadChunks([data_chunk_id(PAYLOAD)], [0], [4096], [0])


class Answers:
    """The calls of `done`."""

    def __init__(self) -> None:
        self.found: list[Reply | LakeError] = []
        self.came = trio.Event()

    def take(self, result: Reply | LakeError) -> None:
        self.found.append(result)
        self.came.set()


def home_of(made: Lake) -> tuple[int, MemberId]:
    """Return the member that has shard 0 of the payload, and its number."""
    member = made.links.tables[0].homes(data_chunk_id(PAYLOAD))[0]
    return [record.member for record in made.records].index(member), member


async def begun(made: Lake, answers: Answers) -> BegunRequest:
    """Begin to read the payload's first shard."""
    found = made.links.begin(home_of(made)[1], READ, [memoryview(bytearray(4096))], answers.take)
    assert found is not None
    assert not answers.found, "the answer comes in a later step"
    return found


def test_a_begun_request_is_answered_with_the_reply_or_its_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            answers = Answers()
            assert made.links.begin(home_of(made)[1], READ, [], answers.take) is None, "nothing is connected"
            await made.stripes.store(GENERATION, [made.in_area(PAYLOAD)])
            target = memoryview(bytearray(4096))
            assert made.links.begin(home_of(made)[1], READ, [target], answers.take) is not None
            await answers.came.wait()
            [reply] = answers.found
            assert isinstance(reply, Reply)
            assert isinstance(reply.message, ReadChunksReply)
            assert bytes(target) == PAYLOAD
            refused = Answers()
            wrong = ReadChunks([data_chunk_id(PAYLOAD)], [0], [4096], [300])
            assert made.links.begin(home_of(made)[1], wrong, [], refused.take) is not None
            await refused.came.wait()
            assert isinstance(refused.found[0], LakeError)
            assert made.links.is_up(home_of(made)[1])

    trio.run(main)


def test_a_request_that_is_given_up_ends_at_the_member_and_is_not_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            await made.stripes.store(GENERATION, [made.in_area(PAYLOAD)])
            member = made.members[home_of(made)[0]]
            member.may_read = trio.Event()
            answers = Answers()
            request = await begun(made, answers)
            while not member.reads:
                await trio.testing.wait_all_tasks_blocked(0.01)
            request.give_up()
            request.give_up()
            while not member.cancelled_reads:
                await trio.testing.wait_all_tasks_blocked(0.01)
            member.may_read.set()
            await made.stripes.offer(GENERATION, [data_chunk_id(PAYLOAD)])
            assert not answers.found

    trio.run(main)


def test_a_request_that_expires_loses_the_member_and_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            await made.stripes.store(GENERATION, [made.in_area(PAYLOAD)])
            number, member = home_of(made)
            made.members[number].may_read = trio.Event()
            first, second = Answers(), Answers()
            request = await begun(made, first)
            await begun(made, second)
            while made.members[number].reads < 2:
                await trio.testing.wait_all_tasks_blocked(0.01)
            request.expire()
            request.expire()
            assert [type(result) for result in first.found] == [EngineUnreachable]
            assert not made.links.is_up(member)
            made.members[number].may_read.set()
            await second.came.wait()
            assert len(first.found) == len(second.found) == 1

    trio.run(main)
