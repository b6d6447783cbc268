/* Answers that Python gave, by the very bytes of Host and target, with the stamps of what they were read from. */
#ifndef LAKE_S3_ANSWERS_H
#define LAKE_S3_ANSWERS_H

#include "../../../lakefs/stamps/kept_answers.h"
#include "claims.h"

#define ANSWER_BYTES_EXPECTED 640 /* of one answer, to choose the count of sets */
#define ANSWER_KEY_MAX 4096
#define ANSWER_LINES_MAX (6 << 10)
#define ANSWER_PIECES_MAX 1024 /* of a layout: objects of 4 GiB */
#define CHUNK_ID_BYTES 33
#define PIECE_BYTES (8 + CHUNK_ID_BYTES) /* of a layout: the end of a piece in the object, its chunk */

typedef struct {
    kept_answer kept;
    uint64_t size_bytes; /* of the object */
    span canonical_target, bucket, lines, sums, logged, layout;
    uint8_t is_of_get; /* else only HEAD was answered like this */
    uint8_t bytes[];
} answer;

typedef struct {
    kept_answers table;
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

/* Keeps an answer: `parts` are copied.  An answer of HEAD does not replace one of GET that rests on the same.  Returns 0 if
   there is no memory for it, or it alone is larger than the limit. */
static int answers_keep(answers *in, const answer *parts)
{
    span key = parts->kept.key, stamps = parts->kept.stamps;
    uint64_t bytes = sizeof *parts + key.length + parts->canonical_target.length + parts->bucket.length +
                     parts->lines.length + parts->sums.length + stamps.length + parts->logged.length +
                     parts->layout.length;
    kept_answer **slot = kept_find(&in->table, key);
    const answer *earlier = slot != NULL ? (const answer *)*slot : NULL;
    if (earlier != NULL && earlier->is_of_get && !parts->is_of_get && span_equals(earlier->kept.stamps, stamps))
        return 1;
    answer *made = kept_memory(&in->table, key, bytes);
    if (made == NULL)
        return 0;
    *made = *parts;
    uint8_t *at = made->bytes;
    made->kept.stamps = span_copied(&at, stamps);
    made->kept.key = span_copied(&at, key);
    made->canonical_target = span_copied(&at, parts->canonical_target);
    made->bucket = span_copied(&at, parts->bucket);
    made->lines = span_copied(&at, parts->lines);
    made->sums = span_copied(&at, parts->sums);
    made->logged = span_copied(&at, parts->logged);
    made->layout = span_copied(&at, parts->layout);
    kept_put(&in->table, &made->kept, bytes);
    return 1;
}

#endif
