"""Tokens of an etcd with users, whose nodes are scripted: one of them stands still."""

from __future__ import annotations

from typing import Final

import grpc
import trio
import trio.testing

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_bounds import ETCD_TRY_S
from engine.etcd.etcd_link import RANGE, Endpoint, EtcdAccess, EtcdLink, Method
from engine.etcd.etcd_status import Status

STOPPED: Final = "http://stopped:2379"
WELL: Final = "http://well:2379"
_SILENT: Final = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "")


class _Link(EtcdLink):
    """A link to a node that answers nothing, and one that answers at once."""

    async def _call(
        self, endpoint: Endpoint, method: Method, request: e.Message, timeout_s: float
    ) -> e.Message | Status:
        await trio.lowlevel.checkpoint()
        if endpoint.address in STOPPED:
            await trio.sleep(timeout_s)
            return _SILENT
        return method.answer(token="token") if method.answer is e.AuthenticateResponse else method.answer()


def test_calls_do_not_wait_for_each_other_to_find_that_a_node_gives_no_token() -> None:
    answered: list[float] = []

    async def ask(link: EtcdLink) -> None:
        answer = await link.ask(RANGE, e.RangeRequest(key=b"a"))
        assert not isinstance(answer, Status)
        answered.append(trio.current_time())

    async def main() -> None:
        link = _Link(EtcdAccess((STOPPED, WELL), user="user", password="secret", first=0))
        begun = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(ask, link)
        finally:
            link.close()
        assert max(answered) - begun < 2 * ETCD_TRY_S

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(answered) == 20
