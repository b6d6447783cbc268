/* A table of answers, each kept under a key with the stamps of the records that it was read from: it stands while they do.

   The table has sets of four.  What it holds is bounded in bytes: a new answer takes the place of an old one of its set,
   and when all is full, of others in turn. */
#ifndef LAKE_KEPT_ANSWERS_H
#define LAKE_KEPT_ANSWERS_H

#include <stdlib.h>

#include "../host/span.h"
#include "stamps.h"

#define KEPT_WAYS 4

/* The first member of each answer, in one allocation with it and with what its spans refer to. */
typedef struct {
    uint64_t hash, allocated_bytes;
    span key, stamps;
} kept_answer;

typedef struct {
    span_hash hash;
    lake_stamps stamps;
    kept_answer **sets; /* set_count times KEPT_WAYS */
    uint8_t *turns;
    uint64_t set_count, sweep;
    uint64_t held_bytes, limit_bytes, count;
} kept_answers;

/* Makes a table; `expected_bytes` of one answer choose the count of sets.  Returns 0 if there is no memory for it. */
static int kept_begin(kept_answers *in, span_hash hash, uint64_t limit_bytes, uint64_t expected_bytes)
{
    in->hash = hash;
    in->limit_bytes = limit_bytes;
    for (in->set_count = 1; in->set_count * KEPT_WAYS * expected_bytes < limit_bytes;)
        in->set_count *= 2;
    in->sets = calloc(in->set_count * KEPT_WAYS, sizeof *in->sets);
    in->turns = calloc(in->set_count, 1);
    return in->sets != NULL && in->turns != NULL;
}

static void kept_drop(kept_answers *in, kept_answer **slot)
{
    if (*slot == NULL)
        return;
    in->held_bytes -= (*slot)->allocated_bytes;
    in->count--;
    free(*slot);
    *slot = NULL;
}

static void kept_forget(kept_answers *in)
{
    for (uint64_t at = 0; in->count && at < in->set_count * KEPT_WAYS; at++)
        kept_drop(in, in->sets + at);
}

/* Frees the table, which is empty. */
static void kept_end(kept_answers *in)
{
    free(in->sets);
    free(in->turns);
}

static kept_answer **kept_find(const kept_answers *in, span key)
{
    uint64_t hash = in->hash(key);
    kept_answer **set = in->sets + (hash & (in->set_count - 1)) * KEPT_WAYS;
    for (int way = 0; way < KEPT_WAYS; way++)
        if (set[way] != NULL && set[way]->hash == hash && span_equals(set[way]->key, key))
            return set + way;
    return NULL;
}

static int kept_stands(const kept_answers *in, const kept_answer *kept)
{
    return lake_stamps_stand(&in->stamps, kept->stamps.at, kept->stamps.length);
}

/* Returns memory for an answer of that many bytes, for `kept_put`.  Where there is none, or it is more than the table may
   hold, returns NULL, and what was kept under the key is dropped. */
static void *kept_memory(kept_answers *in, span key, uint64_t bytes)
{
    kept_answer *made = bytes > in->limit_bytes ? NULL : malloc(bytes), **earlier;
    if (made == NULL && (earlier = kept_find(in, key)) != NULL)
        kept_drop(in, earlier);
    return made;
}

/* Keeps an answer made in memory from `kept_memory`, in place of an earlier one under its key. */
static void kept_put(kept_answers *in, kept_answer *made, uint64_t bytes)
{
    made->allocated_bytes = bytes;
    made->hash = in->hash(made->key);
    uint64_t number = made->hash & (in->set_count - 1);
    kept_answer **set = in->sets + number * KEPT_WAYS, **slot = kept_find(in, made->key);
    for (int way = 0; slot == NULL && way < KEPT_WAYS; way++)
        if (set[way] == NULL)
            slot = set + way;
    if (slot == NULL)
        slot = set + in->turns[number]++ % KEPT_WAYS;
    kept_drop(in, slot);
    while (in->count && in->held_bytes + bytes > in->limit_bytes)
        kept_drop(in, in->sets + in->sweep++ % (in->set_count * KEPT_WAYS));
    *slot = made;
    in->held_bytes += bytes;
    in->count++;
}

#endif
