# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What Python has taught the door, and the native functions that repeat it; `repeat.h` has the rules.

Memory that is used natively (stamps, places, slabs) is kept by references here for as long as it is in use.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import os
import time

from gateway.http.repeater cimport REPEATER_CAPSULE, door_ticket, repeated, repeater
from lakefs.granules.content cimport (
    content_drop_segments,
    content_forget,
    content_note_missing,
    content_table,
    content_use_places,
    content_use_segment,
    content_use_slabs,
)
from lakefs.host.crc32c cimport lake_crc32c_begin
from lakefs.host.python_hash cimport hash_by_python
from lakefs.host.span cimport bytes_of, span, span_hash, span_of
from lakefs.stamps.kept_answers cimport kept_answer, kept_answers, kept_begin, kept_end, kept_forget
from lakefs.stamps.stamps cimport LAKE_STAMPS_CAPSULE, lake_stamps

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    """

cdef extern from "repeat.h" nogil:
    enum:
        CHUNK_ID_BYTES
        PIECE_BYTES
        ANSWER_KEY_MAX
        ANSWER_BYTES_EXPECTED
        ANSWER_LINES_MAX
        FIELD_COUNT
        NOTES_MAX
        TIMES_MAX
        PASSED_COUNT
        FIELD_NONE
        FIELD_HOST
        MD5_DIGEST_LENGTH
        OF_COUNT
    ctypedef struct claim:
        uint8_t ids[32]
        size_t id_count
        uint32_t signed_fields
        int64_t from_s, until_s
    ctypedef struct claims_table "claims":
        span_hash hash
        int64_t until_ns
    ctypedef struct answer:
        kept_answer kept
        uint64_t size_bytes
        span canonical_target, bucket, lines, sums, logged, layout
        uint8_t is_of_get
    ctypedef struct answers_table "answers":
        kept_answers table
    ctypedef struct log_entry:
        span name
    ctypedef struct access_log:
        uint8_t *lines
        size_t length, room
        uint64_t one_of, lost
    ctypedef struct fields:
        span value[FIELD_COUNT]
        uint32_t present
    uint32_t FIELDS_GIVEN
    const span field_names[FIELD_COUNT]
    ctypedef struct gathered:
        door_ticket ticket
        span request, target, body, signer
        fields of
        uint8_t md5[MD5_DIGEST_LENGTH]
    ctypedef struct gathered_puts:
        size_t count, bytes
    ctypedef struct s3_repeater:
        gathered_puts puts
        access_log log
        claims_table claims
        answers_table answers
        content_table content
        uint64_t next_id, random
        int64_t date_s
        uint64_t counts[OF_COUNT][2]
        uint64_t times[OF_COUNT][TIMES_MAX]
        uint64_t took_ns[OF_COUNT]
        uint64_t bounds_ns[TIMES_MAX]
        size_t bound_count
        uint64_t received_bytes, sent_bytes, cut_short
        uint64_t passed[PASSED_COUNT]
        uint8_t notes[NOTES_MAX][CHUNK_ID_BYTES]
        size_t note_count
        uint32_t note_every
    void head_begin()
    void repeat_begin(void *)
    size_t repeat_one(void *, span, int64_t, door_ticket, repeated *)
    void puts_begin(gathered_puts *)
    gathered *puts_take(gathered_puts *)
    span answer_put(s3_repeater *, const gathered *, span lines, span logged)
    span rest_piece(void *, void *)
    int rest_taken(void *, void *, size_t)
    void rest_ended(void *, void *, span, uint64_t, int)
    ctypedef struct body_rest:
        uint64_t first, at, stop
        span layout
        log_entry logged
    void repeat_sent(void *, span, uint64_t)
    int field_of(span name)
    claim *claim_make(const claims_table *, span text, span signed_names, span scope, span buckets, span logged)
    void claim_use_key(claim *, const uint8_t *key)
    void claims_keep(claims_table *, claim *)
    void claims_forget(claims_table *)
    const claim *claims_find(const claims_table *, span text)
    span presigned_text(claims_table *, span method, span host, span target)
    span answers_key(answers_table *, span host, span target)
    int answers_keep(answers_table *, const answer *parts)
    int is_layout(span layout, uint64_t size_bytes)

OPERATIONS: tuple = ("GetObject", "HeadObject", "PutObject")
"""The operations of the door's answers, in the order of their counts."""
PASSED: tuple = ("head", "field", "keys", "new", "changed", "signature", "content")
"""Reasons for passing a request on, in the order of their counts."""

