/* What a client has learned about names: for each its stat, and where it has content, the chunk of it, with the stamps of
   the records that all this was read from.

   Every answer has a serial number of its own, never given twice. */
#ifndef LAKE_KNOWN_H
#define LAKE_KNOWN_H

#include "../../lakefs/granules/content.h"
#include "../../lakefs/stamps/kept_answers.h"

#define KNOWN_BYTES_EXPECTED 512 /* of one answer, to choose the count of sets */
#define KNOWN_CHUNK_BYTES 33
#define KNOWN_CONTENT_MAX (256 << 10) /* bytes of the longest content that is known */
#define KNOWN_SCHEME "lake://"

typedef struct {
    kept_answer kept; /* its key is the name */
    uint64_t serial;
    uint64_t size_bytes; /* of the content */
    span stat;
    int has_content; /* else only the stat is known */
    uint8_t chunk[KNOWN_CHUNK_BYTES];
    uint8_t bytes[];
} known_answer;

typedef struct {
    kept_answers answers;
    content content;
    uint64_t serial, answered;
} known;

/* Returns what is known of a name, as users write it, if it stands; else NULL. */
static const known_answer *known_standing(const known *in, span name)
{
    SPAN_SKIP(&name, KNOWN_SCHEME);
    kept_answer **slot = kept_find(&in->answers, name);
    return slot != NULL && kept_stands(&in->answers, *slot) ? (const known_answer *)*slot : NULL;
}

/* Keeps an answer: `parts` are copied.  A stat does not replace an answer with content that rests on the same.  Returns 0 if
   there is no memory for it, or it alone is larger than the limit. */
static int known_keep(known *in, const known_answer *parts)
{
    span name = parts->kept.key, stamps = parts->kept.stamps;
    uint64_t bytes = sizeof *parts + stamps.length + name.length + parts->stat.length;
    kept_answer **slot = kept_find(&in->answers, name);
    const known_answer *earlier = slot != NULL ? (const known_answer *)*slot : NULL;
    if (earlier != NULL && earlier->has_content && !parts->has_content && span_equals(earlier->kept.stamps, stamps))
        return 1;
    known_answer *made = kept_memory(&in->answers, name, bytes);
    if (made == NULL)
        return 0;
    *made = *parts;
    uint8_t *at = made->bytes;
    made->kept.stamps = span_copied(&at, stamps);
    made->kept.key = span_copied(&at, name);
    made->stat = span_copied(&at, parts->stat);
    made->serial = ++in->serial;
    kept_put(&in->answers, &made->kept, bytes);
    return 1;
}

/* Fills `into`, as long as the content, with checked bytes; returns 0 if they are not at hand. */
static int known_content(known *in, const known_answer *of, uint8_t *into)
{
    return !of->size_bytes || content_whole(&in->content, of->chunk, of->size_bytes, into);
}

#endif
