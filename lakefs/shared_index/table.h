/* The shared index's table as readers use it, and the ports by which other native modules look places up.

   Rules kept here:
   - A reader copies each entry whole, with atomic loads, into memory of its own: nothing is decided on bytes that can
     still change.
   - Each loop is bounded by a constant, whatever the table's bytes are. */
#ifndef LAKE_TABLE_H
#define LAKE_TABLE_H

#include "../host/crc32c.h"
#include "../granules/place.h"
#include <stddef.h>
#include <string.h>

#define LAKE_PROBE_SLOTS 64
#define LAKE_SHIFT_SLOTS 1024
#define LAKE_STRIPES 4096
#define LAKE_STRIPES_OFFSET 4096
#define LAKE_ENTRIES_OFFSET (LAKE_STRIPES_OFFSET + 4 * LAKE_STRIPES)
#define LAKE_VACANT 0
#define LAKE_DEAD 255
#define LAKE_ATTEMPTS 8
#define LAKE_BATCH 64

typedef union {
    struct {
        uint32_t version;
        uint8_t kind, tier;
        uint16_t distance;
        uint8_t digest[32];
        uint64_t segment;
        uint32_t offset, stored_bytes, crc, check;
    };
    uint32_t halves[16];
    uint64_t words[8];
} lake_entry;
_Static_assert(sizeof(lake_entry) == 64, "an entry is a cache line");

typedef struct {
    lake_entry *entries;
    uint32_t *stripes;
    uint64_t capacity, limit, count, dead;
    int home_shift, stripe_shift;
} lake_table;

static inline uint32_t lake_crc(const lake_entry *entry)
{
    return lake_crc32c((const uint8_t *)entry, offsetof(lake_entry, check));
}

static inline void lake_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline uint64_t lake_home(const lake_table *table, const uint8_t *digest)
{
    uint64_t head;
    memcpy(&head, digest, 8);
    return head >> table->home_shift;
}

static inline void lake_prefetch(const lake_table *table, const uint8_t *chunk)
{
    const lake_entry *entry = table->entries + lake_home(table, chunk + 1);
    __builtin_prefetch(entry);
    __builtin_prefetch(entry + 1);
}

static inline uint32_t *lake_stripe(const lake_table *table, uint64_t slot)
{
    uint64_t stripe = slot >> table->stripe_shift;
    return table->stripes + (stripe < LAKE_STRIPES ? stripe : LAKE_STRIPES - 1);
}

/* Loads an entry; returns 1 if it was loaded whole. */
static inline int lake_load(const lake_entry *at, lake_entry *into)
{
    uint32_t version = __atomic_load_n(&at->version, __ATOMIC_ACQUIRE);
    for (int i = 0; i < 8; i++)
        into->words[i] = __atomic_load_n(at->words + i, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return !(version & 1) && into->version == version
        && __atomic_load_n(&at->version, __ATOMIC_RELAXED) == version;
}

/* Returns 1 found, 0 not present, -1 changed during the lookup.

   An entry's first word is its version, kind, tier and distance in one: if it is even, it is that of a complete
   entry.  The second word begins the digest; only an entry that matches there is loaded whole. */
static inline int lake_look(const lake_table *table, const uint8_t *chunk, uint64_t home, lake_entry *found)
{
    const lake_entry *at = table->entries + home;
    uint64_t head;
    memcpy(&head, chunk + 1, 8);
    for (uint64_t distance = 0; distance < LAKE_PROBE_SLOTS; distance++, at++) {
        uint64_t first = __atomic_load_n(at->words, __ATOMIC_ACQUIRE);
        if (first & 1)
            return -1;
        if (((first >> 32) & 255) == LAKE_VACANT || first >> 48 < distance)
            return 0;
        if (__atomic_load_n(at->words + 1, __ATOMIC_RELAXED) != head)
            continue;
        if (!lake_load(at, found))
            return -1;
        if (found->kind == chunk[0] && !memcmp(found->digest, chunk + 1, 32))
            return lake_crc(found) == found->check ? 1 : -1;
    }
    return 0;
}

/* Returns 1 found, 0 not present at a moment of the call, -1: it cannot be known. */
static int lake_seek(const lake_table *table, const uint8_t *chunk, lake_entry *found)
{
    uint64_t home = lake_home(table, chunk + 1);
    uint32_t *first = lake_stripe(table, home);
    uint32_t *last = lake_stripe(table, home + LAKE_PROBE_SLOTS - 1);
    for (int attempt = 0; attempt < LAKE_ATTEMPTS; attempt++) {
        uint32_t first_before = __atomic_load_n(first, __ATOMIC_ACQUIRE);
        uint32_t last_before = __atomic_load_n(last, __ATOMIC_ACQUIRE);
        int seen = lake_look(table, chunk, home, found);
        if (seen == 1)
            return 1;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (seen == 0 && !((first_before | last_before) & 1)
            && first_before == __atomic_load_n(first, __ATOMIC_RELAXED)
            && last_before == __atomic_load_n(last, __ATOMIC_RELAXED))
            return 0;
        lake_pause();
    }
    return -1;
}

static inline int lake_find(const lake_table *table, const uint8_t *chunk, lake_entry *found)
{
    return lake_seek(table, chunk, found) == 1;
}

static inline void lake_tell(const lake_entry *found, void *into)
{
    lake_place place = {found->segment, found->offset, found->stored_bytes, found->crc, found->tier};
    memcpy(into, &place, sizeof(place));
}

/* The ports for other native modules. */
static int lake_find_place(const void *table, const uint8_t *chunk, lake_place *place)
{
    lake_entry found;
    if (!lake_find(table, chunk, &found))
        return 0;
    lake_tell(&found, place);
    return 1;
}

static int lake_seek_place(const void *table, const uint8_t *id, lake_place *place)
{
    lake_entry found;
    int seen = lake_seek(table, id, &found);
    if (seen == 1)
        lake_tell(&found, place);
    return seen;
}

static void lake_prefetch_place(const void *table, const uint8_t *id)
{
    lake_prefetch(table, id);
}

#endif
