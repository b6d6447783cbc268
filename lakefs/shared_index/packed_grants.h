/* Places as the grants of an answer: msgpack, as `lakefs.wire.grants.Grant` has them. */
#ifndef LAKE_PACKED_GRANTS_H
#define LAKE_PACKED_GRANTS_H

#include "table.h"

#define LAKE_GRANT_BYTES 35  /* at most: array 1, tier 1, slab 3 and generation 9, four numbers of 5, a zero */
#define LAKE_ARRAY_BYTES 5

static inline uint8_t *lake_pack_16(uint8_t *at, uint8_t tag, uint32_t number)
{
    uint16_t big = __builtin_bswap16((uint16_t)number);
    *at++ = tag;
    memcpy(at, &big, 2);
    return at + 2;
}

static inline uint8_t *lake_pack_32(uint8_t *at, uint8_t tag, uint32_t number)
{
    uint32_t big = __builtin_bswap32(number);
    *at++ = tag;
    memcpy(at, &big, 4);
    return at + 4;
}

static inline uint8_t *lake_pack_number(uint8_t *at, uint64_t number)
{
    if (number < 0x80) {
        *at++ = (uint8_t)number;
    } else if (number <= 0xff) {
        *at++ = 0xcc;
        *at++ = (uint8_t)number;
    } else if (number <= 0xffff) {
        return lake_pack_16(at, 0xcd, (uint32_t)number);
    } else if (number <= 0xffffffffu) {
        return lake_pack_32(at, 0xce, (uint32_t)number);
    } else {
        uint64_t big = __builtin_bswap64(number);
        *at++ = 0xcf;
        memcpy(at, &big, 8);
        at += 8;
    }
    return at;
}

static uint8_t *lake_pack_array(uint8_t *at, uint32_t length)
{
    if (length > 0xffff)
        return lake_pack_32(at, 0xdd, length);
    if (length >= 16)
        return lake_pack_16(at, 0xdc, length);
    *at++ = (uint8_t)(0x90 | length);
    return at;
}

/* Packs one grant; returns its end, or NULL for a tier that grants do not have. */
static inline uint8_t *lake_pack_grant(uint8_t *at, const lake_entry *found)
{
    uint64_t segment = found->segment, generation = 0;
    if (found->tier == LAKE_TIER_DRAM) {
        segment = found->segment >> LAKE_GENERATION_BITS;
        generation = found->segment & ((UINT64_C(1) << LAKE_GENERATION_BITS) - 1);
    } else if (found->tier != LAKE_TIER_SEGMENT) {
        return NULL;
    }
    *at++ = 0x98;
    at = lake_pack_number(at, found->tier);
    at = lake_pack_number(at, segment);
    at = lake_pack_number(at, found->offset);
    at = lake_pack_number(at, found->stored_bytes);
    at = lake_pack_number(at, found->stored_bytes);
    *at++ = 0;
    at = lake_pack_number(at, found->crc);
    return lake_pack_number(at, generation);
}

#endif
