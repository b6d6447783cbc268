/* The layer between the kernel's FUSE device and libfuse's session: one for each process, as pyfuse3 has one session.

   It defines `fuse_session_mount`, which pyfuse3 calls in place of libfuse's when this module was loaded first, with its
   symbols global.  libfuse's own mounts; then libfuse is given a descriptor and two functions in place of the device
   (`fuse_session_custom_io`): it reads requests with `lake_read`, and writes answers with `lake_write`.

       resting     libfuse's reads go on to the device.  The descriptor is an epoll of device and queue
       awake       threads read the device: reads and writes that they can answer they answer, all else they put into
                   the queue, which libfuse then reads alone

   The layer wakes when libfuse is about to be given a request that native code can answer, and rests after 64 requests in a
   row that it could not.  So requests of all other kinds take the same way as without the layer, and cost the same.

   Rules kept here:
   - Answers, and what the kernel is told, are written to the device at once: their errors are the caller's.
   - The queue has bounds.  Threads that find it full wait, and what they do not read the kernel keeps.
   - A request is answered once: by a thread, or by whoever takes it from the queue.
   - Of an answer to OPEN or CREATE two fields that libfuse does not know are set, if Python wanted that for its handle.
   - The kernel's messages are checked for their lengths; those that are odd are libfuse's. */
#ifndef LAKE_LAYER_H
#define LAKE_LAYER_H

#include "appends.h"
#include "content.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>

#define LAKE_THREADS_MOST 4
#define LAKE_QUEUE_MOST 1024             /* requests */
#define LAKE_QUEUE_BYTES_MOST (16u << 20)
#define LAKE_REQUEST_MOST (4u << 20)     /* bytes of the longest that libfuse may make room for */
#define LAKE_HANDED_OVER_FROM (64u << 10) /* longer requests are not copied into the queue: their memory is */
#define LAKE_REST_AFTER 64
#define LAKE_OPENS_MOST 512              /* being answered: twice what pyfuse3 is told to answer at once */

/* What older headers lack. */
#define LAKE_WRITE_CLEARS_SET_ID (1u << 2)
#define LAKE_PARALLEL_DIROPS (1u << 18)
#define LAKE_INIT_EXT (1u << 30)
#define LAKE_PASSTHROUGH (1u << 5) /* of the second flags */
struct lake_init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth, unused[6];
};
struct lake_open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};
struct lake_backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
_Static_assert(sizeof(struct lake_init_out) == 64 && sizeof(struct lake_open_out) == 16, "as the kernel has them");
_Static_assert(sizeof(struct fuse_read_in) == 40 && sizeof(struct fuse_in_header) == 40, "as the kernel has them");
_Static_assert(sizeof(struct fuse_write_in) == 40 && sizeof(struct fuse_write_out) == 8, "as the kernel has them");
#define LAKE_BACKING_OPEN _IOW(229, 1, struct lake_backing_map)
#define LAKE_BACKING_CLOSE _IOW(229, 2, uint32_t)
#define LAKE_ENTRY_BYTES 128 /* in front of what CREATE answers of the handle */

/* libfuse's, of 3.13 and later. */
struct lake_custom_io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
    ssize_t (*splice_receive)(int, off_t *, int, off_t *, size_t, unsigned, void *);
    ssize_t (*splice_send)(int, off_t *, int, off_t *, size_t, unsigned, void *);
    int (*clone_fd)(int);
};
#define LAKE_CUSTOM_IO_FIRST offsetof(struct lake_custom_io, clone_fd)

typedef struct lake_request {
    struct lake_request *next;
    uint8_t *bytes;
    size_t length;
    size_t taken; /* memory at `bytes`: all of a thread's, where that was handed over */
} lake_request;

typedef struct {
    uint64_t handle; /* 0: free */
    uint32_t set, cleared;
    int32_t backing;
} lake_opening;

