/* Lines of the access log for answers of the door: the same JSON as `gateway.s3.telemetry.access_log` writes.

   What never changes is escaped once, by Python, when it is learned: bucket and key with an answer, the access key with
   a claim, the address with a connection; those of a PUT with its answer.  Lines gather here until they are taken;
   those without room are counted. */
#ifndef LAKE_S3_LOG_H
#define LAKE_S3_LOG_H

#include <stdio.h>
#include <time.h>

#include "claims.h"

#define LOG_AGENT_BYTES 256
#define LOG_STAMP_BYTES 32

typedef struct {
    uint8_t *lines; /* NULL: no log */
    size_t length, room;
    uint64_t one_of, turn, lost;
    time_t second;
    char date[LOG_STAMP_BYTES]; /* of the second: YYYY-MM-DDTHH:MM:SS */
} access_log;

typedef enum { OF_GET, OF_HEAD, OF_PUT, OF_COUNT } log_operation;

typedef struct {
    span id, remote, signer, name, agent; /* `remote`, `signer` and `name` are JSON */
    log_operation operation;
    int is_range, is_cut;
    uint64_t received_bytes, sent_bytes, took_ns;
} log_entry;

/* The client's name, as much of it as is logged. */
static span log_agent(const fields *of)
{
    span agent = field_has(of, FIELD_AGENT) ? of->value[FIELD_AGENT] : (span){NULL, 0};
    if (agent.length > LOG_AGENT_BYTES)
        agent.length = LOG_AGENT_BYTES;
    return agent;
}

static void write_number(writer *to, uint64_t number)
{
    uint8_t digits[20];
    size_t at = sizeof digits;
    do
        digits[--at] = (uint8_t)('0' + number % 10);
    while (number /= 10);
    write_span(to, (span){digits + at, sizeof digits - at});
}

/* Writes a number below 1,000 with three digits. */
static void write_thousandths(writer *to, uint32_t number)
{
    uint8_t digits[3] = {(uint8_t)('0' + number / 100 % 10), (uint8_t)('0' + number / 10 % 10),
                         (uint8_t)('0' + number % 10)};
    write_span(to, (span){digits, sizeof digits});
}

/* Writes text of printable ASCII into a JSON string. */
static void write_escaped(writer *to, span text)
{
    for (size_t at = 0; at < text.length; at++) {
        if (text.at[at] == '"' || text.at[at] == '\\')
            WRITE(to, "\\");
        write_span(to, (span){text.at + at, 1});
    }
}

static void log_time(access_log *in, writer *to)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec != in->second) {
        struct tm date;
        gmtime_r(&now.tv_sec, &date);
        strftime(in->date, sizeof in->date, "%Y-%m-%dT%H:%M:%S", &date);
        in->second = now.tv_sec;
    }
    write_span(to, (span){(const uint8_t *)in->date, strlen(in->date)});
    WRITE(to, ".");
    write_thousandths(to, (uint32_t)(now.tv_nsec / 1000000));
    WRITE(to, "Z");
}

static void write_ms(writer *to, uint64_t ns)
{
    write_number(to, ns / 1000000);
    WRITE(to, ".");
    write_thousandths(to, (uint32_t)(ns / 1000 % 1000));
}

/* Writes the line of one answer, if it is this one's turn. */
static void log_answer(access_log *in, const log_entry *of)
{
    if (in->lines == NULL || ++in->turn < in->one_of)
        return;
    in->turn = 0;
    writer to = writer_of(in->lines + in->length, in->room - in->length);
    WRITE(&to, "{\"event\":\"s3_request\",\"timestamp\":\"");
    log_time(in, &to);
    WRITE(&to, "\",\"request_id\":\"");
    write_span(&to, of->id);
    WRITE(&to, "\",\"remote\":");
    write_span(&to, of->remote);
    WRITE(&to, ",\"access_key\":");
    write_span(&to, of->signer);
    if (of->operation == OF_PUT)
        WRITE(&to, ",\"method\":\"PUT\",\"operation\":\"PutObject\",");
    else if (of->operation == OF_HEAD)
        WRITE(&to, ",\"method\":\"HEAD\",\"operation\":\"HeadObject\",");
    else
        WRITE(&to, ",\"method\":\"GET\",\"operation\":\"GetObject\",");
    write_span(&to, of->name);
    if (of->is_range)
        WRITE(&to, ",\"status\":206");
    else
        WRITE(&to, ",\"status\":200");
    WRITE(&to, ",\"error\":\"\",\"bytes_in\":");
    write_number(&to, of->received_bytes);
    WRITE(&to, ",\"bytes_out\":");
    write_number(&to, of->sent_bytes);
    WRITE(&to, ",\"total_ms\":");
    write_ms(&to, of->took_ns);
    WRITE(&to, ",\"first_byte_ms\":");
    write_ms(&to, of->took_ns);
    WRITE(&to, ",\"user_agent\":\"");
    write_escaped(&to, of->agent);
    if (of->is_cut)
        WRITE(&to, "\",\"cut_short\":true}\n");
    else
        WRITE(&to, "\"}\n");
    if (to.is_full)
        in->lost++;
    else
        in->length = (size_t)(to.at - in->lines);
}

#endif
