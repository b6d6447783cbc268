"""Every limit of the product, with the arithmetic beside it.  Nothing grows without a limit as input grows."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- layout of content -------------------------------------------------------------------------------
CHUNK_BYTES: Final = 4 * MIB
"""Largest chunk; also the size of fixed cuts."""
GRANULE_BYTES: Final = 64 * KIB
"""Unit of CRC32C; a 4 MiB chunk has a vector of 64 checksums, 256 bytes."""
SMALL_PAYLOAD_BYTES: Final = 64 * KIB
"""Smaller payloads are packed into small segments and answered inline."""
PAGE_BYTES: Final = 4 * KIB
PAGE_SUMS_MAX: Final = 32_768
"""Granules for which a mount keeps per-page checksums: 2 GiB of content read at random; 350 bytes each: 11 MiB."""
MANIFEST_FANOUT: Final = 8192
"""Entries of one manifest: 8192 x 40 bytes = 320 KiB, and one level-0 manifest maps up to 32 GiB."""
MANIFEST_LEVELS_MAX: Final = 4
"""8192^5 chunks: far beyond any disk.  A deeper manifest is refused."""
BLOB_BYTES_MAX: Final = 1 << 62
FILE_BYTES_MAX: Final = 4 << 40
"""Largest file written through a mount, holes included: a million chunks, whose plan takes about 100 MB of memory."""
SAFETENSORS_HEADER_BYTES_MAX: Final = 32 * MIB
"""Larger headers are not parsed, and the file gets fixed cuts; the format's own limit is 100 MB."""
SAFETENSORS_TENSORS_MAX: Final = 1_000_000

# --- names -------------------------------------------------------------------------------------------
KEY_BYTES_MAX: Final = 4095
"""Longest new key, in UTF-8 bytes: a path that a system call takes.  Renames of folders may make keys longer."""
S3_KEY_BYTES_MAX: Final = 1024
"""S3's limit for a key, in UTF-8 bytes: the gateway neither lists nor takes longer ones."""
BUCKET_NAME_BYTES_MIN: Final = 3
"""Shortest name of a new bucket, as in S3."""
BUCKET_NAME_BYTES_MAX: Final = 63
BUCKETS_MAX: Final = 10_000
"""One answer lists all of them: 10,000 x at most 90 bytes is well inside one control part."""
PART_NUMBER_MAX: Final = 10_000
"""S3's limit for parts of one upload.  Completing one removes 10,000 records of 27 bytes in one group: 270 KB."""
PART_BYTES_MIN: Final = 5 * MIB
"""S3's minimum size of a part, except the last."""
PART_BYTES_MAX: Final = 5 * GIB
PART_CHUNKS_MAX: Final = 4096
"""Chunks of one part; its layout fits in one answer: 4,096 x 45 bytes = 180 KiB.  5 GiB cut at 4 MiB are 1,280."""
UPLOAD_DETAILS_BYTES_MAX: Final = 1024
"""Largest details of one upload.  A page of 1,000 uploads with keys of 1 KiB takes 2 MiB of one control part."""
PART_CHECKSUMS_BYTES_MAX: Final = 512
"""S3's five checksums take 120 bytes."""
UPLOAD_EXPIRY_S: Final = 7 * 86_400.0
"""Unfinished uploads are removed at this age, unless configured otherwise."""
ACCESS_KEYS_MAX: Final = 10_000
"""They are counted when one is created: about 10 ms."""
ACCESS_KEY_BUCKETS_MAX: Final = 50
"""Buckets that one access key can be limited to.  A page of 1,000 keys with so many of 63 bytes takes 3.3 MiB."""
PART_NAMES_MAX: Final = 8
"""Names tried for the part of a local file; each free one costs a system call of about a microsecond."""
COMPONENT_SPLIT_BYTES: Final = 480
"""LMDB keys hold at most 511 bytes: 8 bytes of parent and 480 of component leave room for the slash."""
ATTRIBUTES_BYTES_MAX: Final = 64 * KIB
"""Encoded attributes of one node: user metadata, headers, xattrs."""
SYMLINK_TARGET_BYTES_MAX: Final = 4095
"""Linux's PATH_MAX without its NUL."""
LIST_PAGE_MAX: Final = 1000
DELETE_BATCH: Final = 1000