typedef struct {
    pthread_mutex_t mutex; /* of all that is not said to be atomic */
    pthread_cond_t changed; /* awake, room in the queue, or stop */
    int armed, may_wake, is_attached, wants_passthrough;
    const char *why_not;
    int device, session, queue_event, stop_event; /* descriptors, -1: none */
    int awake; /* atomic */
    int stop;  /* atomic */
    int ended; /* atomic; the device is no more */
    int dead;  /* errno of the device, when a thread found it gone */
    unsigned misses; /* atomic; in a row */
    int thread_count, threads_started;
    int threads_left; /* that have not ended: without one the layer never wakes */
    pthread_t threads[LAKE_THREADS_MOST];
    size_t request_bytes; /* room that libfuse makes */
    uint8_t *scratch;     /* libfuse's thread's */
    lake_request *first, **last;
    size_t queued, queued_bytes;
    uint64_t init_unique;
    int offers_dirops, offers_passthrough, has_passthrough;
    int last_is_mapped; /* the last WRITE that libfuse was given is of a mapping; libfuse's thread's */
    uint64_t opens[LAKE_OPENS_MOST]; /* being answered: the requests' numbers, 0: free */
    lake_opening openings[LAKE_OPENS_MOST];
    uint64_t reads, read_bytes, queued_ever, wakes, opens_set; /* atomic */
} lake_layer;

static lake_layer lake = {
    .mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .why_not = "nothing is mounted",
    .device = -1, .session = -1, .queue_event = -1, .stop_event = -1, .last = &lake.first,
};

/* --- reads and writes that native code answers --- */

/* Copies what follows the head of a request of that kind; returns 0 if it is another, or too short. */
static int lake_takes(const uint8_t *request, size_t length, uint32_t opcode, void *body, size_t body_bytes)
{
    struct fuse_in_header head;
    if (length < sizeof head + body_bytes)
        return 0;
    memcpy(&head, request, sizeof head);
    if (head.opcode != opcode || head.len != length)
        return 0;
    memcpy(body, request + sizeof head, body_bytes);
    return 1;
}

static int lake_is_read(const uint8_t *request, size_t length, struct fuse_read_in *read)
{
    return lake_takes(request, length, FUSE_READ, read, sizeof *read);
}

static int lake_is_write(const uint8_t *request, size_t length, struct fuse_write_in *write)
{
    return lake_takes(request, length, FUSE_WRITE, write, sizeof *write)
        && write->size == length - sizeof(struct fuse_in_header) - sizeof *write;
}

/* Answers a request if it is a plain write of the next bytes of a file; returns 1 if it did. */
static int lake_serve_write(const uint8_t *request, const struct fuse_write_in *wanted)
{
    /* No set-id bits are left for a write of this handle to clear: Python ends the append when some are set. */
    if (wanted->write_flags & ~(uint32_t)(FUSE_WRITE_LOCKOWNER | LAKE_WRITE_CLEARS_SET_ID)
        || !lake_append_write(wanted->fh, wanted->offset, request + sizeof(struct fuse_in_header) + sizeof *wanted,
                              wanted->size))
        return 0;
    struct {
        struct fuse_out_header head;
        struct fuse_write_out write;
    } answer = {{sizeof answer, 0, ((const struct fuse_in_header *)request)->unique}, {.size = wanted->size}};
    /* An error means that the kernel has given the request up, or has failed it itself. */
    if (write(lake.device, &answer, sizeof answer) < 0) {
    }
    return 1;
}

/* Answers a request if native code can: a read of taught bytes that are cached and right, or an append; returns 1 if it
   did. */
static int lake_serve(const uint8_t *request, size_t length, uint8_t *scratch)
{
    struct fuse_read_in read;
    struct fuse_write_in write;
    if (lake_is_write(request, length, &write))
        return lake_serve_write(request, &write);
    struct fuse_out_header answer = {0};
    const uint8_t *bytes;
    size_t count;
    if (!lake_is_read(request, length, &read))
        return 0;
    lake_content *content = lake_contents_enter(read.fh);
    if (!content)
        return 0;
    int answered = lake_content_fill(content, read.offset, read.size, scratch, &bytes, &count);
    if (answered) {
        answer.len = (uint32_t)(sizeof answer + count);
        answer.unique = ((const struct fuse_in_header *)request)->unique;
        struct iovec parts[2] = {{&answer, sizeof answer}, {(void *)bytes, count}};
        /* An error means that the kernel has given the request up, or has failed it itself. */
        ssize_t written = writev(lake.device, parts, count ? 2 : 1);
        LAKE_COUNT(lake.reads, 1);
        LAKE_COUNT(lake.read_bytes, written < 0 ? 0 : count);
    }
    lake_contents_leave(content);
    return answered;
}