head_begin()
lake_crc32c_begin()
_GIVEN: list = [bytes_of(field_names[field]) for field in range(FIELD_COUNT)]


@cython.no_gc_clear  # its parts are in use until it is freed
cdef class Repeater:
    """Claims, answers and places of content that the door repeats requests with.

    `bounds_ns`: upper bounds of the buckets of the times that `counts` returns.  At most `memory_bytes` of answers.
    """

    cdef s3_repeater *at
    cdef repeater port
    cdef dict in_use

    def __cinit__(self, list bounds_ns not None, uint64_t memory_bytes, uint32_t note_every):
        cdef int slot
        if len(bounds_ns) >= TIMES_MAX or not note_every:
            raise ValueError("too many bounds, or no reads to note")
        self.at = <s3_repeater *>calloc(1, sizeof(s3_repeater))
        if self.at == NULL:
            raise MemoryError("no memory for the door")
        content_drop_segments(&self.at.content)
        if not kept_begin(&self.at.answers.table, hash_by_python, memory_bytes, ANSWER_BYTES_EXPECTED):
            raise MemoryError("no memory for the door's answers")
        puts_begin(&self.at.puts)
        self.at.claims.hash = hash_by_python
        self.at.next_id = int.from_bytes(os.urandom(8), "little")
        self.at.random = int.from_bytes(os.urandom(8), "little")
        self.at.date_s = -1
        self.at.note_every = note_every
        self.at.bound_count = len(bounds_ns)
        for slot in range(len(bounds_ns)):
            self.at.bounds_ns[slot] = bounds_ns[slot]
        self.port.context = self.at
        self.port.begin = repeat_begin
        self.port.repeat = repeat_one
        self.port.sent = repeat_sent
        self.port.piece = rest_piece
        self.port.taken = rest_taken
        self.port.ended = rest_ended
        self.in_use = {}

    def __dealloc__(self):
        if self.at == NULL:
            return
        cdef gathered *put = puts_take(&self.at.puts)
        while put != NULL:
            free(put)
            put = puts_take(&self.at.puts)
        claims_forget(&self.at.claims)
        kept_forget(&self.at.answers.table)
        kept_end(&self.at.answers.table)
        free(self.at.log.lines)
        free(self.at)

    @property
    def native(self):
        """A capsule with the port for `gateway.http._door.Door`; valid as long as this object."""
        return PyCapsule_New(&self.port, REPEATER_CAPSULE, NULL)

    # --- what the engine shares ----------------------------------------------------------------------------------

    def use_stamps(self, reader not None):
        """Check answers by these stamps (`lakefs.stamps.stamps.StampReader`); before any answer is learned."""
        memcpy(&self.at.answers.table.stamps, PyCapsule_GetPointer(reader.native, LAKE_STAMPS_CAPSULE), sizeof(lake_stamps))
        self.in_use["stamps"] = reader

    def use_places(self, table not None):
        """Look chunks up in this table (`lakefs.shared_index.table.SharedTable`)."""
        content_use_places(&self.at.content, table, self.in_use)

    def use_segment(self, uint64_t segment, int descriptor, int flags):
        """Read a segment by this descriptor, which stays the caller's; return the segment whose place it took, if any.

        `flags` are preadv2's: with RWF_NOWAIT a read never waits for a disk.
        """
        return content_use_segment(&self.at.content, segment, descriptor, flags)

    def drop_segments(self):
        """Read no segment: their descriptors may be closed."""
        content_drop_segments(&self.at.content)

    def use_slabs(self, const uint8_t[::1] generations not None, uint64_t slab_bytes, dict slabs not None):
        """Copy cells of these slabs, which the engine has sealed against shrinking, checked by these generations."""
        content_use_slabs(&self.at.content, generations, slab_bytes, slabs, self.in_use)

    def missing(self, list chunks not None):
        """Return the segments and slabs to bring for these chunks, as (tier, number); and True if the index has all."""
        cdef bytes chunk
        cdef bint is_found = True
        wanted = set()
        for chunk in chunks:
            if len(chunk) == CHUNK_ID_BYTES:
                is_found &= content_note_missing(&self.at.content, <const uint8_t *>PyBytes_AS_STRING(chunk), wanted)
        return wanted, is_found

    def forget(self):
        """Drop all claims and answers, and all that the engine shared: its connection was lost, or it has ended."""
        claims_forget(&self.at.claims)
        kept_forget(&self.at.answers.table)
        memset(&self.at.answers.table.stamps, 0, sizeof(lake_stamps))
        content_forget(&self.at.content, self.in_use)

    # --- claims --------------------------------------------------------------------------------------------------

    def hold_until(self, double monotonic_s):
        """Let claims hold until that time of the monotonic clock."""
        self.at.claims.until_ns = <int64_t>(monotonic_s * 1e9)

    def forget_claims(self):
        """Drop all claims."""
        claims_forget(&self.at.claims)

    def knows_signer(self, bytes text not None):
        """Return True if the claim of an Authorization header, without its signature, is known."""
        return claims_find(&self.at.claims, span_of(text)) != NULL

    def learn_signer(
        self,
        bytes text not None,
        tuple names not None,
        bytes scope not None,
        bytes key not None,
        bytes buckets not None,
        bytes logged not None,
    ):
        """Learn whose signatures begin with `text`; False if a signed header is none that the door understands.

        `names`: of the signed headers, in order.  `key`: the signing key derived for `scope`.  `buckets`: those that the
        key is limited to, each with a NUL behind; none for a key that may read all.  `logged`: the access key as JSON.
        """
        cdef bytes name
        cdef int field
        cdef claim *made
        if len(names) > FIELD_COUNT or len(key) != 32 or len(scope) < 8:
            return False
        ids = [field_of(span_of(name)) for name in names]
        if FIELD_NONE in ids:
            return False
        joined = b";".join(names)
        made = claim_make(&self.at.claims, span_of(text), span_of(joined), span_of(scope), span_of(buckets), span_of(logged))
        if made == NULL:
            return False
        for field in ids:
            made.ids[made.id_count] = <uint8_t>field
            made.id_count += 1
            made.signed_fields |= <uint32_t>1 << field
        claim_use_key(made, <const uint8_t *>PyBytes_AS_STRING(key))
        claims_keep(&self.at.claims, made)
        return True

    def learn_presigned(
        self,
        bytes method not None,
        bytes host not None,
        bytes target not None,
        bytes buckets not None,
        bytes logged not None,
        int64_t from_s,
        int64_t until_s,
    ):
        """Learn that the signature in a target is right, from and until these seconds since 1970."""
        cdef span text = presigned_text(&self.at.claims, span_of(method), span_of(host), span_of(target))
        cdef claim *made
        if not text.length:
            return
        made = claim_make(&self.at.claims, text, span_of(b""), span_of(b""), span_of(buckets), span_of(logged))
        if made != NULL:
            made.from_s, made.until_s = from_s, until_s
            claims_keep(&self.at.claims, made)

    # --- answers -------------------------------------------------------------------------------------------------

    def learn_answer(
        self,
        bytes host not None,
        bytes target not None,
        *,
        bint of_get,
        bytes canonical_target not None,
        bytes bucket not None,
        bytes lines not None,
        bytes sums not None,
        bytes layout not None,
        uint64_t size_bytes,
        bytes stamps not None,
        bytes logged not None,
    ):
        """Learn the answer to GET (`of_get`) or only to HEAD of a Host and target; replaces an earlier one.

        `lines`: header lines of a 200, each with its CRLF, without length and request id.  `sums`: those that
        x-amz-checksum-mode adds.  `layout`: of each piece its end in the object (8 bytes, little-endian), its chunk's id;
        b"" if it is not known.  `stamps`: of all records that the answer was read from.  `logged`: bucket and key as
        members in JSON.  Answers that are too long are not learned.
        """
        cdef answer parts
        memset(&parts, 0, sizeof(parts))
        parts.kept.key = answers_key(&self.at.answers, span_of(host), span_of(target))
        if not parts.kept.key.length or not stamps or len(lines) + len(sums) > ANSWER_LINES_MAX:
            return
        parts.canonical_target = span_of(canonical_target)
        parts.bucket = span_of(bucket)
        parts.lines = span_of(lines)
        parts.kept.stamps = span_of(stamps)
        parts.logged = span_of(logged)
        parts.size_bytes = size_bytes
        parts.is_of_get = of_get
        parts.sums = span_of(sums)
        if is_layout(span_of(layout), size_bytes):
            parts.layout = span_of(layout)
        answers_keep(&self.at.answers, &parts)

    def take_rest(self, size_t address, bytes peer not None, int64_t began_ns):
        """Return the rest of an answer that was handed over (`Rest`)."""
        rest = Rest(self, peer, began_ns)
        rest.at = <body_rest *>address
        return rest

    # --- puts ----------------------------------------------------------------------------------------------------

    @property
    def gathered(self):
        """Count of the PUTs that wait to be taken."""
        return self.at.puts.count

    def take_puts(self, int count_max):
        """Return the PUTs that came first (`Put`), at most so many; each is to be answered, or given back."""
        cdef gathered *at
        cdef Put put
        taken = []
        while len(taken) < count_max:
            at = puts_take(&self.at.puts)
            if at == NULL:
                break
            put = Put(self)
            put.at = at
            taken.append(put)
        return taken

    # --- the access log ------------------------------------------------------------------------------------------

    def log(self, uint64_t one_of, size_t room):
        """Write lines of the access log for one in so many answers, at most `room` bytes until they are taken."""
        if self.at.log.lines != NULL or not one_of:
            raise ValueError("the log is on already, or has no turns")
        self.at.log.lines = <uint8_t *>malloc(room)
        if self.at.log.lines == NULL:
            raise MemoryError("no memory for the access log")
        self.at.log.room, self.at.log.one_of = room, one_of

    @property
    def logged_bytes(self):
        """Bytes of the lines that were not taken yet."""
        return self.at.log.length

    def take_log(self):
        """Return the lines since the last call, each with its end, and the count of those without room."""
        lines = PyBytes_FromStringAndSize(<char *>self.at.log.lines, self.at.log.length) if self.at.log.length else b""
        lost = self.at.log.lost
        self.at.log.length = self.at.log.lost = 0
        return lines, lost

    # --- counts --------------------------------------------------------------------------------------------------

    def take_notes(self):
        """Return the ids of chunks that were noted as read since the last call, a sample."""
        noted = [
            PyBytes_FromStringAndSize(<char *>self.at.notes[slot], CHUNK_ID_BYTES)
            for slot in range(<int>self.at.note_count)
        ]
        self.at.note_count = 0
        return noted

    def times(self, int operation):
        """Return how many answers took up to each bound, and longer than all; and the sum in nanoseconds.

        `operation`: its place in OPERATIONS.
        """
        if not 0 <= operation < OF_COUNT:
            raise ValueError("there is no such operation")
        times = [self.at.times[operation][slot] for slot in range(<int>self.at.bound_count + 1)]
        return times, self.at.took_ns[operation]

    @property
    def answered(self):
        """Counts of answers by OPERATIONS: of a whole object, and of a range."""
        return [(self.at.counts[operation][0], self.at.counts[operation][1]) for operation in range(OF_COUNT)]

    @property
    def passed(self):
        """Counts of requests that were passed on, by `PASSED`."""
        return tuple(self.at.passed[reason] for reason in range(PASSED_COUNT))

    @property
    def received_bytes(self):
        """Bytes of the bodies of PUTs that were answered."""
        return self.at.received_bytes

    @property
    def sent_bytes(self):
        """Bytes of the bodies of answers."""
        return self.at.sent_bytes

    @property
    def cut_short(self):
        """Count of answers that ended early."""
        return self.at.cut_short

    @property
    def held(self):
        """Count and bytes of the answers held."""
        return self.at.answers.table.count, self.at.answers.table.held_bytes


