/* The layer's threads beside the thread that teaches, adds and ends contents and appends, for -fsanitize=thread: the
   kernel is a pair of sockets, as in the Python tests.  Prints how many requests were answered; a wrong byte is exit
   code 1. */
#define _GNU_SOURCE
#include "../../../../fuse/native/layer.h"
#include <sys/socket.h>
#include <sys/stat.h>

#define ROUNDS 300
#define APPENDED 32768 /* bytes of a write */
#define APPENDER 9   /* its handle */
#define BYTES (3 * LAKE_GRANULE)

static int kernel;
static uint8_t piece[BYTES];
static int wrong;
static unsigned answered, passed_on;

static void ask(uint32_t opcode, uint64_t unique, uint64_t handle, uint64_t offset, uint32_t size)
{
    struct {
        struct fuse_in_header head;
        struct fuse_read_in read;
    } request = {{.len = sizeof request, .opcode = opcode, .unique = unique}, {.fh = handle, .offset = offset, .size = size}};
    if (send(kernel, &request, sizeof request, 0) < 0)
        wrong = 1;
}

static void ask_append(uint64_t unique, uint64_t offset)
{
    static struct {
        struct fuse_in_header head;
        struct fuse_write_in write;
        uint8_t bytes[APPENDED];
    } request;
    request.head = (struct fuse_in_header){.len = sizeof request, .opcode = FUSE_WRITE, .unique = unique};
    request.write = (struct fuse_write_in){.fh = APPENDER, .offset = offset, .size = APPENDED};
    memset(request.bytes, (int)(offset / APPENDED), APPENDED);
    if (send(kernel, &request, sizeof request, 0) < 0)
        wrong = 1;
}

/* Takes one answer, or what libfuse is given, which it answers as libfuse would. */
static void settle(const uint64_t *offsets)
{
    static uint8_t answer[BYTES + 64], given[1 << 17];
    for (;;) {
        ssize_t length = recv(kernel, answer, sizeof answer, MSG_DONTWAIT);
        if (length > 0) {
            struct fuse_out_header head;
            memcpy(&head, answer, sizeof head);
            if (!head.error && length > (ssize_t)(sizeof head + sizeof(struct fuse_write_out))
                && memcmp(answer + sizeof head, piece + offsets[head.unique % 16], (size_t)length - sizeof head))
                wrong = 1;
            answered++;
            return;
        }
        length = lake_read(0, given, sizeof given, NULL);
        if (length > 0) {
            struct fuse_out_header head = {sizeof head, 0, ((struct fuse_in_header *)given)->unique};
            struct iovec parts = {&head, sizeof head};
            passed_on++;
            lake_write(0, &parts, 1, NULL);
        }
    }
}

int main(void)
{
    int pair[2];
    char path[] = "/tmp/lake-threads-XXXXXX";
    uint32_t crcs[3];
    uint64_t lengths[1] = {BYTES}, offsets[16], unique = 0;
    char staged[] = "/tmp/lake-threads-XXXXXX";
    int file = mkstemp(path), staging = mkstemp(staged);
    uint64_t end = 0;
    unlink(path);
    unlink(staged);
    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
    kernel = pair[0];
    for (int at = 0, room = 8 << 20; at < 2; at++) /* an answer that finds no room would be lost */
        setsockopt(pair[at], SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    lake_arm(4, 1);
    for (size_t at = 0; at < BYTES; at++)
        piece[at] = (uint8_t)(at * 2654435761u >> 13);
    for (int at = 0; at < 3; at++)
        crcs[at] = lake_crc32c(piece + at * LAKE_GRANULE, LAKE_GRANULE);
    if (pwrite(file, piece, BYTES, 0) != BYTES || lake_attach(pair[1]))
        return 2;
    for (int round = 0; round < ROUNDS && !wrong; round++) {
        lake_content *content = lake_content_make(BYTES, lengths, 1);
        for (uint64_t handle = 1; handle <= 4; handle++)
            lake_contents_add(handle, content);
        lake_append append;
        int64_t time_ns;
        if (lake_append_begin(&append, APPENDER, staging, end, end + 3 * APPENDED))
            wrong = 1;
        for (int number = 0; number < 16; number++) {
            unique++;
            offsets[unique % 16] = (unique * 7919) % (BYTES - LAKE_PAGE);
            if (number % 4 == 1) {
                ask_append(unique, end + (round % 2 ? number / 8 : number / 4) * APPENDED); /* or each twice */
                continue;
            }
            ask(number % 5 ? FUSE_READ : FUSE_GETATTR, unique, 1 + unique % 4, offsets[unique % 16], round % 2 ? 4096 : 70000);
            if (number == 2)
                lake_content_teach(content, 0, round % 3 ? NULL : piece, file, 0, 0, (uint8_t *)crcs, sizeof crcs);
        }
        for (int number = 0; number < 16; number++) {
            settle(offsets);
            if (lake_append_found(&append, &time_ns) < end)
                wrong = 1;
            if (number == 8) {
                lake_content_end_now(content);
                lake_content_wait(content);
            }
            if (number == round % 16) {
                if (lake_append_end_now(&append))
                    lake_append_wait(&append);
                uint64_t found = lake_append_found(&append, &time_ns);
                struct stat is;
                if (found < end || found > end + 3 * APPENDED || fstat(staging, &is) || (uint64_t)is.st_size != found)
                    wrong = 1;
                end = found;
            }
        }
        lake_content_release(content);
        lake_contents_remove(1 + round % 4);
    }
    lake_end();
    for (uint64_t at = 0; at < end; at += APPENDED) {
        uint8_t bytes[APPENDED];
        if (pread(staging, bytes, APPENDED, (off_t)at) != APPENDED || bytes[0] != (uint8_t)(at / APPENDED)
            || bytes[APPENDED - 1] != bytes[0])
            wrong = 1;
    }
    printf("%u answers, %u of them to libfuse's, %lu native reads, %lu writes\n", answered, passed_on,
           (unsigned long)lake.reads, (unsigned long)lake_appends.writes);
    return wrong || !lake.reads || !lake_appends.writes || answered != ROUNDS * 16;
}
