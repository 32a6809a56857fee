// Products of many rows of x with codes that lie in panels, whatever format they came from (int8_panel.cpp).
#pragma once
#include "int8.h"

namespace FT_NS {

constexpr int TALL = 16;     // rows of weights in a panel
constexpr int STRIP = 256;   // columns of down at most

// Quantised rows.
struct Octets {
  const uint8_t* rows;
  int64_t stride;
  int num_rows;
};

// 16 rows of weights: dwords [padded / 4][16] in the order of x's, steps and offsets (or null) [padded / SPAN][16].
struct Panel {
  uint32_t* codes;
  float *steps, *offsets;
  int64_t padded;
};
// out[r * os + lane] = the dots of row r of x.
template <int SPAN, int D, bool WIDE>
void panel_dots(const Panel& panel, const Octets& x, float* out, int64_t os);

// W lanes of columns of down; codes in the order of the middle's dwords.
struct Strip {
  alignas(64) uint32_t codes[STRIP / 4][W];
  alignas(64) float steps[STRIP / 16][W], offsets[STRIP / 16][W];
};
// out[r * os + lane] (+)= columns [i0, i1) times the middle.
template <int SPAN, bool WIDE, bool OFFSET>
void strip_dots(const Strip& strip, int i0, int i1, const Octets& mid, int64_t padded, float* out, int64_t os,
                bool fresh);

// y of rows [r, r + count) and 16 columns from i on: sums [count, 16], the bias added, rounded once.
void put_sums(const MatrixJob& job, int64_t r, int64_t i, int count, const float* sums);

}  // namespace FT_NS
