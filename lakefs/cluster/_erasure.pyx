# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Erasure code over GF(256), native, by libisal; `lakefs.cluster.erasure` has the rules.

A shard's bytes are a *column* of the code.  The shards of a chunk have equal lengths but for the last data shard, which
may be shorter.  So bytes are coded in two regions: that in which all data shards have bytes, and behind it one with a
column less.  No shard is copied or padded for it.

    shard 0      |------------------------|-------|
    shard 1      |------------------------|-------|
    shard 2      |------------------------|            j = 3 data shards, of which the last is short
    parity       |------------------------|-------|
                  region of 3 columns      of 2

Rules kept here besides:
- Every length is compared with its buffer before the first byte is read or written.
- One column has the coefficient 1 in each row: its parity is copied, without libisal.
- The interpreter's lock is given away for regions of more than LOCKED_BYTES; a shorter one takes some 5 us, less than
  taking it back may.
- Tables are kept by the shards that are read and those that are made, at most `tables_max`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.limits cimport INT_MAX
from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset

from lakefs.errors import InvalidArgument

cdef extern from "isa-l/erasure_code.h" nogil:
    void ec_init_tables(int sources, int rows, unsigned char *coefficients, unsigned char *tables)
    void ec_encode_data(
        int length, int sources, int rows, unsigned char *tables, unsigned char **read, unsigned char **written
    )
    unsigned char gf_inv(unsigned char)
    unsigned char gf_mul(unsigned char, unsigned char)
    int gf_invert_matrix(unsigned char *matrix, unsigned char *inverse, int width)

cdef enum:
    DATA_MAX = 8
    PARITY_MAX = 2
    SHARDS_MAX = 10
    TABLE_BYTES = 32
    LOCKED_BYTES = 65536


cdef struct Memory:
    # Buffers of one call: first those that are read, then those that are written.  By shard: NULL for one not passed.
    Py_buffer views[SHARDS_MAX]
    int count
    int read
    int shards  # a bit for each that was passed
    uint8_t *present[SHARDS_MAX]
    uint8_t *wanted[SHARDS_MAX]


cdef struct Shape:
    # Shards of a chunk: data shards that exist, bytes of each but the last, bytes of the last.
    int count
    Py_ssize_t shard_bytes
    Py_ssize_t last_bytes


cdef struct Region:
    int columns
    int rows
    Py_ssize_t length
    uint8_t *tables
    uint8_t *read[DATA_MAX]
    uint8_t *written[PARITY_MAX]


