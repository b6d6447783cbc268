/* The bytes of chunks, from memory that the engine shares: a slab of its DRAM tier, or a segment's page cache.

   A place is a hint, as everywhere: bytes are copied into a window and checked by CRC32C there, and sent from there.
   A chunk of at most a granule is checked whole.  A longer one has a vector behind it, the CRC of each granule, which
   is checked by the CRC of the place: so any granules can be read alone.  What is not at hand is not answered natively. */
#ifndef LAKE_CONTENT_H
#define LAKE_CONTENT_H

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../host/crc32c.h"
#include "place.h"
#include "../host/span.h"

#define GRANULE_BYTES (64 << 10)
#define CHUNK_GRANULES_MAX 256 /* a chunk has at most 16 MiB */
#define CONTENT_SEGMENTS 512
#define CONTENT_PROBES 8 /* places where a segment may be */
#define CONTENT_SLABS 4096
#define CONTENT_UNIT_BYTES (16 << 10)
#define CONTENT_ASK_FROM (128 << 10) /* bytes of a read for which it is asked first if they are cached */
#define CONTENT_CACHESTAT 451        /* cachestat(2): the same number on every architecture */
#define CONTENT_PAGE_BYTES 4096
#define CONTENT_GENERATION_BITS 48

typedef struct {
    uint64_t segment;
    int descriptor; /* -1: none */
    int flags;      /* of preadv2: RWF_NOWAIT where the file system has it */
} content_segment;

typedef struct {
    lake_places places;
    content_segment segments[CONTENT_SEGMENTS];
    span slabs[CONTENT_SLABS];
    const uint64_t *generations;
    uint64_t generation_count, slab_bytes;
    uint64_t turn; /* of the segments that make room for others */
} content;

/* Place `probe` of those where a segment may be. */
static inline content_segment *content_slot(content *in, uint64_t segment, int probe)
{
    return in->segments + ((segment * UINT64_C(0x9E3779B97F4A7C15) >> 32) + (uint64_t)probe) % CONTENT_SEGMENTS;
}

static const content_segment *content_find(content *in, uint64_t segment)
{
    for (int probe = 0; probe < CONTENT_PROBES; probe++) {
        const content_segment *slot = content_slot(in, segment, probe);
        if (slot->descriptor >= 0 && slot->segment == segment)
            return slot;
    }
    return NULL;
}

/* Returns the place for a new segment: an empty one, else one of the others in turn. */
static content_segment *content_room(content *in, uint64_t segment)
{
    for (int probe = 0; probe < CONTENT_PROBES; probe++)
        if (content_slot(in, segment, probe)->descriptor < 0)
            return content_slot(in, segment, probe);
    return content_slot(in, segment, (int)(in->turn++ % CONTENT_PROBES));
}

/* Returns the CRCs of the granules of some bytes, the last of which may be short. */
static void content_crcs(const uint8_t *bytes, size_t length, uint32_t *crcs)
{
    for (; length >= 4 * GRANULE_BYTES; bytes += 4 * GRANULE_BYTES, length -= 4 * GRANULE_BYTES, crcs += 4)
        lake_crc32c_of_four(bytes, GRANULE_BYTES, crcs);
    for (; length; crcs++) {
        size_t granule = length < GRANULE_BYTES ? length : GRANULE_BYTES;
        *crcs = lake_crc32c(bytes, granule);
        bytes += granule;
        length -= granule;
    }
}

/* Copies bytes, and returns the CRCs of the copy's granules. */
static void content_copy(const uint8_t *from, size_t length, uint8_t *into, uint32_t *crcs)
{
    for (; length >= 4 * GRANULE_BYTES; from += 4 * GRANULE_BYTES, into += 4 * GRANULE_BYTES, crcs += 4) {
        lake_crc32c_copy_four(from, into, GRANULE_BYTES, crcs);
        length -= 4 * GRANULE_BYTES;
    }
    memcpy(into, from, length);
    content_crcs(into, length, crcs);
}

/* Copies bytes of a cell: payload, and the vector behind it.  `crcs`: of the granules from `begin` on; NULL: none. */
static int content_copy_cell(const content *in, const lake_place *place, uint64_t begin, size_t length, uint8_t *into,
                             uint32_t *crcs)
{
    uint64_t slab = place->segment >> CONTENT_GENERATION_BITS;
    uint64_t generation = place->segment & ((UINT64_C(1) << CONTENT_GENERATION_BITS) - 1);
    if (slab >= CONTENT_SLABS || generation & 1 || in->generations == NULL)
        return 0;
    uint64_t cell = (slab * in->slab_bytes + place->offset) / CONTENT_UNIT_BYTES;
    uint64_t from = place->offset + begin;
    if (cell >= in->generation_count || from + length > in->slabs[slab].length)
        return 0;
    if (__atomic_load_n(in->generations + cell, __ATOMIC_ACQUIRE) != generation)
        return 0;
    if (crcs == NULL)
        memcpy(into, in->slabs[slab].at + from, length);
    else
        content_copy(in->slabs[slab].at + from, length, into, crcs);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(in->generations + cell, __ATOMIC_RELAXED) == generation;
}

