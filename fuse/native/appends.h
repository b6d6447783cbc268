/* Appends: files being written whose next bytes native threads may write, each at its end and as far as its limit.

   Python lets a file be appended to through one handle, asks for its end, and ends that.  Everything but the next bytes
   of a handle's file is Python's: other offsets, other handles, writes of mappings, writes past the limit, writes that
   fail.

   Rules kept here:
   - An end moves when its bytes are in the file, and before the write is answered.  So who was told of a write, or sends
     a request after it, finds it in the end that Python asks for.
   - Bytes behind the end of a write that failed are cut off again; the request is then Python's, as if it had not been
     tried.
   - One write of a file runs at a time.  When `lake_append_end` has returned, none runs, nor begins.
   - Offsets and lengths of requests are not trusted: each is compared with end and limit. */
#ifndef LAKE_APPENDS_H
#define LAKE_APPENDS_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define LAKE_APPENDS_MOST 64 /* files at once */

typedef struct {
    uint64_t handle;
    int descriptor;
    uint64_t end, limit; /* guarded by the mutex, as all below */
    int64_t time_ns;     /* of the last write, since 1970 */
    int busy, ended;
} lake_append;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t quiet; /* a file that was ended has no write any more */
    uint32_t count;
    lake_append *of[LAKE_APPENDS_MOST];
    uint64_t writes, bytes, failed;
} lake_append_table;

static lake_append_table lake_appends = {.mutex = PTHREAD_MUTEX_INITIALIZER, .quiet = PTHREAD_COND_INITIALIZER};

/* --- begun and ended by Python --- */

/* Lets the bytes [end, limit) of a file be written, in order, through a handle; returns 0, or an error number.  The
   caller keeps `append` and descriptor until it has ended that. */
static int lake_append_begin(lake_append *append, uint64_t handle, int descriptor, uint64_t end, uint64_t limit)
{
    if (descriptor < 0 || end > limit || limit > INT64_MAX)
        return EINVAL;
    *append = (lake_append){.handle = handle, .descriptor = descriptor, .end = end, .limit = limit};
    pthread_mutex_lock(&lake_appends.mutex);
    int failed = lake_appends.count >= LAKE_APPENDS_MOST ? ENOSPC : 0;
    for (uint32_t at = 0; at < lake_appends.count; at++)
        if (lake_appends.of[at]->handle == handle)
            failed = EEXIST;
    if (!failed)
        lake_appends.of[lake_appends.count++] = append;
    pthread_mutex_unlock(&lake_appends.mutex);
    return failed;
}

/* Returns the end of what was written by now, and the time of the last write, 0 if there was none. */
static uint64_t lake_append_found(lake_append *append, int64_t *time_ns)
{
    pthread_mutex_lock(&lake_appends.mutex);
    uint64_t end = append->end;
    *time_ns = append->time_ns;
    pthread_mutex_unlock(&lake_appends.mutex);
    return end;
}

/* Lets nothing more be written.  Returns 1 if a write is under way, which `lake_append_wait` waits for. */
static int lake_append_end_now(lake_append *append)
{
    pthread_mutex_lock(&lake_appends.mutex);
    append->ended = 1;
    int busy = append->busy;
    for (uint32_t at = 0; at < lake_appends.count; at++)
        if (lake_appends.of[at] == append) {
            lake_appends.of[at] = lake_appends.of[--lake_appends.count];
            break;
        }
    pthread_mutex_unlock(&lake_appends.mutex);
    return busy;
}

static void lake_append_wait(lake_append *append)
{
    pthread_mutex_lock(&lake_appends.mutex);
    while (append->busy)
        pthread_cond_wait(&lake_appends.quiet, &lake_appends.mutex);
    pthread_mutex_unlock(&lake_appends.mutex);
}

/* --- written by native code --- */

/* Returns the file whose next bytes these are, of which no other write begins until `lake_append_leave`; else NULL. */
static lake_append *lake_append_enter(uint64_t handle, uint64_t offset, uint64_t size)
{
    lake_append *found = NULL;
    pthread_mutex_lock(&lake_appends.mutex);
    for (uint32_t at = 0; at < lake_appends.count; at++)
        if (lake_appends.of[at]->handle == handle)
            found = lake_appends.of[at];
    if (found && (found->busy || !size || offset != found->end || size > found->limit - found->end))
        found = NULL;
    if (found)
        found->busy = 1;
    pthread_mutex_unlock(&lake_appends.mutex);
    return found;
}

static void lake_append_leave(lake_append *append, uint64_t written)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&lake_appends.mutex);
    if (written) {
        append->end += written;
        append->time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
        lake_appends.writes++;
        lake_appends.bytes += written;
    } else
        lake_appends.failed++;
    append->busy = 0;
    if (append->ended)
        pthread_cond_broadcast(&lake_appends.quiet);
    pthread_mutex_unlock(&lake_appends.mutex);
}

/* Writes all of the next bytes of a handle's file; returns 0, with the file as before, if Python has to write them. */
static int lake_append_write(uint64_t handle, uint64_t offset, const uint8_t *bytes, size_t size)
{
    lake_append *append = lake_append_enter(handle, offset, size);
    if (!append)
        return 0;
    size_t done = 0;
    while (done < size) {
        ssize_t count = pwrite(append->descriptor, bytes + done, size - done, (off_t)(offset + done));
        if (count > 0)
            done += (size_t)count;
        else if (count == 0 || errno != EINTR)
            break;
    }
    if (done < size) {
        int cut;
        do
            cut = ftruncate(append->descriptor, (off_t)offset);
        while (cut && errno == EINTR); /* if it fails otherwise, Python's own try finds that */
    }
    lake_append_leave(append, done < size ? 0 : size);
    return done == size;
}

#endif