/* --- the queue --- */

/* Puts a request into the queue, waiting for room; takes `bytes` over.  Returns 0 if the layer ends. */
static int lake_queue(uint8_t *bytes, size_t length, size_t taken)
{
    lake_request *request = malloc(sizeof *request);
    if (!request) {
        struct fuse_out_header failed = {sizeof failed, -ENOMEM, ((struct fuse_in_header *)bytes)->unique};
        if (write(lake.device, &failed, sizeof failed) < 0) { /* the kernel has given it up */
        }
        free(bytes);
        return 1;
    }
    *request = (lake_request){NULL, bytes, length, taken};
    pthread_mutex_lock(&lake.mutex);
    while (!lake.stop && lake.queued
           && (lake.queued >= LAKE_QUEUE_MOST || lake.queued_bytes + taken > LAKE_QUEUE_BYTES_MOST))
        pthread_cond_wait(&lake.changed, &lake.mutex);
    int ends = lake.stop;
    if (!ends) {
        *lake.last = request;
        lake.last = &request->next;
        if (!lake.queued++)
            eventfd_write(lake.queue_event, 1);
        lake.queued_bytes += taken;
        LAKE_COUNT(lake.queued_ever, 1);
    }
    pthread_mutex_unlock(&lake.mutex);
    if (ends) {
        free(bytes);
        free(request);
    }
    return !ends;
}

/* Returns the first request of the queue, which is the caller's then; NULL: it is empty. */
static lake_request *lake_queue_take(int *dead)
{
    pthread_mutex_lock(&lake.mutex);
    lake_request *request = lake.first;
    if (request) {
        lake.first = request->next;
        if (!lake.first)
            lake.last = &lake.first;
        lake.queued_bytes -= request->taken;
        if (!--lake.queued && !lake.dead) {
            eventfd_t value;
            eventfd_read(lake.queue_event, &value);
        }
        pthread_cond_broadcast(&lake.changed);
    }
    *dead = lake.dead;
    pthread_mutex_unlock(&lake.mutex);
    return request;
}

/* --- threads --- */

/* From now on libfuse reads the device itself.  Called with the mutex; returns 0 if that cannot be. */
static int lake_rest_now(void)
{
    struct epoll_event event = {.events = EPOLLIN};
    if (!lake.awake || lake.stop)
        return 1;
    if (epoll_ctl(lake.session, EPOLL_CTL_ADD, lake.device, &event))
        return 0;
    __atomic_store_n(&lake.awake, 0, __ATOMIC_RELEASE);
    return 1;
}

static void lake_rest(void)
{
    pthread_mutex_lock(&lake.mutex);
    lake_rest_now(); /* if not, threads go on */
    pthread_mutex_unlock(&lake.mutex);
}

/* Notes that the device is gone: libfuse sees it when the queue is empty.  Called with the mutex. */
static void lake_die_now(int error)
{
    if (!lake.dead) {
        lake.dead = error;
        eventfd_write(lake.queue_event, 1);
    }
}

static void lake_die(int error)
{
    pthread_mutex_lock(&lake.mutex);
    lake_die_now(error);
    pthread_mutex_unlock(&lake.mutex);
}

/* Ends a thread: the last one leaves the device to libfuse.  A mount that nobody reads for would hang. */
static void lake_thread_ends(void)
{
    pthread_mutex_lock(&lake.mutex);
    if (!--lake.threads_left && !lake_rest_now())
        lake_die_now(ENOMEM);
    pthread_mutex_unlock(&lake.mutex);
}

/* Waits while the layer rests; returns 0 if it ends. */
static int lake_wait_awake(void)
{
    if (LAKE_LOAD(lake.awake) && !LAKE_LOAD(lake.stop))
        return 1;
    pthread_mutex_lock(&lake.mutex);
    while (!lake.awake && !lake.stop)
        pthread_cond_wait(&lake.changed, &lake.mutex);
    int ends = lake.stop;
    pthread_mutex_unlock(&lake.mutex);
    return !ends;
}

