/* Connections that wait for their next request, and the loop that repeats known answers to them.

   A connection is either parked here or its task's: `is_parked` says which, and only a parked one is received from.  A
   dormant one is parked and has no task: its descriptor is the door's.  What a request means, and what is sent, is the repeater's business (`gateway/http/repeater.h`).

   An answer that takes long is shown to its task once, before it goes on: the task has its content kept, and parks the
   connection again with the rest.  It is handed over when that has been sent.

   A turn serves what is ready.  The door may also wait in the place of its owner's loop (`door_await`): it watches the
   descriptor by which that loop learns that it has other work, too.

   A request that is still to come whole, if the repeater waits for it, is received into memory of its own; one that takes
   long is handed over with what has come.  While a request is held nothing is received: its connection waits for the
   answer. */
#ifndef LAKE_DOOR_H
#define LAKE_DOOR_H

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "repeater.h"

#define DOOR_EVENTS 64
#define DOOR_RECEIVE_BYTES (16 << 10)
#define DOOR_PEER_BYTES 92
#define DOOR_TURN_BYTES (1 << 20) /* of one answer, before other connections are served */
#define DOOR_PARTIAL_BYTES (16 << 20) /* of all requests that are still to come whole */

enum { DOOR_BYTES = 0, DOOR_ENDED = 1 };
enum { DOOR_TO_RECEIVE = 0, DOOR_TO_SEND = 1, DOOR_FOR_NOTHING = 2 };

typedef struct {
    int64_t heard_ns; /* CLOCK_MONOTONIC: when bytes last came or went, or it was parked */
    int64_t began_ns; /* when the request or answer under way began */
    void *rest;       /* of the answer under way; NULL: none */
    uint8_t *partial; /* of a request, as far as it has come; NULL: none */
    uint32_t partial_length, partial_wanted;
    uint64_t held; /* number of the request that is held; 0: none */
    uint8_t is_parked, waits, peer_length;
    uint8_t is_kept; /* the task has had the rest's content kept: it is handed over when the rest is sent */
    uint8_t is_last; /* it is handed over when the answer under way is sent */
    uint8_t is_dormant;
    uint8_t peer[DOOR_PEER_BYTES];
} door_connection;

typedef struct {
    int epoll;
    int loop;          /* readable when the owner's loop has work of its own; -1: it is not watched */
    uint8_t is_called; /* it had some when it was last looked at */
    repeater by;
    door_connection *connections; /* by descriptor */
    int connection_count;
    int dormant; /* connections that are */
    int timed; /* connections that are handed over if it takes long: with a rest that is not kept, or half a request */
    int64_t until_ns; /* end of the present turn */
    uint64_t tickets; /* given so far */
    size_t partial_bytes;
    uint8_t *taken; /* memory of the last request that came in parts */
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

/* Waits on a connection, for one of DOOR_TO_RECEIVE, DOOR_TO_SEND and DOOR_FOR_NOTHING. */
static void door_wait(door *at, int descriptor, uint8_t wanted)
{
    static const uint32_t events[] = {EPOLLIN, EPOLLOUT, EPOLLONESHOT}; /* the end of a connection is told once */
    if (at->connections[descriptor].waits == wanted)
        return;
    at->connections[descriptor].waits = wanted;
    struct epoll_event event = {.events = events[wanted], .data.fd = descriptor};
    epoll_ctl(at->epoll, EPOLL_CTL_MOD, descriptor, &event);
}

static inline span door_peer(const door *at, int descriptor)
{
    return (span){at->connections[descriptor].peer, at->connections[descriptor].peer_length};
}

static inline int door_is_timed(const door_connection *of)
{
    return of->partial != NULL || (of->rest != NULL && !of->is_kept);
}

/* Returns 1 for a parked connection with half a request, a request that is held, or an answer under way. */
static inline int door_is_busy(const door *at, int descriptor)
{
    const door_connection *of = at->connections + descriptor;
    return door_is_parked(at, descriptor) && (of->partial != NULL || of->rest != NULL || of->held);
}

static void door_set_rest(door *at, int descriptor, void *rest, int is_kept)
{
    door_connection *of = at->connections + descriptor;
    at->timed -= door_is_timed(of);
    of->rest = rest;
    of->is_kept = (uint8_t)is_kept;
    at->timed += door_is_timed(of);
}

/* Keeps the begin of a request; returns 0 if there is no memory for all of it. */
static int door_set_partial(door *at, int descriptor, span begun, size_t wanted)
{
    door_connection *of = at->connections + descriptor;
    if (wanted <= begun.length || wanted > DOOR_PARTIAL_BYTES - at->partial_bytes)
        return 0;
    uint8_t *memory = malloc(wanted);
    if (memory == NULL)
        return 0;
    memcpy(memory, begun.at, begun.length);
    at->timed -= door_is_timed(of);
    of->partial = memory;
    of->partial_length = (uint32_t)begun.length;
    of->partial_wanted = (uint32_t)wanted;
    at->partial_bytes += wanted;
    at->timed += door_is_timed(of);
    return 1;
}

/* Takes what has come of a request; the bytes are valid until the next call. */
static span door_take_partial(door *at, int descriptor)
{
    door_connection *of = at->connections + descriptor;
    if (of->partial == NULL)
        return door_nothing;
    at->timed -= door_is_timed(of);
    free(at->taken);
    at->taken = of->partial;
    at->partial_bytes -= of->partial_wanted;
    of->partial = NULL;
    at->timed += door_is_timed(of);
    return (span){at->taken, of->partial_length};
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

/* Leaves a connection to its owner, a dormant one to the caller; an answer under way is broken off. */
static void door_leave(door *at, int descriptor)
{
    if (!door_is_parked(at, descriptor))
        return;
    door_end_rest(at, descriptor, 1);
    door_take_partial(at, descriptor);
    at->dormant -= at->connections[descriptor].is_dormant;
    at->connections[descriptor].held = 0;
    at->connections[descriptor].is_parked = at->connections[descriptor].is_dormant = 0;
    epoll_ctl(at->epoll, EPOLL_CTL_DEL, descriptor, NULL);
}

static inline int door_is_dormant(const door *at, int descriptor)
{
    return door_is_parked(at, descriptor) && at->connections[descriptor].is_dormant;
}

/* Makes a parked connection dormant; returns 0 if it is, something is under way, or its peer was cut. */
static int door_let_go(door *at, int descriptor)
{
    if (!door_is_parked(at, descriptor) || door_is_busy(at, descriptor))
        return 0;
    door_connection *of = at->connections + descriptor;
    if (of->is_dormant || of->is_last || of->peer_length >= DOOR_PEER_BYTES)
        return 0;
    of->is_dormant = 1;
    at->dormant++;
    return 1;
}

/* Closes a dormant connection; returns 0 if there is no such one. */
static int door_end(door *at, int descriptor)
{
    if (!door_is_dormant(at, descriptor))
        return 0;
    door_leave(at, descriptor);
    close(descriptor);
    return 1;
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
            door_wait(at, descriptor, DOOR_TO_RECEIVE);
            return 0;
        }
        if ((size_t)sent < piece.length || left <= (size_t)sent) {
            door_wait(at, descriptor, DOOR_TO_SEND);
            return 0;
        }
        left -= (size_t)sent;
    }
}

