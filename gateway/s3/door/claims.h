/* Claims: whose signatures Python has proven, so that the door can prove the next ones of the same signers.

   There are two kinds.  A *signer* is what an Authorization header says before its signature: key, day, region and names
   of signed headers; with the two halves of the HMAC key that were derived for it.  A *presigned* request is one method,
   Host and target whose signature is in the target and was proven as a whole; it holds until the URL expires.

   A claim also holds for a short time only: `claims.until_ns`, as long as the keys that Python has read are fresh.
   Source: "Authenticating Requests (AWS Signature Version 4)" of the S3 API reference. */
#ifndef LAKE_S3_CLAIMS_H
#define LAKE_S3_CLAIMS_H

#define OPENSSL_SUPPRESS_DEPRECATED /* the functions of EVP allocate for each digest */
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <stdlib.h>

#include "fields.h"

#define CLAIM_SLOTS 1024
#define CLAIM_TEXT_MAX 4096
#define SIGNATURE_BYTES 64
#define CANONICAL_BYTES_MAX (16 << 10)
#define CLOCK_SKEW_S 899 /* Python allows 900 */

typedef struct {
    uint64_t hash;
    span text, signed_names, scope, buckets, logged; /* in one allocation with this */
    uint8_t ids[FIELD_COUNT];
    size_t id_count;
    uint32_t signed_fields;
    SHA256_CTX inner, outer; /* behind the first block: the key */
    int64_t from_s, until_s; /* of a presigned request */
    uint8_t bytes[];
} claim;

typedef struct {
    span_hash hash;
    claim *slots[CLAIM_SLOTS];
    int64_t until_ns;
    uint8_t canonical[CANONICAL_BYTES_MAX];
} claims;

static const char hex_digits[] = "0123456789abcdef";

/* --- keeping ------------------------------------------------------------------------------------------------- */

/* `buckets`: names, each with a NUL behind.  `logged`: the access key as JSON. */
static claim *claim_make(const claims *in, span text, span signed_names, span scope, span buckets, span logged)
{
    size_t bytes = text.length + signed_names.length + scope.length + buckets.length + logged.length;
    claim *made = calloc(1, sizeof *made + bytes);
    if (made == NULL)
        return NULL;
    uint8_t *at = made->bytes;
    made->hash = in->hash(text);
    made->text = span_copied(&at, text);
    made->signed_names = span_copied(&at, signed_names);
    made->scope = span_copied(&at, scope);
    made->buckets = span_copied(&at, buckets);
    made->logged = span_copied(&at, logged);
    return made;
}

static void claim_use_key(claim *of, const uint8_t key[SHA256_DIGEST_LENGTH])
{
    uint8_t block[SHA256_CBLOCK];
    for (size_t at = 0; at < sizeof block; at++)
        block[at] = (at < SHA256_DIGEST_LENGTH ? key[at] : 0) ^ 0x36;
    SHA256_Init(&of->inner);
    SHA256_Update(&of->inner, block, sizeof block);
    for (size_t at = 0; at < sizeof block; at++)
        block[at] ^= 0x36 ^ 0x5c;
    SHA256_Init(&of->outer);
    SHA256_Update(&of->outer, block, sizeof block);
    OPENSSL_cleanse(block, sizeof block);
}

static void claim_free(claim *old)
{
    if (old == NULL)
        return;
    OPENSSL_cleanse(&old->inner, sizeof old->inner);
    OPENSSL_cleanse(&old->outer, sizeof old->outer);
    free(old);
}

static void claims_keep(claims *in, claim *made)
{
    claim **slot = in->slots + made->hash % CLAIM_SLOTS;
    claim_free(*slot);
    *slot = made;
}

static void claims_forget(claims *in)
{
    for (size_t at = 0; at < CLAIM_SLOTS; at++) {
        claim_free(in->slots[at]);
        in->slots[at] = NULL;
    }
}

static const claim *claims_find(const claims *in, span text)
{
    uint64_t hash = in->hash(text);
    const claim *found = in->slots[hash % CLAIM_SLOTS];
    return found != NULL && found->hash == hash && span_equals(found->text, text) ? found : NULL;
}

/* --- proving ------------------------------------------------------------------------------------------------- */

static inline int two_digits(const uint8_t *at)
{
    return (at[0] - '0') * 10 + at[1] - '0';
}

