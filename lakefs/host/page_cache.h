/* Files in the kernel's page cache: is a range cached (cachestat(2)), and reads of it.  `page_cache.py` is its brother for
   clients without native modules. */
#ifndef LAKE_PAGE_CACHE_H
#define LAKE_PAGE_CACHE_H

#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LAKE_PAGE 4096u
#define LAKE_CACHESTAT 451 /* the same number on every architecture */

/* Returns 0 if a page of a range is not cached; 1 if all are, or that cannot be known (before Linux 6.5).  A read that does
   not wait would find out, but on a miss the kernel begins to fetch the range, page by page. */
static int lake_may_be_cached(int descriptor, uint64_t offset, uint64_t length)
{
    uint64_t range[2] = {offset, length}, found[5] = {0};
    if (syscall(LAKE_CACHESTAT, descriptor, range, found, 0u))
        return 1;
    return found[0] >= (offset + length - 1) / LAKE_PAGE - offset / LAKE_PAGE + 1;
}

/* preadv2(2), begun again when a signal has ended it. */
static int64_t lake_preadv(int descriptor, const struct iovec *into, int count, uint64_t offset, int flags)
{
    int64_t came;
    do
        came = preadv2(descriptor, into, count, (off_t)offset, flags);
    while (came < 0 && errno == EINTR);
    return came;
}

#endif