/* Sends what is left of an answer's bytes; returns 1 if the connection was handed over. */
static int door_sent(door *at, int descriptor, span answer, ssize_t sent, span received, door_handed *handed)
{
    if (sent < 0)
        return door_hand_over_ended(at, descriptor, handed);
    if ((size_t)sent == answer.length)
        return 0;
    span unsent = {answer.at + sent, answer.length - (size_t)sent};
    return door_hand_over(at, descriptor, DOOR_BYTES, received, unsent, handed);
}

/* Repeats answers to requests of one connection; returns 1 if it was handed over. */
static int door_repeat(door *at, int descriptor, span left, int64_t began_ns, door_handed *handed)
{
    door_connection *to = at->connections + descriptor;
    while (left.length) {
        repeated answer = {door_nothing, NULL, 0, 0};
        door_ticket ticket = {descriptor, at->tickets + 1};
        size_t used = at->by.repeat(at->by.context, left, began_ns, ticket, &answer);
        to->began_ns = began_ns;
        if (!used && answer.wanted && door_set_partial(at, descriptor, left, answer.wanted)) {
            ssize_t sent = answer.bytes.length ? door_send(descriptor, answer.bytes, 0) : 0;
            if (sent == (ssize_t)answer.bytes.length)
                return 0;
            return door_sent(at, descriptor, answer.bytes, sent, door_take_partial(at, descriptor), handed);
        }
        if (!used)
            return door_hand_over(at, descriptor, DOOR_BYTES, left, door_nothing, handed);
        if (answer.is_held) {
            to->held = at->tickets = ticket.number;
            return 0;
        }
        left.at += used;
        left.length -= used;
        ssize_t sent = door_send(descriptor, answer.bytes, answer.rest == NULL ? 0 : MSG_MORE);
        door_set_rest(at, descriptor, answer.rest, 0);
        int64_t ended_ns = door_now_ns();
        if (answer.rest == NULL)
            at->by.sent(at->by.context, door_peer(at, descriptor), (uint64_t)(ended_ns - began_ns));
        if (door_sent(at, descriptor, answer.bytes, sent, left, handed))
            return 1;
        if (answer.rest != NULL)
            return door_go_on(at, descriptor, handed);
        began_ns = ended_ns;
    }
    return 0;
}