@cython.no_gc_clear  # the repeater is in use until this is freed
cdef class Rest:
    """What is left of an answer: bytes [at, stop) of an object.  One that is freed before it has ended was cut short."""

    cdef body_rest *at
    cdef Repeater by
    cdef bytes peer
    cdef readonly int64_t began_ns

    def __cinit__(self, Repeater by not None, bytes peer not None, int64_t began_ns):
        self.by, self.peer, self.began_ns = by, peer, began_ns

    def __dealloc__(self):
        if self.at != NULL:
            self.finish(1)

    @property
    def span(self):
        """First byte that is left, and the end."""
        self.check()
        return self.at.at, self.at.stop

    @property
    def layout(self):
        """As of `Repeater.learn_answer`, of the bytes that are left; what lies before its first piece does not count."""
        self.check()
        return PyBytes_FromStringAndSize(<const char *>self.at.layout.at, self.at.layout.length)

    @property
    def name(self):
        """Bucket and key as members in JSON."""
        self.check()
        return PyBytes_FromStringAndSize(<const char *>self.at.logged.name.at, self.at.logged.name.length)

    def release(self):
        """Give the rest back to native code: return its address.  ValueError when it was given back, or has ended."""
        self.check()
        address = <size_t>self.at
        self.at = NULL
        return address

    def end(self, uint64_t sent_bytes):
        """Count the answer, of which so many bytes more were sent; it was cut short if they are not all."""
        self.check()
        self.at.at = min(self.at.at + sent_bytes, self.at.stop)
        self.finish(self.at.at < self.at.stop)

    cdef int check(self) except -1:
        if self.at == NULL:
            raise ValueError("this rest was given back, or has ended")
        return 0

    cdef void finish(self, int is_cut) noexcept:
        rest_ended(self.by.at, self.at, span_of(self.peer), <uint64_t>(time.monotonic_ns() - self.began_ns), is_cut)
        self.at = NULL


