/* GET and HEAD of objects that were answered before: recognised, proven, and answered again.  PUTs of small objects:
   proven, and gathered (`gather.h`).

   Nothing is decided here.  Where a request, a signer, an answer or the bytes are not known, or a check fails, the
   request is passed on: Python answers it, and may teach the door.  Reasons are counted. */
#ifndef LAKE_S3_REPEAT_H
#define LAKE_S3_REPEAT_H

#include <time.h>

#include "../../http/repeater.h"
#include "answers.h"
#include "../../../lakefs/granules/content.h"
#include "gather.h"
#include "log.h"

#define OUT_HEAD_BYTES (8 << 10)
#define WINDOW_BYTES (1 << 20) /* of a body, read, checked and sent at once; pieces of 64 KiB cost twice as much CPU */
#define WINDOW_BYTES_MIN (2 * LAKE_GRANULE)
#define TIMES_MAX 32
#define NOTES_MAX 256
#define DATE_LINES_BYTES 128
#define ID_BYTES 16

typedef enum {
    PASSED_HEAD,      /* not whole, not plain, or another method */
    PASSED_FIELD,     /* a field that the door does not understand, or a value of one */
    PASSED_KEYS,      /* Python has to read the access keys again */
    PASSED_NEW,       /* not answered before */
    PASSED_CHANGED,   /* answered before, but something has changed since */
    PASSED_SIGNATURE, /* no proof, or one that Python has to look at */
    PASSED_CONTENT,   /* the bytes are not in memory here */
    PASSED_COUNT
} passed_reason;

typedef struct {
    claims claims;
    answers answers;
    content content;
    uint64_t next_id; /* of requests */
    uint64_t random;
    int64_t now_s, date_s;
    uint8_t date_lines[DATE_LINES_BYTES];
    size_t date_length;
    gathered_puts puts;
    log_entry last; /* of an answer without a rest */
    access_log log;
    uint8_t id[ID_BYTES]; /* of the last answer */
    uint64_t counts[OF_COUNT][2]; /* whole and range */
    uint64_t times[OF_COUNT][TIMES_MAX], took_ns[OF_COUNT];
    uint64_t bounds_ns[TIMES_MAX];
    size_t bound_count;
    uint64_t received_bytes, sent_bytes, cut_short, passed[PASSED_COUNT];
    uint8_t notes[NOTES_MAX][CHUNK_ID_BYTES];
    size_t note_count;
    uint32_t note_every, note_skip;
    uint8_t out[OUT_HEAD_BYTES + LAKE_GRANULE];
    uint8_t window[WINDOW_BYTES];
    const void *window_of; /* the rest whose next bytes are in the window; NULL: none */
    span ready;            /* these bytes */
} s3_repeater;

/* --- parts of an answer -------------------------------------------------------------------------------------- */

static void next_id(s3_repeater *in)
{
    uint64_t id = in->next_id++;
    for (int at = 0; at < ID_BYTES; at++)
        in->id[at] = (uint8_t)"0123456789ABCDEF"[id >> (60 - 4 * at) & 15];
}

static void repeat_begin(void *context)
{
    static const char days[] = "SunMonTueWedThuFriSat", months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    s3_repeater *in = context;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    in->now_s = now.tv_sec;
    if (in->date_s == in->now_s)
        return;
    struct tm date;
    gmtime_r(&now.tv_sec, &date);
    int length = snprintf((char *)in->date_lines, DATE_LINES_BYTES,
                          "Server: lake\r\nDate: %.3s, %02d %.3s %04d %02d:%02d:%02d GMT\r\n", days + 3 * date.tm_wday,
                          date.tm_mday, months + 3 * date.tm_mon, date.tm_year + 1900, date.tm_hour, date.tm_min,
                          date.tm_sec);
    in->date_length = length > 0 && length < DATE_LINES_BYTES ? (size_t)length : 0;
    in->date_s = in->now_s;
}

typedef struct {
    uint64_t first, stop;
} byte_range;

