from lakefs.ids import Buffer

def granule_crcs(payload: Buffer) -> bytes:
    """CRC32C of every granule from the start of `payload`, 4 bytes each, little-endian; the last may be short."""

def copy_granules(source: Buffer, target: memoryview) -> bytes:
    """Copy `source` to the start of `target`, and return `granule_crcs` of the copy; in one pass over the bytes.

    ValueError if `target` is shorter.
    """

def granule_crcs_by_tables(payload: Buffer) -> bytes:
    """`granule_crcs` as a processor without an instruction for CRC32C computes them."""

def read_granules(descriptor: int, offset: int, target: memoryview) -> bytes:
    """Fill `target` from a file's `offset` on, and return `granule_crcs` of it.  Blocks, in any thread.

    EOFError when the file ends before, OSError; then anything may be in `target`.
    """
