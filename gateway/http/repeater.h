/* The port between the door and what it repeats: a table of functions, which a native module of the service fills.

   An answer is sent at once, or its body has a rest that is sent in pieces as the socket takes them.  A request that is
   held is answered later: its connection waits, and the answer comes under the ticket that was given with it. */
#ifndef LAKE_REPEATER_H
#define LAKE_REPEATER_H

#include "../../lakefs/host/span.h"

#define REPEATER_CAPSULE "lake_repeater"

/* A request that is held; `number` is never given twice, so that an answer to a connection that has left is nobody's. */
typedef struct {
    int descriptor;
    uint64_t number;
} door_ticket;

typedef struct {
    span bytes;    /* valid until the next call */
    void *rest;    /* what follows; NULL: nothing */
    int is_held;   /* the answer comes later, and there are no bytes */
    size_t wanted; /* bytes that the request has in all, if it has not come whole; 0: it is not waited for.  `bytes` are
                      sent at once then, and are no answer yet */
} repeated;

typedef struct {
    void *context;
    /* Called at the begin of a turn, before its requests. */
    void (*begin)(void *context);
    /* Answers the request at the beginning of `received`; returns how many bytes it has, 0 if it is Python's business.
       An answer with a rest, and a request that is held, belong to the last request of `received`. */
    size_t (*repeat)(void *context, span received, int64_t began_ns, door_ticket ticket, repeated *answer);
    /* Called once the socket has taken an answer without a rest, or some of it, at once or to a request that was held;
       `peer`: as the connection was parked. */
    void (*sent)(void *context, span peer, uint64_t took_ns);
    /* Returns the next bytes of a rest, valid until the next call; none: they are not at hand, and the rest is left to
       Python. */
    span (*piece)(void *context, void *rest);
    /* Notes that the socket has taken so many of them; returns 1 if that was all of the rest. */
    int (*taken)(void *context, void *rest, size_t count);
    /* Ends a rest, instead of `sent`: it was taken as a whole, or is cut because the connection broke. */
    void (*ended)(void *context, void *rest, span peer, uint64_t took_ns, int is_cut);
} repeater;

#endif
