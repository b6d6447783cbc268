/* CRC32C (Castagnoli) of bytes in memory, for native modules.

   A processor has the result of one CRC instruction three cycles later, and begins another in each cycle: so three
   parts of the bytes are gone through side by side, and their CRCs joined.  To join is to multiply by a power of x in
   GF(2) modulo the polynomial, done with four tables of 256 entries (the method is Mark Adler's, crc32c.c, 2013).  The
   longest parts are the thirds of a granule (64 KiB) without its last 16 bytes: most of what is checked is granules,
   and each has one join.
   Without the instruction: eight tables (Kounavis and Berry, "Slicing-by-8", 2005).

   `lake_crc32c_begin` is called once before the first use. */
#ifndef LAKE_CRC32C_H
#define LAKE_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bytes of a store are little-endian"
#endif
#if defined(__x86_64__)
#include <nmmintrin.h>
#define LAKE_CRC_TARGET __attribute__((target("sse4.2")))
#define LAKE_CRC_WORD(crc, word) _mm_crc32_u64((crc), (word))
#define LAKE_CRC_HALF(crc, half) _mm_crc32_u32((uint32_t)(crc), (half))
#define LAKE_CRC_BYTE(crc, byte) _mm_crc32_u8((uint32_t)(crc), (byte))
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define LAKE_CRC_TARGET __attribute__((target("+crc")))
#define LAKE_CRC_WORD(crc, word) __builtin_aarch64_crc32cx((uint32_t)(crc), (word))
#define LAKE_CRC_HALF(crc, half) __builtin_aarch64_crc32cw((uint32_t)(crc), (half))
#define LAKE_CRC_BYTE(crc, byte) __builtin_aarch64_crc32cb((uint32_t)(crc), (byte))
#define LAKE_HWCAP_CRC32 (1 << 7)
#endif

#define LAKE_CRC_POLYNOMIAL 0x82F63B78u
#define LAKE_CRC_LONG 21840 /* bytes of each of the three parts */
#define LAKE_CRC_MIDDLE 2048
#define LAKE_CRC_SHORT 256

typedef uint32_t lake_crc_shift[4][256];

static uint32_t lake_crc_tables[8][256]; /* of a byte that so many others follow */
static lake_crc_shift lake_crc_long, lake_crc_middle, lake_crc_short;
static int lake_crc_has_instruction;

/* The product of two polynomials, bit-reflected, modulo CRC32C's. */
static uint32_t lake_crc_times(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    for (uint32_t bit = UINT32_C(1) << 31; bit; bit >>= 1) {
        if (left & bit)
            product ^= right;
        right = (right >> 1) ^ (LAKE_CRC_POLYNOMIAL & (0u - (right & 1)));
    }
    return product;
}

/* Fills the tables that move a CRC over `length` bytes of zeros. */
static void lake_crc_fill(lake_crc_shift into, size_t length)
{
    uint32_t power = UINT32_C(1) << 31, square = UINT32_C(1) << 23; /* x^0 and x^8 */
    for (; length; length >>= 1) {
        if (length & 1)
            power = lake_crc_times(power, square);
        square = lake_crc_times(square, square);
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int at = 0; at < 4; at++)
            into[at][byte] = lake_crc_times(power, byte << (8 * at));
}

static void lake_crc32c_begin(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (LAKE_CRC_POLYNOMIAL & (0u - (crc & 1)));
        lake_crc_tables[0][byte] = crc;
    }
    for (int after = 1; after < 8; after++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = lake_crc_tables[after - 1][byte];
            lake_crc_tables[after][byte] = (crc >> 8) ^ lake_crc_tables[0][crc & 255];
        }
    lake_crc_fill(lake_crc_long, LAKE_CRC_LONG);
    lake_crc_fill(lake_crc_middle, LAKE_CRC_MIDDLE);
    lake_crc_fill(lake_crc_short, LAKE_CRC_SHORT);
#if defined(__x86_64__)
    __builtin_cpu_init();
    lake_crc_has_instruction = __builtin_cpu_supports("sse4.2");
#elif defined(LAKE_HWCAP_CRC32)
    lake_crc_has_instruction = (getauxval(AT_HWCAP) & LAKE_HWCAP_CRC32) != 0;
#endif
}

static inline uint64_t lake_crc_load(const uint8_t *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Not inlined, so that callers stay short where the processor has the instruction. */
__attribute__((noinline))
static uint32_t lake_crc32c_by_tables(const uint8_t *from, size_t length)
{
    uint32_t crc = ~UINT32_C(0);
    size_t at = 0;
    for (; at + 8 <= length; at += 8) {
        uint64_t word = lake_crc_load(from + at) ^ crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++)
            crc ^= lake_crc_tables[7 - byte][word >> (8 * byte) & 255];
    }
    for (; at < length; at++)
        crc = (crc >> 8) ^ lake_crc_tables[0][(crc ^ from[at]) & 255];
    return ~crc;
}

#ifdef LAKE_CRC_WORD
static inline uint32_t lake_crc_moved(lake_crc_shift shift, uint32_t crc)
{
    return shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^ shift[3][crc >> 24];
}

