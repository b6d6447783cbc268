/* Granules: parts of 64 KiB of a payload, the last of which may be short, and the CRC32C of each. */
#ifndef LAKE_GRANULES_H
#define LAKE_GRANULES_H

#include "../host/crc32c.h"
#include "../host/page_cache.h"

#define LAKE_GRANULE 65536u
#define LAKE_GRANULES_MAX 256u /* of a chunk, which has at most 16 MiB */
#define LAKE_PAGES (LAKE_GRANULE / LAKE_PAGE)
#define LAKE_SUMMED_AT_ONCE (4 * LAKE_GRANULE)

static inline size_t lake_granule_count(uint64_t length)
{
    return (size_t)((length + LAKE_GRANULE - 1) / LAKE_GRANULE);
}

/* Writes the CRCs of the granules of some bytes. */
static void lake_granule_crcs(const uint8_t *from, size_t length, uint32_t *crcs)
{
    for (; length >= LAKE_SUMMED_AT_ONCE; from += LAKE_SUMMED_AT_ONCE, length -= LAKE_SUMMED_AT_ONCE, crcs += 4)
        lake_crc32c_of_four(from, LAKE_GRANULE, crcs);
    for (; length > LAKE_GRANULE; from += LAKE_GRANULE, length -= LAKE_GRANULE)
        *crcs++ = lake_crc32c(from, LAKE_GRANULE);
    if (length)
        *crcs = lake_crc32c(from, length);
}

/* Copies bytes, and writes the CRCs of the copy's granules: in one pass, while others may write to `from`. */
static void lake_granule_crcs_copied(const uint8_t *from, size_t length, uint8_t *into, uint32_t *crcs)
{
    for (; length >= LAKE_SUMMED_AT_ONCE; from += LAKE_SUMMED_AT_ONCE, into += LAKE_SUMMED_AT_ONCE, crcs += 4) {
        lake_crc32c_copy_four(from, into, LAKE_GRANULE, crcs);
        length -= LAKE_SUMMED_AT_ONCE;
    }
    if (length)
        memcpy(into, from, length);
    lake_granule_crcs(into, length, crcs);
}

/* Writes the CRCs of the pages of at most a granule. */
static void lake_page_crcs(const uint8_t *from, size_t length, uint32_t *crcs)
{
    for (size_t at = 0; at < length; at += LAKE_PAGE)
        *crcs++ = lake_crc32c(from + at, length - at < LAKE_PAGE ? length - at : LAKE_PAGE);
}

#endif
