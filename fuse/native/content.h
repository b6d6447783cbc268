/* Contents: where the bytes of opened objects are, and their checksums, so that native code reads and checks them.

   A content is the layout of one object: pieces that follow each other, each of granules of 64 KiB.  Python makes it,
   teaches it a piece when it has read that piece itself, adds handles to it, and ends it.  Native threads only read.

   Rules kept here:
   - What was taught of a piece (`lake_known`) never changes, and lives as long as its content.  Its page sums are added,
     each once.  A piece whose check failed is not read natively again until it is taught anew.
   - Bytes are checked by the CRC32C of whole granules, or by those of single pages, which were computed from the same
     memory as the granule's when that was right.  No byte is answered unchecked.
   - Reads never wait for a disk (RWF_NOWAIT).
   - `lake_content_fill` is called between `lake_contents_enter` and `lake_contents_leave` only.  When
     `lake_content_end` has returned, no read of the content runs, nor begins.
   - Offsets and lengths of requests are not trusted: each is compared with the layout, and none allocates. */
#ifndef LAKE_MOUNT_CONTENT_H
#define LAKE_MOUNT_CONTENT_H

#include "../../lakefs/granules/extent.h"
#include <pthread.h>
#include <stdlib.h>

#define LAKE_READ_MOST (1u << 20)                             /* of one request */
#define LAKE_SCRATCH (LAKE_READ_MOST + 2 * LAKE_GRANULE)      /* it may begin and end inside granules */
#define LAKE_PIECES_MOST 16384u                               /* 64 GiB of large chunks; 40 bytes each */
#define LAKE_PIECE_MOST (64u << 20)
#define LAKE_HANDLES_MOST 65536u
#define LAKE_SLOTS (2 * LAKE_HANDLES_MOST)
#define LAKE_SUMS_MOST 65536u                                 /* granules with page sums, 64 bytes each: 4 MiB */
#define LAKE_TAUGHT_MOST 262144u                              /* pieces taught, 300 bytes each of 4 MiB: 80 MiB, 1 TiB */
#define LAKE_LOOK_FROM (256u << 10)                           /* longer reads first ask if the bytes are cached */

typedef struct {
    uint32_t of_page[LAKE_PAGES];
} lake_sums;

typedef struct lake_known {
    struct lake_known *before; /* what was taught of the same content earlier; all is freed with it */
    lake_extent where;         /* a segment's file, or memory, which its owner may change */
    int failed;       /* atomic */
    uint32_t granules;
    lake_sums **sums; /* of each granule, atomic; NULL: not known yet */
    uint32_t crcs[];
} lake_known;

typedef struct {
    uint64_t begin;
    uint64_t length;
    lake_known *known; /* atomic */
} lake_piece;

typedef struct {
    uint64_t references; /* handles, and the maker; guarded by the mutex, as reads and ended */
    uint64_t reads;      /* under way */
    int ended;
    uint32_t count;
    uint64_t size;
    lake_known *taught; /* the maker's thread only */
    lake_piece pieces[];
} lake_content;

typedef struct {
    uint64_t handle;
    lake_content *content; /* NULL: free */
} lake_slot;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t quiet; /* a content that was ended has no reads any more */
    uint64_t handle_count;
    uint64_t taught_count; /* atomic, as all below */
    uint64_t sums_count;
    uint64_t not_cached; /* reads */
    uint64_t failed;     /* checks */
    lake_slot slots[LAKE_SLOTS];
} lake_contents;

static lake_contents lake_all = {.mutex = PTHREAD_MUTEX_INITIALIZER, .quiet = PTHREAD_COND_INITIALIZER};

#define LAKE_LOAD(from) __atomic_load_n(&(from), __ATOMIC_ACQUIRE)
#define LAKE_COUNT(what, by) __atomic_fetch_add(&(what), (by), __ATOMIC_RELAXED)

/* --- made, taught and ended by Python --- */

static void lake_content_free(lake_content *content)
{
    lake_known *known = content->taught;
    while (known) {
        lake_known *before = known->before;
        for (uint32_t at = 0; at < known->granules; at++)
            if (known->sums[at]) {
                free(known->sums[at]);
                LAKE_COUNT(lake_all.sums_count, -1);
            }
        free(known->sums);
        free(known);
        LAKE_COUNT(lake_all.taught_count, -1);
        known = before;
    }
    free(content);
}