static int take_number(span *from, uint64_t *number)
{
    size_t digits = 0;
    for (*number = 0; from->length && *from->at >= '0' && *from->at <= '9'; digits++) {
        if (digits == 18)
            return 0;
        *number = *number * 10 + (uint64_t)(*from->at - '0');
        from->at++;
        from->length--;
    }
    return digits > 0;
}

/* Reads `bytes=A-B` or `bytes=A-` of an object that has byte A; any other form is Python's. */
static int range_read(span value, uint64_t size_bytes, byte_range *into)
{
    uint64_t first, last;
    if (!SPAN_SKIP(&value, "bytes=") || !take_number(&value, &first) || !SPAN_SKIP(&value, "-") || first >= size_bytes)
        return 0;
    *into = (byte_range){first, size_bytes};
    if (!value.length)
        return 1;
    if (!take_number(&value, &last) || value.length || last < first)
        return 0;
    if (last + 1 < size_bytes)
        into->stop = last + 1;
    return 1;
}


/* Returns 1 if the values of fields that ask for something are those that the door knows. */
static int asks_plainly(const fields *of)
{
    static const span keep_alive = {(const uint8_t *)"keep-alive", 10}, go_on = {(const uint8_t *)"100-continue", 12};
    if (field_has(of, FIELD_CONNECTION) && !field_is(of->value[FIELD_CONNECTION], keep_alive))
        return 0;
    if (field_has(of, FIELD_EXPECT) && !field_is(of->value[FIELD_EXPECT], go_on))
        return 0;
    return !field_has(of, FIELD_CHECKSUM_MODE) || SPAN_IS(of->value[FIELD_CHECKSUM_MODE], "ENABLED");
}

static void note_read(s3_repeater *in, const uint8_t *chunk)
{
    if (in->note_skip) {
        in->note_skip--;
        return;
    }
    in->random = in->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407); /* Knuth's MMIX */
    in->note_skip = (uint32_t)(in->random >> 33) % (2 * in->note_every);
    if (in->note_count < NOTES_MAX)
        memcpy(in->notes[in->note_count++], chunk, CHUNK_ID_BYTES);
}

/* --- bodies that are sent in pieces ------------------------------------------------------------------------------- */

/* What is left of an answer's body, which began with byte `first` of an object: bytes [at, stop). */
typedef struct {
    uint64_t first, at, stop;
    size_t window_bytes; /* to be read at once: as many as the socket has taken before */
    uint64_t vector_of;  /* number of the piece that the vector is of */
    content_vector vector;
    span layout; /* of the pieces that are sent, and the one before; in one allocation with this, as the log's texts */
    log_entry logged;
    uint8_t id[ID_BYTES];
    uint8_t bytes[];
} body_rest;

static span layout_of(span layout, const byte_range *range)
{
    uint64_t first = layout_find(layout, range->first), last = layout_find(layout, range->stop - 1);
    first -= first > 0;
    return (span){layout.at + first * PIECE_BYTES, (size_t)(last - first + 1) * PIECE_BYTES};
}

static body_rest *rest_make(const s3_repeater *in, const answer *of, const byte_range *range, const log_entry *logged)
{
    span layout = layout_of(of->layout, range);
    size_t texts = logged->signer.length + logged->name.length + logged->agent.length;
    body_rest *made = malloc(sizeof *made + layout.length + texts);
    if (made == NULL)
        return NULL;
    uint8_t *at = made->bytes;
    made->first = made->at = range->first;
    made->stop = range->stop;
    made->window_bytes = WINDOW_BYTES;
    made->vector.is_known = 0;
    made->vector_of = 0;
    made->layout = span_copied(&at, layout);
    made->logged = *logged;
    made->logged.signer = span_copied(&at, logged->signer);
    made->logged.name = span_copied(&at, logged->name);
    made->logged.agent = span_copied(&at, logged->agent);
    memcpy(made->id, in->id, ID_BYTES);
    made->logged.id = (span){made->id, ID_BYTES};
    return made;
}