/* Puts what a thread has read into the queue; returns the thread's memory, another one if it was handed over. */
static uint8_t *lake_pass_on(uint8_t *memory, size_t length)
{
    uint8_t *other = malloc(length >= LAKE_HANDED_OVER_FROM ? lake.request_bytes : length);
    if (!other) {
        struct fuse_out_header failed = {sizeof failed, -ENOMEM, ((struct fuse_in_header *)memory)->unique};
        if (write(lake.device, &failed, sizeof failed) < 0) { /* the kernel has given it up */
        }
        return memory;
    }
    if (length >= LAKE_HANDED_OVER_FROM) {
        lake_queue(memory, length, lake.request_bytes);
        return other;
    }
    memcpy(other, memory, length);
    lake_queue(other, length, length);
    return memory;
}

static void *lake_run(void *unused)
{
    uint8_t *memory = malloc(lake.request_bytes), *scratch = malloc(LAKE_SCRATCH);
    int poll = epoll_create1(EPOLL_CLOEXEC);
    /* Exclusive: a request wakes one of the threads. */
    struct epoll_event device = {.events = EPOLLIN | EPOLLEXCLUSIVE}, stop = {.events = EPOLLIN}, event;
    int is_ready = memory && scratch && poll >= 0 && !epoll_ctl(poll, EPOLL_CTL_ADD, lake.device, &device)
                   && !epoll_ctl(poll, EPOLL_CTL_ADD, lake.stop_event, &stop);
    while (is_ready && lake_wait_awake()) {
        ssize_t length = read(lake.device, memory, lake.request_bytes);
        if (length < 0) {
            if (errno == EAGAIN)
                epoll_wait(poll, &event, 1, -1);
            else if (errno != EINTR && errno != ENOENT) {
                lake_die(errno);
                break;
            }
        } else if ((size_t)length < sizeof(struct fuse_in_header)) {
            lake_die(EIO);
            break;
        } else if (lake_serve(memory, (size_t)length, scratch)) {
            if (__atomic_load_n(&lake.misses, __ATOMIC_RELAXED))
                __atomic_store_n(&lake.misses, 0, __ATOMIC_RELAXED);
        } else {
            memory = lake_pass_on(memory, (size_t)length);
            if (LAKE_COUNT(lake.misses, 1) + 1 >= LAKE_REST_AFTER)
                lake_rest();
        }
    }
    if (poll >= 0)
        close(poll);
    free(memory);
    free(scratch);
    lake_thread_ends();
    return unused;
}

/* Starts the threads, if they were not, and has them read the device.  Called in libfuse's thread. */
static void lake_wake(void)
{
    pthread_mutex_lock(&lake.mutex);
    if (!lake.awake && !lake.stop && !lake.dead) {
        sigset_t all, before;
        sigfillset(&all); /* signals are Python's main thread's */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (lake.threads_started < lake.thread_count
               && !pthread_create(&lake.threads[lake.threads_started], NULL, lake_run, NULL))
            lake.threads_started++, lake.threads_left++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (lake.threads_left && !epoll_ctl(lake.session, EPOLL_CTL_DEL, lake.device, NULL)) {
            __atomic_store_n(&lake.misses, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&lake.awake, 1, __ATOMIC_RELEASE);
            LAKE_COUNT(lake.wakes, 1);
            pthread_cond_broadcast(&lake.changed);
        }
    }
    pthread_mutex_unlock(&lake.mutex);
}

/* --- what libfuse calls --- */

