/* Feeds the door's repeater with requests that begin as good ones and are changed at random.

   Built with -fsanitize=address,undefined by door_inputs.py: a byte read or written outside of its object ends the
   program.  Input arrives in an allocation of its own length, so that a read behind it is seen.

   door_inputs COUNT SEED REQUEST...   (files with one request each; the first is known and right)  */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>

#include "repeat.h"

static uint64_t state;

static uint64_t drawn(uint64_t below)
{
    state ^= state << 13; /* xorshift64 (Marsaglia, 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static uint64_t hash_of(span text)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t at = 0; at < text.length; at++)
        hash = (hash ^ text.at[at]) * 1099511628211u;
    return hash;
}

static int find_any(const void *table, const uint8_t *chunk, lake_place *place)
{
    (void)chunk;
    *place = *(const lake_place *)table;
    if (!drawn(8))
        place->stored_bytes ^= 1u << drawn(32);
    if (!drawn(8))
        place->offset ^= 1u << drawn(32);
    if (!drawn(8))
        place->segment ^= UINT64_C(1) << drawn(64);
    if (!drawn(8))
        place->tier = (uint32_t)drawn(5);
    return drawn(16) != 0;
}

static span file_of(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        exit(2);
    uint8_t *bytes = malloc(1 << 16);
    size_t length = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    return (span){bytes, length};
}

static span changed(const span *seeds, size_t count)
{
    static const char pieces[][24] = {"\r\n", "\r\n\r\n", ": ", "range: bytes=0-", "bytes=", "%00", " HTTP/1.1",
                                      "host", "99999999999999999999", "authorization: ", "-", "  ", "\"", "\\"};
    span from = seeds[drawn(count)];
    size_t room = from.length + 256;
    uint8_t *bytes = malloc(room);
    memcpy(bytes, from.at, from.length);
    size_t length = from.length;
    for (uint64_t changes = drawn(4); changes && length; changes--) {
        size_t at = drawn(length);
        switch (drawn(5)) {
        case 0:
            bytes[at] ^= (uint8_t)(1u << drawn(8));
            break;
        case 1:
            bytes[at] = (uint8_t)drawn(256);
            break;
        case 2:
            length = at;
            break;
        case 3: {
            const char *piece = pieces[drawn(sizeof pieces / sizeof *pieces)];
            size_t more = strlen(piece);
            if (length + more > room)
                break;
            memmove(bytes + at + more, bytes + at, length - at);
            memcpy(bytes + at, piece, more);
            length += more;
            break;
        }
        default: {
            size_t gone = drawn(length - at) + 1;
            memmove(bytes + at, bytes + at + gone, length - at - gone);
            length -= gone;
        }
        }
    }
    uint8_t *exact = malloc(length ? length : 1);
    memcpy(exact, bytes, length);
    free(bytes);
    return (span){exact, length};
}

static void teach(s3_repeater *in, span request, uint8_t *stamps_memory)
{
    static const uint8_t key[SHA256_DIGEST_LENGTH] = {7};
    static const span buckets = {(const uint8_t *)"other\0bucket\0", 13}, quoted = {(const uint8_t *)"\"K\"", 3};
    static const span lines = {(const uint8_t *)"ETag: \"a\"\r\n", 11};
    head of;
    fields with;
    if (!head_read(request, &of) || !fields_read(&of, &with))
        exit(3);
    span authorization = with.value[FIELD_AUTHORIZATION];
    span text = {authorization.at, authorization.length - SIGNATURE_BYTES};
    span names = {(const uint8_t *)"host;x-amz-content-sha256;x-amz-date", 36};
    span scope = {with.value[FIELD_DATE].at, 8};
    claim *signer = claim_make(&in->claims, text, names, scope, buckets, quoted);
    const uint8_t ids[] = {FIELD_HOST, FIELD_CONTENT, FIELD_DATE};
    memcpy(signer->ids, ids, sizeof ids);
    signer->id_count = sizeof ids;
    signer->signed_fields = FIELD_BIT(FIELD_HOST) | FIELD_BIT(FIELD_CONTENT) | FIELD_BIT(FIELD_DATE);
    claim_use_key(signer, key);
    claims_keep(&in->claims, signer);
    span presigned = presigned_text(&in->claims, of.method, with.value[FIELD_HOST], of.target);
    claim *whole = claim_make(&in->claims, presigned, (span){key, 0}, (span){key, 0}, buckets, quoted);
    whole->until_s = INT64_MAX;
    claims_keep(&in->claims, whole);
    static const uint8_t set[LAKE_STAMP_BYTES];
    (void)stamps_memory;
    answer parts = {
        .size_bytes = 4 + drawn(131000),
        .bucket = {(const uint8_t *)"bucket", 6},
        .lines = lines,
        .sums = lines,
        .logged = lines,
        .kept.stamps = {set, sizeof set},
        .is_of_get = 1,
    };
    uint8_t layout[3 * PIECE_BYTES] = {0};
    uint64_t pieces = drawn(8) ? 1 : 1 + drawn(3);
    for (uint64_t number = 0; number < pieces; number++) {
        uint64_t end = number + 1 == pieces ? parts.size_bytes : parts.size_bytes * (number + 1) / pieces;
        memcpy(layout + number * PIECE_BYTES, &end, sizeof end);
    }
    parts.layout = (span){layout, pieces * PIECE_BYTES};
    parts.canonical_target = of.target;
    parts.kept.key = answers_key(&in->answers, with.value[FIELD_HOST], of.target);
    if (!answers_keep(&in->answers, &parts))
        exit(4);
}

/* Takes the rest of an answer in pieces of any length; returns 1 if a piece is not in the window. */
static int sent_rest(s3_repeater *in, void *rest)
{
    for (;;) {
        span piece = rest_piece(in, rest);
        if (!piece.length) {
            rest_ended(in, rest, (span){(const uint8_t *)"\"p\"", 3}, 1, 1);
            return 0;
        }
        if (piece.at < in->window || piece.at + piece.length > in->window + sizeof in->window)
            return 1;
        if (rest_taken(in, rest, drawn(3) ? piece.length : drawn(piece.length + 1)))
            break;
    }
    rest_ended(in, rest, (span){(const uint8_t *)"\"p\"", 3}, 1, 0);
    return 0;
}

/* Answers the PUT that is held; returns 1 if it is not the input, or its parts are not in it. */
static int answered_held(s3_repeater *in, span input)
{
    gathered *put = puts_take(&in->puts);
    if (put == NULL || in->puts.count || in->puts.bytes || !span_equals(put->request, input))
        return 1;
    span all = put->request, host = put->of.value[FIELD_HOST];
    span parts[] = {host, put->target, put->of.value[FIELD_TYPE], log_agent(&put->of), put->body};
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++)
        if (parts[at].at != NULL && (parts[at].at < all.at || parts[at].at + parts[at].length > all.at + all.length))
            return 1;
    span answer = answer_put(in, put, (span){(const uint8_t *)"ETag: x\r\n", 9}, (span){(const uint8_t *)"\"key\":1", 7});
    if (!answer.length)
        return 1;
    repeat_sent(in, (span){(const uint8_t *)"\"p\"", 3}, 1);
    free(put);
    return 0;
}

