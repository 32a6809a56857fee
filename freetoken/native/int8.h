// Signed bytes instead of 16-bit numbers for x: rows quantised once, and the vectors that multiply them.
//
// A row comes in blocks of 32 elements: q = round(x 127 / max |x|), x ~ q d, d = max |x| / 127. Codes of weights are
// unsigned bytes; what lies above their true value, LEAST, is taken off a span's sum as LEAST times the sum of q.
// ORDER. The sum of a span (elements that share a step) is an exact integer, whoever computes it in which order.
// Span s of a dot goes to chain s % 8 as fma(sum, step d, chain), offsets to chains of their own, and the eight
// are added by one tree; down is one chain over spans. So every tier gives the same bits.
#pragma once
#include "blocks.h"

namespace FT_NS {

#define FT_LAMBDA __attribute__((always_inline))

// --- bytes in vectors of the tier -------------------------------------------------------------------

constexpr int N64 = 64 / (4 * W);  // vectors in 64 bytes

// 64 bytes, or the sums of four products each that they gave.
struct Bytes {
  I v[N64];
};
typedef float E8 __attribute__((vector_size(32)));
typedef int32_t T8 __attribute__((vector_size(32)));

#if defined(FT_AVX512)
FT_INLINE I same(int32_t v) { return _mm512_set1_epi32(v); }
FT_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
FT_INLINE I flip(I a, int32_t bits) { return _mm512_xor_si512(a, _mm512_set1_epi32(bits)); }
template <int N>
FT_INLINE I words_left(I v) { return N >= 0 ? _mm512_slli_epi16(v, N & 15) : _mm512_srli_epi16(v, -N & 15); }
FT_INLINE I words_right(I v, int n) { return _mm512_srl_epi16(v, _mm_cvtsi32_si128(n)); }
FT_INLINE F signed_floats(I v) { return _mm512_cvtepi32_ps(v); }
FT_INLINE I apart(I v) {
  return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
}
FT_INLINE I level(I nibbles, const uint8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), nibbles);
}
#elif defined(FT_AVX2)
FT_INLINE I same(int32_t v) { return _mm256_set1_epi32(v); }
FT_INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }
FT_INLINE I flip(I a, int32_t bits) { return _mm256_xor_si256(a, _mm256_set1_epi32(bits)); }
template <int N>
FT_INLINE I words_left(I v) { return N >= 0 ? _mm256_slli_epi16(v, N & 15) : _mm256_srli_epi16(v, -N & 15); }
FT_INLINE I words_right(I v, int n) { return _mm256_srl_epi16(v, _mm_cvtsi32_si128(n)); }
FT_INLINE F signed_floats(I v) { return _mm256_cvtepi32_ps(v); }
FT_INLINE I apart(I v) {
  return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
}
FT_INLINE I level(I nibbles, const uint8_t* table) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), nibbles);
}
#else
FT_INLINE I same(int32_t v) { return (I)v; }
FT_INLINE I both(I a, I b) { return a & b; }
FT_INLINE I flip(I a, int32_t bits) { return a ^ (I)bits; }
template <int N>
FT_INLINE I words_left(I v) {
  const uint32_t low = v & 0xFFFF, high = v >> 16;
  return N >= 0 ? (low << (N & 15) & 0xFFFF) | high << (N & 15) << 16 : low >> (-N & 15) | high >> (-N & 15) << 16;
}
FT_INLINE I words_right(I v, int n) { return (v & 0xFFFF) >> n | v >> 16 >> n << 16; }
FT_INLINE F signed_floats(I v) { return (float)(int32_t)v; }
FT_INLINE I level(I nibbles, const uint8_t* table) {
  I out = 0;
  for (int b = 0; b < 32; b += 8) out |= (I)table[nibbles >> b & 15] << b;
  return out;
}
#endif

// acc + the sums of four products of unsigned and signed bytes. WIDE: unsigned ones above 128 occur.
template <bool WIDE>
FT_INLINE I dot4(I acc, I u, I s) {
#if defined(FT_AVX512) && defined(FT_BF16_DOT)
  return _mm512_dpbusd_epi32(acc, u, s);
#elif defined(FT_AVX_VNNI)
  return _mm256_dpbusd_avx_epi32(acc, u, s);
#elif defined(FT_AVX2)
  const I ones = _mm256_set1_epi16(1);
  if (WIDE) {  // a pair of products fits 16 bits if one factor is at most 128
    const I top = _mm256_and_si256(u, _mm256_set1_epi8((char)0x80));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(top, s), ones));
    u = _mm256_xor_si256(u, top);
  }
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), ones));
#elif defined(FT_AVX512)
  (void)u, (void)s;
  return acc;  // never called: such CPUs compute as avx2 does