/* Reads bytes from `at` on of one piece into the window, as many as fit; returns them, none if they are not at hand. */
static span rest_read(s3_repeater *in, body_rest *rest)
{
    static const span none;
    uint64_t number = layout_find(rest->layout, rest->at);
    piece from = layout_piece(rest->layout, number);
    uint64_t length = from.end - from.begin, at = rest->at - from.begin;
    uint64_t stop = rest->stop < from.end ? rest->stop - from.begin : length;
    if (length <= LAKE_GRANULE)
        return content_whole(&in->content, from.chunk, length, in->window) ? (span){in->window + at, stop - at} : none;
    if (number != rest->vector_of)
        rest->vector.is_known = 0;
    rest->vector_of = number;
    size_t first = (size_t)(at / LAKE_GRANULE), last = (size_t)((stop - 1) / LAKE_GRANULE);
    if (last - first >= rest->window_bytes / LAKE_GRANULE)
        last = first + rest->window_bytes / LAKE_GRANULE - 1;
    if (!content_granules(&in->content, from.chunk, length, first, last + 1, &rest->vector, in->window))
        return none;
    note_read(in, from.chunk);
    uint64_t begin = (uint64_t)first * LAKE_GRANULE, end = (uint64_t)(last + 1) * LAKE_GRANULE;
    if (end > stop)
        end = stop;
    return (span){in->window + (at - begin), (size_t)(end - at)};
}

static span rest_piece(void *context, void *rest)
{
    s3_repeater *in = context;
    if (in->window_of != rest)
        in->ready = rest_read(in, rest);
    in->window_of = rest;
    return in->ready;
}

/* Bytes that the socket did not take are read again, so the next window is about as long as what it took. */
static int rest_taken(void *context, void *opaque, size_t count)
{
    s3_repeater *in = context;
    body_rest *rest = opaque;
    in->window_of = NULL;
    rest->at += count;
    size_t window = (count / LAKE_GRANULE + 1) * LAKE_GRANULE;
    if (window < WINDOW_BYTES_MIN)
        window = WINDOW_BYTES_MIN;
    rest->window_bytes = window < WINDOW_BYTES ? window : WINDOW_BYTES;
    return rest->at >= rest->stop;
}

static void rest_free(s3_repeater *in, body_rest *rest)
{
    if (in->window_of == rest)
        in->window_of = NULL;
    free(rest);
}

/* --- one request --------------------------------------------------------------------------------------------- */

static inline size_t passed_on(s3_repeater *in, passed_reason reason)
{
    in->passed[reason]++;
    return 0;
}

/* Writes the head so that it ends where the body begins; returns it, or nothing if it is too long. */
static span write_head(s3_repeater *in, const answer *kept, const fields *of, const byte_range *range,
                       uint8_t *body)
{
    uint8_t head[OUT_HEAD_BYTES];
    writer to = writer_of(head, sizeof head);
    int is_range = field_has(of, FIELD_RANGE);
    if (is_range)
        WRITE(&to, "HTTP/1.1 206 Partial Content\r\n");
    else
        WRITE(&to, "HTTP/1.1 200 OK\r\n");
    write_span(&to, (span){in->date_lines, in->date_length});
    WRITE(&to, "x-amz-request-id: ");
    next_id(in);
    write_span(&to, (span){in->id, ID_BYTES});
    WRITE(&to, "\r\n");
    write_span(&to, kept->lines);
    if (field_has(of, FIELD_CHECKSUM_MODE) && !is_range)
        write_span(&to, kept->sums);
    if (is_range) {
        WRITE(&to, "Content-Range: bytes ");
        write_number(&to, range->first);
        WRITE(&to, "-");
        write_number(&to, range->stop - 1);
        WRITE(&to, "/");
        write_number(&to, kept->size_bytes);
        WRITE(&to, "\r\n");
    }
    WRITE(&to, "Content-Length: ");
    write_number(&to, range->stop - range->first);
    WRITE(&to, "\r\n\r\n");
    if (to.is_full)
        return (span){NULL, 0};
    uint8_t *begin = body - written(&to).length;
    memcpy(begin, head, written(&to).length);
    return (span){begin, written(&to).length};
}