/* Seconds since 1970 of YYYYMMDDTHHMMSSZ; -1 if the text is none.  Days from the calendar: "chrono-Compatible
   Low-Level Date Algorithms" (Howard Hinnant), days_from_civil. */
static int64_t epoch_of(span text)
{
    static const uint8_t days_of[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    const uint8_t *at = text.at;
    if (text.length != 16 || at[8] != 'T' || at[15] != 'Z')
        return -1;
    for (int digit = 0; digit < 15; digit++)
        if (digit != 8 && (at[digit] < '0' || at[digit] > '9'))
            return -1;
    int64_t year = two_digits(at) * 100 + two_digits(at + 2), month = two_digits(at + 4), day = two_digits(at + 6);
    int64_t hour = two_digits(at + 9), minute = two_digits(at + 11), second = two_digits(at + 13);
    if (year < 1970 || month < 1 || month > 12 || hour > 23 || minute > 59 || second > 59)
        return -1;
    int is_leap = month == 2 && year % 4 == 0 && (year % 100 || year % 400 == 0);
    if (day < 1 || day > days_of[month - 1] + is_leap)
        return -1;
    year -= month <= 2;
    int64_t era = year / 400, year_of_era = year % 400;
    int64_t day_of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    int64_t day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    return (era * 146097 + day_of_era - 719468) * 86400 + hour * 3600 + minute * 60 + second;
}

static inline void hex_of(uint8_t *into, const uint8_t *digest)
{
    for (size_t at = 0; at < SHA256_DIGEST_LENGTH; at++) {
        into[2 * at] = (uint8_t)hex_digits[digest[at] >> 4];
        into[2 * at + 1] = (uint8_t)hex_digits[digest[at] & 15];
    }
}

/* A buffer that is written to its end and no further; `is_full` says that something did not fit. */
typedef struct {
    uint8_t *begin, *at, *end;
    int is_full;
} writer;

static inline writer writer_of(uint8_t *into, size_t length)
{
    return (writer){into, into, into + length, 0};
}

static inline void write_span(writer *to, span text)
{
    if ((size_t)(to->end - to->at) < text.length) {
        to->is_full = 1;
        return;
    }
    if (text.length)
        memcpy(to->at, text.at, text.length);
    to->at += text.length;
}

#define WRITE(to, text) write_span((to), (span){(const uint8_t *)(text), sizeof(text) - 1})

static inline span written(const writer *from)
{
    return (span){from->begin, (size_t)(from->at - from->begin)};
}

/* Returns 1 if a value is as the signature has it: single spaces only. */
static inline int is_folded(span value)
{
    for (size_t at = 1; at < value.length; at++)
        if (value.at[at] == ' ' && value.at[at - 1] == ' ')
            return 0;
    return 1;
}

static int canonical_digest(claims *in, const claim *by, span method, span canonical_target, const fields *of,
                            uint8_t digest[SHA256_DIGEST_LENGTH])
{
    writer to = writer_of(in->canonical, sizeof in->canonical);
    write_span(&to, method);
    WRITE(&to, "\n");
    write_span(&to, canonical_target);
    WRITE(&to, "\n");
    for (size_t at = 0; at < by->id_count; at++) {
        span value = of->value[by->ids[at]];
        if (!is_folded(value))
            return 0;
        write_span(&to, field_names[by->ids[at]]);
        WRITE(&to, ":");
        write_span(&to, value);
        WRITE(&to, "\n");
    }
    WRITE(&to, "\n");
    write_span(&to, by->signed_names);
    WRITE(&to, "\n");
    write_span(&to, of->value[FIELD_CONTENT]);
    if (to.is_full)
        return 0;
    SHA256_CTX sha;
    SHA256_Init(&sha);
    SHA256_Update(&sha, in->canonical, (size_t)(to.at - to.begin));
    SHA256_Final(digest, &sha);
    return 1;
}

static void sign(const claim *by, span date, const uint8_t canonical[SHA256_DIGEST_LENGTH], uint8_t hex[SIGNATURE_BYTES])
{
    uint8_t text[SIGNATURE_BYTES], digest[SHA256_DIGEST_LENGTH];
    SHA256_CTX sha = by->inner;
    SHA256_Update(&sha, "AWS4-HMAC-SHA256\n", 17);
    SHA256_Update(&sha, date.at, date.length);
    SHA256_Update(&sha, "\n", 1);
    SHA256_Update(&sha, by->scope.at, by->scope.length);
    SHA256_Update(&sha, "\n", 1);
    hex_of(text, canonical);
    SHA256_Update(&sha, text, sizeof text);
    SHA256_Final(digest, &sha);
    sha = by->outer;
    SHA256_Update(&sha, digest, sizeof digest);
    SHA256_Final(digest, &sha);
    hex_of(hex, digest);
}

/* Returns the signer whose signature in the Authorization header is right for this request; NULL: Python decides.
   A target that has a signature in its query has no canonical form here.  That the body is the one that was signed is
   another question: `content_is`. */
static const claim *claims_signer(claims *in, span method, span canonical_target, const fields *of, int64_t now_s)
{
    static const uint32_t needed = FIELD_BIT(FIELD_HOST) | FIELD_BIT(FIELD_AUTHORIZATION) | FIELD_BIT(FIELD_DATE) |
                                   FIELD_BIT(FIELD_CONTENT);
    span authorization = of->value[FIELD_AUTHORIZATION];
    if ((of->present & needed) != needed || authorization.length <= SIGNATURE_BYTES)
        return NULL;
    span text = {authorization.at, authorization.length - SIGNATURE_BYTES};
    const claim *by = claims_find(in, text);
    if (by == NULL || !canonical_target.length)
        return NULL;
    if (by->signed_fields & ~of->present || of->present & FIELDS_OF_AMZ & ~by->signed_fields)
        return NULL;
    span date = of->value[FIELD_DATE];
    int64_t signed_s = epoch_of(date);
    if (signed_s < 0 || by->scope.length < 8 || memcmp(date.at, by->scope.at, 8))
        return NULL;
    if (now_s - signed_s > CLOCK_SKEW_S || signed_s - now_s > CLOCK_SKEW_S)
        return NULL;
    uint8_t digest[SHA256_DIGEST_LENGTH], hex[SIGNATURE_BYTES];
    if (!canonical_digest(in, by, method, canonical_target, of, digest))
        return NULL;
    sign(by, date, digest, hex);
    return CRYPTO_memcmp(hex, text.at + text.length, SIGNATURE_BYTES) ? NULL : by;
}

/* Returns 1 if a body is the one that x-amz-content-sha256 says, or that field leaves the body open. */
static int content_is(const fields *of, span body)
{
    if (!field_has(of, FIELD_CONTENT))
        return 0;
    span content = of->value[FIELD_CONTENT];
    if (SPAN_IS(content, "UNSIGNED-PAYLOAD"))
        return 1;
    if (!body.length)
        return SPAN_IS(content, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    uint8_t digest[SHA256_DIGEST_LENGTH], hex[2 * SHA256_DIGEST_LENGTH];
    if (content.length != sizeof hex)
        return 0;
    SHA256(body.at, body.length, digest);
    hex_of(hex, digest);
    return !CRYPTO_memcmp(hex, content.at, sizeof hex);
}

/* Writes what a presigned claim is kept under; an empty span if it is too long. */
static span presigned_text(claims *in, span method, span host, span target)
{
    writer to = writer_of(in->canonical, CLAIM_TEXT_MAX);
    write_span(&to, method);
    WRITE(&to, " ");
    write_span(&to, host);
    WRITE(&to, " ");
    write_span(&to, target);
    return to.is_full ? (span){to.begin, 0} : written(&to);
}

/* Returns the claim of a presigned request that was proven before and has not expired; NULL: Python decides. */
static const claim *claims_presigned(claims *in, span method, span target, const fields *of, int64_t now_s)
{
    if (of->present & (FIELDS_OF_AMZ | FIELD_BIT(FIELD_AUTHORIZATION)))
        return NULL;
    const claim *by = claims_find(in, presigned_text(in, method, of->value[FIELD_HOST], target));
    return by != NULL && by->until_s && by->from_s <= now_s && now_s < by->until_s ? by : NULL;
}

/* Returns 1 if the claim's key is not limited to other buckets. */
static int claim_allows(const claim *by, span bucket)
{
    span left = by->buckets;
    if (!left.length)
        return 1;
    while (left.length) {
        const uint8_t *end = memchr(left.at, 0, left.length);
        size_t length = end == NULL ? left.length : (size_t)(end - left.at);
        if (length == bucket.length && !memcmp(left.at, bucket.at, length))
            return 1;
        length += end != NULL;
        left.at += length;
        left.length -= length;
    }
    return 0;
}

#endif
