// Dense products of a few rows with plain weights, as fast as memory gives the weights.
//
// For one row of x, one row of weights after the other, which is memory's own order. For more, two neighbouring
// rows side by side; what is prefetched then lies ahead along the pair, not along each row (measured: 21 GB/s a
// thread against 15). Either way a row's sum is one chain: the same bits.
#include "engine.h"

namespace FT_NS {

template <class T, F (*Convert)(const T*)>
static void linear_rows(const LinearJob& job, int64_t first, int64_t last, const float* x, int64_t xs,
                        float* y) {
  const T* w = (const T*)job.w;
  const int rows_left = (int)job.rows;
  const int64_t ys = last - first;
  int64_t i = first;
  for (; rows_left > ALONE && i + 2 <= last; i += 2) {
    const T* pair[2] = {w + i * job.k, w + (i + 1) * job.k};
#define FT_CALL(R)                                                             \
  {                                                                            \
    float dots[2][R];                                                          \
    plain_dots<T, Convert, R, 2, true>(pair, x + r * xs, xs, job.k, dots);           \
    for (int c = 0; c < 2; c++)                                                \
      for (int q = 0; q < R; q++) y[(r + q) * ys + i - first + c] = dots[c][q]; \
  }
    FT_ROW_GROUPS(rows_left, FT_CALL)
#undef FT_CALL
  }
  for (; i < last; i++) {
    const T* one[1] = {w + i * job.k};
#define FT_CALL(R)                                                     \
  {                                                                    \
    float dots[1][R];                                                  \
    plain_dots<T, Convert, R, 1>(one, x + r * xs, xs, job.k, dots);    \
    for (int q = 0; q < R; q++) y[(r + q) * ys + i - first] = dots[0][q]; \
  }
    FT_ROW_GROUPS(rows_left, FT_CALL)
#undef FT_CALL
  }
}

#if defined(FT_BF16_DOT)
template <int R>
FT_INLINE void pair_dots(const uint16_t* const (&rows)[2], const uint16_t* x, int64_t xs, int64_t k_size,
                         float (&out)[2][R]) {
  F acc[2][R];
  for (int c = 0; c < 2; c++)
    for (int r = 0; r < R; r++) acc[c][r] = zero();
  int64_t k = 0;
  for (; k + 32 <= k_size; k += 32)
    for (int c = 0; c < 2; c++) {
      FT_PREFETCH((const char*)(rows[0] + 2 * k + 32 * c) + AHEAD);
      I weight = _mm512_loadu_si512(rows[c] + k);
      for (int r = 0; r < R; r++)
        acc[c][r] = _mm512_dpbf16_ps(acc[c][r], (__m512bh)weight,
                                     (__m512bh)_mm512_loadu_si512(x + r * xs + k));
    }
  if (k < k_size)
    for (int c = 0; c < 2; c++) {
      I weight = _mm512_maskz_loadu_epi16((__mmask32)((1ull << (k_size - k)) - 1), rows[c] + k);
      for (int r = 0; r < R; r++)
        acc[c][r] = _mm512_dpbf16_ps(acc[c][r], (__m512bh)weight,
                                     (__m512bh)_mm512_loadu_si512(x + r * xs + k));
    }
  for (int c = 0; c < 2; c++)
    for (int r = 0; r < R; r++) out[c][r] = sum(acc[c][r]);
}

static void linear_pairs(const LinearJob& job, int64_t first, int64_t last, const uint16_t* x, int64_t xs,
                         float* y) {
  const uint16_t* w = (const uint16_t*)job.w;
  const int rows_left = (int)job.rows;
  const int64_t ys = last - first;
  for (int64_t i = first; rows_left <= ALONE && i < last; i++) {
    const uint16_t* row = w + i * job.k;
    const uint8_t* far = (const uint8_t*)row + ft_row_near;
#define FT_CALL(R)                                                              \
  {                                                                             \
    float dots[R];                                                              \
    row_dots<R>(row, x + r * xs, xs, job.k, far, (const uint8_t*)x, dots);      \
    for (int q = 0; q < R; q++) y[(r + q) * ys + i - first] = dots[q];          \
  }
    FT_ROW_GROUPS(rows_left, FT_CALL)
#undef FT_CALL
  }
  for (int64_t i = first; rows_left > ALONE && i < last; i += 2) {
    const bool both = i + 1 < last;
    const uint16_t* pair[2] = {w + i * job.k, w + (both ? i + 1 : i) * job.k};
#define FT_CALL(R)                                                             \
  {                                                                            \
    float dots[2][R];                                                          \
    pair_dots<R>(pair, x + r * xs, xs, job.k, dots);                           \
    for (int c = 0; c < 1 + both; c++)                                         \
      for (int q = 0; q < R; q++) y[(r + q) * ys + i - first + c] = dots[c][q]; \
  }
    FT_ROW_GROUPS(rows_left, FT_CALL)
#undef FT_CALL
  }
}
#endif

FT_INLINE float number(const void* p, int dtype, int64_t at) {
  if (dtype == FT_BF16) return bf16_to_float(((const uint16_t*)p)[at]);
  if (dtype == FT_F16) return f16_to_float(((const uint16_t*)p)[at]);
  return ((const float*)p)[at];
}
FT_INLINE void set_number(void* p, int dtype, int64_t at, float v) {
  if (dtype == FT_BF16) ((uint16_t*)p)[at] = float_to_bf16(v);
  else if (dtype == FT_F16) ((uint16_t*)p)[at] = float_to_f16(v);
  else ((float*)p)[at] = v;
}

// The bias before rounding, the residual after it, then rounded again.
static void finish(const LinearJob& job, int64_t first, int64_t last, const float* y) {
  const int64_t ys = last - first;
  for (int64_t r = 0; r < job.rows; r++)
    for (int64_t i = first; i < last; i++) {
      float v = y[r * ys + i - first];
      const int64_t at = r * job.n + i;
      if (job.bias) v += number(job.bias, job.dtype, i);
      set_number(job.y, job.dtype, at, v);
      if (job.residual)
        set_number(job.y, job.dtype, at, number(job.residual, job.dtype, at) + number(job.y, job.dtype, at));
    }
}

// scratch: rows of x (x_stride(k) floats each), then rows * (last - first) floats.
void linear(const LinearJob& job, int64_t first, int64_t last, uint8_t* scratch) {
  const int64_t xs = x_stride(job.k);
  float* y = (float*)scratch + job.rows * xs;
#if defined(FT_BF16_DOT)
  if (job.dtype == FT_BF16) {
    uint16_t* x = (uint16_t*)scratch;
    for (int64_t r = 0; r < job.rows; r++) {
      memcpy(x + r * xs, (const uint16_t*)job.x + r * job.k, job.k * 2);
      memset(x + r * xs + job.k, 0, (xs - job.k) * 2);
    }
    linear_pairs(job, first, last, x, xs, y);
    return finish(job, first, last, y);
  }
#endif
  float* x = (float*)scratch;
  for (int64_t r = 0; r < job.rows; r++) {
    widen(job.x, job.dtype, r * job.k, job.k, x + r * xs);
    memset(x + r * xs + job.k, 0, (xs - job.k) * sizeof(float));
  }
  if (job.dtype == FT_BF16) linear_rows<uint16_t, from_bf16>(job, first, last, x, xs, y);
  else if (job.dtype == FT_F16) linear_rows<uint16_t, from_f16>(job, first, last, x, xs, y);
  else linear_rows<float, from_f32>(job, first, last, x, xs, y);
  finish(job, first, last, y);
}

}  // namespace FT_NS