# --- journal, overlay, index -------------------------------------------------------------------------
GROUP_BYTES_MAX: Final = 8 * MIB
"""Body of one journal group.  One request's mutations fit in one group or the request is refused."""
JOURNAL_FILE_BYTES: Final = 64 * MIB
JOURNAL_FILL_BYTES: Final = 4 * MIB
"""Zero-fill ahead of the journal's end: a synced write into written blocks costs half."""
OVERLAY_ENTRIES_APPLY: Final = 16_384
"""Entries at which the overlay is applied to LMDB without waiting for the timer."""
OVERLAY_ENTRIES_MAX: Final = 131_072
"""Entries at which commits wait for the index; about 400 bytes each: 52 MiB."""
OVERLAY_BYTES_APPLY: Final = 32 * MIB
"""Like OVERLAY_ENTRIES_APPLY, but in estimated bytes, for records with large attributes (64 KiB each at most)."""
OVERLAY_BYTES_MAX: Final = 128 * MIB
OVERLAY_APPLY_INTERVAL_S: Final = 1.0
CHECKPOINT_JOURNAL_BYTES: Final = 64 * MIB
"""A checkpoint is due when the journal written since the last one is longer than this, and longer than half of that
checkpoint."""
JOURNAL_SHARE: Final = 32
"""On a small file system a checkpoint is due when the journal has taken 1/32 of it."""
LMDB_MAP_BYTES: Final = 1 << 42
"""4 TiB of address space, sized once; the file grows as needed."""
ADDRESS_SPACE_BYTES: Final = 3 * LMDB_MAP_BYTES
"""12 TiB that a process with a store may map: the index, a rebuilt index beside it, and as much for everything else
(the DRAM tier, memory that clients lend, buffers, threads' stacks), which is a few times the machine's memory."""
VERIFY_BATCH: Final = 4096
"""Records checked by one call to a thread while the index is verified after start-up: about 5 ms."""

# --- stamps ---------------------------------------------------------------------------------------------
STAMP_COUNT: Final = 1 << 18
"""Stamps of an engine: 2 MiB.  An answer that rests on 6 records shares a stamp with one change in 44,000."""
STAMPS_PER_ANSWER_MAX: Final = 32
"""Most records of one answer with stamps: a key of 28 parts.  A batch of 4,096 answers has at most 1.5 MiB of them."""

# --- known names ----------------------------------------------------------------------------------------
KNOWN_NAMES_BYTES: Final = 32 * MIB
"""Most bytes that a client keeps of what it has learned about names: some 80,000 names at 400 bytes.  With none
it takes 0.1 MiB, and 0.5 MiB of address space."""
KNOWN_CONTENT_BYTES_MAX: Final = 256 * KIB
"""Longest content of a known name: it is copied and checked in 60 us, for which the interpreter's lock is held."""
KNOWN_SEGMENTS_MAX: Final = 256
"""Most segments whose descriptors are borrowed to read known names: half of what a client holds."""
KNOWN_WANTED_MAX: Final = 64
"""Most segments and slabs that are asked for at once; others are asked for when their names are learned again."""

# --- shared index ---------------------------------------------------------------------------------------
HOT_INDEX_SLOTS_MIN: Final = 1 << 10
HOT_INDEX_SLOTS_MAX: Final = 1 << 32
"""Slots of one table; at 64 bytes each 256 GiB.  An entry's home slot is taken from the first 8 bytes of its digest."""
HOT_INDEX_ENTRIES_MIN: Final = 200_000
"""Entries that the smallest default table has room for: 16 MiB.  The table grows by itself."""
HOT_INDEX_MEMORY_SHARE: Final = 16
"""A table takes at most 1/16 of the memory: 2 GiB on 32 GiB, 26 million chunks."""
HOT_INDEX_ATTEMPTS: Final = 8
"""Attempts of a reader at a part of the table that changes during the read; then it asks the engine."""
READ_NOTES_EVERY: Final = 8
"""About one of so many reads through the shared index is noted, to be reported to the engine."""
READ_NOTES_MAX: Final = 256
"""Notes in one request: 8.5 KB, at most ten times a second."""
KEY_NOTES_MAX: Final = 1024
"""Notes of keys in one request: 37 KB with keys of 36 bytes."""

# --- reading whole content ---------------------------------------------------------------------------
UNLEASED_BELOW_BYTES: Final = 8 * MIB
"""Shorter content is read without a lease: it takes a few milliseconds, and is read again if gc frees a chunk during
the read."""

# --- reading ahead -----------------------------------------------------------------------------------
READ_AHEAD_WINDOW_BYTES_MIN: Final = 4 * MIB
"""First window of a reader that continues where it stopped: a chunk, 1.4 ms of a disk that reads 3 GB/s."""
READ_AHEAD_WINDOW_BYTES_MAX: Final = 32 * MIB
"""Window of such a reader after three doublings: 10 ms of a disk's reading, longer than a thread's pause."""

# --- segments ----------------------------------------------------------------------------------------
LARGE_SEGMENT_BYTES: Final = 1 * GIB
SMALL_SEGMENT_BYTES: Final = 256 * MIB
LARGE_EXTEND_BYTES: Final = 128 * MIB
WRITE_RUN_BYTES: Final = MIB
"""Large payload hashed by one call to a thread, and written by another: 0.3 ms of a core, 0.5 ms of a disk."""
WRITE_RUNS_AT_ONCE: Final = 4
"""Runs of one request that are hashed or written at once: two for the cores, two for the disk."""
WRITE_AHEAD_BYTES: Final = MIB
"""A request of at least this length is written while it is hashed; hashing less takes under 0.2 ms."""
WRITE_AHEAD_RUN_BYTES: Final = 4 * MIB + 64 * KIB
"""Longest run written ahead: a chunk of the maximum length, or several with the checksums written behind each; 2 ms
of a disk in one call."""
SMALL_FILL_BYTES: Final = 4 * MIB
SMALL_UNWRITTEN_BYTES: Final = 2 * MIB
"""Small payloads in memory at which they are written without waiting for more."""
SMALL_UNWRITTEN_BYTES_MAX: Final = 16 * MIB
"""Small payloads in memory at which more wait: one batch being written, one behind it, and one more request."""
RESERVE_BYTES: Final = 64 * MIB
"""Space that only the journal and the index may use, so that rm and gc work on a full disk."""
RESERVE_SHARE: Final = 32
"""On a small file system the reserve is at most 1/32 of it."""
RING_ENTRIES: Final = 256
"""Reads that io_uring has in flight: four requests of 64 pieces; 256 x 64 bytes and 512 x 16 bytes of memory."""

