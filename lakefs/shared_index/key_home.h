/* The home of a key on a ring of members: keyed BLAKE3 over the space's number and the key, then the first vnode at or
   behind it.  `lakefs.cluster.key_ring` has the rules, and is what this is tested against.

   BLAKE3: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020, section 2.  A text of at most 72 bytes is one chunk of one or
   two blocks, so there is no tree: the last block is the root, and 8 bytes of its output are taken. */
#ifndef LAKE_KEY_HOME_H
#define LAKE_KEY_HOME_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LAKE_HOME_KEY_BYTES_MAX 64
#define LAKE_HOME_BLOCK_BYTES 64
#define LAKE_HOME_NOWHERE 0xFFFF

enum { LAKE_BLAKE3_CHUNK_START = 1, LAKE_BLAKE3_CHUNK_END = 2, LAKE_BLAKE3_ROOT = 8, LAKE_BLAKE3_KEYED = 16 };

static const uint32_t lake_blake3_iv[4] = {0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au};
static const uint8_t lake_blake3_order[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

static inline uint32_t lake_blake3_turn(uint32_t word, int count)
{
    return word >> count | word << (32 - count);
}

static inline void lake_blake3_mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y)
{
    v[a] += v[b] + x;
    v[d] = lake_blake3_turn(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = lake_blake3_turn(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = lake_blake3_turn(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = lake_blake3_turn(v[b] ^ v[c], 7);
}

/* Replaces a chaining value by that behind one block of `length` bytes, padded with zeros.  x86 is little-endian. */
static void lake_blake3_block(uint32_t *chaining, const uint8_t *block, uint32_t length, uint32_t flags)
{
    uint32_t m[16], v[16];
    memcpy(m, block, sizeof m);
    memcpy(v, chaining, 32);
    memcpy(v + 8, lake_blake3_iv, 16);
    v[12] = v[13] = 0; /* number of the chunk */
    v[14] = length;
    v[15] = flags;
    for (int round = 0; round < 7; round++) {
        const uint8_t *at = lake_blake3_order[round];
        for (int i = 0; i < 4; i++)
            lake_blake3_mix(v, i, 4 + i, 8 + i, 12 + i, m[at[2 * i]], m[at[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            lake_blake3_mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[at[8 + 2 * i]],
                            m[at[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++)
        chaining[i] = v[i] ^ v[i + 8];
}

/* Returns the position of a key of 1 to LAKE_HOME_KEY_BYTES_MAX bytes. */
static uint64_t lake_key_position(const uint8_t *hash_key, uint64_t space, const uint8_t *key, size_t length)
{
    uint8_t text[2 * LAKE_HOME_BLOCK_BYTES] = {0};
    uint32_t chaining[8], total = 8 + (uint32_t)length, first = LAKE_BLAKE3_KEYED | LAKE_BLAKE3_CHUNK_START;
    uint64_t digest;
    memcpy(text, &space, 8);
    memcpy(text + 8, key, length);
    memcpy(chaining, hash_key, sizeof chaining);
    if (total > LAKE_HOME_BLOCK_BYTES) {
        lake_blake3_block(chaining, text, LAKE_HOME_BLOCK_BYTES, first);
        lake_blake3_block(chaining, text + LAKE_HOME_BLOCK_BYTES, total - LAKE_HOME_BLOCK_BYTES,
                          LAKE_BLAKE3_KEYED | LAKE_BLAKE3_CHUNK_END | LAKE_BLAKE3_ROOT);
    } else {
        lake_blake3_block(chaining, text, total, first | LAKE_BLAKE3_CHUNK_END | LAKE_BLAKE3_ROOT);
    }
    memcpy(&digest, chaining, 8);
    return __builtin_bswap64(digest);
}

/* A ring: the positions of its vnodes, ascending, then the home of each, a number of 2 bytes. */
typedef struct {
    const uint8_t *hash_key;
    const uint8_t *positions;
    const uint8_t *homes;
    size_t count;
} lake_key_ring;

/* Returns the home of a position; LAKE_HOME_NOWHERE on an empty ring.  The ring may be any bytes. */
static uint16_t lake_key_home(const lake_key_ring *ring, uint64_t position)
{
    size_t low = 0, high = ring->count, middle;
    uint64_t found;
    uint16_t home;
    if (!ring->count)
        return LAKE_HOME_NOWHERE;
    while (low < high) {
        middle = low + (high - low) / 2;
        memcpy(&found, ring->positions + 8 * middle, 8);
        if (found < position)
            low = middle + 1;
        else
            high = middle;
    }
    memcpy(&home, ring->homes + 2 * (low < ring->count ? low : 0), 2);
    return home;
}

#endif
