/* Extents: where the bytes of a chunk lie for this process, and reads of them.  Known names, the door, plans of batches and
   the mount all read and check shared content with it; `__init__.py` names the two checks that stand elsewhere.

   An extent is made of a place of the shared index (`content.h`, `lake_extent_of_cell`), or Python has taught it (the
   mount): readers do not care.  A chunk has its payload there, and if that is longer than a granule, behind it the vector:
   the CRC32C of each granule.  Today a chunk has one extent; one that lies in parts would be a loop in here.

   Rules kept here:
   - Bytes are copied first, and checked where they arrived: others may write to where they were.
   - Files are read without waiting for a disk, if the extent's flags say so: what is not cached is not at hand.
   - Bytes that do not match are WRONG only if they cannot be another chunk's by now. */
#ifndef LAKE_EXTENT_H
#define LAKE_EXTENT_H

#include "granules.h"
#include "place.h"

#define LAKE_NEVER_ASK UINT64_MAX
#define LAKE_CELL_UNIT_BYTES (16 << 10) /* of a slab: each has a generation */
/* Bytes read from a file by one call, and summed then.  Memory of a caller is filled piece by piece, while the
   processor's nearest caches have each: summed after the whole, each byte would be fetched a second time.  A window that
   is used for one read after the other stays in the caches: all of it is read at once, which saves calls. */
#define LAKE_READ_AT_ONCE (2 * LAKE_GRANULE)
#define LAKE_READ_WINDOW (32 * LAKE_GRANULE)

typedef enum { LAKE_WRONG = -1, LAKE_NOT_AT_HAND = 0, LAKE_RIGHT = 1 } lake_reading;

typedef struct {
    const uint8_t *memory; /* where the payload begins; NULL: it is in a file */
    union {
        struct { /* of memory */
            const uint64_t *mark; /* has `generation` for as long as the payload is there; NULL: for ever */
            uint64_t generation, room; /* bytes that may be read from `memory` on */
        };
        struct { /* of a file */
            uint64_t offset;
            uint64_t ask_from; /* bytes of a read for which it is asked first if they are cached */
            int descriptor, flags; /* of preadv2 */
            uint32_t at_once;      /* LAKE_READ_AT_ONCE or LAKE_READ_WINDOW */
        };
    };
} lake_extent;

/* The generations of the cells of all slabs. */
typedef struct {
    const uint64_t *generations; /* NULL: there are none */
    uint64_t count, slab_bytes;
} lake_cells;

static inline lake_extent lake_extent_of_file(int descriptor, int flags, uint64_t offset, uint64_t ask_from,
                                              uint32_t at_once)
{
    return (lake_extent){.descriptor = descriptor, .flags = flags, .offset = offset, .ask_from = ask_from,
                         .at_once = at_once};
}

static inline lake_extent lake_extent_of_memory(const uint8_t *memory, uint64_t room)
{
    return (lake_extent){.memory = memory, .mark = NULL, .room = room};
}

static inline uint64_t lake_slab_of(const lake_place *place)
{
    return place->segment >> LAKE_GENERATION_BITS;
}

/* Finds a place of the DRAM tier in its slab's memory; returns 0 if it cannot be there. */
static int lake_extent_of_cell(const lake_cells *cells, const uint8_t *slab, uint64_t slab_length, const lake_place *place,
                               lake_extent *into)
{
    uint64_t generation = place->segment & ((UINT64_C(1) << LAKE_GENERATION_BITS) - 1);
    uint64_t cell = (lake_slab_of(place) * cells->slab_bytes + place->offset) / LAKE_CELL_UNIT_BYTES;
    if (slab == NULL || cells->generations == NULL || generation & 1 || cell >= cells->count || place->offset > slab_length)
        return 0;
    *into = (lake_extent){.memory = slab + place->offset, .mark = cells->generations + cell, .generation = generation,
                          .room = slab_length - place->offset};
    return 1;
}