int main(int count, char **texts)
{
    if (count < 4)
        return 1;
    uint64_t inputs = strtoull(texts[1], NULL, 10);
    state = strtoull(texts[2], NULL, 10) | 1;
    span seeds[32];
    size_t seed_count = 0;
    for (int at = 3; at < count && seed_count < 32; at++)
        seeds[seed_count++] = file_of(texts[at]);
    head_begin();
    lake_crc32c_begin();

    static s3_repeater in;
    static uint8_t stamps_memory[LAKE_STAMPS_COUNTERS + 64];
    static uint8_t slab[1 << 18];
    static uint64_t generations[16];
    lake_stamps_header *header = (lake_stamps_header *)stamps_memory;
    header->magic = LAKE_STAMPS_MAGIC;
    header->owner = 1;
    lake_place place = {8, 16384, 0, 0, LAKE_TIER_DRAM};
    in.claims.hash = hash_of;
    in.claims.until_ns = INT64_MAX;
    in.answers.table.stamps = (lake_stamps){stamps_memory, 8};
    in.content.places = (lake_places){&place, find_any};
    in.content.slabs[0] = (span){slab, sizeof slab};
    in.content.cells = (lake_cells){generations, 16, sizeof slab};
    for (size_t at = 0; at < CONTENT_SEGMENTS; at++)
        in.content.segments[at].descriptor = -1;
    for (size_t at = 0; at < 16; at++)
        generations[at] = 8;
    in.note_every = 4;
    static uint8_t lines[4096];
    in.log = (access_log){.lines = lines, .room = sizeof lines, .one_of = 2};
    if (!kept_begin(&in.answers.table, hash_of, 4096, ANSWER_BYTES_EXPECTED))
        return 5;
    puts_begin(&in.puts);

    uint64_t answered = 0, held = 0;
    for (uint64_t turn = 0; turn < inputs; turn++) {
        if (turn % 64 == 0) {
            teach(&in, seeds[0], stamps_memory);
            span host = {(const uint8_t *)"lake:9000", 9}, target = {(const uint8_t *)"/bucket/key", 11};
            const answer *kept = (const answer *)*kept_find(&in.answers.table, answers_key(&in.answers, host, target));
            place.stored_bytes = (uint32_t)kept->size_bytes;
            memset(slab, 0, sizeof slab);
            if (kept->size_bytes <= LAKE_GRANULE) {
                place.crc = lake_crc32c(slab + place.offset, kept->size_bytes);
            } else {
                uint32_t vector[2] = {lake_crc32c(slab, LAKE_GRANULE),
                                      lake_crc32c(slab, kept->size_bytes - LAKE_GRANULE)};
                memcpy(slab + place.offset + kept->size_bytes, vector, sizeof vector);
                place.crc = lake_crc32c((const uint8_t *)vector, sizeof vector);
            }
        }
        if (turn % 1024 == 0)
            in.log.length = in.note_count = 0;
        span input = changed(seeds, seed_count);
        repeated out = {{NULL, 0}, NULL, 0, 0};
        repeat_begin(&in);
        size_t used = repeat_one(&in, input, 0, (door_ticket){1, turn + 1}, &out);
        if (used > input.length || (out.wanted && (used || out.wanted <= input.length)))
            return 6;
        if (out.is_held) {
            held++;
            if (used != input.length || answered_held(&in, input))
                return 9;
        } else if (used) {
            answered++;
            if (out.bytes.at < in.out || out.bytes.at + out.bytes.length > in.out + sizeof in.out)
                return 7;
            if (out.rest == NULL)
                repeat_sent(&in, (span){(const uint8_t *)"\"p\"", 3}, turn);
            else if (sent_rest(&in, out.rest))
                return 8;
        }
        free((void *)input.at);
    }
    claims_forget(&in.claims);
    kept_forget(&in.answers.table);
    kept_end(&in.answers.table);
    for (size_t at = 0; at < seed_count; at++)
        free((void *)seeds[at].at);
    printf("%llu answered, %llu held\n", (unsigned long long)answered, (unsigned long long)held);
    return 0;
}