/* Returns a content of `count` pieces of these lengths, of which the first `size` bytes are shown; NULL with errno. */
static lake_content *lake_content_make(uint64_t size, const uint64_t *lengths, uint32_t count)
{
    uint64_t total = 0;
    if (!count || count > LAKE_PIECES_MOST) {
        errno = E2BIG;
        return NULL;
    }
    for (uint32_t at = 0; at < count; at++) {
        if (!lengths[at] || lengths[at] > LAKE_PIECE_MOST) {
            errno = EINVAL;
            return NULL;
        }
        total += lengths[at];
    }
    if (size > total) {
        errno = EINVAL;
        return NULL;
    }
    lake_content *content = calloc(1, sizeof *content + (size_t)count * sizeof(lake_piece));
    if (!content)
        return NULL;
    content->references = 1;
    content->size = size;
    content->count = count;
    total = 0;
    for (uint32_t at = 0; at < count; at++) {
        content->pieces[at].begin = total;
        content->pieces[at].length = lengths[at];
        total += lengths[at];
    }
    return content;
}

/* Returns the length of a piece; 0 if there is none. */
static uint64_t lake_content_length(const lake_content *content, uint32_t index)
{
    return index < content->count ? content->pieces[index].length : 0;
}

/* Returns 1 if a piece can be read natively, as far as is known. */
static int lake_content_knows(lake_content *content, uint32_t index)
{
    lake_known *known = index < content->count ? LAKE_LOAD(content->pieces[index].known) : NULL;
    return known && !LAKE_LOAD(known->failed);
}

/* Teaches where a piece is, in memory or else in a file, and the CRC32C of each of its granules; returns 0, or an error
   number.

   Descriptor and memory stay the caller's, who keeps them until the content was ended. */
static int lake_content_teach(lake_content *content, uint32_t index, const uint8_t *memory, int descriptor,
                              uint64_t place, int nowait, const uint8_t *crcs, size_t crcs_bytes)
{
    if (index >= content->count || (!memory && descriptor < 0) || place > INT64_MAX - LAKE_PIECE_MOST)
        return EINVAL;
    uint32_t granules = (uint32_t)((content->pieces[index].length + LAKE_GRANULE - 1) / LAKE_GRANULE);
    if (crcs_bytes != 4 * (size_t)granules)
        return EINVAL;
    if (LAKE_LOAD(lake_all.taught_count) >= LAKE_TAUGHT_MOST)
        return ENOSPC;
    lake_known *known = calloc(1, sizeof *known + crcs_bytes);
    lake_sums **sums = calloc(granules, sizeof *sums);
    if (!known || !sums) {
        free(known);
        free(sums);
        return ENOMEM;
    }
    uint64_t ask_from = nowait ? LAKE_LOOK_FROM : LAKE_NEVER_ASK;
    lake_extent where = memory ? lake_extent_of_memory(memory, content->pieces[index].length)
                               : lake_extent_of_file(descriptor, nowait, place, ask_from, LAKE_READ_WINDOW);
    *known = (lake_known){content->taught, where, 0, granules, sums};
    memcpy(known->crcs, crcs, crcs_bytes);
    LAKE_COUNT(lake_all.taught_count, 1);
    content->taught = known;
    __atomic_store_n(&content->pieces[index].known, known, __ATOMIC_RELEASE);
    return 0;
}

static uint64_t lake_slot_of(uint64_t handle)
{
    return (handle * 0x9e3779b97f4a7c15ull) >> 47; /* 17 bits: LAKE_SLOTS */
}
_Static_assert(LAKE_SLOTS == 1u << 17, "a slot's number has 17 bits");

/* Returns the handle's slot, or the free one where it would be. */
static lake_slot *lake_slot_find(uint64_t handle)
{
    uint64_t at = lake_slot_of(handle);
    while (lake_all.slots[at].content && lake_all.slots[at].handle != handle)
        at = (at + 1) % LAKE_SLOTS;
    return &lake_all.slots[at];
}

/* Drops a reference; the mutex is held.  Returns the content if the caller has to free it, without the mutex. */
static lake_content *lake_content_drop(lake_content *content)
{
    return --content->references || content->reads ? NULL : content;
}

