/* Runs of a plan, read from segments and checked by CRC32C where they arrive, piece by piece.

   A piece is copied by the kernel and summed at once, while the processor's nearest caches have it: summed after the
   whole, each byte would be fetched a second time.  Nothing waits for a disk: pages that are not cached make a read
   short.  A file without flags lies in memory, and is never asked what is cached.

   Rules kept here:
   - Only bytes that a system call reported are summed, and a chunk is right only if all of it is.
   - Two threads may do a job: each run is taken by one of them, and each chunk is in one run. */
#ifndef LAKE_CHECKED_READS_H
#define LAKE_CHECKED_READS_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../../lakefs/host/crc32c.h"
#include "../../lakefs/shared_index/place.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "places are little-endian, as the shared index is"
#endif

#define LAKE_GRANULE 65536
#define LAKE_RUN_CHUNKS 1024
#define LAKE_CHECKED_RUN_BYTES (128 << 10) /* a piece: as much as the nearest caches keep beside what it was copied from */
#define LAKE_CHECKED_BYTES_MAX (16 << 20)
#define LAKE_CHECKED_GRANULES_MAX (LAKE_CHECKED_BYTES_MAX / LAKE_GRANULE)
#define LAKE_PAGE 4096
#define LAKE_CACHESTAT 451 /* cachestat(2): the same number on every architecture */

typedef struct {
    uint64_t offset, bytes;
    int64_t came;
    uint32_t segment, first, count;
} lake_run;

typedef struct {
    void *at;
    uint64_t length;
} lake_target;

typedef struct {
    lake_run *runs;
    const lake_target *targets; /* of the chunks, in order; each has room for its chunk */
    const lake_place *places;
    const int *files, *flags; /* of the segments; a file of -1: not held */
    uint64_t ask_from;        /* bytes from which on it is asked first if they are cached */
    uint8_t *right;           /* of the chunks: 1 if it arrived whole and passed its check */
    uint32_t next, stop;      /* runs */
} lake_checked_job;

/* Returns 1 if the page cache lacks some of the range; 0 also when that cannot be known. */
static int lake_is_missing(int descriptor, uint64_t offset, uint64_t length)
{
    uint64_t range[2] = {offset, length}, counts[5] = {0};
    if (syscall(LAKE_CACHESTAT, descriptor, range, counts, 0))
        return 0;
    return counts[0] < (offset + length - 1) / LAKE_PAGE - offset / LAKE_PAGE + 1;
}

static int64_t lake_preadv(int descriptor, const struct iovec *into, int count, uint64_t offset, int flags)
{
    int64_t came;
    do
        came = preadv2(descriptor, into, count, (off_t)offset, flags);
    while (came < 0 && errno == EINTR);
    return came;
}

/* Reads a run by one call, unchecked; notes the bytes that came. */
static void lake_read(lake_run *run, const lake_target *targets, const lake_place *places, int descriptor, int flags,
                      uint64_t ask_from)
{
    struct iovec into[LAKE_RUN_CHUNKS];
    run->came = -1;
    if (descriptor < 0)
        return;
    if (flags && places[run->first].stored_bytes >= ask_from && lake_is_missing(descriptor, run->offset, run->bytes))
        return;
    for (uint32_t i = 0; i < run->count; i++) {
        into[i].iov_base = targets[run->first + i].at;
        into[i].iov_len = places[run->first + i].stored_bytes;
    }
    run->came = lake_preadv(descriptor, into, (int)run->count, run->offset, flags);
}

/* Reads a chunk of more than a granule, and checks each granule by the vector behind it; returns 1 if all are right. */
static int lake_read_long(const lake_place *place, uint8_t *into, int descriptor, int flags, uint64_t ask_from)
{
    uint32_t crcs[LAKE_CHECKED_GRANULES_MAX];
    uint64_t length = place->stored_bytes;
    size_t vector_bytes = (length + LAKE_GRANULE - 1) / LAKE_GRANULE * sizeof *crcs;
    if (flags && length >= ask_from && lake_is_missing(descriptor, place->offset, length + vector_bytes))
        return 0;
    struct iovec vector = {crcs, vector_bytes};
    if (lake_preadv(descriptor, &vector, 1, place->offset + length, flags) != (int64_t)vector_bytes)
        return 0;
    if (lake_crc32c((const uint8_t *)crcs, vector_bytes) != place->crc)
        return 0;
    for (uint64_t at = 0; at < length; at += LAKE_CHECKED_RUN_BYTES) {
        uint64_t size = length - at < LAKE_CHECKED_RUN_BYTES ? length - at : LAKE_CHECKED_RUN_BYTES;
        struct iovec piece = {into + at, size};
        if (lake_preadv(descriptor, &piece, 1, place->offset + at, flags) != (int64_t)size)
            return 0;
        for (uint64_t begin = at; begin < at + size; begin += LAKE_GRANULE) {
            uint64_t granule = at + size - begin < LAKE_GRANULE ? at + size - begin : LAKE_GRANULE;
            if (lake_crc32c(into + begin, granule) != crcs[begin / LAKE_GRANULE])
                return 0;
        }
    }
    return 1;
}

static void lake_read_checked(const lake_checked_job *job, lake_run *run)
{
    int descriptor = job->files[run->segment], flags = job->flags[run->segment];
    const lake_place *place = job->places + run->first;
    if (descriptor < 0)
        return;
    if (place->stored_bytes > LAKE_GRANULE) {
        job->right[run->first] =
            (uint8_t)lake_read_long(place, job->targets[run->first].at, descriptor, flags, job->ask_from);
        return;
    }
    lake_read(run, job->targets, job->places, descriptor, flags, job->ask_from);
    int64_t left = run->came;
    for (uint32_t number = run->first; number < run->first + run->count; number++, place++) {
        left -= place->stored_bytes;
        if (left < 0)
            return;
        job->right[number] = lake_crc32c(job->targets[number].at, place->stored_bytes) == place->crc;
    }
}

/* Takes runs until none is left. */
static void lake_work_off(void *at)
{
    lake_checked_job *job = at;
    for (;;) {
        uint32_t number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (number >= job->stop)
            return;
        lake_read_checked(job, job->runs + number);
    }
}

#endif
