// What one ISA tier offers: plain function pointers, so that nothing of a tier's code leaks into another.
// Files compiled for a tier include this, simd.h and each other only, never a std header: an inline
// function from one could be kept by the linker in its AVX-512 copy and run on a machine without it.
#pragma once
#include <stdint.h>

#include "api.h"

constexpr int FT_ROWS = 32;  // rows of x that one chunk computes at most, unless a format says otherwise

// A run of tiles of one expert over a few rows.
struct TileJob {
  const ft_layer* layer;
  const uint8_t* record;
  int first, last;            // tiles
  int from, to;               // their columns; of one tile alone others than all
  const void* x;              // [tokens, H] of x_dtype
  const int32_t* rows;        // num_rows tokens; -1 = a padding row, whose output is zero
  int num_rows;               // <= the format's most_rows
  int x_dtype;                // ft_dtype
  float* out;                 // [num_rows, H], overwritten with the sum over the tiles, ascending
  uint8_t* scratch;           // scratch_bytes(layer), 64-byte aligned, private to the thread
  const uint8_t* next = nullptr;  // tile that the thread computes next, worth prefetching from that column on; null: not known
  int next_from = 0;
  bool same_rows = false;  // as its last job, so what `scratch` holds of x is still good
};

// A coded matrix w [n, k] times rows of x, x, bias and y of dtype; or as numbers, y float [n, k].
struct MatrixJob {
  const void *x, *w, *bias;
  void* y;
  int64_t rows, n, k;
  int dtype;
};

// Some of a tile's weights as floats, in whole steps of 32: numbers [from, to) of rows [first, last) of gate (0) or up
// (1), or of columns of down (2). Rows of `out` follow each other.
struct WeightsJob {
  const ft_layer* layer;
  const uint8_t* tile;
  int matrix, first, last;
  int64_t from, to;  // from a multiple of 32
  float* out;
};

struct PreparedFormat;  // prepared.h
struct DigitCodes;      // digits.h

struct TileFormat {
  const char* name;
  void (*run)(const TileJob& job);
  uint64_t (*tile_bytes)(uint32_t tile_width, uint32_t hidden);  // 0: that shape can't be
  // A coded matrix [n, k]: its bytes; its rows [first, last) times x, or as floats. Null: plain formats have LinearJob.
  uint64_t (*matrix_bytes)(int64_t rows, int64_t columns);
  void (*matrix)(const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch);
  void (*numbers)(const MatrixJob& job, int64_t first, int64_t last);
  void (*weights)(const WeightsJob& job) = nullptr;  // may be null
  int most_rows = FT_ROWS;
  uint64_t (*scratch)(uint32_t hidden, uint32_t tile_width) = nullptr;  // null: scratch_bytes
  const PreparedFormat* many = nullptr;  // `matrix` for more rows of bfloat16 than FT_ROWS; null: there is none
  const DigitCodes* digits = nullptr;    // of four-bit codes that the tier above multiplies as bytes; null: not these
  int cut = 0;  // a tile may be computed in pieces of multiples of so many columns; 0: only as a whole
};

// Rows [first, last) of w, times all rows of x; bias and residual may be null.
struct LinearJob {
  const void *x, *w, *bias, *residual;
  void* y;
  int64_t rows, n, k;
  int dtype;
};

struct TierOps;  // ops.h

struct TierKernels {
  const char* name;
  const TileFormat* const* formats;
  // total[i] += parts[0][i], then parts[1][i] and so on; parts lie `stride` floats apart
  void (*add)(float* total, const float* parts, int64_t num_parts, int64_t stride, int64_t count);
  // y[i] = sum over routes, one after the other, of weights[r] rows[places[r]][i]; places < 0 add nothing
  void (*combine)(float* y, const float* rows, const int32_t* places, const float* weights, int64_t routes,
                  int64_t count);
  void (*linear)(const LinearJob& job, int64_t first, int64_t last, uint8_t* scratch);
  uint64_t (*read)(const void* data, uint64_t num_bytes);
  const TierOps* ops;
  // `width` numbers of dtype from element `at` on, as floats
  void (*widen)(const void* x, int dtype, int64_t at, int64_t width, float* out);
};

// How far ahead to prefetch, bytes; 0 on AMD, whose own prefetching is better left alone (Zen 4: 25 GB/s a thread
// against 20). ft_row_ahead: along two rows in turns, into L1; ft_row_near: along one after the other, into L2, just
// before the CPU would (Emerald Rapids: 9 % more than 4096 into L1).
extern const int ft_row_ahead, ft_row_near;

inline uint64_t ft_align(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Rows of x as the engine wants them, running sums, and gate, up, middle of one tile.
inline uint64_t scratch_bytes(uint64_t width, uint64_t tile_width) {
  uint64_t padded = ft_align(width, 256) * 9 / 8 + 64;
  return FT_ROWS * (2 * padded * 4 + 3 * (ft_align(tile_width, 64) + 32) * 4) + 4096;
}
inline uint64_t scratch_bytes(const TileFormat& f, uint32_t width, uint32_t tile_width) {
  return f.scratch ? f.scratch(width, tile_width) : scratch_bytes(width, tile_width);
}