#else
  int32_t sum = (int32_t)acc;
  for (int b = 0; b < 32; b += 8) sum += (int32_t)(u >> b & 255) * (int8_t)(s >> b);
  return (I)sum;
#endif
}

FT_INLINE Bytes load64(const void* p) {
  Bytes out;
  for (int j = 0; j < N64; j++) out.v[j] = dwords_of((const uint8_t*)p + 4 * W * j);
  return out;
}
FT_INLINE void store64(void* p, const Bytes& b) { memcpy(p, &b, 64); }
// Of each 16 bytes, those at even places, then those at odd ones.
FT_INLINE Bytes apart(const Bytes& b) {
  Bytes out;
#if defined(FT_AVX512) || defined(FT_AVX2)
  for (int j = 0; j < N64; j++) out.v[j] = apart(b.v[j]);
#else
  const uint8_t* from = (const uint8_t*)&b;
  uint8_t* to = (uint8_t*)&out;
  for (int i = 0; i < 64; i++) to[i] = from[i / 16 * 16 + i % 8 * 2 + i % 16 / 8];
#endif
  return out;
}

// --- eight numbers ----------------------------------------------------------------------------------

#if defined(FT_AVX512) || defined(FT_AVX2)
FT_INLINE E8 fused(E8 a, E8 b, E8 c) { return _mm256_fmadd_ps(a, b, c); }
FT_INLINE F fused_lanes(F a, F b, F c) { return fma(a, b, c); }
FT_INLINE E8 all8(float v) { return _mm256_set1_ps(v); }
template <class T>
FT_INLINE E8 eight_times(T v) { return all8(number(v)); }
FT_INLINE E8 eight_times(Half v) { return _mm256_cvtph_ps(_mm_set1_epi16((short)v.bits)); }
FT_INLINE E8 floats(T8 v) { return _mm256_cvtepi32_ps((__m256i)v); }
FT_INLINE E8 load8(const float* p) { return _mm256_loadu_ps(p); }
FT_INLINE T8 load8(const int32_t* p) { return (T8)_mm256_loadu_si256((const __m256i*)p); }
FT_INLINE __m256i eight_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
FT_INLINE E8 eight(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE E8 eight(const uint8_t* p) { return _mm256_cvtepi32_ps(eight_bytes(p)); }
FT_INLINE E8 eight(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
FT_INLINE E8 eight(const Less32* p) {
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(eight_bytes(p), _mm256_set1_epi32(32)));
}
FT_INLINE E8 eight(const LowNibble* p) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(eight_bytes(p), _mm256_set1_epi32(15)));
}
FT_INLINE E8 eight(const HighNibble* p) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(eight_bytes(p), 4)); }
FT_INLINE E8 eight(const E8m0* p) {  // 2^-127, a subnormal, is what 0 means
  const __m256i e = _mm256_slli_epi32(eight_bytes(p), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(e, _mm256_set1_epi32(0x00400000)));
}
FT_INLINE E8 eight(const E4m3* p) {
  const __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x7F)), 7),
                                    _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
