/* What a client has learned about names: for each its stat, and where it has content, the chunk of it, with the stamps of
   the records that all this was read from.

   The table has sets of four.  What it holds is bounded in bytes: a new answer takes the place of an old one of its set,
   and when all is full, of others in turn.  Every answer has a serial number of its own, never given twice. */
#ifndef LAKE_KNOWN_H
#define LAKE_KNOWN_H

#include <stdlib.h>

#include "../../lakefs/host/span.h"
#include "../../lakefs/shared_index/content.h"
#include "../../lakefs/stamps/stamps.h"

#define KNOWN_WAYS 4
#define KNOWN_BYTES_EXPECTED 512 /* of one answer, to choose the count of sets */
#define KNOWN_CHUNK_BYTES 33
#define KNOWN_CONTENT_MAX (256 << 10) /* bytes of the longest content that is known */
#define KNOWN_SCHEME "lake://"

typedef struct {
    uint64_t hash, serial, allocated_bytes;
    uint64_t size_bytes;     /* of the content */
    span stamps, name, stat; /* in one allocation with this */
    int has_content;         /* else only the stat is known */
    uint8_t chunk[KNOWN_CHUNK_BYTES];
    uint8_t bytes[];
} known_answer;

typedef uint64_t (*known_hash)(span);

typedef struct {
    known_hash hash;
    lake_stamps stamps;
    content content;
    known_answer **sets; /* set_count times KNOWN_WAYS */
    uint8_t *turns;
    uint64_t set_count, sweep, serial;
    uint64_t held_bytes, limit_bytes, count, answered;
} known;

static int known_begin(known *in, known_hash hash, uint64_t limit_bytes)
{
    in->hash = hash;
    in->limit_bytes = limit_bytes;
    for (in->set_count = 1; in->set_count * KNOWN_WAYS * KNOWN_BYTES_EXPECTED < limit_bytes;)
        in->set_count *= 2;
    in->sets = calloc(in->set_count * KNOWN_WAYS, sizeof *in->sets);
    in->turns = calloc(in->set_count, 1);
    return in->sets != NULL && in->turns != NULL;
}

static void known_drop(known *in, known_answer **slot)
{
    if (*slot == NULL)
        return;
    in->held_bytes -= (*slot)->allocated_bytes;
    in->count--;
    free(*slot);
    *slot = NULL;
}

static void known_forget(known *in)
{
    for (uint64_t at = 0; in->count && at < in->set_count * KNOWN_WAYS; at++)
        known_drop(in, in->sets + at);
}

static void known_end(known *in)
{
    free(in->sets);
    free(in->turns);
}

static known_answer **known_find(const known *in, span name)
{
    uint64_t hash = in->hash(name);
    known_answer **set = in->sets + (hash & (in->set_count - 1)) * KNOWN_WAYS;
    for (int way = 0; way < KNOWN_WAYS; way++)
        if (set[way] != NULL && set[way]->hash == hash && span_equals(set[way]->name, name))
            return set + way;
    return NULL;
}

/* Returns what is known of a name, as users write it, if it stands; else NULL. */
static const known_answer *known_standing(const known *in, span name)
{
    SPAN_SKIP(&name, KNOWN_SCHEME);
    known_answer **slot = known_find(in, name);
    if (slot == NULL || !lake_stamps_stand(&in->stamps, (*slot)->stamps.at, (*slot)->stamps.length))
        return NULL;
    return *slot;
}

/* Returns the place for an answer: that of an earlier one about this name, an empty one, or that of another in turn. */
static known_answer **known_room(known *in, span name)
{
    uint64_t number = in->hash(name) & (in->set_count - 1);
    known_answer **set = in->sets + number * KNOWN_WAYS, **slot = known_find(in, name);
    for (int way = 0; slot == NULL && way < KNOWN_WAYS; way++)
        if (set[way] == NULL)
            slot = set + way;
    return slot != NULL ? slot : set + in->turns[number]++ % KNOWN_WAYS;
}

/* Keeps an answer: `parts` are copied.  A stat does not replace an answer with content that rests on the same.  Returns 0 if
   there is no memory for it, or it alone is larger than the limit. */
static int known_keep(known *in, const known_answer *parts)
{
    uint64_t bytes = sizeof *parts + parts->stamps.length + parts->name.length + parts->stat.length;
    known_answer **earlier = known_find(in, parts->name), *made;
    if (earlier != NULL && (*earlier)->has_content && !parts->has_content && span_equals((*earlier)->stamps, parts->stamps))
        return 1;
    if (bytes > in->limit_bytes || (made = malloc(bytes)) == NULL) {
        if (earlier != NULL)
            known_drop(in, earlier);
        return 0;
    }
    *made = *parts;
    uint8_t *at = made->bytes;
    made->stamps = span_copied(&at, parts->stamps);
    made->name = span_copied(&at, parts->name);
    made->stat = span_copied(&at, parts->stat);
    made->allocated_bytes = bytes;
    made->hash = in->hash(made->name);
    made->serial = ++in->serial;
    known_answer **slot = known_room(in, made->name);
    known_drop(in, slot);
    while (in->count && in->held_bytes + bytes > in->limit_bytes)
        known_drop(in, in->sets + in->sweep++ % (in->set_count * KNOWN_WAYS));
    *slot = made;
    in->held_bytes += bytes;
    in->count++;
    return 1;
}

/* Fills `into`, as long as the content, with checked bytes; returns 0 if they are not at hand. */
static int known_content(known *in, const known_answer *of, uint8_t *into)
{
    content_vector vector = {0};
    uint64_t count = (of->size_bytes + GRANULE_BYTES - 1) / GRANULE_BYTES;
    if (count > 1)
        return content_granules(&in->content, of->chunk, of->size_bytes, 0, count, &vector, into);
    return !count || content_whole(&in->content, of->chunk, of->size_bytes, into);
}

typedef enum {
    KNOWN_AT_HAND, /* or it lies where it can never be read here */
    KNOWN_WANTED,  /* its segment or slab is not in use here */
    KNOWN_NOWHERE, /* the index does not have it, or there is none */
} known_where;

/* Finds the place of a chunk. */
static known_where known_locate(known *in, const uint8_t *chunk, lake_place *place)
{
    if (in->content.places.find == NULL || !in->content.places.find(in->content.places.table, chunk, place))
        return KNOWN_NOWHERE;
    if (place->tier == LAKE_TIER_SEGMENT)
        return content_find(&in->content, place->segment) == NULL ? KNOWN_WANTED : KNOWN_AT_HAND;
    uint64_t slab = place->segment >> CONTENT_GENERATION_BITS;
    if (place->tier == LAKE_TIER_DRAM && slab < CONTENT_SLABS && in->content.slabs[slab].at == NULL)
        return KNOWN_WANTED;
    return KNOWN_AT_HAND;
}

#endif
