/* CRC32C (Castagnoli) of bytes in memory, for native modules.

   A processor has the result of one CRC instruction three cycles later, and begins another in each cycle: so three
   parts of the bytes are gone through side by side, and their CRCs joined.  To join is to multiply by a power of x in
   GF(2) modulo the polynomial, done with four tables of 256 entries (the method is Mark Adler's, crc32c.c, 2013).
   Without the instruction: one table.

   `lake_crc32c_begin` is called once before the first use. */
#ifndef LAKE_CRC32C_H
#define LAKE_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#define LAKE_CRC_TARGET __attribute__((target("sse4.2")))
#define LAKE_CRC_WORD(crc, word) _mm_crc32_u64((crc), (word))
#define LAKE_CRC_BYTE(crc, byte) _mm_crc32_u8((uint32_t)(crc), (byte))
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define LAKE_CRC_TARGET __attribute__((target("+crc")))
#define LAKE_CRC_WORD(crc, word) __builtin_aarch64_crc32cx((uint32_t)(crc), (word))
#define LAKE_CRC_BYTE(crc, byte) __builtin_aarch64_crc32cb((uint32_t)(crc), (byte))
#define LAKE_HWCAP_CRC32 (1 << 7)
#endif

#define LAKE_CRC_POLYNOMIAL 0x82F63B78u
#define LAKE_CRC_LONG 8192 /* bytes of each of the three parts */
#define LAKE_CRC_SHORT 256

typedef uint32_t lake_crc_shift[4][256];

static uint32_t lake_crc_of_byte[256];
static lake_crc_shift lake_crc_long, lake_crc_short;
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
        lake_crc_of_byte[byte] = crc;
    }
    lake_crc_fill(lake_crc_long, LAKE_CRC_LONG);
    lake_crc_fill(lake_crc_short, LAKE_CRC_SHORT);
#if defined(__x86_64__)
    __builtin_cpu_init();
    lake_crc_has_instruction = __builtin_cpu_supports("sse4.2");
#elif defined(LAKE_HWCAP_CRC32)
    lake_crc_has_instruction = (getauxval(AT_HWCAP) & LAKE_HWCAP_CRC32) != 0;
#endif
}

static uint32_t lake_crc32c_by_table(const uint8_t *from, size_t length)
{
    uint32_t crc = ~UINT32_C(0);
    for (size_t at = 0; at < length; at++)
        crc = (crc >> 8) ^ lake_crc_of_byte[(crc ^ from[at]) & 255];
    return ~crc;
}

#ifdef LAKE_CRC_WORD
static inline uint64_t lake_crc_load(const uint8_t *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

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
    for (; length >= 3 * LAKE_CRC_LONG; from += 3 * LAKE_CRC_LONG, length -= 3 * LAKE_CRC_LONG)
        crc = lake_crc_of_three((uint32_t)crc, from, LAKE_CRC_LONG, lake_crc_long);
    for (; length >= 3 * LAKE_CRC_SHORT; from += 3 * LAKE_CRC_SHORT, length -= 3 * LAKE_CRC_SHORT)
        crc = lake_crc_of_three((uint32_t)crc, from, LAKE_CRC_SHORT, lake_crc_short);
    for (; length >= 8; from += 8, length -= 8)
        crc = LAKE_CRC_WORD(crc, lake_crc_load(from));
    for (; length; from++, length--)
        crc = LAKE_CRC_BYTE(crc, *from);
    return ~(uint32_t)crc;
}
#endif

static inline uint32_t lake_crc32c(const uint8_t *from, size_t length)
{
#ifdef LAKE_CRC_WORD
    if (lake_crc_has_instruction)
        return lake_crc32c_by_instruction(from, length);
#endif
    return lake_crc32c_by_table(from, length);
}

#endif
