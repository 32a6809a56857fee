// What a tier has besides formats, products and a layer's small operations: ordered sums, reading. And its table.
#include "engine.h"
#include "formats/list.h"
#include "ops.h"
#include "prepared.h"

#if !defined(FT_INT8_ONLY)
namespace FT_NS {

static void add_parts(float* total, const float* parts, int64_t num_parts, int64_t stride, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    F acc = load(total + i);
    for (int64_t p = 0; p < num_parts; p++) acc = add(acc, load(parts + p * stride + i));
    store(total + i, acc);
  }
  for (; i < count; i++)
    for (int64_t p = 0; p < num_parts; p++) total[i] += parts[p * stride + i];
}

static void combine(float* y, const float* rows, const int32_t* places, const float* weights, int64_t routes,
                    int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    F acc = zero();
    for (int64_t r = 0; r < routes; r++)
      if (places[r] >= 0) acc = add(acc, mul(set1(weights[r]), load(rows + places[r] * count + i)));
    store(y + i, acc);
  }
  for (; i < count; i++) {
    y[i] = 0;
    for (int64_t r = 0; r < routes; r++)
      if (places[r] >= 0) y[i] += weights[r] * rows[places[r] * count + i];
  }
}

static void widen_row(const void* x, int dtype, int64_t at, int64_t width, float* out) {
  widen(x, dtype, at, width, out);
}

static uint64_t read(const void* data, uint64_t num_bytes) {
  const uint8_t* p = (const uint8_t*)data;
  const uint8_t* end = p + num_bytes / 256 * 256;
#if defined(FT_AVX512)
  I acc[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (; p < end; p += 256)
    for (int i = 0; i < 4; i++) {
      FT_PREFETCH(p + ft_row_ahead + 64 * i);
      acc[i] = _mm512_xor_si512(acc[i], _mm512_loadu_si512(p + 64 * i));
    }
  acc[0] = _mm512_xor_si512(_mm512_xor_si512(acc[0], acc[1]), _mm512_xor_si512(acc[2], acc[3]));
  return (uint64_t)_mm512_reduce_or_epi64(acc[0]);
#elif defined(FT_AVX2)
  I acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (; p < end; p += 256)
    for (int i = 0; i < 8; i++) {
      if (i % 2 == 0) FT_PREFETCH(p + ft_row_ahead + 32 * i);
      acc[i % 4] = _mm256_xor_si256(acc[i % 4], _mm256_loadu_si256((const I*)(p + 32 * i)));
    }
  acc[0] = _mm256_xor_si256(_mm256_xor_si256(acc[0], acc[1]), _mm256_xor_si256(acc[2], acc[3]));
  return (uint64_t)_mm256_extract_epi64(acc[0], 0) ^ (uint64_t)_mm256_extract_epi64(acc[0], 2);
#else
  uint64_t acc[4] = {0, 0, 0, 0};
  for (; p < end; p += 256) {
    FT_PREFETCH(p + ft_row_ahead);
    for (int i = 0; i < 32; i++) {
      uint64_t word;
      memcpy(&word, p + 8 * i, 8);
      acc[i % 4] ^= word;
    }
  }
  return acc[0] ^ acc[1] ^ acc[2] ^ acc[3];
#endif
}

void linear(const LinearJob& job, int64_t first, int64_t last, uint8_t* scratch);
extern const TierOps ops;
}  // namespace FT_NS
#endif

#if defined(FT_INT8_ONLY)  // all else is the tier below's
#define FT_BASE ft_avx2
#else
#define FT_BASE FT_NS
#endif
#if defined(FT_AVX512) && !defined(FT_BF16_DOT)  // no byte products: as avx2, with the same bits
#define FT_INT8 ft_avx2
#elif defined(FT_NEON)
#define FT_INT8 ft_scalar
#else
#define FT_INT8 FT_NS
#endif

#define FT_NOTHING(name)
#define FT_EXTERN(name) extern const TileFormat format_##name;
#define FT_EXTERN_INT8(name) extern const PreparedFormat int8_##name;
namespace FT_BASE {
FT_FORMATS(FT_EXTERN)
}
namespace FT_INT8 {
FT_FORMATS_OF(FT_EXTERN_INT8, FT_NOTHING)
}

namespace FT_NS {

#define FT_ENTRY(name) &FT_BASE::format_##name,
#define FT_ENTRY_INT8(name) &FT_INT8::int8_##name,
#define FT_NONE(name) nullptr,
extern const TileFormat* const formats[];
const TileFormat* const formats[] = {FT_FORMATS(FT_ENTRY) nullptr, FT_FORMATS_OF(FT_ENTRY_INT8, FT_NONE)};

#if !defined(FT_INT8_ONLY)
#define FT_QUOTE2(x) #x
#define FT_QUOTE(x) FT_QUOTE2(x)
extern const TierKernels kernels;
const TierKernels kernels = {FT_QUOTE(FT_TIER), formats, add_parts, combine, linear, read, &ops, widen_row};
#endif

}  // namespace FT_NS
