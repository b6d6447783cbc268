"""The check of the names of one shard, and of the content that they refer to, in the process that leads it.

    NamesFsck      one check, into a report: where shard 0 is led
    ShardFsck      checks of another shard, as that leader asks for them, each with a report of its own

Rules kept here:
- Findings about the shard's store say which shard it is; those of objects have bucket and key, and no other shard has
  the bucket.
- One check of a shard at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import trio

from engine.coordinator.lake_state import LakeState
from engine.fsck.keyed_check import KeyedCheck
from engine.fsck.names_check import NamesCheck
from engine.fsck.report import Report
from engine.lake_upkeep.content_check import ContentCheck
from engine.lake_upkeep.named_chunks import NamedChunks
from engine.lake_upkeep.stripe_check import StripeCheck
from engine.members.ports import Members, Stripes
from engine.metadata.metadata_store import Metadata
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import EngineBusy
from lakefs.ids import ChunkId, NamesShard


@dataclass(frozen=True)
class FsckParts:
    """The parts of a lake that a check stands on, and the names of one shard."""

    members: Members
    state: LakeState
    stripes: Stripes
    metadata: Metadata
    code: ErasureCode


class NamesFsck:
    """One check of the names of one shard."""

    def __init__(self, parts: FsckParts, report: Report, *, full: bool, has_spaces: bool) -> None:
        """`has_spaces`: the shard has the lake's spaces of keyed blobs."""
        self._report = report
        self.looks: Final = StripeCheck(parts.members, parts.state, parts.code)
        self.content: Final = ContentCheck(parts.metadata, parts.stripes, self.looks, report, full=full)
        self._of_names = NamesCheck(parts.metadata, report, self.content.problem_of)
        # values are members', who check them
        self._of_spaces = KeyedCheck(parts.metadata, _no_problem) if has_spaces else None

    @property
    def has_damage(self) -> bool:
        """True if there are names whose content is damaged."""
        return bool(self._of_names.damaged)

    async def look(self, store: str = "") -> None:
        """Check everything.  `store`: put before the subjects of findings about the store itself.

        Errors of the coordinator.
        """
        found = len(self._report.findings)
        await self._of_names.index_and_journal()
        for finding in self._report.findings[found:]:
            finding["object"] = store + finding["object"]
        await self.content.run()
        await self._of_names.nodes()
        await self._of_names.uploads()
        await self._of_names.names()
        if self._of_spaces is not None:
            await self._of_spaces.run()
            self._report.count("spaces", self._of_spaces.counts["spaces"])

    async def name_damaged(self) -> None:
        """Report what is damaged, by name."""
        await self._of_names.report_damaged(() if self._of_spaces is None else self._of_spaces.findings())


class NamesChecked(NamedTuple):
    """The result of the check of one shard: a report, and the chunks that its names refer to.

    Beside what each report has: `short`, `unknown`: numbers of chunks; `has_damage`: there are names whose content is
    damaged; `away`: members that did not answer, by their ids in hex, with the reasons.
    """

    report: dict[str, Any]
    named: NamedChunks


class ShardFsck:
    """Checks of one shard, in the process that leads it.  Used on the loop."""

    def __init__(self, shard: NamesShard, parts: FsckParts) -> None:
        self._shard = shard
        self._parts = parts
        self._lock = trio.Lock()

    async def run(self, *, full: bool) -> NamesChecked:
        """Check the shard.  EngineBusy while it is being checked; errors of the coordinator."""
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            raise EngineBusy(f"names shard {self._shard} is being checked already") from None
        try:
            report = Report("full" if full else "quick")
            check = NamesFsck(self._parts, report, full=full, has_spaces=False)
            await check.look(f"names shard {self._shard}: ")
            await check.name_damaged()
        finally:
            self._lock.release()
        more = {
            "short": check.content.short_count,
            "unknown": check.content.unknown_count,
            "has_damage": check.has_damage,
            "away": {member.hex(): reason for member, reason in check.looks.away.items()},
        }
        return NamesChecked(report.as_json() | more, check.content.named)


def _no_problem(_chunk: ChunkId, _length: int) -> None:
    return None