/* Removes a handle.  Harmless if it was not added. */
static void lake_contents_remove(uint64_t handle)
{
    lake_content *free_it = NULL;
    pthread_mutex_lock(&lake_all.mutex);
    lake_slot *slot = lake_slot_find(handle);
    if (slot->content) {
        free_it = lake_content_drop(slot->content);
        lake_all.handle_count--;
        /* Those behind it, up to a free one, are found through its slot: each moves there that may. */
        uint64_t hole = (uint64_t)(slot - lake_all.slots), at = hole;
        for (;;) {
            lake_all.slots[hole].content = NULL;
            for (;;) {
                at = (at + 1) % LAKE_SLOTS;
                if (!lake_all.slots[at].content)
                    goto moved;
                uint64_t home = lake_slot_of(lake_all.slots[at].handle);
                if ((at - home) % LAKE_SLOTS >= (at - hole) % LAKE_SLOTS)
                    break;
            }
            lake_all.slots[hole] = lake_all.slots[at];
            hole = at;
        }
    }
moved:
    pthread_mutex_unlock(&lake_all.mutex);
    if (free_it)
        lake_content_free(free_it);
}

/* Has the content answer a handle's reads, in place of another one; returns 0, or an error number. */
static int lake_contents_add(uint64_t handle, lake_content *content)
{
    int failed = 0;
    pthread_mutex_lock(&lake_all.mutex);
    int is_added = lake_slot_find(handle)->content == content, ended = content->ended;
    pthread_mutex_unlock(&lake_all.mutex);
    if (is_added || ended)
        return ended ? ESTALE : 0;
    lake_contents_remove(handle);
    pthread_mutex_lock(&lake_all.mutex);
    if (content->ended)
        failed = ESTALE;
    else if (lake_all.handle_count >= LAKE_HANDLES_MOST)
        failed = ENOSPC;
    else {
        *lake_slot_find(handle) = (lake_slot){handle, content};
        content->references++;
        lake_all.handle_count++;
    }
    pthread_mutex_unlock(&lake_all.mutex);
    return failed;
}

/* Ends a content, and waits for its reads under way: its bytes are answered no more.  Returns 1 if that may wait. */
static int lake_content_end_now(lake_content *content)
{
    pthread_mutex_lock(&lake_all.mutex);
    content->ended = 1;
    int busy = content->reads != 0;
    pthread_mutex_unlock(&lake_all.mutex);
    return busy;
}

static void lake_content_wait(lake_content *content)
{
    pthread_mutex_lock(&lake_all.mutex);
    while (content->reads)
        pthread_cond_wait(&lake_all.quiet, &lake_all.mutex);
    pthread_mutex_unlock(&lake_all.mutex);
}

/* Gives the maker's reference up, of a content that was ended. */
static void lake_content_release(lake_content *content)
{
    pthread_mutex_lock(&lake_all.mutex);
    lake_content *free_it = lake_content_drop(content);
    pthread_mutex_unlock(&lake_all.mutex);
    if (free_it)
        lake_content_free(free_it);
}

/* --- read by native code --- */

/* Returns the content that answers a handle's reads, and counts a read of it; NULL: Python answers them. */
static lake_content *lake_contents_enter(uint64_t handle)
{
    pthread_mutex_lock(&lake_all.mutex);
    lake_content *content = lake_slot_find(handle)->content;
    if (content && content->ended)
        content = NULL;
    if (content)
        content->reads++;
    pthread_mutex_unlock(&lake_all.mutex);
    return content;
}

static void lake_contents_leave(lake_content *content)
{
    lake_content *free_it = NULL;
    pthread_mutex_lock(&lake_all.mutex);
    if (!--content->reads) {
        if (!content->references)
            free_it = content;
        else if (content->ended)
            pthread_cond_broadcast(&lake_all.quiet);
    }
    pthread_mutex_unlock(&lake_all.mutex);
    if (free_it)
        lake_content_free(free_it);
}

/* Counts what a read has found; returns 1 if it is right.  What is wrong is not read natively again. */
static int lake_counted(lake_known *known, lake_reading found)
{
    if (found == LAKE_NOT_AT_HAND)
        LAKE_COUNT(lake_all.not_cached, 1);
    if (found == LAKE_WRONG) {
        __atomic_store_n(&known->failed, 1, __ATOMIC_RELEASE);
        LAKE_COUNT(lake_all.failed, 1);
    }
    return found == LAKE_RIGHT;
}