# --- the DRAM tier -----------------------------------------------------------------------------------
DRAM_PAYLOAD_BYTES_MIN: Final = 4 * KIB
"""Shorter payloads are served inline from the page cache; in a slot of 16 KiB they would waste most of it."""
DRAM_SHARE: Final = 16
"""Default size of the tier: 1/16 of the memory that the machine and the control group leave to the engine."""
DRAM_BYTES_AUTO_MIN: Final = 256 * MIB
"""A smaller share (four slabs) is not worth having: a machine of less than 4 GiB has no tier."""
DRAM_BYTES_AUTO_MAX: Final = 4 * GIB
DRAM_SHARE_MOST: Final = 0.75
"""Largest share of that memory that the tier may take; the rest serves everything else, the page cache too."""
DRAM_FILLS_QUEUED_MAX: Final = 256
"""Chunks that wait to be filled; the rest wait for their next read.  50 KB of references."""
DRAM_HELD_BYTES_MAX: Final = 16 * MIB
"""Payload that reads have already fetched, held for chunks that wait; a payload that does not fit is read again."""
DRAM_FILLERS: Final = 2
"""Chunks filled at the same time: two of the engine's threads at most."""
SLABS_PER_REQUEST_MAX: Final = 63
"""Their descriptors and that of the generations fit in one frame."""

# --- sessions, gc ------------------------------------------------------------------------------------
SESSIONS_PER_CONNECTION_MAX: Final = 4096
"""Puts in progress of one client; a gateway process is one client, with 4,096 connections (HTTP_CONNECTIONS_MAX)."""
SESSIONS_MAX: Final = 65_536
"""Sessions of all connections; one user gets a quarter: 16,384, four such gateways.  A session takes 0.5 KiB, and 0.7
KiB for each run of 4,096 births of which it holds any: 77 MiB if each session holds one chunk."""
SESSIONS_LINGERING_MAX: Final = 64
"""Sessions kept for a connection that has ended: as many as it has requests in flight.  256 such connections fill one
user's share."""
SESSION_LINGER_S: Final = 60.0
LEASES_PER_CONNECTION_MAX: Final = 65_536
"""Objects open for reading on one connection: all handles of a mount.  About 200 bytes each: 13 MiB."""
LEASES_MAX: Final = 1 << 20
"""Leases of all connections: 200 MiB.  One user gets a quarter: four such connections."""
GC_GRACE_S: Final = 10.0
"""No chunk is freed this long after a start that found a store: clients of the last boot re-offer first."""
SCRUB_RATE_BYTES_PER_S: Final = 64 * MIB
"""Rate of a background scrub: 5.3 TiB a day; a hundredth of the rate at which a core hashes."""
SCRUB_INTERVAL_S: Final = 14 * 24 * 3600.0
"""Time from the end of one full pass to the start of the next."""
SCRUB_STEP_S_MAX: Final = 60.0
"""Longest time that one request may continue a pass before it is answered."""
GC_BATCH: Final = 256
"""Records walked between two rests, while no client writes: keys of a space take up to 2 ms."""
GC_BATCH_BESIDE_WRITERS: Final = 64
"""The same while a client writes: half a millisecond, for which its requests may wait at each of their steps."""
COMPACT_SHARE: Final = 0.75
"""A segment is compacted when at most this share of its space is live: three bytes written free one."""
COMPACT_SHARE_MOST: Final = 0.97
"""The share when all space is to be freed."""
COMPACT_WON_BYTES_MIN: Final = 16 * KIB
"""Saving less is not worth a new file: the last page of a segment is never full, and each start begins a new
segment."""
COMPACT_BATCH: Final = 128
"""Chunks moved by one decision: 11 KiB of a group."""
COMPACT_BATCH_BESIDE_WRITERS: Final = 16
"""Chunks moved by one decision while a writer's group waits for this one: a millisecond of the loop, one small
write."""
COMPACT_BATCH_BYTES: Final = 4 * MIB
"""Payload copied at once; with a chunk's vector and rounding at most 3 buffers of the pool."""
COMPACT_BYTES_PER_S: Final = 128 * MIB
"""Rate of compaction: a share of any disk's rate that leaves room for writers."""
COMPACT_RECORDS_MAX: Final = 100_000
"""Records in memory while segments are compacted, about 400 bytes each: 40 MiB."""

