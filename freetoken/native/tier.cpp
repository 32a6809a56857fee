// What a tier has besides formats: ordered sums, dense products, reading. And the tier's table.
#include "engine.h"
#include "formats/list.h"

namespace FT_NS {

static void sum_parts(float* total, const float* parts, int64_t num_parts, int64_t stride, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    F acc = load(parts + i);
    for (int64_t p = 1; p < num_parts; p++) acc = add(acc, load(parts + p * stride + i));
    store(total + i, acc);
  }
  for (; i < count; i++) {
    float acc = parts[i];
    for (int64_t p = 1; p < num_parts; p++) acc += parts[p * stride + i];
    total[i] = acc;
  }
}

template <class T, F (*Convert)(const T*)>
static void linear_rows(const LinearJob& job, int64_t first, int64_t last, const float* x, int64_t xs,
                        float* y) {
  const T* w = (const T*)job.w;
  const int rows_left = (int)job.rows;
  const int64_t ys = last - first;
  int64_t i = first;
  for (; i + 2 <= last; i += 2) {
    const T* pair[2] = {w + i * job.k, w + (i + 1) * job.k};
#define FT_CALL(R)                                                             \
  {                                                                            \
    float dots[2][R];                                                          \
    plain_dots<T, Convert, R, 2>(pair, x + r * xs, xs, job.k, dots);           \
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
      FT_PREFETCH((const char*)(rows[c] + k) + AHEAD);
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
  for (int64_t i = first; i < last; i += 2) {
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

// Round y and add the bias before, both in float32.
static void finish(const LinearJob& job, int64_t first, int64_t last, const float* y) {
  const int64_t ys = last - first;
  for (int64_t r = 0; r < job.rows; r++)
    for (int64_t i = first; i < last; i++) {
      float v = y[r * ys + i - first];
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
}

// scratch: rows of x (x_stride(k) floats each), then rows * (last - first) floats.
static void linear(const LinearJob& job, int64_t first, int64_t last, uint8_t* scratch) {
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

static uint64_t read(const void* data, uint64_t num_bytes) {
  const uint8_t* p = (const uint8_t*)data;
  const uint8_t* end = p + num_bytes / 256 * 256;
#if defined(FT_AVX512)
  I acc[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (; p < end; p += 256)
    for (int i = 0; i < 4; i++) {
      FT_PREFETCH(p + AHEAD + 64 * i);
      acc[i] = _mm512_xor_si512(acc[i], _mm512_loadu_si512(p + 64 * i));
    }
  acc[0] = _mm512_xor_si512(_mm512_xor_si512(acc[0], acc[1]), _mm512_xor_si512(acc[2], acc[3]));
  return (uint64_t)_mm512_reduce_or_epi64(acc[0]);
#elif defined(FT_AVX2)
  I acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (; p < end; p += 256)
    for (int i = 0; i < 8; i++) {
      if (i % 2 == 0) FT_PREFETCH(p + AHEAD + 32 * i);
      acc[i % 4] = _mm256_xor_si256(acc[i % 4], _mm256_loadu_si256((const I*)(p + 32 * i)));
    }
  acc[0] = _mm256_xor_si256(_mm256_xor_si256(acc[0], acc[1]), _mm256_xor_si256(acc[2], acc[3]));
  return (uint64_t)_mm256_extract_epi64(acc[0], 0) ^ (uint64_t)_mm256_extract_epi64(acc[0], 2);
#else
  uint64_t acc[4] = {0, 0, 0, 0};
  for (; p < end; p += 256) {
    FT_PREFETCH(p + AHEAD);
    for (int i = 0; i < 32; i++) {
      uint64_t word;
      memcpy(&word, p + 8 * i, 8);
      acc[i % 4] ^= word;
    }
  }
  return acc[0] ^ acc[1] ^ acc[2] ^ acc[3];
#endif
}

#define FT_EXTERN(name) extern const TileFormat format_##name;
FT_FORMATS(FT_EXTERN)
#define FT_ENTRY(name) &format_##name,
static const TileFormat* const formats[] = {FT_FORMATS(FT_ENTRY) nullptr};

#define FT_QUOTE2(x) #x
#define FT_QUOTE(x) FT_QUOTE2(x)
extern const TierKernels kernels;
const TierKernels kernels = {FT_QUOTE(FT_TIER), formats, sum_parts, linear, read};

}  // namespace FT_NS
