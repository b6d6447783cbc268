/* Changes of the shared index's table, and the audit of one.  The writer alone changes it, so it reads entries without
   atomic loads. */
#ifndef LAKE_TABLE_WRITER_H
#define LAKE_TABLE_WRITER_H

#include "table.h"

static void lake_write(lake_entry *at, const lake_entry *wanted, uint64_t distance)
{
    lake_entry entry = *wanted;
    entry.version = at->version + 2;
    entry.distance = (uint16_t)distance;
    entry.check = entry.kind == LAKE_VACANT ? 0 : lake_crc(&entry);
    __atomic_store_n(&at->version, at->version | 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(at->halves + 1, entry.halves[1], __ATOMIC_RELAXED);
    for (int i = 1; i < 8; i++)
        __atomic_store_n(at->words + i, entry.words[i], __ATOMIC_RELAXED);
    __atomic_store_n(&at->version, entry.version, __ATOMIC_RELEASE);
}

static void lake_turn_stripes(lake_table *table, uint64_t first_slot, uint64_t last_slot)
{
    uint32_t *last = lake_stripe(table, last_slot);
    for (uint32_t *stripe = lake_stripe(table, first_slot); stripe <= last; stripe++)
        __atomic_store_n(stripe, *stripe + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Finds the slot of the chunk (returns 1), or the slot where it belongs (0): home + LAKE_PROBE_SLOTS is none. */
static int lake_search(const lake_table *table, const uint8_t *chunk, uint64_t home, uint64_t *slot)
{
    for (uint64_t distance = 0; distance < LAKE_PROBE_SLOTS; distance++) {
        const lake_entry *entry = table->entries + home + distance;
        *slot = home + distance;
        if (entry->kind == LAKE_VACANT || entry->distance < distance)
            return 0;
        if (entry->kind == chunk[0] && !memcmp(entry->digest, chunk + 1, 32))
            return 1;
    }
    *slot = home + LAKE_PROBE_SLOTS;
    return 0;
}

/* Counts slots from `slot` to the empty one behind its run; -1: one is too far from home, or they are too many. */
static int lake_run(const lake_table *table, uint64_t slot)
{
    for (int length = 0; length < LAKE_SHIFT_SLOTS; length++) {
        const lake_entry *entry = table->entries + slot + length;
        if (entry->kind == LAKE_VACANT)
            return length;
        if (entry->distance + 1 >= LAKE_PROBE_SLOTS)
            return -1;
    }
    return -1;
}

static int lake_put(lake_table *table, const uint8_t *chunk, const lake_entry *wanted)
{
    uint64_t home = lake_home(table, chunk + 1), slot;
    int is_present = lake_search(table, chunk, home, &slot);
    if (!is_present) {
        if (slot == home + LAKE_PROBE_SLOTS || table->count + table->dead >= table->limit)
            return 0;
        int length = lake_run(table, slot);
        if (length < 0)
            return 0;
        for (lake_entry *at = table->entries + slot + length; at > table->entries + slot; at--)
            lake_write(at, at - 1, at[-1].distance + 1);
        table->count++;
    }
    lake_write(table->entries + slot, wanted, slot - home);
    return 1;
}

static int lake_remove(lake_table *table, const uint8_t *chunk)
{
    static const lake_entry vacant;
    uint64_t home = lake_home(table, chunk + 1), slot;
    if (!lake_search(table, chunk, home, &slot))
        return 0;
    table->count--;
    uint64_t end = slot + 1;
    while (table->entries[end].kind != LAKE_VACANT && table->entries[end].distance) {
        if (++end - slot > LAKE_SHIFT_SLOTS) {
            lake_entry dead = vacant;
            dead.kind = LAKE_DEAD;
            memcpy(dead.digest, chunk + 1, 32);
            lake_write(table->entries + slot, &dead, slot - home);
            table->dead++;
            return 1;
        }
    }
    lake_turn_stripes(table, slot, end - 1);
    for (lake_entry *at = table->entries + slot; at < table->entries + end - 1; at++)
        lake_write(at, at + 1, at[1].distance - 1);
    lake_write(table->entries + end - 1, &vacant, 0);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    lake_turn_stripes(table, slot, end - 1);
    return 1;
}

static void lake_clear(lake_table *table)
{
    static const lake_entry vacant;
    uint64_t slots = table->capacity + LAKE_PROBE_SLOTS;
    lake_turn_stripes(table, 0, slots - 1);
    for (uint64_t slot = 0; slot < slots; slot++)
        if (table->entries[slot].kind != LAKE_VACANT)
            lake_write(table->entries + slot, &vacant, 0);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    lake_turn_stripes(table, 0, slots - 1);
    table->count = table->dead = 0;
}

static int lake_audit(lake_table *table)
{
    uint64_t count = 0, dead = 0, slots = table->capacity + LAKE_PROBE_SLOTS;
    int64_t before = -1;
    for (uint64_t slot = 0; slot < slots; slot++) {
        const lake_entry *entry = table->entries + slot;
        if (entry->version & 1)
            return 0;
        if (entry->kind == LAKE_VACANT) {
            before = -1;
            continue;
        }
        if (entry->distance > before + 1 || entry->distance >= LAKE_PROBE_SLOTS
            || lake_home(table, entry->digest) + entry->distance != slot || lake_crc(entry) != entry->check)
            return 0;
        if (entry->kind == LAKE_DEAD)
            dead++;
        else if (entry->kind == 1 || entry->kind == 2)
            count++;
        else
            return 0;
        before = entry->distance;
    }
    table->count = count;
    table->dead = dead;
    return 1;
}

#endif
