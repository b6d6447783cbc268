/* Connections that wait for their next request, and the loop that repeats known answers to them.

   A connection is either parked here or its task's: `is_parked` says which, and only a parked one is received from.
   What a request means, and what is sent, is the repeater's business (`gateway/http/repeater.h`).

   An answer that takes long is shown to its task once, before it goes on: the task has its content kept, and parks the
   connection again with the rest.  It is handed over when that has been sent. */
#ifndef LAKE_DOOR_H
#define LAKE_DOOR_H

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include "repeater.h"

#define DOOR_EVENTS 64
#define DOOR_RECEIVE_BYTES (16 << 10)
#define DOOR_PEER_BYTES 92
#define DOOR_TURN_BYTES (1 << 20) /* of one answer, before other connections are served */

enum { DOOR_BYTES = 0, DOOR_ENDED = 1 };

typedef struct {
    int64_t heard_ns; /* CLOCK_MONOTONIC: when bytes last came or went, or it was parked */
    int64_t began_ns; /* when the answer under way began */
    void *rest;       /* of the answer under way; NULL: none */
    uint8_t is_parked, waits_to_send, peer_length;
    uint8_t is_kept; /* the task has had the rest's content kept: it is handed over when the rest is sent */
    uint8_t is_last; /* it is handed over when the answer under way is sent */
    uint8_t peer[DOOR_PEER_BYTES];
} door_connection;

typedef struct {
    int epoll;
    repeater by;
    door_connection *connections; /* by descriptor */
    int connection_count;
    int unkept; /* rests under way that are not kept */
    int64_t until_ns; /* end of the present turn */
    struct epoll_event events[DOOR_EVENTS];
    int next, count;
    uint8_t received[DOOR_RECEIVE_BYTES];
} door;

/* A connection that is its task's from now on. */
typedef struct {
    int descriptor; /* -1: none */
    int kind;
    span received; /* bytes that were not answered */
    span unsent;   /* the rest of an answer, which goes out before any other */
    void *rest;    /* what follows it; NULL: nothing */
} door_handed;

static const span door_nothing;

static inline int64_t door_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline int door_is_parked(const door *at, int descriptor)
{
    return descriptor >= 0 && descriptor < at->connection_count && at->connections[descriptor].is_parked;
}

static void door_wait(door *at, int descriptor, int to_send)
{
    if (at->connections[descriptor].waits_to_send == to_send)
        return;
    at->connections[descriptor].waits_to_send = (uint8_t)to_send;
    struct epoll_event wanted = {.events = to_send ? EPOLLOUT : EPOLLIN, .data.fd = descriptor};
    epoll_ctl(at->epoll, EPOLL_CTL_MOD, descriptor, &wanted);
}

static inline span door_peer(const door *at, int descriptor)
{
    return (span){at->connections[descriptor].peer, at->connections[descriptor].peer_length};
}

static void door_set_rest(door *at, int descriptor, void *rest, int is_kept)
{
    door_connection *of = at->connections + descriptor;
    at->unkept += (rest != NULL && !is_kept) - (of->rest != NULL && !of->is_kept);
    of->rest = rest;
    of->is_kept = (uint8_t)is_kept;
}

static void door_end_rest(door *at, int descriptor, int is_cut)
{
    door_connection *of = at->connections + descriptor;
    void *rest = of->rest;
    if (rest == NULL)
        return;
    door_set_rest(at, descriptor, NULL, 0);
    at->by.ended(at->by.context, rest, door_peer(at, descriptor), (uint64_t)(door_now_ns() - of->began_ns), is_cut);
}

/* Leaves a connection to its owner; an answer under way is broken off. */
static void door_leave(door *at, int descriptor)
{
    if (!door_is_parked(at, descriptor))
        return;
    door_end_rest(at, descriptor, 1);
    at->connections[descriptor].is_parked = 0;
    epoll_ctl(at->epoll, EPOLL_CTL_DEL, descriptor, NULL);
}

/* Returns 1: the connection is handed over. */
static int door_hand_over(door *at, int descriptor, int kind, span received, span unsent, door_handed *into)
{
    *into = (door_handed){descriptor, kind, received, unsent, at->connections[descriptor].rest};
    door_set_rest(at, descriptor, NULL, 0);
    door_leave(at, descriptor);
    return 1;
}

static int door_hand_over_ended(door *at, int descriptor, door_handed *into)
{
    door_leave(at, descriptor);
    *into = (door_handed){descriptor, DOOR_ENDED, door_nothing, door_nothing, NULL};
    return 1;
}

