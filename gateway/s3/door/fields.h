/* The header fields that the door understands.  A request with any other field, or with one twice, is Python's.

   That a field is on this list says: with it, the answer is the same as without it, or the door does what it asks for
   (`range`, `x-amz-checksum-mode`, `connection: keep-alive`, `content-md5`, `expect`), or it belongs to the signature.
   Those of a PUT that are kept with the object, or checked by Python, are given to it (`FIELDS_GIVEN`). */
#ifndef LAKE_S3_FIELDS_H
#define LAKE_S3_FIELDS_H

#include "../../http/head.h"

typedef enum {
    FIELD_NONE,
    FIELD_HOST,
    FIELD_AUTHORIZATION,
    FIELD_DATE,
    FIELD_CONTENT,
    FIELD_RANGE,
    FIELD_CONNECTION,
    FIELD_CHECKSUM_MODE,
    FIELD_ACCEPT,
    FIELD_ACCEPT_ENCODING,
    FIELD_INVOCATION_ID,
    FIELD_SDK_REQUEST,
    FIELD_SDK_AGENT,
    FIELD_AGENT,
    FIELD_LENGTH,
    FIELD_TYPE,
    FIELD_MD5,
    FIELD_EXPECT,
    FIELD_CRC32,
    FIELD_CRC32C,
    FIELD_CRC64NVME,
    FIELD_SHA1,
    FIELD_SHA256,
    FIELD_SDK_CHECKSUM,
    FIELD_COUNT
} field_id;

static const span field_names[FIELD_COUNT] = {
#define FIELD_NAME(text) {(const uint8_t *)(text), sizeof(text) - 1}
    [FIELD_HOST] = FIELD_NAME("host"),
    [FIELD_AUTHORIZATION] = FIELD_NAME("authorization"),
    [FIELD_DATE] = FIELD_NAME("x-amz-date"),
    [FIELD_CONTENT] = FIELD_NAME("x-amz-content-sha256"),
    [FIELD_RANGE] = FIELD_NAME("range"),
    [FIELD_CONNECTION] = FIELD_NAME("connection"),
    [FIELD_CHECKSUM_MODE] = FIELD_NAME("x-amz-checksum-mode"),
    [FIELD_ACCEPT] = FIELD_NAME("accept"),
    [FIELD_ACCEPT_ENCODING] = FIELD_NAME("accept-encoding"),
    [FIELD_INVOCATION_ID] = FIELD_NAME("amz-sdk-invocation-id"),
    [FIELD_SDK_REQUEST] = FIELD_NAME("amz-sdk-request"),
    [FIELD_SDK_AGENT] = FIELD_NAME("x-amz-user-agent"),
    [FIELD_AGENT] = FIELD_NAME("user-agent"),
    [FIELD_LENGTH] = FIELD_NAME("content-length"),
    [FIELD_TYPE] = FIELD_NAME("content-type"),
    [FIELD_MD5] = FIELD_NAME("content-md5"),
    [FIELD_EXPECT] = FIELD_NAME("expect"),
    [FIELD_CRC32] = FIELD_NAME("x-amz-checksum-crc32"),
    [FIELD_CRC32C] = FIELD_NAME("x-amz-checksum-crc32c"),
    [FIELD_CRC64NVME] = FIELD_NAME("x-amz-checksum-crc64nvme"),
    [FIELD_SHA1] = FIELD_NAME("x-amz-checksum-sha1"),
    [FIELD_SHA256] = FIELD_NAME("x-amz-checksum-sha256"),
    [FIELD_SDK_CHECKSUM] = FIELD_NAME("x-amz-sdk-checksum-algorithm"),
#undef FIELD_NAME
};

#define FIELD_BIT(id) (UINT32_C(1) << (id))
#define FIELDS_OF_CHECKSUMS                                                                                            \
    (FIELD_BIT(FIELD_CRC32) | FIELD_BIT(FIELD_CRC32C) | FIELD_BIT(FIELD_CRC64NVME) | FIELD_BIT(FIELD_SHA1) |           \
     FIELD_BIT(FIELD_SHA256) | FIELD_BIT(FIELD_SDK_CHECKSUM))
#define FIELDS_OF_AMZ                                                                                                  \
    (FIELD_BIT(FIELD_DATE) | FIELD_BIT(FIELD_CONTENT) | FIELD_BIT(FIELD_CHECKSUM_MODE) | FIELD_BIT(FIELD_SDK_AGENT) |  \
     FIELDS_OF_CHECKSUMS)
#define FIELDS_OF_BODY                                                                                                 \
    (FIELD_BIT(FIELD_LENGTH) | FIELD_BIT(FIELD_TYPE) | FIELD_BIT(FIELD_MD5) | FIELD_BIT(FIELD_EXPECT) |                \
     FIELDS_OF_CHECKSUMS)
#define FIELDS_OF_READS (~FIELDS_OF_BODY)
#define FIELDS_OF_PUT (~(FIELD_BIT(FIELD_RANGE) | FIELD_BIT(FIELD_CHECKSUM_MODE)))
#define FIELDS_GIVEN (FIELD_BIT(FIELD_TYPE) | FIELDS_OF_CHECKSUMS)

typedef struct {
    span value[FIELD_COUNT]; /* of those that came; of the others there is nothing */
    uint32_t present;        /* FIELD_BIT of each that came */
} fields;

/* Compares names in any case; `lower` is in lower case. */
static inline int field_is(span name, span lower)
{
    if (name.length != lower.length)
        return 0;
    for (size_t at = 0; at < name.length; at++) {
        uint8_t byte = name.at[at];
        if (byte >= 'A' && byte <= 'Z')
            byte |= 0x20;
        if (byte != lower.at[at])
            return 0;
    }
    return 1;
}

static field_id field_of(span name)
{
    for (int id = FIELD_NONE + 1; id < FIELD_COUNT; id++)
        if (field_is(name, field_names[id]))
            return (field_id)id;
    return FIELD_NONE;
}

static inline int field_has(const fields *from, field_id id)
{
    return (from->present & FIELD_BIT(id)) != 0;
}

/* Returns 1 if every field of a head is on the list, once. */
static int fields_read(const head *from, fields *into)
{
    memset(into, 0, sizeof *into);
    for (size_t at = 0; at < from->field_count; at++) {
        field_id id = field_of(from->fields[at].name);
        if (id == FIELD_NONE || field_has(into, id))
            return 0;
        into->present |= FIELD_BIT(id);
        into->value[id] = from->fields[at].value;
    }
    return 1;
}

#endif