# --- keyed blobs ------------------------------------------------------------------------------------------
KEYED_KEY_BYTES_MAX: Final = 64
"""Longest key: a hash with a few bytes beside it."""
KEYED_PARTS_MAX: Final = 256
"""Most parts of a value: 36 bytes of its record each, 9 KiB."""
KEYED_VALUE_BYTES_MAX: Final = 256 * MIB
"""Longest value: 64 parts of 4 MiB."""
KEYED_DEPTH_MAX: Final = 65_535
KEYED_PARTS_ANSWERED_MAX: Final = 32_768
"""Most parts in one answer to KeyedMatch, at most 49 bytes each with their leases: 1.6 MB of the 4 MiB of a frame."""
KEYED_QUOTA_BYTES_MIN: Final = 64 * MIB
"""Least quota of a space: a twentieth of it, the room that eviction keeps free, is a request of small values."""
KEYED_ROOM_WAIT_S: Final = 2.0
"""Longest time that a put waits for eviction."""
KEYED_TTL_S_MAX: Final = 10 * 366 * 24 * 3600
SPACES_MAX: Final = 1024
"""Spaces of a store, removed ones too until their values are gone: about 300 bytes each in one answer."""
SPACE_NAME_BYTES_MAX: Final = 200

# --- cluster: the coordinator -----------------------------------------------------------------------------
# etcd takes 1.5 MiB a request and 128 comparisons or operations a transaction, unless it is configured otherwise.
COORDINATOR_KEY_BYTES_MAX: Final = 256
COORDINATOR_VALUE_BYTES_MAX: Final = MIB
"""Longest value: a table of 16,384 rows of 16 bytes takes a quarter."""
COORDINATOR_OPERATIONS_MAX: Final = 120
"""Comparisons of a transaction, and operations of each branch: etcd does 128, and two or three more mark it as done."""
COORDINATOR_TRANSACTION_BYTES_MAX: Final = MIB + 256 * KIB
"""Keys and values of a transaction; 256 KiB of 1.5 MiB remain for its framing: 3 x 120 x 720 bytes."""
COORDINATOR_PAGE_MAX: Final = 1000
COORDINATOR_PAGE_BYTES_MAX: Final = 2 * MIB
"""A page ends when its keys and values have reached this: it holds 3 MiB at most, and fits in a frame."""
COORDINATOR_KEY_COST_BYTES: Final = 128
"""Counted for each key beside its own bytes and its value's."""
COORDINATOR_BYTES_MAX: Final = 64 * MIB
"""All keys and values.  4 tables of 256 KiB, 16,384 dirty partitions and 3,072 members of 2 KiB each take 10 MiB."""
COORDINATOR_HISTORY_COUNT: Final = 8192
"""Revisions held for watches that are behind, and each of their changes counts: 64 notes of 120 partitions."""
COORDINATOR_HISTORY_BYTES: Final = 16 * MIB
"""The same in bytes: 64 tables of 256 KiB."""
COORDINATOR_WATCHES_MAX: Final = 16_384
"""3,072 members and some hundred heads with three watches each; about 1 KiB each: 16 MiB."""
COORDINATOR_LEASES_MAX: Final = 8192
"""A lease for each member and head, twice; about 500 bytes each: 4 MiB."""
COORDINATOR_LEASE_KEYS_MAX: Final = 128
"""Keys of one lease, which are removed in one transaction."""
COORDINATOR_LEASE_S_MIN: Final = 2  # the least that etcd grants
COORDINATOR_LEASE_S_MAX: Final = 86_400
COORDINATOR_SEEN_BYTES_MAX: Final = 2 * MIB
"""Keys and values that comparisons saw; a frame holds 120 x 300 bytes with them.  Values behind it are left out."""
COORDINATOR_WATCH_S_MAX: Final = 60.0
"""One request of a watch waits so long: a process that watches asks once or twice a minute while nothing changes."""
NAMES_CONNECT_S: Final = 4.0
"""Time to connect to the names of a lake and have them answer: shorter than a client's patience with a head's Hello
(HELLO_TIMEOUT_S), and than MEMBER_CONNECT_S, in which the generation is read."""
NAMES_SILENCE_S: Final = 4.0
"""Time that the names may leave requests, a Ping too, unanswered before a connection to them counts as lost."""
NAMES_PAUSE_S_MAX: Final = 2.0
"""Pause between two attempts to reach names that are away: some hundred processes, each every other second."""

