/* Runs of a plan, read from segments and checked by CRC32C where they arrive, piece by piece.

   A piece is copied by the kernel and summed at once, while the processor's nearest caches have it: summed after the
   whole, each byte would be fetched a second time.  Nothing waits for a disk: pages that are not cached make a read
   short.  A file without flags lies in memory, and is never asked what is cached.

   Rules kept here:
   - Only bytes that a system call reported are summed, and a chunk is right only if all of it is.
   - Two threads may do a job: each run is taken by one of them, and each chunk is in one run. */
#ifndef LAKE_CHECKED_READS_H
#define LAKE_CHECKED_READS_H

#include "../../lakefs/granules/extent.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "places are little-endian, as the shared index is"
#endif

#define LAKE_RUN_CHUNKS 1024
#define LAKE_CHECKED_RUN_BYTES LAKE_READ_AT_ONCE
#define LAKE_CHECKED_BYTES_MAX (LAKE_GRANULES_MAX * LAKE_GRANULE)

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

/* Reads a run by one call, unchecked; notes the bytes that came. */
static void lake_read(lake_run *run, const lake_target *targets, const lake_place *places, int descriptor, int flags,
                      uint64_t ask_from)
{
    struct iovec into[LAKE_RUN_CHUNKS];
    run->came = -1;
    if (descriptor < 0)
        return;
    if (flags && places[run->first].stored_bytes >= ask_from && !lake_may_be_cached(descriptor, run->offset, run->bytes))
        return;
    for (uint32_t i = 0; i < run->count; i++) {
        into[i].iov_base = targets[run->first + i].at;
        into[i].iov_len = places[run->first + i].stored_bytes;
    }
    run->came = lake_preadv(descriptor, into, (int)run->count, run->offset, flags);
}

static void lake_read_checked(const lake_checked_job *job, lake_run *run)
{
    int descriptor = job->files[run->segment], flags = job->flags[run->segment];
    const lake_place *place = job->places + run->first;
    if (descriptor < 0)
        return;
    if (place->stored_bytes > LAKE_GRANULE) {
        uint64_t ask_from = flags ? job->ask_from : LAKE_NEVER_ASK;
        lake_extent from = lake_extent_of_file(descriptor, flags, place->offset, ask_from, LAKE_READ_AT_ONCE);
        job->right[run->first] =
            (uint8_t)lake_extent_chunk(&from, place->stored_bytes, place->crc, job->targets[run->first].at);
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