/* Notes requests whose answers are looked at, and what libfuse does not tell Python of a request. */
static void lake_note_request(const uint8_t *request, size_t length)
{
    struct fuse_in_header head;
    if (length < sizeof head)
        return;
    memcpy(&head, request, sizeof head);
    if (head.opcode == FUSE_WRITE) {
        struct fuse_write_in write;
        /* Pages are written back through any handle that writes: its own program may have written nothing. */
        lake.last_is_mapped = lake_is_write(request, length, &write) && (write.write_flags & FUSE_WRITE_CACHE) != 0;
    } else if (head.opcode == FUSE_INIT) {
        struct {
            uint32_t major, minor, max_readahead, flags, flags2;
        } init = {0};
        size_t given = length - sizeof head;
        memcpy(&init, request + sizeof head, given < sizeof init ? given : sizeof init);
        lake.init_unique = head.unique;
        lake.offers_dirops = (init.flags & LAKE_PARALLEL_DIROPS) != 0;
        lake.offers_passthrough = lake.wants_passthrough && (init.flags & LAKE_INIT_EXT) && (init.flags2 & LAKE_PASSTHROUGH);
    } else if (head.opcode == FUSE_OPEN || head.opcode == FUSE_CREATE) {
        for (int at = 0; at < LAKE_OPENS_MOST; at++)
            if (!lake.opens[at]) {
                lake.opens[at] = head.unique;
                return;
            }
    }
}

/* Reads a request for libfuse: from the queue, or from the device while the layer rests.  EINTR: there is none. */
static ssize_t lake_read(int session, void *into, size_t room, void *unused)
{
    int dead;
    (void)session;
    (void)unused;
    lake_request *request = lake_queue_take(&dead);
    if (request) {
        size_t length = request->length;
        int fits = length <= room;
        if (fits)
            memcpy(into, request->bytes, length);
        else {
            struct fuse_out_header failed = {sizeof failed, -EIO, ((struct fuse_in_header *)request->bytes)->unique};
            if (write(lake.device, &failed, sizeof failed) < 0) { /* the kernel has given it up */
            }
        }
        free(request->bytes);
        free(request);
        if (!fits) {
            errno = EINTR;
            return -1;
        }
        lake_note_request(into, length);
        return (ssize_t)length;
    }
    if (dead || LAKE_LOAD(lake.awake)) {
        errno = dead ? ENODEV : EINTR;
        return -1;
    }
    ssize_t length = read(lake.device, into, room);
    if (length < 0) {
        if (errno == EAGAIN || errno == ENOENT)
            errno = EINTR;
        else if (errno == ECONNABORTED)
            errno = ENODEV;
        return -1;
    }
    struct fuse_read_in read;
    struct fuse_write_in write;
    if (lake.may_wake && room <= LAKE_REQUEST_MOST
        && (lake_is_read(into, (size_t)length, &read) || lake_is_write(into, (size_t)length, &write))) {
        if (!lake.scratch) {
            lake.request_bytes = room;
            lake.scratch = malloc(LAKE_SCRATCH);
        }
        if (lake.scratch && lake_serve(into, (size_t)length, lake.scratch)) {
            lake_wake();
            errno = EINTR;
            return -1;
        }
    }
    lake_note_request(into, (size_t)length);
    return length;
}

/* Sets in an answer to OPEN or CREATE what Python wanted for its handle. */
static void lake_set_opened(struct lake_open_out *opened)
{
    for (int at = 0; at < LAKE_OPENS_MOST; at++) {
        lake_opening *opening = &lake.openings[at];
        if (opening->handle && opening->handle == opened->fh) {
            opened->open_flags = (opened->open_flags & ~opening->cleared) | opening->set;
            opened->backing_id = opening->backing;
            opening->handle = 0;
            LAKE_COUNT(lake.opens_set, 1);
            return;
        }
    }
}

static void lake_look_at_answer(const struct fuse_out_header *head, const struct iovec *body)
{
    if (head->unique == lake.init_unique) {
        lake.init_unique = 0;
        struct lake_init_out *init = body->iov_base;
        if (head->error || body->iov_len < sizeof *init)
            return;
        if (lake.offers_dirops)
            init->flags |= LAKE_PARALLEL_DIROPS;
        if (lake.offers_passthrough) {
            init->flags |= LAKE_INIT_EXT;
            init->flags2 |= LAKE_PASSTHROUGH;
            init->max_stack_depth = 1;
            lake.has_passthrough = 1;
        }
        return;
    }
    for (int at = 0; at < LAKE_OPENS_MOST; at++)
        if (lake.opens[at] == head->unique) {
            lake.opens[at] = 0;
            size_t before = body->iov_len == sizeof(struct lake_open_out) ? 0 : LAKE_ENTRY_BYTES;
            if (!head->error && body->iov_len == before + sizeof(struct lake_open_out))
                lake_set_opened((struct lake_open_out *)((uint8_t *)body->iov_base + before));
            return;
        }
}