/* Goes through three parts of `part` bytes, which follow each other. */
LAKE_CRC_TARGET
static inline uint32_t lake_crc_of_three(uint32_t crc, const uint8_t *from, size_t part, lake_crc_shift shift)
{
    uint64_t first = crc, second = 0, third = 0;
    for (size_t at = 0; at < part; at += 8) {
        first = LAKE_CRC_WORD(first, lake_crc_load(from + at));
        second = LAKE_CRC_WORD(second, lake_crc_load(from + part + at));
        third = LAKE_CRC_WORD(third, lake_crc_load(from + 2 * part + at));
    }
    return lake_crc_moved(shift, lake_crc_moved(shift, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

LAKE_CRC_TARGET
static uint32_t lake_crc32c_by_instruction(const uint8_t *from, size_t length)
{
    uint64_t crc = ~UINT32_C(0);
    if (length >= 3 * LAKE_CRC_SHORT) {
        for (; length >= 3 * LAKE_CRC_LONG; from += 3 * LAKE_CRC_LONG, length -= 3 * LAKE_CRC_LONG)
            crc = lake_crc_of_three((uint32_t)crc, from, LAKE_CRC_LONG, lake_crc_long);
        for (; length >= 3 * LAKE_CRC_MIDDLE; from += 3 * LAKE_CRC_MIDDLE, length -= 3 * LAKE_CRC_MIDDLE)
            crc = lake_crc_of_three((uint32_t)crc, from, LAKE_CRC_MIDDLE, lake_crc_middle);
        for (; length >= 3 * LAKE_CRC_SHORT; from += 3 * LAKE_CRC_SHORT, length -= 3 * LAKE_CRC_SHORT)
            crc = lake_crc_of_three((uint32_t)crc, from, LAKE_CRC_SHORT, lake_crc_short);
    }
    for (; length >= 8; from += 8, length -= 8)
        crc = LAKE_CRC_WORD(crc, lake_crc_load(from));
    if (length >= 4) {
        uint32_t half;
        memcpy(&half, from, sizeof half);
        crc = LAKE_CRC_HALF(crc, half);
        from += 4;
        length -= 4;
    }
    for (; length; from++, length--)
        crc = LAKE_CRC_BYTE(crc, *from);
    return ~(uint32_t)crc;
}

LAKE_CRC_TARGET
static inline void lake_crc32c_of_four_by_instruction(const uint8_t *from, size_t part, uint32_t *crcs)
{
    uint64_t first = ~UINT32_C(0), second = first, third = first, fourth = first;
    for (size_t at = 0; at < part; at += 8) {
        first = LAKE_CRC_WORD(first, lake_crc_load(from + at));
        second = LAKE_CRC_WORD(second, lake_crc_load(from + part + at));
        third = LAKE_CRC_WORD(third, lake_crc_load(from + 2 * part + at));
        fourth = LAKE_CRC_WORD(fourth, lake_crc_load(from + 3 * part + at));
    }
    crcs[0] = ~(uint32_t)first;
    crcs[1] = ~(uint32_t)second;
    crcs[2] = ~(uint32_t)third;
    crcs[3] = ~(uint32_t)fourth;
}

LAKE_CRC_TARGET
static inline uint64_t lake_crc_copied(uint64_t crc, const uint8_t *from, uint8_t *into)
{
    uint64_t word = lake_crc_load(from);
    memcpy(into, &word, sizeof word);
    return LAKE_CRC_WORD(crc, word);
}

LAKE_CRC_TARGET
static inline void lake_crc32c_copy_four_by_instruction(const uint8_t *from, uint8_t *into, size_t part, uint32_t *crcs)
{
    uint64_t first = ~UINT32_C(0), second = first, third = first, fourth = first;
    for (size_t at = 0; at < part; at += 8) {
        first = lake_crc_copied(first, from + at, into + at);
        second = lake_crc_copied(second, from + part + at, into + part + at);
        third = lake_crc_copied(third, from + 2 * part + at, into + 2 * part + at);
        fourth = lake_crc_copied(fourth, from + 3 * part + at, into + 3 * part + at);
    }
    crcs[0] = ~(uint32_t)first;
    crcs[1] = ~(uint32_t)second;
    crcs[2] = ~(uint32_t)third;
    crcs[3] = ~(uint32_t)fourth;
}
#endif

static inline uint32_t lake_crc32c(const uint8_t *from, size_t length)
{
#ifdef LAKE_CRC_WORD
    if (__builtin_expect(lake_crc_has_instruction, 1))
        return lake_crc32c_by_instruction(from, length);
#endif
    return lake_crc32c_by_tables(from, length);
}

/* Writes the CRCs of four parts of `part` bytes, a multiple of 8, which follow each other.

   As fast as `lake_crc32c` of each in the processor's cache, and 1.4 times as fast from memory: the processor fetches
   ahead for each of four places that lie far apart. */
static inline void lake_crc32c_of_four(const uint8_t *from, size_t part, uint32_t *crcs)
{
#ifdef LAKE_CRC_WORD
    if (__builtin_expect(lake_crc_has_instruction, 1)) {
        lake_crc32c_of_four_by_instruction(from, part, crcs);
        return;
    }
#endif
    for (int at = 0; at < 4; at++)
        crcs[at] = lake_crc32c_by_tables(from + (size_t)at * part, part);
}

/* Copies four parts of `part` bytes, a multiple of 8, which follow each other, and writes the CRCs of the copies.

   Takes as long as copying alone: each word is summed on its way.  Others may write to `from` during the copy; the CRCs
   are of the bytes at `into` all the same. */
static inline void lake_crc32c_copy_four(const uint8_t *from, uint8_t *into, size_t part, uint32_t *crcs)
{
#ifdef LAKE_CRC_WORD
    if (__builtin_expect(lake_crc_has_instruction, 1)) {
        lake_crc32c_copy_four_by_instruction(from, into, part, crcs);
        return;
    }
#endif
    memcpy(into, from, 4 * part);
    lake_crc32c_of_four(into, part, crcs);
}

#endif
