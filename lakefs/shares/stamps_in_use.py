"""The stamps in use: what says, without a request, that an answer about names still stands."""

from __future__ import annotations

from lakefs.shares.share import Share, opened
from lakefs.stamps import stamps as shared_stamps
from lakefs.stamps.stamps import StampReader
from lakefs.steps.steps import Steps
from lakefs.wire.messages import OpenStamps


class StampsInUse(Share[StampReader]):
    """The stamps of one connection."""

    @property
    def _is_offered(self) -> bool:
        return self._client.steps.offers.stamps

    def _opened(self, epoch: int) -> Steps[StampReader | None]:
        if not shared_stamps.IS_BUILT:
            return None
        return (yield from opened(OpenStamps(), StampReader))