/* Writes an answer, or what the kernel is told, to the device; libfuse sees the error.  In any thread. */
static ssize_t lake_write(int session, struct iovec *parts, int count, void *unused)
{
    (void)session;
    (void)unused;
    if (LAKE_LOAD(lake.ended)) {
        errno = ENODEV;
        return -1;
    }
    if (count >= 1 && parts[0].iov_len == sizeof(struct fuse_out_header)) {
        const struct fuse_out_header *head = parts[0].iov_base;
        static const struct iovec none;
        if (head->unique) { /* else the kernel is told something, maybe by another thread */
            pthread_mutex_lock(&lake.mutex);
            lake_look_at_answer(head, count == 2 ? &parts[1] : &none);
            pthread_mutex_unlock(&lake.mutex);
        }
    }
    return writev(lake.device, parts, count);
}

/* --- beginning and end --- */

/* Takes a device over; returns 0, or an error number.  `lake.session` is libfuse's descriptor from now on. */
static int lake_attach(int device)
{
    int flags = fcntl(device, F_GETFL);
    int session = epoll_create1(EPOLL_CLOEXEC);
    int queue = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    if (flags < 0 || session < 0 || queue < 0 || stop < 0 || fcntl(device, F_SETFL, flags | O_NONBLOCK) < 0
        || epoll_ctl(session, EPOLL_CTL_ADD, device, &event) || epoll_ctl(session, EPOLL_CTL_ADD, queue, &event)) {
        int failed = errno;
        if (session >= 0)
            close(session);
        if (queue >= 0)
            close(queue);
        if (stop >= 0)
            close(stop);
        return failed;
    }
    lake.device = device;
    lake.session = session;
    lake.queue_event = queue;
    lake.stop_event = stop;
    lake.stop = lake.ended = lake.dead = lake.awake = lake.threads_started = lake.threads_left = 0;
    lake.has_passthrough = lake.offers_passthrough = lake.offers_dirops = 0;
    lake.init_unique = 0;
    memset(lake.opens, 0, sizeof lake.opens);
    memset(lake.openings, 0, sizeof lake.openings);
    lake.is_attached = 1;
    lake.why_not = NULL;
    return 0;
}

/* Ends the threads, forgets what is in the queue, and closes the device, though not libfuse's descriptor.  Waits for
   reads under way; called without Python's lock, in the thread that called `lake_read`. */
static void lake_end(void)
{
    pthread_mutex_lock(&lake.mutex);
    int was_attached = lake.is_attached;
    lake.is_attached = lake.armed = 0;
    lake.why_not = "the mount has ended";
    __atomic_store_n(&lake.stop, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&lake.changed);
    pthread_mutex_unlock(&lake.mutex);
    if (!was_attached)
        return;
    eventfd_write(lake.stop_event, 1);
    for (int at = 0; at < lake.threads_started; at++)
        pthread_join(lake.threads[at], NULL);
    lake.threads_started = 0;
    int dead;
    for (lake_request *request; (request = lake_queue_take(&dead));) {
        free(request->bytes);
        free(request);
    }
    __atomic_store_n(&lake.ended, 1, __ATOMIC_RELEASE);
    /* Another thread may be about to tell the kernel something.  Its descriptor is never another file's: the number
       stays taken. */
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing < 0 || dup3(nothing, lake.device, O_CLOEXEC) < 0)
        close(lake.device);
    if (nothing >= 0)
        close(nothing);
    close(lake.queue_event);
    close(lake.stop_event);
    free(lake.scratch);
    lake.scratch = NULL;
}

static void *lake_of_libfuse(const char *name)
{
    static const char *const libraries[] = {"libfuse3.so.4", "libfuse3.so.3"};
    for (size_t at = 0; at < sizeof libraries / sizeof *libraries; at++) {
        void *library = dlopen(libraries[at], RTLD_NOW | RTLD_NOLOAD);
        if (library) {
            void *found = dlsym(library, name);
            dlclose(library); /* it stays: pyfuse3 has it */
            return found;
        }
    }
    return NULL;
}