cdef class Code:
    """The code of `data` columns and `parity` rows."""

    cdef readonly int data
    cdef readonly int parity
    cdef Py_ssize_t granule_bytes
    cdef Py_ssize_t chunk_bytes_max
    cdef Py_ssize_t tables_max
    cdef uint8_t coefficients[PARITY_MAX * DATA_MAX]
    cdef dict tables

    def __cinit__(
        self,
        int data,
        int parity,
        Py_ssize_t granule_bytes,
        Py_ssize_t chunk_bytes_max,
        Py_ssize_t tables_max,
    ):
        cdef int row, column
        if not (1 <= data <= DATA_MAX and 0 <= parity <= PARITY_MAX and tables_max >= 1):
            raise ValueError("1 to 8 data shards, 0 to 2 parity shards, and a table")
        if not 1 <= granule_bytes <= chunk_bytes_max <= INT_MAX - granule_bytes:
            raise ValueError("libisal takes lengths of 31 bits")
        self.data = data
        self.parity = parity
        self.granule_bytes = granule_bytes
        self.chunk_bytes_max = chunk_bytes_max
        self.tables_max = tables_max
        self.tables = {}
        # Cauchy: 1 / (x + y) with x = data + row, y = column; each row times x, so that column 0 has 1.
        for row in range(parity):
            for column in range(data):
                self.coefficients[row * data + column] = gf_mul(data + row, gf_inv((data + row) ^ column))

    @property
    def tables_kept(self):
        """The number of tables that are kept."""
        return len(self.tables)

    cpdef Py_ssize_t shard_bytes(self, Py_ssize_t length) except -1:
        """Return the bytes of each shard of a chunk, but for the last data shard."""
        cdef Py_ssize_t rows = self.data * self.granule_bytes
        if not 0 < length <= self.chunk_bytes_max:
            raise InvalidArgument(f"a chunk of {length} bytes; it has 1 to {self.chunk_bytes_max}")
        return min((length + rows - 1) // rows * self.granule_bytes, length)

    def encode(self, chunk not None, parity not None):
        """Write the parity shards of a chunk: buffers of `shard_bytes`, in order."""
        cdef Memory memory
        cdef Shape shape
        cdef int i
        memset(&memory, 0, sizeof(memory))
        try:
            hold(&memory, chunk, PyBUF_SIMPLE)
            shape = self.shape_of(memory.views[0].len)
            for i in range(shape.count):
                memory.present[i] = <uint8_t *>memory.views[0].buf + i * shape.shard_bytes
            memory.read = memory.count
            if len(parity) != self.parity:
                raise InvalidArgument(f"memory for {len(parity)} parity shards, and the code has {self.parity}")
            for i in range(self.parity):
                memory.wanted[self.data + i] = hold(&memory, parity[i], PyBUF_WRITABLE)
                check_length(&memory, self.data + i, shape.shard_bytes)
            self.make(&memory, &shape, 0, shape.shard_bytes)
        finally:
            release(&memory)

    def rebuild(self, Py_ssize_t length, present not None, wanted not None, Py_ssize_t begin, last):
        """Write the bytes [begin, last) of the wanted shards, from the same range of those that are present.

        None for `last`: to the end of the shards.
        """
        cdef Memory memory
        cdef Shape shape = self.shape_of(length)
        cdef Py_ssize_t end = shape.shard_bytes if last is None else last
        if not 0 <= begin < end <= shape.shard_bytes:
            raise InvalidArgument(f"bytes {begin} to {end} of shards that have {shape.shard_bytes}")
        memset(&memory, 0, sizeof(memory))
        try:
            for shard, buffer in present.items():
                self.take(&memory, &shape, shard, buffer, PyBUF_SIMPLE, begin, end)
            memory.read = memory.count
            for shard, buffer in wanted.items():
                self.take(&memory, &shape, shard, buffer, PyBUF_WRITABLE, begin, end)
            self.make(&memory, &shape, begin, end)
        finally:
            release(&memory)

    cdef Shape shape_of(self, Py_ssize_t length) except *:
        cdef Shape shape
        shape.shard_bytes = self.shard_bytes(length)
        shape.count = <int>((length + shape.shard_bytes - 1) // shape.shard_bytes)
        shape.last_bytes = length - (shape.count - 1) * shape.shard_bytes
        return shape

    cdef int take(
        self, Memory *memory, Shape *shape, int shard, buffer, int flags, Py_ssize_t begin, Py_ssize_t end
    ) except -1:
        """Hold the buffer of a shard's part."""
        cdef uint8_t *start
        cdef Py_ssize_t part = shape.last_bytes if shard == shape.count - 1 else shape.shard_bytes
        if not (0 <= shard < shape.count or self.data <= shard < self.data + self.parity):
            raise InvalidArgument(f"the chunk has no shard {shard}")
        if memory.shards & (1 << shard):
            raise InvalidArgument(f"shard {shard} is present, so it cannot be wanted")
        memory.shards |= 1 << shard
        start = hold(memory, buffer, flags)
        check_length(memory, shard, max(0, min(part, end) - begin))
        if flags == PyBUF_WRITABLE:
            memory.wanted[shard] = start
        else:
            memory.present[shard] = start
        return 0

    cdef int make(self, Memory *memory, Shape *shape, Py_ssize_t begin, Py_ssize_t end) except -1:
        """Write what is wanted of the bytes [begin, end)."""
        cdef Region whole, tail
        cdef Py_ssize_t cut = min(max(begin, shape.last_bytes), end)
        check_apart(memory)
        of_whole = self.plan(memory, shape.count, 0, cut - begin, &whole)
        of_tail = self.plan(memory, shape.count - 1, cut - begin, end - cut, &tail)
        if whole.length * whole.columns + tail.length * tail.columns > LOCKED_BYTES:
            with nogil:
                write(&whole)
                write(&tail)
        else:
            write(&whole)
            write(&tail)
        return 0

    cdef object plan(self, Memory *memory, int columns, Py_ssize_t offset, Py_ssize_t length, Region *region):
        """Choose what a region is made from.  Returns its tables, which must live as long as the region."""
        cdef int sources[DATA_MAX]
        cdef int wanted[SHARDS_MAX]
        cdef int shard, found = 0
        memset(region, 0, sizeof(Region))
        for shard in range(self.data + self.parity):
            if columns <= shard < self.data:
                continue
            if memory.wanted[shard] != NULL:
                wanted[region.rows] = shard
                region.rows += 1
            elif memory.present[shard] != NULL and found < columns:
                sources[found] = shard
                region.read[found] = memory.present[shard] + offset
                found += 1
        if length == 0 or region.rows == 0:
            return None
        if found < columns:
            raise InvalidArgument(f"{found} shards are present, and {columns} are needed")
        for shard in range(region.rows):
            region.written[shard] = memory.wanted[wanted[shard]] + offset
        region.columns = columns
        region.length = length
        if columns == 1:
            return None
        tables = self.tables_for(columns, sources, region.rows, wanted)
        region.tables = <uint8_t *>PyBytes_AS_STRING(tables)
        return tables

    cdef bytes tables_for(self, int columns, int *sources, int rows, int *wanted):
        """Return libisal's tables that make the wanted shards from the sources."""
        cdef int i, key = 0
        for i in range(columns):
            key |= 1 << sources[i]
        for i in range(rows):
            key |= 1 << (SHARDS_MAX + wanted[i])
        tables = self.tables.get(key)
        if tables is None:
            if len(self.tables) >= self.tables_max:
                self.tables.clear()
            tables = self.tables[key] = self.new_tables(columns, sources, rows, wanted)
        return tables

    cdef bytes new_tables(self, int columns, int *sources, int rows, int *wanted):
        """Invert the rows of the sources: that gives the data; parity is made from that."""
        cdef uint8_t matrix[DATA_MAX * DATA_MAX]
        cdef uint8_t inverse[DATA_MAX * DATA_MAX]
        cdef uint8_t made[PARITY_MAX * DATA_MAX]
        cdef uint8_t tables[PARITY_MAX * DATA_MAX * TABLE_BYTES]
        cdef int row, column, i
        memset(matrix, 0, sizeof(matrix))
        memset(made, 0, sizeof(made))
        for row in range(columns):
            if sources[row] < self.data:
                matrix[row * columns + sources[row]] = 1
            else:
                memcpy(matrix + row * columns, self.coefficients + (sources[row] - self.data) * self.data, columns)
        if gf_invert_matrix(matrix, inverse, columns):
            raise AssertionError("any rows of the code are independent")
        for row in range(rows):
            if wanted[row] < self.data:
                memcpy(made + row * columns, inverse + wanted[row] * columns, columns)
                continue
            for column in range(columns):
                for i in range(columns):
                    made[row * columns + column] ^= gf_mul(
                        self.coefficients[(wanted[row] - self.data) * self.data + i], inverse[i * columns + column]
                    )
        ec_init_tables(columns, rows, made, tables)
        return PyBytes_FromStringAndSize(<char *>tables, columns * rows * TABLE_BYTES)


cdef void write(Region *region) noexcept nogil:
    cdef int row
    if region.length == 0:
        return
    if region.columns == 1:
        for row in range(region.rows):
            memcpy(region.written[row], region.read[0], region.length)
    else:
        ec_encode_data(
            <int>region.length, region.columns, region.rows, region.tables, region.read, region.written
        )


cdef uint8_t *hold(Memory *memory, buffer, int flags) except? NULL:
    """Hold a contiguous buffer until `release`; return its first byte."""
    PyObject_GetBuffer(buffer, &memory.views[memory.count], flags)
    memory.count += 1
    return <uint8_t *>memory.views[memory.count - 1].buf


cdef void release(Memory *memory) noexcept:
    cdef int i
    for i in range(memory.count):
        PyBuffer_Release(&memory.views[i])


cdef int check_length(Memory *memory, int shard, Py_ssize_t length) except -1:
    """Compare the buffer that was held last with the length that a shard has there."""
    if memory.views[memory.count - 1].len != length:
        raise InvalidArgument(
            f"memory of {memory.views[memory.count - 1].len} bytes for shard {shard}, which has {length} there"
        )
    return 0


cdef int check_apart(Memory *memory) except -1:
    """Refuse memory that is written and overlaps other memory of the call."""
    cdef int i, other
    cdef char *one
    cdef char *two
    for i in range(memory.read, memory.count):
        one = <char *>memory.views[i].buf
        for other in range(i):
            two = <char *>memory.views[other].buf
            if (
                memory.views[i].len
                and memory.views[other].len
                and one < two + memory.views[other].len
                and two < one + memory.views[i].len
            ):
                raise InvalidArgument("memory for a shard overlaps that of another")
    return 0
