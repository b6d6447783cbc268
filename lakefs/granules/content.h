/* Shared content by chunk: looked up in the shared index, and read from what the engine has given this process: slabs of
   its DRAM tier, and descriptors of segments.

   A place is a hint, as everywhere: `extent.h` copies and checks what lies there.  A chunk of at most a granule is checked
   whole; of a longer one any granules can be read alone.  What is not at hand is not answered natively.

   A new tier is a case in `content_extent` and one in `content_locate`. */
#ifndef LAKE_SHARED_CONTENT_H
#define LAKE_SHARED_CONTENT_H

#include "../host/span.h"
#include "extent.h"

#define CONTENT_SEGMENTS 512
#define CONTENT_PROBES 8 /* places where a segment may be */
#define CONTENT_SLABS 4096
#define CONTENT_ASK_FROM (128 << 10)

typedef struct {
    uint64_t segment;
    int descriptor; /* -1: none */
    int flags;      /* of preadv2: RWF_NOWAIT where the file system has it */
} content_segment;

typedef struct {
    lake_places places;
    content_segment segments[CONTENT_SEGMENTS];
    span slabs[CONTENT_SLABS];
    lake_cells cells;
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

/* Holds no segments; the caller has closed them. */
static void content_drop_segments(content *in)
{
    for (int slot = 0; slot < CONTENT_SEGMENTS; slot++)
        in->segments[slot].descriptor = -1;
}

static void content_drop_slabs(content *in)
{
    memset(&in->cells, 0, sizeof in->cells);
    memset(in->slabs, 0, sizeof in->slabs);
}

/* Finds the place of a chunk; returns 0 if the index does not have it, or there is none. */
static inline int content_place(const content *in, const uint8_t *chunk, lake_place *place)
{
    return in->places.find != NULL && in->places.find(in->places.table, chunk, place);
}

/* Finds where a place's bytes are for this process; returns 0 if it does not hold the segment or slab. */
static int content_extent(content *in, const lake_place *place, lake_extent *into)
{
    const content_segment *of;
    uint64_t slab = lake_slab_of(place);
    switch (place->tier) {
    case LAKE_TIER_SEGMENT:
        if ((of = content_find(in, place->segment)) == NULL)
            return 0;
        *into = lake_extent_of_file(of->descriptor, of->flags, place->offset, CONTENT_ASK_FROM, LAKE_READ_WINDOW);
        return 1;
    case LAKE_TIER_DRAM:
        return slab < CONTENT_SLABS &&
               lake_extent_of_cell(&in->cells, in->slabs[slab].at, in->slabs[slab].length, place, into);
    default:
        return 0;
    }
}

typedef enum {
    CONTENT_AT_HAND, /* or it lies where it can never be read here */
    CONTENT_WANTED,  /* its segment or slab is not in use here */
    CONTENT_NOWHERE, /* the index does not have it, or there is none */
} content_where;

/* Finds the place of a chunk, and whether Python has to bring what it lies in. */
static content_where content_locate(content *in, const uint8_t *chunk, lake_place *place)
{
    if (!content_place(in, chunk, place))
        return CONTENT_NOWHERE;
    uint64_t slab = lake_slab_of(place);
    switch (place->tier) {
    case LAKE_TIER_SEGMENT:
        return content_find(in, place->segment) == NULL ? CONTENT_WANTED : CONTENT_AT_HAND;
    case LAKE_TIER_DRAM:
        return slab < CONTENT_SLABS && in->slabs[slab].at == NULL ? CONTENT_WANTED : CONTENT_AT_HAND;
    default:
        return CONTENT_AT_HAND;
    }
}

/* Finds the bytes of a chunk of that length, and its CRC; returns 0 if they are not at hand. */
static int content_of(content *in, const uint8_t *chunk, uint64_t length, lake_extent *from, uint32_t *crc)
{
    lake_place place;
    if (!content_place(in, chunk, &place) || place.stored_bytes != length)
        return 0;
    *crc = place.crc;
    return content_extent(in, &place, from);
}

/* Reads a whole chunk into `into`, checked. */
static int content_whole(content *in, const uint8_t *chunk, uint64_t length, uint8_t *into)
{
    lake_extent from;
    uint32_t crc;
    return content_of(in, chunk, length, &from, &crc) && lake_extent_chunk(&from, length, crc, into);
}

/* The vector of a chunk that is sent in pieces. */
typedef struct {
    int is_known;
    uint32_t crcs[LAKE_GRANULES_MAX];
} content_vector;

/* Reads granules [first, stop) of a chunk of more than a granule into `into`, each checked; `vector` is read when it is
   not known.  The last granule of a chunk may be short. */
static int content_granules(content *in, const uint8_t *chunk, uint64_t length, size_t first, size_t stop,
                            content_vector *vector, uint8_t *into)
{
    lake_extent from;
    uint32_t crc;
    size_t count = lake_granule_count(length);
    if (length <= LAKE_GRANULE || count > LAKE_GRANULES_MAX || first >= stop || stop > count)
        return 0;
    if (!content_of(in, chunk, length, &from, &crc))
        return 0;
    if (!vector->is_known && !lake_extent_vector(&from, length, crc, vector->crcs))
        return 0;
    vector->is_known = 1;
    uint64_t begin = (uint64_t)first * LAKE_GRANULE, end = (uint64_t)stop * LAKE_GRANULE;
    return lake_extent_granules(&from, begin, end < length ? end : length, vector->crcs, into) == LAKE_RIGHT;
}

#endif
