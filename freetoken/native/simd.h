// One vector of W floats, the same words in every tier. Compiled once per tier, into namespace FT_NS.
// Every operation is one IEEE operation in a fixed order, so a result depends on its inputs alone.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(FT_AVX512) || defined(FT_AVX2)
#include <immintrin.h>
#elif defined(FT_NEON)
#include <arm_neon.h>
#endif

namespace FT_NS {

static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
static inline float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
static inline uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}
static inline float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3FF;
  if (exp == 31) return bits_to_float(sign | 0x7F800000u | man << 13);
  if (exp) return bits_to_float(sign | (exp + 112) << 23 | man << 13);
  float tiny = (float)man * 5.9604644775390625e-08f;  // 2^-24
  return bits_to_float(sign | float_to_bits(tiny));
}
static inline uint16_t float_to_f16(float f) {
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7FFFFFFFu;
  if (u > 0x7F800000u) return (uint16_t)(sign | 0x7E00);
  if (u >= 0x477FF000u) return (uint16_t)(sign | 0x7C00);  // rounds to infinity
  if (u < 0x38800000u) {                                   // subnormal: let the adder round to 2^-24
    float scaled = bits_to_float(u) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(scaled) - 0x3F000000u));
  }
  return (uint16_t)(sign | ((u - 0x38000000u + 0xFFF + ((u >> 13) & 1)) >> 13));
}

#define FT_PREFETCH(p) __builtin_prefetch((p), 0, 3)
#define FT_INLINE static inline __attribute__((always_inline))
#define FT_INLINE_MEMBER inline __attribute__((always_inline))
// A loop that several callers share: compiled once for all of them.
#if defined(__clang__)
#define FT_APART __attribute__((noinline))
#else
#define FT_APART __attribute__((noinline, noclone))
#endif

#if defined(FT_AVX512)

constexpr int W = 16;
typedef __m512 F;
typedef __m512i I;
FT_INLINE F zero() { return _mm512_setzero_ps(); }
FT_INLINE F set1(float v) { return _mm512_set1_ps(v); }
FT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
FT_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
FT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
FT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
FT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
FT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
FT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
FT_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
FT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
FT_INLINE F round(F a) { return _mm512_roundscale_ps(a, 8); }
FT_INLINE F pow2(F n) {  // n integral, -126..128
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
FT_INLINE F from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
FT_INLINE F from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
FT_INLINE F from_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
FT_INLINE float sum(F v) {
  __m256 low = _mm512_castps512_ps256(v);
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  __m256 a = _mm256_add_ps(low, high);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#elif defined(FT_AVX2)

constexpr int W = 8;
typedef __m256 F;
typedef __m256i I;
FT_INLINE F zero() { return _mm256_setzero_ps(); }
FT_INLINE F set1(float v) { return _mm256_set1_ps(v); }
FT_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
FT_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
FT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
FT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
FT_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
FT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
FT_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
FT_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
FT_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
FT_INLINE F round(F a) { return _mm256_round_ps(a, 8); }
FT_INLINE F pow2(F n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
FT_INLINE F from_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
FT_INLINE F from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE F from_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
FT_INLINE float sum(F v) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#elif defined(FT_NEON)

constexpr int W = 4;
typedef float32x4_t F;
typedef uint32x4_t I;
FT_INLINE I bits_of(F v) { return vreinterpretq_u32_f32(v); }
FT_INLINE F of_bits(I v) { return vreinterpretq_f32_u32(v); }
FT_INLINE F zero() { return vdupq_n_f32(0.0f); }
FT_INLINE F set1(float v) { return vdupq_n_f32(v); }
FT_INLINE F load(const float* p) { return vld1q_f32(p); }
FT_INLINE void store(float* p, F v) { vst1q_f32(p, v); }
FT_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
FT_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
FT_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
FT_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
FT_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
FT_INLINE F min(F a, F b) { return vminq_f32(a, b); }  // NaN if either is
FT_INLINE F max(F a, F b) { return vmaxq_f32(a, b); }
FT_INLINE F round(F a) { return vrndnq_f32(a); }
FT_INLINE F pow2(F n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
FT_INLINE F from_bf16(const uint16_t* p) { return of_bits(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16)); }
FT_INLINE F from_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
FT_INLINE F from_i8(const int8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
FT_INLINE float sum(F v) { return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v))); }

#else  // scalar: any machine, and the plainest statement of what the others do

constexpr int W = 1;
typedef float F;
FT_INLINE F zero() { return 0.0f; }
FT_INLINE F set1(float v) { return v; }
FT_INLINE F load(const float* p) { return *p; }
FT_INLINE void store(float* p, F v) { *p = v; }
FT_INLINE F fma(F a, F b, F c) { return a * b + c; }
FT_INLINE F add(F a, F b) { return a + b; }
FT_INLINE F sub(F a, F b) { return a - b; }
FT_INLINE F mul(F a, F b) { return a * b; }
FT_INLINE F div(F a, F b) { return a / b; }
FT_INLINE F min(F a, F b) { return a < b ? a : b; }
FT_INLINE F max(F a, F b) { return a > b ? a : b; }
FT_INLINE F round(F a) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: |a| < 2^22 here
  return (a + magic) - magic;
}
FT_INLINE F pow2(F n) { return bits_to_float((uint32_t)((int32_t)n + 127) << 23); }
FT_INLINE F from_bf16(const uint16_t* p) { return bf16_to_float(*p); }
FT_INLINE F from_f16(const uint16_t* p) { return f16_to_float(*p); }
FT_INLINE F from_i8(const int8_t* p) { return (float)*p; }
FT_INLINE float sum(F v) { return v; }

#endif

FT_INLINE F from_f32(const float* p) { return load(p); }

// The first n < W elements, the rest zero: the end of a row, read without touching what follows it.
template <class T, F (*Convert)(const T*)>
FT_INLINE F load_some(const T* p, int n) {
  T buffer[W];
  memset(buffer, 0, sizeof buffer);
  memcpy(buffer, p, sizeof(T) * n);
  return Convert(buffer);
}
FT_INLINE void store_some(float* p, F v, int n) {
  float buffer[W];
  store(buffer, v);
  memcpy(p, buffer, sizeof(float) * n);
}

// e^x with about 1.5 ulp; overflows to infinity, underflows to about 1e-38. The bounds come first in min and max,
// so that NaN passes: what is broken shall be seen at the end.
FT_INLINE F exp(F x) {
  x = min(set1(89.0f), max(set1(-87.3f), x));
  F n = round(mul(x, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return mul(p, pow2(n));
}

}  // namespace FT_NS