# --- cluster: heads ---------------------------------------------------------------------------------------
HEAD_ANSWERS_MAX: Final = 1 << 21
"""Chunks that all puts in progress at a head were answered as stored, at about 250 bytes each: 500 MiB.
One user gets a quarter: half a million, 2 TiB of chunks of 4 MiB."""
HEAD_LENGTHS_MAX: Final = 1 << 17
"""Lengths of chunks that a head keeps, at about 200 bytes each: 25 MiB."""
HEAD_PLACES_MAX: Final = 1 << 17
"""Chunks of keyed blobs whose member a head keeps, at about 250 bytes each: 32 MiB, four full answers to KeyedMatch."""
HEAD_SPACES_FRESH_S: Final = 10.0
"""Time for which a head relies on what it read of the lake's spaces: 6 short requests to the names a minute."""
HEAD_BIND_ATTEMPTS: Final = 4
"""Times that a head binds names, as gc generations and ring epochs advance; each takes minutes to."""

# --- wire --------------------------------------------------------------------------------------------
CONTROL_BYTES_MAX: Final = 4 * MIB
"""Control part of one frame.  A locate of 4096 chunks answers with about 0.5 MiB."""
BODY_BYTES_MAX: Final = 16 * MIB
BATCH_MAX: Final = 4096
"""Items in one batched request."""
INFLIGHT_PER_CONNECTION: Final = 64
"""Requests being served for one connection; the next is not read until one ends."""
CONNECTIONS_MAX: Final = 4096
"""Connections of accepted clients: 3,072 (three quarters) for root and the engine's own user, 1,024 for any other
user."""
STRANGERS_MAX: Final = 64
"""TCP connections that have not shown the token, in addition to those: 64 x 32 KiB (receive buffer, control part) = 2
MiB. A new one replaces the oldest: where 1,000 arrive in a second, one has 64 ms to send its Hello."""
FRAME_TIMEOUT_S: Final = 30.0
"""Time within which a frame that has begun must end."""
HELLO_TIMEOUT_S: Final = 5.0
SOURCES_PER_CONNECTION_MAX: Final = 64
"""Descriptors that one client has registered for the engine to read from."""
PINS_PER_CONNECTION_MAX: Final = 65_536
"""Chunks that one client has pinned: 256 GiB of 4 MiB each."""
PINS_MAX: Final = 131_072
"""Chunks pinned on all connections together: at most 450 bytes each, 56 MiB."""
LENT_MEMORIES_PER_CONNECTION_MAX: Final = 16
"""Memories that one client has lent to the engine."""
LENT_MEMORIES_MAX: Final = 1024
"""Memories lent on all connections: two descriptors and a mapping each."""
LENT_MEMORY_BYTES_MAX: Final = 256 * GIB
"""Bytes of all memory lent: page tables of 512 MiB if every page (4 KiB) were mapped and written to."""
FABRIC_LINKS_MAX: Final = 256
"""Queue pairs of an engine, one for each connection: most adapters have tens of thousands; some 100 KiB each."""
BOUNCE_BYTES: Final = 4 * MIB + PAGE_BYTES
"""Registered buffer that loads and puts over RDMA move their bytes through: the longest chunk, and its vector."""
BUFFER_POOL_BYTES: Final = 64 * MIB
"""Pooled payload buffers of the engine: 15 of 4 MiB + 4 KiB."""
BUFFERS_HUGE: Final = 6
"""Pool buffers on huge pages, from the first large payload on: 26 MiB, for a request of 16 x 1 MiB, or six of a
chunk."""
ANSWER_CLIENT_BYTES: Final = 8 * MIB
"""Content of streamed answers to one client that is being read or sent: a request of two chunks, or two of one."""
ANSWER_MEMORY_BYTES: Final = 512 * MIB
"""The same of all clients: 64 clients that do not take their answers.  FRAME_TIMEOUT_S ends those."""
ANSWER_KEPT_BYTES: Final = 24 * MIB
"""Kept of it while no answer needs it: for three clients, and less than a processor's last cache."""
SMALL_MEMORY_BYTES: Final = 128 * MIB
"""Small payloads of all requests that are being received or stored: 8 requests of 16 MiB, or 2,000 of 64 KiB."""
WATCHERS_MAX: Final = 1024
"""Open watches of one engine: with full queues 1024 x 4096 references of 8 bytes = 32 MiB.  Users share them as they
share CONNECTIONS_MAX: 768 for root and the engine's own user, 256 for any other, which are the watches of 16
connections."""
WATCH_QUEUE_MAX: Final = 4096
"""Events kept for a slow watcher before it gets one `resync`."""
ENGINE_WAIT_S: Final = 5.0
"""Time that a client waits for an engine that it lost."""
ENGINE_SILENCE_S: Final = 30.0
"""Time that an engine may leave requests, a Ping too, unanswered before its connection counts as lost.  The engine's
own watchdog ends a process that hangs as long."""
HELLO_CONTROL_BYTES_MAX: Final = 16 * KIB
"""Control part before Hello has been accepted, so that a stranger makes the engine hold almost nothing."""
DESCRIPTORS_PER_FRAME_MAX: Final = 64
"""Descriptors that one frame may carry; the kernel allows up to 253."""
WATCHES_PER_CONNECTION_MAX: Final = 16
"""Watches stay open, so they are counted apart from requests in flight."""
RECEIVE_BUFFER_BYTES: Final = 16 * KIB
"""Receive buffer of one connection: 4096 connections hold 64 MiB; some 200 small requests fit."""
SOCKET_BUFFER_BYTES: Final = 1 * MIB
"""Kernel buffers requested for Unix sockets: a quarter of the largest chunk between two wake-ups."""
LISTEN_BACKLOG: Final = 1024
"""Connections that wait to be accepted."""