@cython.no_gc_clear  # its bytes are in use until this is freed
cdef class Put:
    """A PUT of a small object that came whole, with a signature and digests that were proven; its buffer is the body.

    `descriptor` and `number` are its ticket at the door.
    """

    cdef gathered *at
    cdef Repeater by

    def __cinit__(self, Repeater by not None):
        self.by = by

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.at.body.at, <Py_ssize_t>self.at.body.length, 1, flags)

    def __len__(self):
        return <Py_ssize_t>self.at.body.length

    @property
    def descriptor(self):
        return self.at.ticket.descriptor

    @property
    def number(self):
        return self.at.ticket.number

    @property
    def host(self):
        """The Host, as received."""
        return bytes_of(self.at.of.value[FIELD_HOST])

    @property
    def target(self):
        """The target, as received: a path without a query."""
        return bytes_of(self.at.target)

    @property
    def headers(self):
        """The header fields that are kept with the object, or that Python checks, by name in lower case."""
        cdef int field
        cdef uint32_t present = self.at.of.present & FIELDS_GIVEN
        found = {}
        for field in range(FIELD_COUNT if present else 0):
            if present >> field & 1:
                found[_GIVEN[field]] = bytes_of(self.at.of.value[field])
        return found

    @property
    def signer(self):
        """The access key that it was signed with, as JSON."""
        return bytes_of(self.at.signer)

    @property
    def md5(self):
        """MD5 of the body."""
        return PyBytes_FromStringAndSize(<const char *>self.at.md5, MD5_DIGEST_LENGTH)

    @property
    def request(self):
        """The whole request, as received."""
        return bytes_of(self.at.request)

    def answer(self, bytes lines not None, bytes logged not None):
        """Return the bytes of a 200 with these header lines, to be sent at once; `logged` as of `learn_answer`.

        ValueError for lines that are too long.
        """
        cdef span answer = answer_put(self.by.at, self.at, span_of(lines), span_of(logged))
        if not answer.length:
            raise ValueError("the header lines are too long for an answer")
        return bytes_of(answer)
