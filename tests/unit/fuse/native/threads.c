/* The layer's threads beside the thread that teaches, adds and ends contents, for -fsanitize=thread: the kernel is a
   pair of sockets, as in the Python tests.  Prints how many reads were answered; a wrong byte is exit code 1. */
#define _GNU_SOURCE
#include "../../../../fuse/native/layer.h"
#include <sys/socket.h>

#define ROUNDS 300
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

/* Takes one answer, or what libfuse is given, which it answers as libfuse would. */
static void settle(const uint64_t *offsets)
{
    static uint8_t answer[BYTES + 64], given[1 << 16];
    for (;;) {
        ssize_t length = recv(kernel, answer, sizeof answer, MSG_DONTWAIT);
        if (length > 0) {
            struct fuse_out_header head;
            memcpy(&head, answer, sizeof head);
            if (!head.error && length > (ssize_t)sizeof head
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
    int file = mkstemp(path);
    unlink(path);
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
        for (int number = 0; number < 16; number++) {
            unique++;
            offsets[unique % 16] = (unique * 7919) % (BYTES - LAKE_PAGE);
            ask(number % 5 ? FUSE_READ : FUSE_GETATTR, unique, 1 + unique % 4, offsets[unique % 16], round % 2 ? 4096 : 70000);
            if (number == 2)
                lake_content_teach(content, 0, round % 3 ? NULL : piece, file, 0, 0, (uint8_t *)crcs, sizeof crcs);
        }
        for (int number = 0; number < 16; number++) {
            settle(offsets);
            if (number == 8) {
                lake_content_end_now(content);
                lake_content_wait(content);
            }
        }
        lake_content_release(content);
        lake_contents_remove(1 + round % 4);
    }
    lake_end();
    printf("%u answers, %u of them to libfuse's, %lu native\n", answered, passed_on, (unsigned long)lake.reads);
    return wrong || !lake.reads || answered != ROUNDS * 16;
}
