/* A chunk's place in the shared index, and the ports by which other native modules look places up. */
#ifndef LAKE_PLACE_H
#define LAKE_PLACE_H

#include <stdint.h>

#define LAKE_TIER_SEGMENT 1
#define LAKE_TIER_DRAM 3 /* `segment` is slab and generation in one number: `lakefs.shared_index.table_format` */
#define LAKE_GENERATION_BITS 48
#define LAKE_PLACES_CAPSULE "lake_places"

typedef struct {
    uint64_t segment;
    uint32_t offset, stored_bytes, crc, tier;
} lake_place;
_Static_assert(sizeof(lake_place) == 24, "as PLACE of the format");

typedef struct {
    const void *table;
    /* Returns 1 and the place of a chunk, by its id of 33 bytes; 0 if it is not known. */
    int (*find)(const void *table, const uint8_t *chunk, lake_place *place);
} lake_places;

#define LAKE_SEEKER_CAPSULE "lake_seeker"
#define LAKE_ID_BYTES 33

/* A port for whoever has to know that something is not in the table. */
typedef struct {
    const void *table;
    void (*prefetch)(const void *table, const uint8_t *id);
    /* Returns 1 and the place; 0: the id was not in the table at a moment of this call; -1: it cannot be told, because
       the table was changed all the time. */
    int (*seek)(const void *table, const uint8_t *id, lake_place *place);
} lake_seeker;

#endif