/* Sends; returns how many bytes the socket took, -1 if the connection is broken. */
static ssize_t door_send(int descriptor, span bytes, int flags)
{
    ssize_t sent = send(descriptor, bytes.at, bytes.length, flags | MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : sent;
}

/* Sends pieces of an answer's rest until the socket takes no more, the turn's bytes are used up, or the end. */
static int door_go_on(door *at, int descriptor, door_handed *handed)
{
    door_connection *to = at->connections + descriptor;
    for (size_t left = DOOR_TURN_BYTES;;) {
        span piece = at->by.piece(at->by.context, to->rest);
        if (!piece.length)
            return door_hand_over(at, descriptor, DOOR_BYTES, door_nothing, door_nothing, handed);
        ssize_t sent = door_send(descriptor, piece, 0);
        if (sent < 0)
            return door_hand_over_ended(at, descriptor, handed);
        if (sent)
            to->heard_ns = door_now_ns();
        if (at->by.taken(at->by.context, to->rest, (size_t)sent)) {
            int is_awaited = to->is_kept || to->is_last;
            door_end_rest(at, descriptor, 0);
            if (is_awaited)
                return door_hand_over(at, descriptor, DOOR_BYTES, door_nothing, door_nothing, handed);
            door_wait(at, descriptor, 0);
            return 0;
        }
        if ((size_t)sent < piece.length || left <= (size_t)sent) {
            door_wait(at, descriptor, 1);
            return 0;
        }
        left -= (size_t)sent;
    }
}

/* Receives from one connection and repeats answers to it; returns 1 if it was handed over. */
static int door_receive(door *at, int descriptor, door_handed *handed)
{
    ssize_t count = recv(descriptor, at->received, sizeof at->received, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (count <= 0)
        return door_hand_over_ended(at, descriptor, handed);
    door_connection *from = at->connections + descriptor;
    int64_t began_ns = from->heard_ns = door_now_ns();
    span left = {at->received, (size_t)count};
    while (left.length) {
        repeated answer = {door_nothing, NULL};
        size_t used = at->by.repeat(at->by.context, left, began_ns, &answer);
        if (!used)
            return door_hand_over(at, descriptor, DOOR_BYTES, left, door_nothing, handed);
        left.at += used;
        left.length -= used;
        ssize_t sent = door_send(descriptor, answer.bytes, answer.rest == NULL ? 0 : MSG_MORE);
        from->began_ns = began_ns;
        door_set_rest(at, descriptor, answer.rest, 0);
        int64_t ended_ns = door_now_ns();
        if (answer.rest == NULL)
            at->by.sent(at->by.context, door_peer(at, descriptor), (uint64_t)(ended_ns - began_ns));
        if (sent < 0)
            return door_hand_over_ended(at, descriptor, handed);
        if ((size_t)sent < answer.bytes.length) {
            span unsent = {answer.bytes.at + sent, answer.bytes.length - (size_t)sent};
            return door_hand_over(at, descriptor, DOOR_BYTES, left, unsent, handed);
        }
        if (answer.rest != NULL)
            return door_go_on(at, descriptor, handed);
        began_ns = ended_ns;
    }
    return 0;
}

/* Hands over a connection whose answer began before `began_ns` and has content that is not kept; 0: there is none. */
static int door_long_under_way(door *at, int64_t began_ns, door_handed *handed)
{
    for (int descriptor = 0; at->unkept && descriptor < at->connection_count; descriptor++) {
        const door_connection *of = at->connections + descriptor;
        if (of->is_parked && of->rest != NULL && !of->is_kept && of->began_ns < began_ns)
            return door_hand_over(at, descriptor, DOOR_BYTES, door_nothing, door_nothing, handed);
    }
    handed->descriptor = -1;
    return 0;
}

/* Begins a turn.  It goes on with the events that are left of the turn before, so that each connection has its turn. */
static void door_begin(door *at, int64_t until_ns)
{
    at->until_ns = until_ns;
    at->by.begin(at->by.context);
}

/* Serves connections until none is ready, the turn is over, or one is handed over; then the turn may go on. */
static void door_serve(door *at, door_handed *handed)
{
    handed->descriptor = -1;
    while (door_now_ns() < at->until_ns) {
        if (at->next == at->count) {
            at->next = at->count = 0;
            int ready = epoll_wait(at->epoll, at->events, DOOR_EVENTS, 0);
            if (ready <= 0)
                return;
            at->count = ready;
        }
        int descriptor = at->events[at->next++].data.fd;
        /* Its connection may have left since the event was fetched. */
        if (!door_is_parked(at, descriptor))
            continue;
        if (at->connections[descriptor].rest != NULL ? door_go_on(at, descriptor, handed)
                                                     : door_receive(at, descriptor, handed))
            return;
    }
}

#endif
