/* Spans: bytes with their length.  What is taken from a span shortens it; nothing reads past its end. */
#ifndef LAKE_SPAN_H
#define LAKE_SPAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *at;
    size_t length;
} span;

/* A hash of bytes, with a secret of the process: what others choose does not fill one set of a table. */
typedef uint64_t (*span_hash)(span);

/* Skips `text` at the beginning of `from`; returns 0 if it is not there. */
static inline int span_skip(span *from, const char *text, size_t length)
{
    if (from->length < length || memcmp(from->at, text, length))
        return 0;
    from->at += length;
    from->length -= length;
    return 1;
}

static inline int span_is(span left, const char *text, size_t length)
{
    return left.length == length && !memcmp(left.at, text, length);
}

static inline int span_equals(span left, span right)
{
    return left.length == right.length && !memcmp(left.at, right.at, left.length);
}

#define SPAN_IS(left, text) span_is((left), (text), sizeof(text) - 1)
#define SPAN_SKIP(from, text) span_skip((from), (text), sizeof(text) - 1)

/* Copies a span to where `into` is, and moves that behind the copy. */
static inline span span_copied(uint8_t **into, span from)
{
    span copied = {*into, from.length};
    if (from.length)
        memcpy(*into, from.at, from.length);
    *into += from.length;
    return copied;
}

static inline span span_trimmed(span text)
{
    while (text.length && *text.at == ' ') {
        text.at++;
        text.length--;
    }
    while (text.length && text.at[text.length - 1] == ' ')
        text.length--;
    return text;
}

#endif