# --- in flight ---------------------------------------------------------------------------------------
# A window is the number of requests, or pieces of work for threads, that are in flight at once: the bytes
# that all of them may hold, divided by the bytes that one holds at most.
#
# window                 one     all  count  what is in flight; what bounds the bytes of all
# STORE_WINDOW         8 MiB  48 MiB   6  requests to store two chunks, or manifests; 12 of the engine's 15 buffers
# PUT_MANY_WINDOW     16 MiB  32 MiB   2  requests to put small objects; one is received, or copied, while one is synced
# FRAMES_PER_JOB       4 MiB   8 MiB   2  frames of small files of one job; one is read while one is stored
# WRITE_BEHIND_WINDOW  8 MiB  16 MiB   2  requests to store an open file; one is hashed while one is written to disk
# WRITE_BEHIND_FILES  16 MiB  32 MiB   2  open files of one mount that are being stored; 8 of the engine's 15 buffers
# HOT_FILLS            1 MiB   2 MiB   2  hot files that a mount fills at once; half of the threads that read for it
# S3_STORE_WINDOW      4 MiB  12 MiB   3  chunks of one PUT; a gateway's S3_RECEIVE_BYTES are enough for 15 such PUTs
# FETCH_WINDOW        16 MiB  96 MiB   6  groups of chunks, or streamed chunks; enough for two threads and a disk
# LOAD_WINDOW          4 MiB  16 MiB   4  streamed chunks, requests to load, portions to check; two for each thread
# CHECK_WINDOW         4 MiB  16 MiB   4  chunks that threads hash where they lie; two for each thread
# WRITE_FILES_WINDOW   2 MiB   8 MiB   4  batches of small files to write; two for each thread
# MARKS_WINDOW       132 KiB 264 KiB   2  requests to mark chunks at one member; it marks one while the other is sent
# COPY_WINDOW          4 KiB 128 KiB  32  requests to copy names; half of those that are served for one connection
# ETCD_IN_FLIGHT       2 MiB 128 MiB  64  transactions of a process at etcd, with what they saw; others wait for them
# BOUNCE_BUFFERS       4 MiB  60 MiB  15  registered buffers of an engine; locked memory, beside the DRAM tier's
# BOUNCES_PER_LINK     4 MiB   8 MiB   2  such buffers of one connection; one is filled while the other is moved
# CLIENT_BOUNCES       4 MiB   8 MiB   2  registered buffers of a client; one is filled while the other is checked
# CLIENT_LANDINGS      4 MiB   8 MiB   2  such buffers that the engine writes to; one is written while one is checked
CLIENT_THREADS: Final = 2
STORE_REQUEST_BYTES: Final = 2 * CHUNK_BYTES
"""Large enough that a request's overhead vanishes, small enough to overlap hash and disk."""
STORE_REQUEST_CHUNKS: Final = STORE_REQUEST_BYTES // CHUNK_BYTES
FRAME_BYTES: Final = 4 * MIB
"""Payload of small objects that travel together."""
STREAM_GROUP_BYTES: Final = 2 * CHUNK_BYTES
"""Chunks that one request has streamed: a request costs as much as copying half of it."""
FETCH_GROUP_BYTES: Final = 16 * MIB
CHECK_BYTES: Final = CHUNK_BYTES
"""Bytes checked by one call to a thread: a chunk, or short ones together."""
WRITE_FILES_BATCH: Final = 32
STORE_WINDOW: Final = 48 * MIB // STORE_REQUEST_BYTES
PUT_MANY_WINDOW: Final = 32 * MIB // BODY_BYTES_MAX
PUT_MANY_COUNT: Final = 64
"""Short objects in a request from which two requests are in flight: with fewer, one of twice as many is faster."""
PUT_MANY_SHORT_BYTES: Final = 16 * KIB
"""A request of PUT_MANY_COUNT such objects is one of 1 MiB, which is received and hashed in less than a sync takes."""
FRAMES_PER_JOB: Final = 8 * MIB // FRAME_BYTES
WRITE_BEHIND_WINDOW: Final = 16 * MIB // STORE_REQUEST_BYTES
WRITE_BEHIND_FILES: Final = 32 * MIB // (WRITE_BEHIND_WINDOW * STORE_REQUEST_BYTES)
HOT_FILLS: Final = 2 * MIB // MIB
S3_STORE_WINDOW: Final = 12 * MIB // CHUNK_BYTES
FETCH_WINDOW: Final = 96 * MIB // FETCH_GROUP_BYTES
LOAD_WINDOW: Final = 16 * MIB // CHECK_BYTES
CHECK_WINDOW: Final = 16 * MIB // CHECK_BYTES
WRITE_FILES_WINDOW: Final = 8 * MIB // (WRITE_FILES_BATCH * SMALL_PAYLOAD_BYTES)
BOUNCE_BUFFERS: Final = 60 * MIB // CHUNK_BYTES
BOUNCES_PER_LINK: Final = 8 * MIB // CHUNK_BYTES
CLIENT_BOUNCES: Final = 8 * MIB // CHUNK_BYTES
CLIENT_LANDINGS: Final = 8 * MIB // CHUNK_BYTES
MARKS_WINDOW: Final = 2
ETCD_IN_FLIGHT: Final = 128 * MIB // COORDINATOR_SEEN_BYTES_MAX
COPY_WINDOW: Final = INFLIGHT_PER_CONNECTION // 2
READ_AHEAD_BYTES_MAX: Final = FETCH_WINDOW * FETCH_GROUP_BYTES + READ_AHEAD_WINDOW_BYTES_MAX
"""Bytes waiting to be read ahead for one client: the groups in flight, and one reader's window, 128 MiB."""
STREAM_BYTES: Final = 16 * MIB
"""Payload of one step of a stream; memory holds twice that: one step is fetched while one is written."""
# One piece of a gateway's answer: sent from memory that all answers share, read into the page cache, or held.
S3_SEND_BYTES: Final = 2 * GRANULE_BYTES
S3_BROUGHT_BYTES: Final = 2 * MIB
S3_HELD_BYTES: Final = 1 * MIB