/* Computes the CRC of each page of a granule that is right, and keeps them. */
static void lake_keep_sums(lake_known *known, uint32_t number, const uint8_t *granule, size_t length)
{
    if (LAKE_COUNT(lake_all.sums_count, 1) >= LAKE_SUMS_MOST) {
        LAKE_COUNT(lake_all.sums_count, -1);
        return;
    }
    lake_sums *none = NULL, *sums = calloc(1, sizeof *sums);
    if (sums)
        lake_page_crcs(granule, length, sums->of_page);
    if (!sums || !__atomic_compare_exchange_n(&known->sums[number], &none, sums, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
        free(sums);
        LAKE_COUNT(lake_all.sums_count, -1);
    }
}

/* Reads the pages around [first, last) of one granule, once the granule's page sums are known; else all of it.

   Returns where `first` is in `into`; NULL if Python has to answer. */
static uint8_t *lake_fill_pages(lake_known *known, uint64_t length, uint64_t first, uint64_t last, uint8_t *into)
{
    uint32_t number = (uint32_t)(first / LAKE_GRANULE);
    uint64_t granule = (uint64_t)number * LAKE_GRANULE;
    uint64_t stop = length - granule < LAKE_GRANULE ? length : granule + LAKE_GRANULE;
    const lake_sums *sums = LAKE_LOAD(known->sums[number]);
    if (!sums) {
        if (!lake_counted(known, lake_extent_granules(&known->where, granule, stop, known->crcs, into)))
            return NULL;
        lake_keep_sums(known, number, into, stop - granule);
        return into + (first - granule);
    }
    uint64_t begin = first - (first - granule) % LAKE_PAGE, end = last + (LAKE_PAGE - (last - granule) % LAKE_PAGE) % LAKE_PAGE;
    if (end > stop)
        end = stop;
    uint32_t found[LAKE_PAGES];
    if (!lake_extent_copy(&known->where, begin, end - begin, into)) {
        lake_counted(known, LAKE_NOT_AT_HAND);
        return NULL;
    }
    lake_page_crcs(into, end - begin, found);
    if (memcmp(found, sums->of_page + (begin - granule) / LAKE_PAGE, (end - begin + LAKE_PAGE - 1) / LAKE_PAGE * sizeof *found)) {
        lake_counted(known, LAKE_WRONG);
        return NULL;
    }
    return into + (first - begin);
}

/* Reads [offset, offset + length) of a content, cut at its end, into `scratch` of LAKE_SCRATCH bytes.

   Returns 1 and sets `bytes` and `count`: all of them right; 0 if Python has to answer. */
static int lake_content_fill(lake_content *content, uint64_t offset, uint64_t length, uint8_t *scratch,
                             const uint8_t **bytes, size_t *count)
{
    if (length > LAKE_READ_MOST)
        return 0;
    *bytes = scratch;
    *count = 0;
    if (offset >= content->size)
        return 1;
    if (length > content->size - offset)
        length = content->size - offset;
    if (!length)
        return 1;
    uint32_t low = 0, high = content->count; /* the last piece that begins at offset or before it */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (content->pieces[middle].begin <= offset)
            low = middle;
        else
            high = middle;
    }
    uint64_t end = offset + length, filled = 0, skipped = 0;
    for (uint32_t index = low; index < content->count && content->pieces[index].begin < end; index++) {
        lake_piece *piece = &content->pieces[index];
        lake_known *known = LAKE_LOAD(piece->known);
        if (!known || LAKE_LOAD(known->failed))
            return 0;
        uint64_t first = offset > piece->begin ? offset - piece->begin : 0;
        uint64_t last = end - piece->begin < piece->length ? end - piece->begin : piece->length;
        if (last - first == length && first / LAKE_GRANULE == (last - 1) / LAKE_GRANULE && length < LAKE_GRANULE) {
            *bytes = lake_fill_pages(known, piece->length, first, last, scratch);
            *count = length;
            return *bytes != NULL;
        }
        uint64_t begin = first - first % LAKE_GRANULE;
        uint64_t stop = last + (LAKE_GRANULE - last % LAKE_GRANULE) % LAKE_GRANULE;
        if (stop > piece->length)
            stop = piece->length;
        if (stop - begin > LAKE_SCRATCH - filled
            || !lake_counted(known, lake_extent_granules(&known->where, begin, stop, known->crcs, scratch + filled)))
            return 0;
        if (!filled)
            skipped = first - begin;
        filled += stop - begin;
    }
    if (filled < skipped + length)
        return 0;
    *bytes = scratch + skipped;
    *count = length;
    return 1;
}

#endif