/* Answers with content of one chunk, which lies behind the head. */
static void answer_at_once(s3_repeater *in, const answer *kept, const fields *of, const byte_range *range,
                           repeated *into)
{
    uint8_t *body = in->out + OUT_HEAD_BYTES;
    if (kept->layout.length != PIECE_BYTES)
        return;
    const uint8_t *chunk = layout_piece(kept->layout, 0).chunk;
    if (!content_whole(&in->content, chunk, kept->size_bytes, body))
        return;
    note_read(in, chunk);
    into->bytes = write_head(in, kept, of, range, body + range->first);
    if (into->bytes.length)
        into->bytes.length += range->stop - range->first;
}

/* Answers with a head, and content as its rest.  Bytes that are not at hand are found out before the head is sent. */
static void answer_in_pieces(s3_repeater *in, const answer *kept, const fields *of, const byte_range *range,
                             const log_entry *logged, repeated *into)
{
    if (!kept->layout.length)
        return;
    span bytes = write_head(in, kept, of, range, in->out + OUT_HEAD_BYTES);
    body_rest *rest = bytes.length ? rest_make(in, kept, range, logged) : NULL;
    if (rest == NULL)
        return;
    if (!rest_piece(in, rest).length) {
        rest_free(in, rest);
        return;
    }
    *into = (repeated){bytes, rest};
}

static size_t repeat_read(s3_repeater *in, span received, const head *request, const fields *of, repeated *into)
{
    int is_head = SPAN_IS(request->method, "HEAD");
    kept_answers *table = &in->answers.table;
    kept_answer **found = kept_find(table, answers_key(&in->answers, of->value[FIELD_HOST], request->target));
    const answer *kept = found != NULL ? (const answer *)*found : NULL;
    if (kept == NULL || !(is_head || kept->is_of_get))
        return passed_on(in, PASSED_NEW);
    if (!kept_stands(table, *found)) {
        kept_drop(table, found);
        return passed_on(in, PASSED_CHANGED);
    }
    byte_range range = {0, kept->size_bytes};
    if (field_has(of, FIELD_RANGE) && !range_read(of->value[FIELD_RANGE], kept->size_bytes, &range))
        return passed_on(in, PASSED_FIELD);
    const claim *by = NULL;
    if (!field_has(of, FIELD_AUTHORIZATION))
        by = claims_presigned(&in->claims, request->method, request->target, of, in->now_s);
    else if (content_is(of, (span){NULL, 0}))
        by = claims_signer(&in->claims, request->method, kept->canonical_target, of, in->now_s);
    if (by == NULL || !claim_allows(by, kept->bucket))
        return passed_on(in, PASSED_SIGNATURE);
    log_entry logged = {
        .id = {in->id, ID_BYTES},
        .signer = by->logged,
        .name = kept->logged,
        .agent = log_agent(of),
        .operation = is_head ? OF_HEAD : OF_GET,
        .is_range = field_has(of, FIELD_RANGE),
        .sent_bytes = is_head ? 0 : range.stop - range.first,
    };
    if (is_head || !kept->size_bytes)
        into->bytes = write_head(in, kept, of, &range, in->out + OUT_HEAD_BYTES);
    else if (kept->size_bytes <= LAKE_GRANULE)
        answer_at_once(in, kept, of, &range, into);
    else if (request->length == received.length)
        answer_in_pieces(in, kept, of, &range, &logged, into);
    if (!into->bytes.length)
        return passed_on(in, PASSED_CONTENT);
    in->last = logged;
    return request->length;
}

