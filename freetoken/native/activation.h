// act(g) * u on a run of floats, in float32, then rounded once to x's 16-bit type (equality rule).
#pragma once
#include "kernels.h"
#include "simd.h"

extern "C" float erfcf(float);

namespace FT_NS {

#if defined(FT_AVX512)
FT_INLINE F round_bf16(F v) {
  I bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
  I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  I up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xFFFF0000)));
}
FT_INLINE F round_f16(F v) { return _mm512_cvtph_ps(_mm512_cvtps_ph(v, 8)); }
#elif defined(FT_AVX2)
FT_INLINE F round_bf16(F v) {
  I bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
  I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  I up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  F nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  F quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)));
  F kept = _mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, nan);
  return _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000)));
}
FT_INLINE F round_f16(F v) { return _mm256_cvtph_ps(_mm256_cvtps_ph(v, 8)); }
#elif defined(FT_NEON)
FT_INLINE F round_bf16(F v) {
  const I bits = bits_of(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const I up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
  const I quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
  return of_bits(vandq_u32(vbslq_u32(vceqq_f32(v, v), up, quiet), vdupq_n_u32(0xFFFF0000)));
}
FT_INLINE F round_f16(F v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }
#else
FT_INLINE F round_bf16(F v) { return bf16_to_float(float_to_bf16(v)); }
FT_INLINE F round_f16(F v) { return f16_to_float(float_to_f16(v)); }
#endif

FT_INLINE F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// g' sigmoid(alpha g') u'; the constants come first in min and max, so that NaN passes through.
static void act_swiglu(const ft_layer& l, float* g, const float* u, int n) {
  F alpha = set1(-l.alpha), high = set1(l.limit), low = set1(-l.limit), plus = set1(l.up_offset);
  for (int i = 0; i < n; i += W) {
    F a = min(high, load(g + i));
    F b = add(max(low, min(high, load(u + i))), plus);
    F s = div(a, add(set1(1.0f), exp(mul(alpha, a))));
    store(g + i, mul(s, b));
  }
}

static void act_gelu(float* g, const float* u, int n) {
  for (int i = 0; i < n; i++) g[i] = 0.5f * g[i] * erfcf(g[i] * -0.70710678118654752f) * u[i];
}

// 0.5 x (1 + tanh(y)) = x sigmoid(2 y), without the cancellation.
static void act_gelu_tanh(float* g, const float* u, int n) {
  for (int i = 0; i < n; i += W) {
    F x = load(g + i);
    F y = mul(fma(mul(mul(x, x), x), set1(0.044715f), x), set1(2 * 0.7978845608028654f));
    store(g + i, mul(mul(x, sigmoid(y)), load(u + i)));
  }
}

static void act_relu(float* g, const float* u, int n) {
  for (int i = 0; i < n; i += W) store(g + i, mul(max(zero(), load(g + i)), load(u + i)));
}

// g <- round(act(g) * u), n a multiple of W (buffers are padded).
static void activate(const ft_layer& l, int x_dtype, float* g, const float* u, int n) {
  switch (l.activation) {
    case FT_SWIGLU: act_swiglu(l, g, u, n); break;
    case FT_GELU: act_gelu(g, u, n); break;
    case FT_GELU_TANH: act_gelu_tanh(g, u, n); break;
    default: act_relu(g, u, n); break;
  }
  if (x_dtype == FT_BF16)
    for (int i = 0; i < n; i += W) store(g + i, round_bf16(load(g + i)));
  else if (x_dtype == FT_F16)
    for (int i = 0; i < n; i += W) store(g + i, round_f16(load(g + i)));
}

}  // namespace FT_NS