/* Returns 0 if a page is not cached; 1 if all are, or that cannot be known (before Linux 6.5).  A read that does not wait
   would find out, but on a miss the kernel begins to fetch the range, page by page. */
static int content_is_cached(int descriptor, uint64_t offset, uint64_t length)
{
    uint64_t range[2] = {offset, length}, found[5];
    if (syscall(CONTENT_CACHESTAT, descriptor, range, found, 0))
        return 1;
    return found[0] >= (offset + length - 1) / CONTENT_PAGE_BYTES - offset / CONTENT_PAGE_BYTES + 1;
}

static int content_read_segment(content *in, const lake_place *place, uint64_t begin, size_t length, uint8_t *into)
{
    const content_segment *from = content_find(in, place->segment);
    if (from == NULL)
        return 0;
    if (length >= CONTENT_ASK_FROM && !content_is_cached(from->descriptor, place->offset + begin, length))
        return 0;
    struct iovec target = {into, length};
    return preadv2(from->descriptor, &target, 1, (off_t)(place->offset + begin), from->flags) == (ssize_t)length;
}

/* Copies bytes from `begin` on of a chunk's payload and its vector; returns 0 if they are not at hand. */
static int content_read(content *in, const lake_place *place, uint64_t begin, size_t length, uint8_t *into)
{
    if (place->tier == LAKE_TIER_DRAM)
        return content_copy_cell(in, place, begin, length, into, NULL);
    return place->tier == LAKE_TIER_SEGMENT && content_read_segment(in, place, begin, length, into);
}

/* As `content_read` of whole granules, with their CRCs: a cell is copied and summed in one pass. */
static int content_read_summed(content *in, const lake_place *place, uint64_t begin, size_t length, uint8_t *into,
                               uint32_t *crcs)
{
    if (place->tier == LAKE_TIER_DRAM)
        return content_copy_cell(in, place, begin, length, into, crcs);
    if (place->tier != LAKE_TIER_SEGMENT || !content_read_segment(in, place, begin, length, into))
        return 0;
    content_crcs(into, length, crcs);
    return 1;
}

/* Reads a whole chunk of at most a granule into `into`, checked. */
static int content_whole(content *in, const uint8_t *chunk, uint64_t length, uint8_t *into)
{
    lake_place place;
    if (in->places.find == NULL || length > GRANULE_BYTES || !in->places.find(in->places.table, chunk, &place))
        return 0;
    return place.stored_bytes == length && content_read(in, &place, 0, length, into) &&
           lake_crc32c(into, length) == place.crc;
}

/* The vector of a chunk that is sent in pieces. */
typedef struct {
    int is_known;
    uint32_t crcs[CHUNK_GRANULES_MAX];
} content_vector;

/* Reads granules [first, stop) of a chunk of more than a granule into `into`, each checked; `vector` is read when it is
   not known.  The last granule of a chunk may be short. */
static int content_granules(content *in, const uint8_t *chunk, uint64_t length, size_t first, size_t stop,
                            content_vector *vector, uint8_t *into)
{
    lake_place place;
    size_t count = (size_t)((length + GRANULE_BYTES - 1) / GRANULE_BYTES);
    if (in->places.find == NULL || length <= GRANULE_BYTES || count > CHUNK_GRANULES_MAX || first >= stop || stop > count)
        return 0;
    if (!in->places.find(in->places.table, chunk, &place) || place.stored_bytes != length)
        return 0;
    if (!vector->is_known) {
        if (!content_read(in, &place, length, count * sizeof *vector->crcs, (uint8_t *)vector->crcs) ||
            lake_crc32c((const uint8_t *)vector->crcs, count * sizeof *vector->crcs) != place.crc)
            return 0;
        vector->is_known = 1;
    }
    uint64_t begin = (uint64_t)first * GRANULE_BYTES, end = (uint64_t)stop * GRANULE_BYTES;
    if (end > length)
        end = length;
    uint32_t crcs[CHUNK_GRANULES_MAX];
    if (!content_read_summed(in, &place, begin, (size_t)(end - begin), into, crcs))
        return 0;
    return !memcmp(crcs, vector->crcs + first, (stop - first) * sizeof *crcs);
}

#endif