/* Receives from one connection and repeats answers to it; returns 1 if it was handed over. */
static int door_receive(door *at, int descriptor, door_handed *handed)
{
    door_connection *from = at->connections + descriptor;
    uint8_t *into = from->partial == NULL ? at->received : from->partial + from->partial_length;
    size_t room = from->partial == NULL ? sizeof at->received : from->partial_wanted - from->partial_length;
    ssize_t count = recv(descriptor, into, room, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (count <= 0 && from->partial == NULL)
        return door_hand_over_ended(at, descriptor, handed);
    if (count <= 0) /* its task answers half a request */
        return door_hand_over(at, descriptor, DOOR_BYTES, door_take_partial(at, descriptor), door_nothing, handed);
    from->heard_ns = door_now_ns();
    if (from->partial == NULL)
        return door_repeat(at, descriptor, (span){at->received, (size_t)count}, from->heard_ns, handed);
    from->partial_length += (uint32_t)count;
    if (from->partial_length < from->partial_wanted)
        return 0;
    return door_repeat(at, descriptor, door_take_partial(at, descriptor), from->began_ns, handed);
}

/* Returns 1 if the connection has the request that the ticket was given for. */
static inline int door_has(const door *at, door_ticket ticket)
{
    if (!door_is_parked(at, ticket.descriptor) || !ticket.number)
        return 0;
    return at->connections[ticket.descriptor].held == ticket.number;
}

/* Answers a request that was held; returns 1 if its connection was handed over. */
static int door_answer(door *at, door_ticket ticket, span answer, door_handed *handed)
{
    handed->descriptor = -1;
    if (!door_has(at, ticket))
        return 0;
    door_connection *to = at->connections + ticket.descriptor;
    ssize_t sent = door_send(ticket.descriptor, answer, 0);
    to->held = 0;
    to->heard_ns = door_now_ns();
    at->by.sent(at->by.context, door_peer(at, ticket.descriptor), (uint64_t)(to->heard_ns - to->began_ns));
    if (door_sent(at, ticket.descriptor, answer, sent, door_nothing, handed))
        return 1;
    if (to->is_last)
        return door_hand_over(at, ticket.descriptor, DOOR_BYTES, door_nothing, door_nothing, handed);
    door_wait(at, ticket.descriptor, DOOR_TO_RECEIVE);
    return 0;
}

/* Hands over a connection with the request that was held; returns 0 if it has left. */
static int door_give_back(door *at, door_ticket ticket, span request, door_handed *handed)
{
    handed->descriptor = -1;
    return door_has(at, ticket) && door_hand_over(at, ticket.descriptor, DOOR_BYTES, request, door_nothing, handed);
}

/* Hands over a connection on which half a request, or an answer with content that is not kept, began before `began_ns`;
   0: there is none. */
static int door_long_under_way(door *at, int64_t began_ns, door_handed *handed)
{
    for (int descriptor = 0; at->timed && descriptor < at->connection_count; descriptor++) {
        const door_connection *of = at->connections + descriptor;
        if (!of->is_parked || !door_is_timed(of) || of->began_ns >= began_ns)
            continue;
        span received = door_take_partial(at, descriptor);
        return door_hand_over(at, descriptor, DOOR_BYTES, received, door_nothing, handed);
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

/* Takes the owner's loop out of the events that were fetched. */
static void door_look_for_call(door *at)
{
    for (int number = 0; number < at->count; number++)
        if (at->events[number].data.fd == at->loop) {
            at->is_called = 1;
            at->events[number] = at->events[--at->count];
            return;
        }
}

/* Waits until a connection is ready, the owner's loop has other work, a signal comes, or until `until_ns`.  Returns 1 if
   there are connections to serve. */
static int door_await(door *at, int64_t until_ns)
{
    at->is_called = 0;
    if (at->next < at->count) {
        struct pollfd loop = {.fd = at->loop, .events = POLLIN};
        at->is_called = poll(&loop, 1, 0) > 0; /* these events may take many turns */
        return 1;
    }
    int64_t left_ms = (until_ns - door_now_ns() + 999999) / 1000000;
    int wait_ms = left_ms < 0 ? 0 : left_ms < INT_MAX ? (int)left_ms : INT_MAX;
    int ready = epoll_wait(at->epoll, at->events, DOOR_EVENTS, wait_ms);
    at->is_called = ready < 0 && errno != EINTR; /* the loop is woken for a signal that is its own */
    at->next = 0;
    at->count = ready < 0 ? 0 : ready;
    door_look_for_call(at);
    return at->count > 0;
}

/* Serves connections until none is ready, the turn is over, or one is handed over; then the turn may go on. */
static void door_serve(door *at, door_handed *handed)
{
    handed->descriptor = -1;
    while (door_now_ns() < at->until_ns) {
        if (at->next == at->count) {
            if (at->is_called)
                return;
            at->next = at->count = 0;
            int ready = epoll_wait(at->epoll, at->events, DOOR_EVENTS, 0);
            if (ready <= 0)
                return;
            at->count = ready;
            door_look_for_call(at);
            continue;
        }
        int descriptor = at->events[at->next++].data.fd;
        /* Its connection may have left since the event was fetched. */
        if (!door_is_parked(at, descriptor))
            continue;
        if (at->connections[descriptor].held) {
            door_wait(at, descriptor, DOOR_FOR_NOTHING);
            continue;
        }
        if (at->connections[descriptor].rest != NULL ? door_go_on(at, descriptor, handed)
                                                     : door_receive(at, descriptor, handed))
            return;
    }
}

#endif
