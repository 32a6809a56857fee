// One coded matrix [N, K] times a few rows of x: what a dense layer asks of a format's tile of one matrix.
//
// The format's class gives dots<R, 2>, as for gate and up of experts (engine.h); pairs of rows of W are walked
// side by side. A row of x has the same bits alone and in a batch, and whoever computes which rows of W.
#pragma once
#include "coded.h"  // which ends by including this

namespace FT_NS {

FT_INLINE void matrix_x(const MatrixJob& job, int64_t r, float* out) { widen(job.x, job.dtype, r * job.k, job.k, out); }
FT_INLINE void matrix_x(const MatrixJob& job, int64_t r, uint16_t* out) {
  memcpy(out, (const uint16_t*)job.x + r * job.k, job.k * 2);
}

FT_INLINE void put_number(const MatrixJob& job, int64_t r, int64_t i, float v) {
  const int64_t at = r * job.n + i;
  if (job.dtype == FT_BF16) {
    if (job.bias) v += bf16_to_float(((const uint16_t*)job.bias)[i]);
    ((uint16_t*)job.y)[at] = float_to_bf16(v);
  } else if (job.dtype == FT_F16) {
    if (job.bias) v += f16_to_float(((const uint16_t*)job.bias)[i]);
    ((uint16_t*)job.y)[at] = float_to_f16(v);
  } else {
    if (job.bias) v += ((const float*)job.bias)[i];
    ((float*)job.y)[at] = v;
  }
}

// Rows i and i + 1 of W for all rows of x; the last one alone goes with itself, which spares a loop of its own.
template <class Format>
FT_INLINE void matrix_rows(const Format& f, const MatrixJob& job, int64_t i, int count, const typename Format::X* x,
                           int64_t xs) {
  const int m[2] = {}, at[2] = {(int)i, (int)i + count - 1};
  const int rows_left = (int)job.rows;
#define FT_CALL(R)                                                          \
  {                                                                         \
    float out[2][R];                                                        \
    f.template dots<R, 2>(m, at, x + r * xs, xs, out);                      \
    for (int n = 0; n < count; n++)                                         \
      for (int q = 0; q < R; q++) put_number(job, r + q, i + n, out[n][q]); \
  }
  FT_ROW_GROUPS(rows_left, FT_CALL)
#undef FT_CALL
}

// scratch: rows of x as the format wants them, x_stride(k) numbers of at most four bytes each.
template <class Format>
static void run_matrix(const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch) {
  typedef typename Format::X X;
  const Format f(Shape(job.n, job.k, 1), (const uint8_t*)job.w);
  const int64_t xs = x_stride(job.k);
  X* x = (X*)scratch;
  for (int64_t r = 0; r < job.rows; r++) {
    matrix_x(job, r, x + r * xs);
    memset(x + r * xs + job.k, 0, (xs - job.k) * sizeof(X));
  }
  Format::prepare(x, xs, job.k, (int)job.rows);
  for (int64_t i = first; i < last; i += 2) matrix_rows(f, job, i, last - i < 2 ? 1 : 2, x, xs);
}

// Rows [first, last) of W as floats, job.y being row 0.
template <class Tile>
static void matrix_numbers(const MatrixJob& job, int64_t first, int64_t last) {
  const Tile tile(Shape(job.n, job.k, 1), (const uint8_t*)job.w);
  for (int64_t i = first; i < last; i++)
    for (int64_t k = 0; k < job.k; k += STEP) {
      F w[V];
      tile.row(0, (int)i, k, w);
      float* out = (float*)job.y + i * job.k + k;
      for (int v = 0; v < V; v++) store(out + v * W, w[v]);
    }
}

template <class Tile>
static void tile_weights(const WeightsJob& job) {
  const Tile tile(Shape(*job.layer), job.tile);
  float* out = job.out;
  for (int i = job.first; i < job.last; i++)
    for (int64_t k = job.from; k < job.to; k += STEP, out += STEP) {
      F w[V];
      if (job.matrix < 2) tile.row(job.matrix, i, k, w);
      else tile.down(i, k, w);
      for (int v = 0; v < V; v++) store(out + v * W, w[v]);
    }
}

template <class Tile>
static uint64_t matrix_bytes(int64_t rows, int64_t columns) {
  const Shape shape(rows, columns, 1);
  return Tile(shape, nullptr).size(shape, nullptr);
}

}  // namespace FT_NS
