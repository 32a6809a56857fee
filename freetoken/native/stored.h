/* An expert's stored tensors laid into all tiles of its record by one call (stored.cpp); the mirror is
 * native/stored.py. A format and a dialect come as data: a step for each stored tensor of each matrix. */
#ifndef FREETOKEN_STORED_H
#define FREETOKEN_STORED_H

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ft_step_kind {
  FT_STEP_CODES = 0,  /* rows of a code a byte, into words of two */
  FT_STEP_PART = 1,   /* a grid of numbers; down's is transposed */
  FT_STEP_SINGLE = 2, /* one number for a matrix */
  FT_STEP_HALVES = 3, /* a grid as float16, and the power of two that all of it was divided by, as float32 */
  FT_STEP_NIBBLES = 4, /* rows of two codes a byte, the low one first, into words of four */
  FT_STEP_EIGHTS = 5, /* nothing is laid: all must be 8 */
  FT_STEP_SORTED = 6  /* likewise: int32, none smaller than the one before */
};
enum ft_numbers {
  FT_AS_THEY_LIE = 0, FT_FROM_BF16 = 1, FT_FROM_F16 = 2, FT_FROM_F32 = 3, FT_RECIPROCAL = 4,
  FT_TURNED = 5, /* words of eight neighbours of a row lie one below the other */
  FT_FIELDS = 6  /* words hold a column of eight rows, four bits each */
};
enum ft_finite { FT_ANY = 0, FT_FINITE_E4M3 = 1, FT_FINITE_F16 = 2, FT_FINITE_F32 = 3, FT_FINITE_E8M0 = 4 };

typedef struct ft_step {
  uint32_t kind, tensor; /* which of the stored tensors */
  uint32_t numbers;      /* what becomes of them; from types and reciprocals: float32, or halves */
  uint32_t finite;       /* what the result must be */
  uint32_t item, down;   /* bytes of a number in the tile */
  uint32_t order, more;  /* of fields: the four bits of order that say which one a row's is; what is added to it */
  int64_t start, row;    /* bytes: to the first row, from row to row (of fields: of eight rows, or words turned) */
  int64_t column;        /* likewise from column to column */
  int64_t rows, columns; /* of the grid; of codes, rows and bytes of one (item 1) */
  int64_t span, lines;   /* of I: what one line of a part covers, and the lines of a tile */
  int64_t offsets[2];    /* in a tile: of codes or the part, and of its power of two */
} ft_step;

/* Tiles are `tile_step` bytes apart, their first `used` bytes are written; shape is H, w of I, tiles. Returns -1,
 * or the number of a step whose numbers can't be that: nothing is written then. */
FT_API int ft_lay(const ft_step* steps, int count, const uint8_t* const* tensors, const int64_t shape[3],
                  uint8_t* tiles, int64_t tile_step, int64_t used);

/* Bytes of a file. cached: a handle through the page cache; direct: one past it, or -1. */
typedef struct ft_span {
  int32_t cached, direct;
  int64_t offset, num_bytes, least; /* a file may end after `least` */
  uint8_t* into;                    /* 4096-byte aligned, as are offset and num_bytes, for `direct` */
} ft_span;

/* Read them one after the other; first_cached: what lies in the page cache from there, whatever `direct` is.
 * Returns -1, or the number of the span whose file ended early or failed. */
FT_API int ft_read_spans(const ft_span* spans, int count, int first_cached);

#ifdef __cplusplus
}
#endif
#endif
