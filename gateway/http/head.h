/* The head of an HTTP request, read into spans, for native modules.

   Only plain heads are read: one request line with single spaces, a target that is a path, HTTP/1.1, fields of one
   line each, printable ASCII.  Anything else, and a head that is not whole, is "not plain": 0.  `gateway.http.head`
   reads every head, and knows what to refuse; a head that is plain here means the same there.

   Every byte is reached through spans, which never pass the end of the bytes that were received. */
#ifndef LAKE_HEAD_H
#define LAKE_HEAD_H

#include "../../lakefs/host/span.h"

#define HEAD_FIELDS_MAX 24

typedef struct {
    span name, value;
} head_field;

typedef struct {
    span method, target;
    head_field fields[HEAD_FIELDS_MAX];
    size_t field_count;
    size_t length; /* with the empty line that ends it */
} head;

enum { HEAD_OF_NAME = 1, HEAD_OF_TARGET = 2, HEAD_OF_VALUE = 4, HEAD_OF_METHOD = 8 };
static uint8_t head_classes[256];

static void head_begin(void)
{
    for (int byte = 0x21; byte < 0x7f; byte++)
        head_classes[byte] = HEAD_OF_TARGET | HEAD_OF_VALUE;
    head_classes[' '] = HEAD_OF_VALUE;
    for (int byte = 'A'; byte <= 'Z'; byte++) {
        head_classes[byte] |= HEAD_OF_NAME | HEAD_OF_METHOD;
        head_classes[byte + 'a' - 'A'] |= HEAD_OF_NAME;
    }
    for (int byte = '0'; byte <= '9'; byte++)
        head_classes[byte] |= HEAD_OF_NAME;
    head_classes['-'] |= HEAD_OF_NAME;
    for (const char *refused = "#\"<>\\^`{|}"; *refused; refused++)
        head_classes[(uint8_t)*refused] &= (uint8_t)~HEAD_OF_TARGET;
}

/* Takes the bytes of one class from the beginning of `from`. */
static inline span span_take(span *from, uint8_t wanted)
{
    span taken = {from->at, 0};
    while (taken.length < from->length && head_classes[from->at[taken.length]] & wanted)
        taken.length++;
    from->at += taken.length;
    from->length -= taken.length;
    return taken;
}

/* Reads the head at the beginning of `received`; returns 1 if it is whole and plain. */
static int head_read(span received, head *into)
{
    span left = received;
    into->method = span_take(&left, HEAD_OF_METHOD);
    if (!into->method.length || !SPAN_SKIP(&left, " ") || !left.length || *left.at != '/')
        return 0;
    into->target = span_take(&left, HEAD_OF_TARGET);
    if (!SPAN_SKIP(&left, " HTTP/1.1\r\n"))
        return 0;
    for (into->field_count = 0; !SPAN_SKIP(&left, "\r\n"); into->field_count++) {
        if (into->field_count == HEAD_FIELDS_MAX)
            return 0;
        head_field *field = into->fields + into->field_count;
        field->name = span_take(&left, HEAD_OF_NAME);
        if (!field->name.length || !SPAN_SKIP(&left, ":"))
            return 0;
        field->value = span_trimmed(span_take(&left, HEAD_OF_VALUE));
        if (!SPAN_SKIP(&left, "\r\n"))
            return 0;
    }
    into->length = received.length - left.length;
    return 1;
}

#endif