# --- admin port --------------------------------------------------------------------------------------
ADMIN_CONNECTIONS_MAX: Final = 128
"""When full, a new connection replaces the one that has waited longest for its next request: 128 x 8 KiB = 1 MiB."""
ADMIN_HEAD_BYTES_MAX: Final = 8 * KIB
ADMIN_REQUEST_TIMEOUT_S: Final = 15.0
"""Time from the end of one request to the end of the next head, however slowly its bytes arrive."""
ADMIN_RESPONSE_TIMEOUT_S: Final = 5.0
"""Time for a client that does not read; also the longest that a shutdown waits for an answer in progress."""
ADMIN_LINGER_S: Final = 1.0
"""Time that a refused client's bytes are read and dropped, so that the refusal reaches it before a reset."""

# --- HTTP and S3 requests ----------------------------------------------------------------------------
HTTP_HEAD_BYTES_MAX: Final = 32 * KIB
"""Request line and headers: 8,192 headers at most, of 4 bytes each.  A 1,024-byte key takes 3 KiB percent-encoded, user
metadata 2 KiB, a signature 1 KiB."""
HTTP_CHUNK_LINE_BYTES_MAX: Final = 1 * KIB
"""The line before a chunk, with its extensions."""
HTTP_TRAILER_BYTES_MAX: Final = 4 * KIB
"""All lines behind the last chunk; S3 clients send a checksum and its signature."""
HTTP_TRAILERS_MAX: Final = 16
HTTP_IDLE_TIMEOUT_S: Final = 75.0
"""Idle time between requests; longer than the 60 s after which clients' pools and balancers drop a connection
themselves."""
HTTP_HEAD_TIMEOUT_S: Final = 15.0
"""Time from a head's first byte to its last, however slowly they arrive."""
HTTP_HANDSHAKE_TIMEOUT_S: Final = 10.0
"""Time for a TLS handshake, which takes two round trips."""
HTTP_STALL_TIMEOUT_S: Final = 60.0
"""Time for the next bytes of a body to arrive, or to be accepted: up to 1 MiB that way, 17 KiB/s at least."""
GATEWAY_PROCESSES_MAX: Final = 64
"""Processes of one `lake gateway`; each takes about 60 MiB and a connection to the engine."""
GATEWAY_NOTE_S: Final = 2.0
"""Time between two notes of a gateway's counts to the engine, for `lake status`."""
GATEWAY_URL_CHARACTERS_MAX: Final = 300
GATEWAY_REASONS_MAX: Final = 16
GATEWAY_REASON_CHARACTERS_MAX: Final = 32
"""A note is 300 + 16 x (32 + 20 digits) = 1.2 KB at most: 5 MB on 4096 connections."""
GATEWAYS_LISTED_MAX: Final = 1024
"""Notes in one answer to Status, of 1.5 KB as JSON: 1.5 MB of the 4 MiB that a frame may have."""
HTTP_LINGER_S: Final = 5.0
"""Time that a refused client's bytes are read and dropped, so that the refusal reaches it before a reset."""
HTTP_LINGER_BYTES_MAX: Final = 64 * MIB
"""The same limit in bytes: the client of a refused PUT of that size still receives the reason."""
HTTP_CONNECTIONS_MAX: Final = 4096
"""When full, a new connection replaces the one that has been idle longest; 4096 x 8 KiB of buffers = 32 MiB."""
HTTP_DATES_CACHED: Final = 4096
"""Dates parsed or formatted recently: 4096 x about 200 bytes = 0.8 MiB for each direction."""
S3_CLOCK_SKEW_S: Final = 900
"""Largest difference between a client's clock and the gateway's; S3's own 15 minutes."""
S3_PRESIGN_S_MAX: Final = 7 * 24 * 3600
S3_SIGNING_KEYS_CACHED: Final = 4096
"""One for each access key, day and region: 4096 x about 400 bytes = 1.6 MiB."""
S3_AUTHORIZATIONS_CACHED: Final = 4096
"""Parsed Authorization headers, one for each key, day and set of signed headers: 4096 x 2 KiB = 8 MiB."""
S3_XML_BODY_BYTES_MAX: Final = 4 * MIB
"""A CompleteMultipartUpload of 10,000 parts with checksums is about 2.5 MiB."""
S3_XML_DEPTH_MAX: Final = 8
S3_XML_ELEMENTS_MAX: Final = 100_000
"""10,000 parts of up to eight elements each, and some margin."""
S3_PARTS_MAX: Final = 10_000
S3_BUCKETS_PAGE_MAX: Final = 10_000
"""S3's own page; as many as a store has buckets (BUCKETS_MAX)."""
S3_DOMAINS_MAX: Final = 16
"""Host suffixes of virtual-host style; each is compared with every new Host."""
S3_RECEIVE_BYTES: Final = 192 * MIB
"""Payload bytes of PUTs that a gateway is receiving: 47 buffers of a chunk."""
S3_ACCESS_LOG_BYTES_MAX: Final = 4 * MIB
"""Access log lines that wait for the disk: about 10,000."""
S3_DOOR_BYTES: Final = 64 * MIB
"""Answers that the door keeps: some 100,000 of objects without metadata."""
S3_DOOR_PIECES_MAX: Final = 1024
"""Chunks of an object that the door sends: 4 GiB; its answers keep 41 bytes of each."""
S3_PUTS_GATHERED_MAX: Final = 64
"""PUTs of small objects that the door has stored with one request: 4 MiB at most."""
S3_TAGS_MAX: Final = 10
S3_QUERY_PARAMETERS_MAX: Final = 64
HISTOGRAM_MAX_NS: Final = 3600 * 10**9
"""An operation that takes longer counts as an hour."""
HISTOGRAM_PRECISION_BITS: Final = 7
"""Each doubling has 128 buckets: (42 - 8 + 2) x 128 = 4,608 counters, 37 KiB, right to 0.8%."""

