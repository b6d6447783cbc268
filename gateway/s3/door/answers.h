/* Answers that Python gave, by the very bytes of Host and target, with the stamps of what they were read from.

   An answer is repeated while its stamps stand.  The table has sets of four; what it holds is bounded in bytes: a new
   answer takes the place of an old one of its set, and when all is full, of others in turn. */
#ifndef LAKE_S3_ANSWERS_H
#define LAKE_S3_ANSWERS_H

#include "../../../lakefs/stamps/stamps.h"
#include "claims.h"

#define ANSWER_WAYS 4
#define ANSWER_BYTES_EXPECTED 640 /* of one answer, to choose the count of sets */
#define ANSWER_KEY_MAX 4096
#define ANSWER_LINES_MAX (6 << 10)
#define ANSWER_PIECES_MAX 1024 /* of a layout: objects of 4 GiB */
#define CHUNK_ID_BYTES 33
#define PIECE_BYTES (8 + CHUNK_ID_BYTES) /* of a layout: the end of a piece in the object, its chunk */

typedef struct {
    uint64_t hash, allocated_bytes;
    uint64_t size_bytes; /* of the object */
    span key, canonical_target, bucket, lines, sums, stamps, logged, layout; /* in one allocation with this */
    uint8_t is_of_get; /* else only HEAD was answered like this */
    uint8_t bytes[];
} answer;

typedef struct {
    keyed_hash hash;
    lake_stamps stamps;
    answer **sets; /* set_count times ANSWER_WAYS */
    uint8_t *turns;
    uint64_t set_count, sweep;
    uint64_t held_bytes, limit_bytes, count;
    uint8_t key[ANSWER_KEY_MAX];
} answers;

/* Writes the key of Host and target; an empty span if it is too long. */
static span answers_key(answers *in, span host, span target)
{
    writer to = writer_of(in->key, sizeof in->key);
    write_span(&to, host);
    WRITE(&to, " ");
    write_span(&to, target);
    return to.is_full ? (span){in->key, 0} : written(&to);
}

static int answers_begin(answers *in, keyed_hash hash, uint64_t limit_bytes)
{
    in->hash = hash;
    in->limit_bytes = limit_bytes;
    for (in->set_count = 1; in->set_count * ANSWER_WAYS * ANSWER_BYTES_EXPECTED < limit_bytes;)
        in->set_count *= 2;
    in->sets = calloc(in->set_count * ANSWER_WAYS, sizeof *in->sets);
    in->turns = calloc(in->set_count, 1);
    return in->sets != NULL && in->turns != NULL;
}

static void answers_drop(answers *in, answer **slot)
{
    if (*slot == NULL)
        return;
    in->held_bytes -= (*slot)->allocated_bytes;
    in->count--;
    free(*slot);
    *slot = NULL;
}

static void answers_forget(answers *in)
{
    for (uint64_t at = 0; at < in->set_count * ANSWER_WAYS; at++)
        answers_drop(in, in->sets + at);
}

static void answers_end(answers *in)
{
    free(in->sets);
    free(in->turns);
}

static inline answer **answers_set(const answers *in, uint64_t hash)
{
    return in->sets + (hash & (in->set_count - 1)) * ANSWER_WAYS;
}

static answer **answers_find(answers *in, span key)
{
    uint64_t hash = in->hash(key);
    answer **set = answers_set(in, hash);
    for (int way = 0; way < ANSWER_WAYS; way++)
        if (set[way] != NULL && set[way]->hash == hash && span_equals(set[way]->key, key))
            return set + way;
    return NULL;
}

/* Piece `number` of an object: `chunk`, and its bytes [begin, end) of the object. */
typedef struct {
    const uint8_t *chunk;
    uint64_t begin, end;
} piece;

static uint64_t layout_end(span layout, uint64_t number)
{
    uint64_t end;
    memcpy(&end, layout.at + number * PIECE_BYTES, sizeof end);
    return end;
}

static piece layout_piece(span layout, uint64_t number)
{
    return (piece){
        layout.at + number * PIECE_BYTES + 8,
        number ? layout_end(layout, number - 1) : 0,
        layout_end(layout, number),
    };
}

/* Returns 1 if the pieces of a layout follow each other, and end with the object. */
static int is_layout(span layout, uint64_t size_bytes)
{
    uint64_t count = layout.length / PIECE_BYTES, before = 0;
    if (!count || layout.length % PIECE_BYTES || count > ANSWER_PIECES_MAX)
        return 0;
    for (uint64_t number = 0; number < count; number++) {
        uint64_t end = layout_end(layout, number);
        if (end <= before)
            return 0;
        before = end;
    }
    return before == size_bytes;
}

/* Returns the number of the piece that has byte `at` of the object, which is in it. */
static uint64_t layout_find(span layout, uint64_t at)
{
    uint64_t low = 0, high = layout.length / PIECE_BYTES - 1;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (layout_end(layout, middle) <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int answer_stands(const answers *in, const answer *kept)
{
    return lake_stamps_stand(&in->stamps, kept->stamps.at, kept->stamps.length);
}

/* Keeps an answer: `parts` are copied.  An answer of HEAD does not replace one of GET that rests on the same.  Returns 0 if
   there is no memory for it. */
static int answers_keep(answers *in, const answer *parts)
{
    uint64_t bytes = sizeof *parts + parts->key.length + parts->canonical_target.length + parts->bucket.length +
                     parts->lines.length + parts->sums.length + parts->stamps.length + parts->logged.length +
                     parts->layout.length;
    answer **known = answers_find(in, parts->key);
    if (known != NULL && (*known)->is_of_get && !parts->is_of_get && span_equals((*known)->stamps, parts->stamps))
        return 1;
    answer *made = malloc(bytes);
    if (made == NULL)
        return 0;
    *made = *parts;
    uint8_t *at = made->bytes;
    made->stamps = span_copied(&at, parts->stamps); /* first, and so aligned */
    made->key = span_copied(&at, parts->key);
    made->canonical_target = span_copied(&at, parts->canonical_target);
    made->bucket = span_copied(&at, parts->bucket);
    made->lines = span_copied(&at, parts->lines);
    made->sums = span_copied(&at, parts->sums);
    made->logged = span_copied(&at, parts->logged);
    made->layout = span_copied(&at, parts->layout);
    made->allocated_bytes = bytes;
    made->hash = in->hash(made->key);
    answer **set = answers_set(in, made->hash), **slot = answers_find(in, made->key);
    for (int way = 0; slot == NULL && way < ANSWER_WAYS; way++)
        if (set[way] == NULL)
            slot = set + way;
    if (slot == NULL)
        slot = set + in->turns[(set - in->sets) / ANSWER_WAYS]++ % ANSWER_WAYS;
    answers_drop(in, slot);
    while (in->count && in->held_bytes + bytes > in->limit_bytes)
        answers_drop(in, in->sets + in->sweep++ % (in->set_count * ANSWER_WAYS));
    *slot = made;
    in->held_bytes += bytes;
    in->count++;
    return 1;
}

#endif