FT_INLINE float tree(E8 v) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
#else
FT_INLINE F fused_lanes(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
FT_INLINE E8 all8(float v) { return E8{v, v, v, v, v, v, v, v}; }
template <class T>
FT_INLINE E8 eight_times(T v) { return all8(number(v)); }
FT_INLINE E8 fused(E8 a, E8 b, E8 c) {
  for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
FT_INLINE E8 floats(T8 v) {
  E8 out;
  for (int i = 0; i < 8; i++) out[i] = (float)v[i];
  return out;
}
FT_INLINE E8 load8(const float* p) {
  E8 out;
  memcpy(&out, p, 32);
  return out;
}
FT_INLINE T8 load8(const int32_t* p) {
  T8 out;
  memcpy(&out, p, 32);
  return out;
}
template <class T>
FT_INLINE E8 eight(const T* p) {
  E8 out;
  for (int i = 0; i < 8; i++) out[i] = number(p[i]);
  return out;
}
FT_INLINE float tree(E8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
#endif

// What holds for the eight spans from element k of a row on; n elements are left of it.
template <int SPAN>
struct EightAt {
  int m, i;
  int64_t k, n;
  template <class T, int C>
  FT_INLINE_MEMBER E8 operator()(const Part<T, C>& p) const {
    if constexpr (C >= 8 * SPAN) return eight_times(*p.row(m, i, k));
    else {
      constexpr int TIMES = C / SPAN;
      if (TIMES == 1 && n >= 8 * SPAN) return eight(p.row(m, i, k));
      T some[8] = {};  // beyond the row lies something else, or nothing
      if (n >= 8 * SPAN) memcpy(some, p.row(m, i, k), 8 / TIMES * sizeof(T));
      else if (n > 0) memcpy(some, p.row(m, i, k), n / C * sizeof(T));
      if constexpr (TIMES > 1)
        for (int s = 7; s >= 0; s--) some[s] = some[s / TIMES];
      return eight(some);
    }
  }
  FT_INLINE_MEMBER E8 operator()(const Whole& p) const { return all8(p.of[m]); }
};

// --- rows of x --------------------------------------------------------------------------------------

// Where a quantised row's numbers lie: bytes, then for each span d, what is taken off its sum, and sum of q times d.
struct Row8 {
  const uint8_t* q;
  const float* d;
  const int32_t* less;
  const float* sums;
  FT_INLINE_MEMBER int32_t dword(int64_t at) const {
    int32_t four;
    memcpy(&four, q + 4 * at, 4);
    return four;
  }
};
FT_INLINE int64_t x8_bytes(int64_t padded, int span) { return padded + padded / span * 12; }
FT_INLINE Row8 x8_row(const uint8_t* at, int64_t padded, int span) {
  const float* d = (const float*)(at + padded);
  const int32_t* less = (const int32_t*)(d + padded / span);
  return {at, d, less, (const float*)(less + padded / span)};
}

// How a format wants its rows: `place`(bytes of a block, where the row begins, number of the block) gives their order.
struct Rules {
  int span, least;
  float unit;
  void (*place)(const int8_t* q, uint8_t* row, int64_t block);
};
template <class Format>
constexpr Rules ROWS{Format::SPAN, Format::LEAST, Format::UNIT, Format::place_row};
template <class Format>
constexpr Rules MIDDLE{Format::SPAN, Format::LEAST, Format::UNIT, Format::place_middle};
// `width` numbers into a row of `padded` bytes.
void quantise_row(const float* x, int64_t width, int64_t padded, uint8_t* at, const Rules& rules);

// --- sums of spans ----------------------------------------------------------------------------------

// The sums of 256 elements' spans in order, eight a vector, from the sums of fours of four times 64 bytes.
// Plain order: block 2 v, then 2 v + 1. Else each 16 bytes hold 8 of block first(v), then 8 of first(v) + D, where
// D vectors make a line of 2 D blocks.
template <int SPAN, int D>
struct Totals {
  T8 of[32 / SPAN];
};

#if defined(FT_AVX512)
FT_INLINE I pairs(I a, I b) {  // of each 16 bytes: two sums of neighbours of a, then two of b
  const F x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xDD)));
}
template <int D>
FT_INLINE Totals<32, D> totals32(const Bytes (&v)[4]) {
  const I a = pairs(v[0].v[0], v[1].v[0]), b = pairs(v[2].v[0], v[3].v[0]);
  if (D == 0) {
    const I c = pairs(a, b);  // of each lane: sums of its part of vectors 0 to 3
    const I both = _mm512_add_epi32(c, _mm512_shuffle_i64x2(c, c, 0xB1));
    const I order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    return {{(T8)_mm512_castsi512_si256(_mm512_permutexvar_epi32(order, both))}};
  }
  I c = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
  c = _mm512_add_epi32(c, _mm512_shuffle_i64x2(c, c, 0xB1));
  const I order = D == 2 ? _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 0, 0, 0, 0, 0, 0, 0, 0)
                         : _mm512_setr_epi32(0, 2, 8, 10, 1, 3, 9, 11, 0, 0, 0, 0, 0, 0, 0, 0);
  return {{(T8)_mm512_castsi512_si256(_mm512_permutexvar_epi32(order, c))}};
}
template <int D>
FT_INLINE Totals<16, D> totals16(const Bytes (&v)[4]) {
  const I a = pairs(v[0].v[0], v[1].v[0]), b = pairs(v[2].v[0], v[3].v[0]);
  const I c = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
  const I order = D == 2 ? _mm512_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15)
                         : _mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15);
  const I all = _mm512_permutexvar_epi32(order, c);
  return {{(T8)_mm512_castsi512_si256(all), (T8)_mm512_extracti64x4_epi64(all, 1)}};
}
#elif defined(FT_AVX2)
FT_INLINE I lanes_added(I a, I b) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}
template <int D>
FT_INLINE Totals<32, D> totals32(const Bytes (&v)[4]) {
  I half[2];
  for (int p = 0; p < 2; p++) {
    const Bytes &a = v[2 * p], &b = v[2 * p + 1];
    if (D == 0) half[p] = _mm256_hadd_epi32(_mm256_hadd_epi32(a.v[0], a.v[1]), _mm256_hadd_epi32(b.v[0], b.v[1]));
    else half[p] = _mm256_hadd_epi32(_mm256_add_epi32(a.v[0], a.v[1]), _mm256_add_epi32(b.v[0], b.v[1]));
  }
  const I all = lanes_added(half[0], half[1]);
  if (D == 0) return {{(T8)all}};
  const I order = D == 2 ? _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7) : _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  return {{(T8)_mm256_permutevar8x32_epi32(all, order)}};
}
template <int D>
FT_INLINE Totals<16, D> totals16(const Bytes (&v)[4]) {
  I c[2];  // halves 0 and 1 of the blocks of vectors 2 p and 2 p + 1
  for (int p = 0; p < 2; p++) {
    const Bytes &a = v[2 * p], &b = v[2 * p + 1];
    c[p] = lanes_added(_mm256_hadd_epi32(a.v[0], b.v[0]), _mm256_hadd_epi32(a.v[1], b.v[1]));
  }
  if (D == 2) {
    const I order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    return {{(T8)_mm256_permutevar8x32_epi32(c[0], order), (T8)_mm256_permutevar8x32_epi32(c[1], order)}};
  }
  const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const F x = _mm256_castsi256_ps(c[0]), y = _mm256_castsi256_ps(c[1]);
  return {{(T8)_mm256_permutevar8x32_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), order),
           (T8)_mm256_permutevar8x32_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD)), order)}};
}
#else
template <int SPAN, int D>
FT_INLINE Totals<SPAN, D> totals_of(const Bytes (&v)[4]) {
  int32_t sums[256 / SPAN] = {};
  for (int p = 0; p < 4; p++)
    for (int t = 0; t < 16; t++) {
      const int block = D == 0 ? 2 * p + t / 8 : p / (D + !D) * 2 * D + p % (D + !D) + t % 4 / 2 * D;
      sums[SPAN == 32 ? block : 2 * block + t / 8] += (int32_t)v[p].v[t];
    }
  Totals<SPAN, D> out;
  for (int s = 0; s < 256 / SPAN; s++) out.of[s / 8][s % 8] = sums[s];
  return out;
}
template <int D>
FT_INLINE Totals<32, D> totals32(const Bytes (&v)[4]) { return totals_of<32, D>(v); }
template <int D>
FT_INLINE Totals<16, D> totals16(const Bytes (&v)[4]) { return totals_of<16, D>(v); }
#endif

