/* PUTs of small objects that came whole, and whose signature and digests were proven here: gathered until Python stores
   them, many with one request.

   What a PUT means is not decided here.  Python reads its target, checks the rights of its key, stores it, and says what
   to answer; what it does not want to store this way goes to the connection's task, byte for byte as it came. */
#ifndef LAKE_S3_GATHER_H
#define LAKE_S3_GATHER_H

#include <openssl/evp.h>
#include <openssl/md5.h>

#include "../../http/repeater.h"
#include "log.h"

#define PUT_BODY_BYTES_MAX (64 << 10)
#define PUT_TARGET_BYTES_MAX 4096
#define PUTS_BYTES_MAX (64 << 20) /* gathered and not taken yet; each connection has one at most */
#define MD5_BASE64_BYTES 24

typedef struct gathered {
    struct gathered *next;
    door_ticket ticket;
    int64_t began_ns;
    span request, target, body, signer; /* in one allocation with this */
    fields of;                          /* as well */
    uint8_t md5[MD5_DIGEST_LENGTH];
    uint8_t bytes[];
} gathered;

typedef struct {
    gathered *first, **end; /* in the order in which they came */
    size_t count, bytes;
    uint8_t canonical[PUT_TARGET_BYTES_MAX + 1];
} gathered_puts;

static void puts_begin(gathered_puts *in)
{
    in->end = &in->first;
}

static int puts_add(gathered_puts *in, gathered *put)
{
    if (put->request.length > PUTS_BYTES_MAX - in->bytes)
        return 0;
    *in->end = put;
    in->end = &put->next;
    in->bytes += put->request.length;
    in->count++;
    return 1;
}

/* Takes the one that came first; NULL: there is none. */
static gathered *puts_take(gathered_puts *in)
{
    gathered *put = in->first;
    if (put == NULL)
        return NULL;
    in->first = put->next;
    if (in->first == NULL)
        in->end = &in->first;
    in->bytes -= put->request.length;
    in->count--;
    return put;
}

/* The canonical form of a target that is a path: it as it came, and an empty query.  Nothing for another target. */
static span put_canonical(gathered_puts *in, span target)
{
    if (target.length > PUT_TARGET_BYTES_MAX || memchr(target.at, '?', target.length) != NULL)
        return (span){NULL, 0};
    memcpy(in->canonical, target.at, target.length);
    in->canonical[target.length] = '\n';
    return (span){in->canonical, target.length + 1};
}

/* Returns the length of the body; 0 if it is not one that is gathered. */
static size_t put_length(const head *request, const fields *of)
{
    span digits = of->value[FIELD_LENGTH];
    size_t length = 0;
    if (!field_has(of, FIELD_LENGTH) || !field_has(of, FIELD_AUTHORIZATION) || digits.length > 5)
        return 0;
    for (size_t at = 0; at < digits.length; at++) {
        if (digits.at[at] < '0' || digits.at[at] > '9')
            return 0;
        length = length * 10 + (size_t)(digits.at[at] - '0');
    }
    return length <= PUT_BODY_BYTES_MAX && request->target.length <= PUT_TARGET_BYTES_MAX ? length : 0;
}

/* Returns 1 if a digest is the one that Content-MD5 says, or there is none. */
static int md5_is(const fields *of, const uint8_t digest[MD5_DIGEST_LENGTH])
{
    uint8_t text[MD5_BASE64_BYTES + 1];
    if (!field_has(of, FIELD_MD5))
        return 1;
    EVP_EncodeBlock(text, digest, MD5_DIGEST_LENGTH);
    return span_is(of->value[FIELD_MD5], (const char *)text, MD5_BASE64_BYTES);
}

static inline span span_moved(span of, span from, const uint8_t *to)
{
    return of.at == NULL ? of : (span){to + (of.at - from.at), of.length};
}

/* Copies a PUT that has come whole; NULL if Content-MD5 is not that of its body, or there is no memory. */
static gathered *put_make(span received, const head *request, const fields *of, const claim *by, span body)
{
    uint8_t digest[MD5_DIGEST_LENGTH];
    MD5(body.at, body.length, digest);
    if (!md5_is(of, digest))
        return NULL;
    gathered *made = malloc(sizeof *made + received.length + by->logged.length);
    if (made == NULL)
        return NULL;
    memset(made, 0, sizeof *made);
    uint8_t *at = made->bytes;
    made->request = span_copied(&at, received);
    made->signer = span_copied(&at, by->logged);
    made->target = span_moved(request->target, received, made->bytes);
    made->body = span_moved(body, received, made->bytes);
    made->of.present = of->present;
    for (int id = 0; id < FIELD_COUNT; id++)
        made->of.value[id] = span_moved(of->value[id], received, made->bytes);
    memcpy(made->md5, digest, sizeof digest);
    return made;
}

#endif