/* Mounts as libfuse does, and puts the layer below the session if Python has asked for it. */
__attribute__((visibility("default"))) int fuse_session_mount(void *session, const char *mount_point)
{
    static const struct lake_custom_io io = {.writev = lake_write, .read = lake_read};
    int (*mount)(void *, const char *) = lake_of_libfuse("fuse_session_mount");
    int (*descriptor_of)(void *) = lake_of_libfuse("fuse_session_fd");
    int (*give_sized)(void *, const struct lake_custom_io *, size_t, int) = lake_of_libfuse("fuse_session_custom_io_317");
    int (*give)(void *, const struct lake_custom_io *, int) = lake_of_libfuse("fuse_session_custom_io");
    if (!mount) {
        fprintf(stderr, "fuse: fuse_session_mount is not in libfuse\n");
        return -1;
    }
    int failed = mount(session, mount_point);
    if (failed || !lake.armed)
        return failed;
    if (!descriptor_of || (!give && !give_sized)) {
        lake.why_not = "libfuse 3.13 or later is needed";
        return 0;
    }
    int device = descriptor_of(session);
    if (lake_attach(device)) {
        lake.why_not = "no descriptors could be made for it";
        return 0;
    }
    failed = give_sized ? give_sized(session, &io, LAKE_CUSTOM_IO_FIRST, lake.session) : give(session, &io, lake.session);
    if (failed) {
        int flags = fcntl(device, F_GETFL);
        fcntl(device, F_SETFL, flags & ~O_NONBLOCK);
        close(lake.session);
        close(lake.queue_event);
        close(lake.stop_event);
        lake.is_attached = 0;
        lake.why_not = "libfuse refused it";
    }
    return 0;
}

/* Has the next mount of this process get the layer; its threads read only if `threads` is not 0, and the kernel is told
   that files may pass through only if `passthrough` is not. */
static void lake_arm(int threads, int passthrough)
{
    lake.wants_passthrough = passthrough;
    lake_crc32c_begin();
    lake.armed = 1;
    lake.thread_count = threads < LAKE_THREADS_MOST ? threads : LAKE_THREADS_MOST;
    lake.may_wake = lake.thread_count > 0;
    lake.why_not = "pyfuse3 was loaded before it";
}

/* --- passthrough --- */

static int lake_backing_open(int descriptor)
{
    struct lake_backing_map map = {.fd = descriptor};
    int id = lake.is_attached ? ioctl(lake.device, LAKE_BACKING_OPEN, &map) : (errno = ENODEV, -1);
    return id < 0 ? -errno : id;
}

static int lake_backing_close(uint32_t id)
{
    if (!lake.is_attached)
        return 0; /* the kernel has closed it with the device */
    return ioctl(lake.device, LAKE_BACKING_CLOSE, &id) < 0 ? errno : 0;
}

/* Wants these fields in the next answer to OPEN or CREATE that names the handle; returns 0, or an error number. */
static int lake_want_opened(uint64_t handle, uint32_t set, uint32_t cleared, int32_t backing)
{
    int failed = handle ? ENOSPC : EINVAL;
    pthread_mutex_lock(&lake.mutex);
    for (int at = 0; handle && failed && at < LAKE_OPENS_MOST; at++)
        if (!lake.openings[at].handle || lake.openings[at].handle == handle) {
            lake.openings[at] = (lake_opening){handle, set, cleared, backing};
            failed = 0;
        }
    pthread_mutex_unlock(&lake.mutex);
    return failed;
}

/* Takes that back; returns 1 if no answer had it yet. */
static int lake_unwant_opened(uint64_t handle)
{
    int found = 0;
    pthread_mutex_lock(&lake.mutex);
    for (int at = 0; handle && at < LAKE_OPENS_MOST; at++)
        if (lake.openings[at].handle == handle) {
            lake.openings[at].handle = 0;
            found = 1;
        }
    pthread_mutex_unlock(&lake.mutex);
    return found;
}

#endif