#if defined(FT_AVX512) && defined(FT_BF16_DOT)
// Half a vector at a time both halves meet in one sum, which spares adding them up: a fifth of the work.
FT_INLINE __m256i folded(I codes, const uint8_t* x) {
  const __m256i* q = (const __m256i*)x;
  const __m256i low = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm512_castsi512_si256(codes), _mm256_loadu_si256(q));
  return _mm256_dpbusd_epi32(low, _mm512_extracti64x4_epi64(codes, 1), _mm256_loadu_si256(q + 1));
}
FT_INLINE __m256i pairs(__m256i a, __m256i b) {
  const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
  return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD)));
}
template <int D>
FT_INLINE Totals<32, D> folded_sums(const Bytes (&codes)[4], const uint8_t* x) {
  const __m256i a = pairs(folded(codes[0].v[0], x), folded(codes[1].v[0], x + 64));
  const __m256i b = pairs(folded(codes[2].v[0], x + 128), folded(codes[3].v[0], x + 192));
  const __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  if (D == 2) return {{(T8)_mm256_shuffle_epi32(all, 0xD8)}};
  return {{(T8)_mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))}};
}
#endif

// Of 256 codes times 256 bytes of x.
template <int SPAN, int D, bool WIDE>
FT_INLINE Totals<SPAN, D> block_sums(const Bytes (&codes)[4], const uint8_t* x) {
#if defined(FT_AVX512) && defined(FT_BF16_DOT)
  if constexpr (SPAN == 32 && D > 0) return folded_sums<D>(codes, x);
#endif
  Bytes v[4];
  for (int p = 0; p < 4; p++) {
    const Bytes q = load64(x + 64 * p);
    for (int j = 0; j < N64; j++) v[p].v[j] = dot4<WIDE>(same(0), codes[p].v[j], q.v[j]);
  }
  if constexpr (SPAN == 32) return totals32<D>(v);
  else return totals16<D>(v);
}

}  // namespace FT_NS