/* Returns 0 if a range cannot be read now, as far as is known. */
static inline int lake_extent_is_ready(const lake_extent *from, uint64_t begin, uint64_t length)
{
    if (from->memory == NULL)
        return length < from->ask_from || lake_may_be_cached(from->descriptor, from->offset + begin, length);
    if (begin > from->room || length > from->room - begin)
        return 0;
    return from->mark == NULL || __atomic_load_n(from->mark, __ATOMIC_ACQUIRE) == from->generation;
}

/* Returns 1 if what was copied was the chunk's to the end. */
static inline int lake_extent_is_same(const lake_extent *from)
{
    if (from->memory == NULL || from->mark == NULL)
        return 1;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(from->mark, __ATOMIC_RELAXED) == from->generation;
}

static inline int lake_extent_pread(const lake_extent *from, uint64_t begin, uint8_t *into, size_t length)
{
    struct iovec target = {into, length};
    return lake_preadv(from->descriptor, &target, 1, from->offset + begin, from->flags) == (int64_t)length;
}

/* Copies bytes from `begin` on of a chunk's payload and its vector, unchecked; returns 0 if they are not at hand. */
static int lake_extent_copy(const lake_extent *from, uint64_t begin, size_t length, uint8_t *into)
{
    if (!lake_extent_is_ready(from, begin, length))
        return 0;
    if (from->memory == NULL)
        return lake_extent_pread(from, begin, into, length);
    memcpy(into, from->memory + begin, length);
    return lake_extent_is_same(from);
}

/* Reads bytes [begin, stop) of a payload, whole granules, and checks each; `crcs`: of all granules of the payload. */
static lake_reading lake_extent_granules(const lake_extent *from, uint64_t begin, uint64_t stop, const uint32_t *crcs,
                                         uint8_t *into)
{
    uint32_t found[LAKE_READ_WINDOW / LAKE_GRANULE];
    uint64_t step = from->memory == NULL ? from->at_once : LAKE_SUMMED_AT_ONCE;
    if (!lake_extent_is_ready(from, begin, stop - begin))
        return LAKE_NOT_AT_HAND;
    for (uint64_t at = begin; at < stop; at += step, into += step) {
        if (step > stop - at)
            step = stop - at;
        if (from->memory != NULL)
            lake_granule_crcs_copied(from->memory + at, step, into, found);
        else if (lake_extent_pread(from, at, into, step))
            lake_granule_crcs(into, step, found);
        else
            return LAKE_NOT_AT_HAND;
        if (memcmp(found, crcs + at / LAKE_GRANULE, lake_granule_count(step) * sizeof *found))
            return lake_extent_is_same(from) ? LAKE_WRONG : LAKE_NOT_AT_HAND;
    }
    return lake_extent_is_same(from) ? LAKE_RIGHT : LAKE_NOT_AT_HAND;
}

/* Reads the vector behind a payload of more than a granule into `crcs`, and checks it; returns 1 if it is right. */
static int lake_extent_vector(const lake_extent *from, uint64_t length, uint32_t crc, uint32_t *crcs)
{
    size_t bytes = lake_granule_count(length) * sizeof *crcs;
    return lake_extent_copy(from, length, bytes, (uint8_t *)crcs) && lake_crc32c((const uint8_t *)crcs, bytes) == crc;
}

/* Reads a whole chunk, and checks it by the CRC of its place; returns 1 if it is right. */
static int lake_extent_chunk(const lake_extent *from, uint64_t length, uint32_t crc, uint8_t *into)
{
    if (length <= LAKE_GRANULE)
        return lake_extent_copy(from, 0, length, into) && lake_crc32c(into, length) == crc;
    uint32_t crcs[LAKE_GRANULES_MAX];
    lake_extent asked = *from;
    if (lake_granule_count(length) > LAKE_GRANULES_MAX)
        return 0;
    if (from->memory == NULL && length >= from->ask_from) { /* once, for all of it */
        if (!lake_may_be_cached(from->descriptor, from->offset, length + lake_granule_count(length) * sizeof *crcs))
            return 0;
        asked.ask_from = LAKE_NEVER_ASK;
    }
    return lake_extent_vector(&asked, length, crc, crcs) &&
           lake_extent_granules(&asked, 0, length, crcs, into) == LAKE_RIGHT;
}

#endif
