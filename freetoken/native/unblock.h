/* GGUF blocks cut into a tile's streams (unblock.cpp). A format comes as data; the mirror is native/unblock.py. */
#ifndef FREETOKEN_UNBLOCK_H
#define FREETOKEN_UNBLOCK_H

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FT_FIELDS_MOST 8
#define FT_PARTS_MOST 8

enum ft_field_kind { FT_FIELD_RAW = 0, FT_FIELD_DIGITS = 1, FT_FIELD_SIX_BITS = 2 };
enum ft_check { FT_CHECK_NONE = 0, FT_CHECK_HALF = 1, FT_CHECK_E8M0 = 2 };

/* A part of each block: bytes as they lie, or digits of `bits` in runs of `run` bytes, going to bits `at` and up. */
typedef struct ft_field {
  uint8_t into; /* 0: codes, p + 1: part p; six bits go to `into` and the next */
  uint8_t kind, bits, at;
  uint16_t num_bytes, run;
} ft_field;

typedef struct ft_blocks {
  uint32_t num_fields, num_planes, num_parts;
  uint32_t columns, block_bytes; /* of a block */
  uint32_t words;                /* 0: codes lie as bytes */
  uint32_t plane_bits[2];
  uint32_t part_bytes[FT_PARTS_MOST], part_columns[FT_PARTS_MOST], part_check[FT_PARTS_MOST];
  ft_field fields[FT_FIELDS_MOST];
} ft_blocks;

/* Rows [rows, columns] of a matrix, `step` bytes apart, into the streams of gate or up (planes, then parts).
 * Returns 1 if a factor is not a finite number, and has then written some of it; else 0. */
FT_API int ft_unblock_rows(const ft_blocks*, const uint8_t* raw, int64_t step, int64_t rows, int64_t columns,
                           uint8_t* const* streams);
/* Likewise w columns of down, from each of its `hidden` rows: `raw` points at the first of them. */
FT_API int ft_unblock_down(const ft_blocks*, const uint8_t* raw, int64_t step, int64_t hidden, int64_t w,
                           uint8_t* const* streams);
/* All tiles of a matrix, w of its I columns each: `streams` are those of the first tile, the next one's lie
 * `tile_step` bytes further. */
FT_API int ft_unblock_tiles(const ft_blocks*, const uint8_t* raw, int64_t step, int64_t hidden, int64_t w,
                            int64_t count, uint8_t* const* streams, int64_t tile_step, int down);

#ifdef __cplusplus
}
#endif
#endif
