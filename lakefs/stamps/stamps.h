/* Stamps in memory that the engine shares: the layout, and readers for native modules.

   offset  size  content
   0       8     magic "LAKESTMP"; written last, when everything else is
   8       4     version: 1, or 2 where the right to use the stamps has an end
   12      4     0
   16      8     count of stamps, a power of two
   24      4     ended: 1 once the engine has stopped
   28      4     0
   32      8     end of the right to use the stamps, nanoseconds of CLOCK_BOOTTIME; 0: it has no end
   40      24    0
   64      64    a robust, process-shared pthread mutex of glibc; its first 4 bytes are the futex word
   4096    8n    the stamps, 64-bit counters; numbers are little-endian

   Rules kept here:
   - The engine's thread locks the mutex before anything is served and holds it for as long as it lives.  When it is
     killed, the kernel marks the futex word (FUTEX_OWNER_DIED) while it takes down the process's memory.  That happens
     before it closes the process's files, so before another engine can have the store's lock.  (For want of memory it
     may fail to: see stamps.py.)
   - Readers only read: each of these functions is safe over memory that the engine writes at the same time.  None of
     them locks the mutex, waits or makes a system call.
   - A set of stamps stands if every counter has the value of the set while the engine lives.  Counters only grow, so
     the set stood at every moment before.
   - A head of a lake repeats the counters of another process, and may use them up to an end, which is later in each
     right that it gets.  A reader loads the end before it compares the counters, and looks at the clock behind that:
     a right that comes after the comparison may be one that follows a turn. */

#ifndef LAKE_STAMPS_H
#define LAKE_STAMPS_H

#include <stdint.h>
#include <string.h>
#include <time.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stamps are little-endian"
#endif

#define LAKE_STAMPS_CAPSULE "lake_stamps"
#define LAKE_STAMPS_MAGIC 0x504d5453454b414cull /* "LAKESTMP" */
#define LAKE_STAMPS_VERSION 1
#define LAKE_STAMPS_VERSION_WITH_END 2
#define LAKE_STAMPS_NO_RIGHT 1 /* an end that was over when the machine started */
#define LAKE_STAMPS_MUTEX 64
#define LAKE_STAMPS_COUNTERS 4096
#define LAKE_STAMP_BYTES 12 /* of a stamp in a set: slot (4), value (8) */
#define LAKE_STAMPS_OWNER 0x3fffffffu /* FUTEX_TID_MASK */
#define LAKE_STAMPS_OWNER_DIED 0x40000000u /* FUTEX_OWNER_DIED */

/* What a capsule named "lake_stamps" points to. */
typedef struct {
    const uint8_t *memory;
    uint64_t count;
} lake_stamps;

typedef struct {
    uint64_t magic;
    uint32_t version, reserved;
    uint64_t count;
    uint32_t ended, padding;
    uint64_t right_end;
    uint8_t more_padding[24];
    uint32_t owner;
} lake_stamps_header;
_Static_assert(__builtin_offsetof(lake_stamps_header, count) == 16, "the layout above");
_Static_assert(__builtin_offsetof(lake_stamps_header, ended) == 24, "the layout above");
_Static_assert(__builtin_offsetof(lake_stamps_header, right_end) == 32, "the layout above");
_Static_assert(__builtin_offsetof(lake_stamps_header, owner) == LAKE_STAMPS_MUTEX, "the layout above");

static inline const lake_stamps_header *lake_stamps_head(const lake_stamps *stamps)
{
    return (const lake_stamps_header *)stamps->memory;
}

/* Returns 1 while the engine that writes the stamps lives and has not stopped. */
static inline int lake_stamps_live(const lake_stamps *stamps)
{
    const lake_stamps_header *head = lake_stamps_head(stamps);
    uint32_t owner = __atomic_load_n(&head->owner, __ATOMIC_ACQUIRE);
    return (owner & LAKE_STAMPS_OWNER) && !(owner & LAKE_STAMPS_OWNER_DIED)
        && !__atomic_load_n(&head->ended, __ATOMIC_ACQUIRE)
        && __atomic_load_n(&head->magic, __ATOMIC_ACQUIRE) == LAKE_STAMPS_MAGIC;
}

/* Returns the counter of a slot, which is below `count`. */
static inline uint64_t lake_stamps_read(const lake_stamps *stamps, uint64_t slot)
{
    const uint64_t *counters = (const uint64_t *)(stamps->memory + LAKE_STAMPS_COUNTERS);
    return __atomic_load_n(counters + slot, __ATOMIC_ACQUIRE);
}

static inline uint64_t lake_stamps_right_end(const lake_stamps *stamps)
{
    return __atomic_load_n(&lake_stamps_head(stamps)->right_end, __ATOMIC_ACQUIRE);
}

/* Returns 1 while a right that ends then may be used. */
static inline int lake_stamps_may_use(uint64_t right_end)
{
    struct timespec now;
    if (!right_end)
        return 1;
    if (right_end == LAKE_STAMPS_NO_RIGHT || clock_gettime(CLOCK_BOOTTIME, &now))
        return 0;
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec < right_end;
}

/* Returns 1 if the engine lives and every stamp of a set stands; 0 for an empty set, or bytes that are none. */
static inline int lake_stamps_stand(const lake_stamps *stamps, const uint8_t *set, uint64_t set_bytes)
{
    if (!set_bytes || set_bytes % LAKE_STAMP_BYTES || !stamps->count) /* without a count there is no memory */
        return 0;
    uint64_t right_end = lake_stamps_right_end(stamps);
    for (uint64_t at = 0; at < set_bytes; at += LAKE_STAMP_BYTES) {
        uint32_t slot;
        uint64_t value;
        memcpy(&slot, set + at, sizeof slot);
        memcpy(&value, set + at + sizeof slot, sizeof value);
        if (slot >= stamps->count || lake_stamps_read(stamps, slot) != value)
            return 0;
    }
    return lake_stamps_live(stamps) && lake_stamps_may_use(right_end);
}

#endif
