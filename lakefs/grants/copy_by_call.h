/* Copies from memory of this process to memory of this process by a system call.

   The target may be memory that another program makes shorter at any moment (a pool): the call then fails with EFAULT,
   where a plain copy would end the process by SIGBUS.  It needs no descriptor of either side. */
#ifndef LAKE_COPY_BY_CALL_H
#define LAKE_COPY_BY_CALL_H

#include "../../lakefs/granules/extent.h"

#include <sys/uio.h>
#include <unistd.h>

/* Copies the beginning of a payload in memory; returns 1 if all of it came, and was the chunk's to the end. */
static int lake_extent_copy_by_call(const lake_extent *from, size_t length, void *into)
{
    struct iovec source = {(void *)from->memory, length}, target = {into, length};
    if (from->memory == NULL || !lake_extent_is_ready(from, 0, length))
        return 0;
    return process_vm_writev(getpid(), &source, 1, &target, 1, 0) == (ssize_t)length && lake_extent_is_same(from);
}

#endif