/* Gathers a PUT whose target is a plain path: its canonical form is the path itself. */
static size_t gather_one(s3_repeater *in, span received, const head *request, const fields *of, int64_t began_ns,
                         door_ticket ticket, repeated *into)
{
    size_t length = put_length(request, of);
    if (!length)
        return passed_on(in, PASSED_FIELD);
    span canonical = put_canonical(&in->puts, request->target);
    const claim *by = claims_signer(&in->claims, request->method, canonical, of, in->now_s);
    if (by == NULL)
        return passed_on(in, PASSED_SIGNATURE);
    if (received.length < request->length + length) {
        static const span go_on = {(const uint8_t *)"HTTP/1.1 100 Continue\r\n\r\n", 25};
        if (field_has(of, FIELD_EXPECT) && received.length == request->length)
            into->bytes = go_on;
        into->wanted = request->length + length;
        return 0;
    }
    span body = {received.at + request->length, length};
    if (received.length > request->length + length)
        return passed_on(in, PASSED_HEAD);
    if (!content_is(of, body))
        return passed_on(in, PASSED_SIGNATURE);
    gathered *put = put_make(received, request, of, by, body);
    if (put == NULL || !puts_add(&in->puts, put)) {
        free(put);
        return passed_on(in, PASSED_FIELD);
    }
    put->ticket = ticket;
    put->began_ns = began_ns;
    into->is_held = 1;
    return received.length;
}

static size_t repeat_one(void *context, span received, int64_t began_ns, door_ticket ticket, repeated *into)
{
    s3_repeater *in = context;
    head request;
    fields of;
    if (!head_read(received, &request))
        return passed_on(in, PASSED_HEAD);
    int is_put = SPAN_IS(request.method, "PUT");
    if (!is_put && !SPAN_IS(request.method, "GET") && !SPAN_IS(request.method, "HEAD"))
        return passed_on(in, PASSED_HEAD);
    if (!fields_read(&request, &of) || of.present & ~(is_put ? FIELDS_OF_PUT : FIELDS_OF_READS))
        return passed_on(in, PASSED_FIELD);
    if (!field_has(&of, FIELD_HOST) || !asks_plainly(&of))
        return passed_on(in, PASSED_FIELD);
    if (began_ns >= in->claims.until_ns)
        return passed_on(in, PASSED_KEYS);
    if (is_put)
        return gather_one(in, received, &request, &of, began_ns, ticket, into);
    return repeat_read(in, received, &request, &of, into);
}

/* Writes the answer to a PUT; `lines` as of `answer`.  Returns nothing if it is too long. */
static span answer_put(s3_repeater *in, const gathered *put, span lines, span logged)
{
    repeat_begin(in);
    writer to = writer_of(in->out, sizeof in->out);
    WRITE(&to, "HTTP/1.1 200 OK\r\n");
    write_span(&to, (span){in->date_lines, in->date_length});
    WRITE(&to, "x-amz-request-id: ");
    next_id(in);
    write_span(&to, (span){in->id, ID_BYTES});
    WRITE(&to, "\r\n");
    write_span(&to, lines);
    WRITE(&to, "Content-Length: 0\r\n\r\n");
    in->last = (log_entry){
        .id = {in->id, ID_BYTES},
        .signer = put->signer,
        .name = logged,
        .agent = log_agent(&put->of),
        .operation = OF_PUT,
        .received_bytes = put->body.length,
    };
    return to.is_full ? (span){NULL, 0} : written(&to);
}

static void count_answer(s3_repeater *in, log_entry *of, span peer, uint64_t took_ns)
{
    size_t bound = 0;
    while (bound < in->bound_count && took_ns > in->bounds_ns[bound])
        bound++;
    in->counts[of->operation][of->is_range]++;
    in->times[of->operation][bound]++;
    in->took_ns[of->operation] += took_ns;
    in->received_bytes += of->received_bytes;
    in->sent_bytes += of->sent_bytes;
    in->cut_short += (uint64_t)of->is_cut;
    of->remote = peer;
    of->took_ns = took_ns;
    log_answer(&in->log, of);
}

static void repeat_sent(void *context, span peer, uint64_t took_ns)
{
    s3_repeater *in = context;
    count_answer(in, &in->last, peer, took_ns);
}

static void rest_ended(void *context, void *opaque, span peer, uint64_t took_ns, int is_cut)
{
    body_rest *rest = opaque;
    rest->logged.sent_bytes = rest->at - rest->first;
    rest->logged.is_cut = is_cut;
    count_answer(context, &rest->logged, peer, took_ns);
    rest_free(context, rest);
}

#endif
