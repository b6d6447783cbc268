"""The erasure code against PyECLib's Cauchy code of ISA-L.

Its parity rows are 1 / (x + i) with the same x and i, not scaled; so ours are its own times x.  Fragments of equal
lengths only: it pads where we do not.
"""

from __future__ import annotations

import pytest
from pyeclib.ec_iface import ECDriver

from lakefs.limits import GRANULE_BYTES
from tests.oracles.gf256 import scaled
from tests.unit.lakefs.cluster.chunks_cut import CODES, chunk_of, encoded

HEAD_BYTES = 80


@pytest.mark.parametrize("name", ["4+2", "2+1", "8+2"])
@pytest.mark.parametrize("granules", [1, 3])
def test_parity_is_that_of_pyeclib(name: str, granules: int) -> None:
    code = CODES[name]
    length = code.data * granules * GRANULE_BYTES
    driver = ECDriver(k=code.data, m=code.parity, ec_type="isa_l_rs_cauchy")
    fragments = [fragment[HEAD_BYTES:] for fragment in driver.encode(chunk_of(length))]
    shards = encoded(code, chunk_of(length))
    assert [shards[shard] for shard in range(code.data)] == fragments[: code.data]
    for shard in range(code.data, code.data + code.parity):
        assert shards[shard] == scaled(fragments[shard], shard)
