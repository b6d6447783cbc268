"""The parts of LMCache that its connector uses: the calls of LMCache's adapter, and the names that it gives objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Final

from lakefs.plugins.kv.offers import Offer, sends

PACKAGE: Final = "lmcache"
_ADAPTER: Final = "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter"
_EXAMPLE: Final = "a/model@00000002@3@616263@salt"


def offers_to(connector: type) -> Sequence[Offer]:
    """Return the offers that a connector of this class needs."""
    return (
        sends(_ADAPTER, "NativeConnectorL2Adapter", "_client", connector),
        Offer(_ADAPTER, "_object_key_to_string", _names_otherwise),
    )


def _names_otherwise(name_of: Callable[[object], str]) -> str:
    """Return what is wrong with the names of objects: model, rank, group, hash and salt, in this order."""
    name = name_of(
        SimpleNamespace(model_name="a/model", kv_rank=2, object_group_id=3, chunk_hash=b"abc", cache_salt="salt")
    )
    return "" if name == _EXAMPLE else f"LMCache names objects like {name!r}, not {_EXAMPLE!r}"