# --- cluster -----------------------------------------------------------------------------------------
CLUSTER_MEMBERS_MAX: Final = 65_535
"""Members of one table: an index of 2 bytes, of which 65,535 means none."""
PARTITION_BITS: Final = 12
"""4,096 rows: 170 places on each of 24 members for each column of a row, so that loads can be even to a percent."""
PARTITION_BITS_MANY: Final = 14
"""16,384 rows x (6 + 2) places x 2 bytes = 256 KiB; 98 places on each of 1,000 members at 4+2."""
MANY_MEMBERS: Final = 100
"""From so many members on, 4,096 rows would leave fewer than 246 places to a member."""
MEMBER_ROOM_BYTES_MAX: Final = 1 << 62
DOMAIN_NAME_BYTES_MAX: Final = 255
"""The longest name of a host is 253 bytes; its length fits in one byte."""
TABLE_BYTES_MAX: Final = 64 * MIB
"""Longest packed table: 65,535 members x (44 + 3 x 256) bytes = 51 MiB, and 16,384 rows x 12 places x 2 bytes = 384
KiB."""
MEMBER_CONNECT_S: Final = 5.0
"""Time to connect to a member and have SetEpoch answered; a sixth of a client's patience (ENGINE_SILENCE_S)."""
MEMBER_SILENCE_S: Final = 5.0
"""Time that a member may leave requests, a Ping too, unanswered before its connection counts as lost."""
MEMBER_ANSWER_S: Final = 10.0
"""Time for one request about shards: a put that meets a silent member, then a silent substitute, is done in 20 s."""
MEMBER_IDLE_S: Final = 60.0
"""Time without a request after which a connection to a member is closed."""
MEMBER_LINKS_MAX: Final = 4096
"""Connections to members: 96 machines of 32 are 3,072; a receive buffer of 16 KiB each, 64 MiB."""
AWAY_PAUSE_S_MIN: Final = 0.1
AWAY_PAUSE_S_MAX: Final = 5.0
"""Pause between two attempts to reach a member that is away: it is back in use 5 s after its return."""
PARITY_MEMORY_BYTES: Final = 64 * MIB
"""Parity of all puts that a process stores at a time: 15 buffers; a put of 16 MiB needs at most 9."""
KNOWN_CHUNKS_MAX: Final = 16_384
"""Chunks whose length and checksums are kept in memory, at most 500 bytes each: 8 MiB, for 64 GiB of whole chunks."""
HEDGE_S_MIN: Final = 0.02
HEDGE_S_MAX: Final = 0.5
"""Bounds of the wait for an answer of a member before its shard is decoded from others: a few times a disk's time, and
less than a person notices."""
STRIPE_ATTEMPTS_MAX: Final = 4
"""Times that a request is made again with a newer table; tables change a few times a day."""
