#include "int8_panel.h"

#include "activation.h"

namespace FT_NS {

#if !defined(FT_AVX512) || defined(FT_BF16_DOT)  // other CPUs with AVX-512 compute as avx2 does

#if defined(FT_AVX512)
constexpr int MANY = 6;
#elif defined(FT_AVX2)
constexpr int MANY = 4;
#else
constexpr int MANY = 2;
#endif

// 32 numbers as signed bytes; returns d. NaN and infinity make d NaN; what is too small for a quotient is zero.
FT_INLINE float quantise(const float* x, int8_t* q) {
#if defined(FT_AVX512)
  const __m512i a = _mm512_castps_si512(load(x)), b = _mm512_castps_si512(load(x + 16));
  const __m512i one = _mm512_set1_epi32(0x7FFFFFFF);
  const uint32_t most = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(a, one), _mm512_and_si512(b, one)));
#else
  uint32_t most = 0;
  for (int i = 0; i < 32; i++) {
    const uint32_t bits = float_to_bits(x[i]) & 0x7FFFFFFFu;
    most = bits > most ? bits : most;
  }
#endif
  const float largest = bits_to_float(most);
  if (most >= 0x7F800000u || largest < 1e-36f) {
    memset(q, 0, 32);
    return most > 0x7F7FFFFFu ? bits_to_float(0x7FC00000u) : 0.0f;
  }
  const float times = 127.0f / largest;
#if defined(FT_AVX512)
  for (int i = 0; i < 32; i += 16)
    _mm_storeu_si128((__m128i*)(q + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(mul(load(x + i), set1(times)))));
#elif defined(FT_AVX2)
  __m256i v[4];
  for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(mul(load(x + 8 * i), set1(times)));
  const __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
  for (int i = 0; i < 32; i++) q[i] = (int8_t)(int32_t)round(x[i] * times);
#endif
  return largest / 127.0f;
}

// Sums of 16 bytes each.
FT_INLINE void sum_halves(const int8_t* q, int32_t (&sums)[2]) {
#if defined(FT_AVX512) || defined(FT_AVX2)  // as unsigned bytes, 128 too large each
  const __m256i bytes = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)q), _mm256_set1_epi8((char)0x80));
  const __m256i eights = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  const __m128i low = _mm256_castsi256_si128(eights), high = _mm256_extracti128_si256(eights, 1);
  sums[0] = _mm_cvtsi128_si32(low) + _mm_extract_epi32(low, 2) - 16 * 128;
  sums[1] = _mm_cvtsi128_si32(high) + _mm_extract_epi32(high, 2) - 16 * 128;
#else
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 32; i++) sums[i / 16] += q[i];
#endif
}

void quantise_row(const float* x, int64_t width, int64_t padded, uint8_t* at, const Rules& rules) {
  const int span = rules.span;
  memset(at, 0, x8_bytes(padded, span));
  float* d = (float*)(at + padded);
  int32_t* less = (int32_t*)(d + padded / span);
  float* sums = (float*)(less + padded / span);
  for (int64_t k = 0; k < width; k += 32) {
    int8_t q[32];
    float last[32] = {};
    if (width - k < 32) memcpy(last, x + k, (width - k) * sizeof(float));
    const float unit = quantise(width - k < 32 ? last : x + k, q);
    rules.place(q, at, k / 32);
    int32_t halves[2];
    sum_halves(q, halves);
    for (int b = 0; b < 32; b += span) {
      const int32_t sum = span == 32 ? halves[0] + halves[1] : halves[b / 16];
      const int64_t s = (k + b) / span;
      d[s] = unit * rules.unit;
      less[s] = rules.least * sum;
      sums[s] = unit * (float)sum;
    }
  }
}

// Dword of x that span s begins with; the others follow in pairs (plain order: one by one).
template <int SPAN, int D>
FT_INLINE int64_t first_dword(int64_t s) {
  if constexpr (D == 0) return s * (SPAN / 4);
  else {
    const int64_t block = s * SPAN / 32, line = block / (2 * D), in = block % (2 * D);
    return (line * D + in % D) * 16 + in / D * 2 + (SPAN == 16 ? s % 2 * 8 : 0);
  }
}

// Lanes [lane, lane + W) of a panel times R rows of x.
template <int SPAN, int D, bool WIDE, int R>
FT_INLINE void some_dots(const Panel& p, int lane, const Octets& x, int first_row, float* out, int64_t os) {
  Row8 rows[R];
  for (int r = 0; r < R; r++) rows[r] = x8_row(x.rows + (first_row + r) * x.stride, p.padded, SPAN);
  F eighth[8][R];
  for (int c = 0; c < 8; c++) {
    F chain[R], extra[R];
    for (int r = 0; r < R; r++) chain[r] = extra[r] = zero();
    for (int64_t s = c; s < p.padded / SPAN; s += 8) {
      I sum[R];
      for (int r = 0; r < R; r++) sum[r] = same(-rows[r].less[s]);
      const int64_t first = first_dword<SPAN, D>(s);
      for (int j = 0; j < SPAN / 4; j++) {
        const int64_t t = first + (D ? j / 2 * 4 + j % 2 : j);
        const I w = dwords_of((const uint8_t*)(p.codes + t * TALL + lane));
        for (int r = 0; r < R; r++) sum[r] = dot4<WIDE>(sum[r], w, same(rows[r].dword(t)));
      }
      const F step = load(p.steps + s * TALL + lane);
      for (int r = 0; r < R; r++) chain[r] = fused_lanes(signed_floats(sum[r]), mul(step, set1(rows[r].d[s])), chain[r]);
    }
    if (p.offsets)
      for (int64_t s = c; s < p.padded / SPAN; s += 8) {
        const F offset = load(p.offsets + s * TALL + lane);
        for (int r = 0; r < R; r++) extra[r] = fused_lanes(offset, set1(rows[r].sums[s]), extra[r]);
      }
    for (int r = 0; r < R; r++) eighth[c][r] = p.offsets ? add(chain[r], extra[r]) : chain[r];
  }
  for (int r = 0; r < R; r++)
    store(out + (first_row + r) * os + lane,
          add(add(add(eighth[0][r], eighth[4][r]), add(eighth[2][r], eighth[6][r])),
              add(add(eighth[1][r], eighth[5][r]), add(eighth[3][r], eighth[7][r]))));
}

template <int SPAN, int D, bool WIDE>
void panel_dots(const Panel& p, const Octets& x, float* out, int64_t os) {
  int r = 0;
  for (; r + MANY <= x.num_rows; r += MANY)
    for (int lane = 0; lane < TALL; lane += W) some_dots<SPAN, D, WIDE, MANY>(p, lane, x, r, out, os);
  for (; r < x.num_rows; r++)
    for (int lane = 0; lane < TALL; lane += W) some_dots<SPAN, D, WIDE, 1>(p, lane, x, r, out, os);
}

template <int SPAN, bool WIDE, bool OFFSET, int R>
FT_INLINE void strip_rows(const Strip& strip, int i0, int i1, const Octets& mid, int first_row, int64_t padded,
                          float* out, int64_t os, bool fresh) {
  Row8 rows[R];
  for (int r = 0; r < R; r++) rows[r] = x8_row(mid.rows + (first_row + r) * mid.stride, padded, SPAN);
  out += first_row * os;
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = fresh ? zero() : load(out + r * os);
  for (int i = i0; i < i1; i += SPAN) {
    I sum[R];
    for (int r = 0; r < R; r++) sum[r] = same(-rows[r].less[i / SPAN]);
    for (int j = 0; j < SPAN / 4; j++) {
      const I w = dwords_of((const uint8_t*)strip.codes[(i - i0) / 4 + j]);
      for (int r = 0; r < R; r++) sum[r] = dot4<WIDE>(sum[r], w, same(rows[r].dword(i / 4 + j)));
    }
    const F step = load(strip.steps[(i - i0) / SPAN]);
    for (int r = 0; r < R; r++)
      acc[r] = fused_lanes(signed_floats(sum[r]), mul(step, set1(rows[r].d[i / SPAN])), acc[r]);
    if constexpr (OFFSET) {
      const F offset = load(strip.offsets[(i - i0) / SPAN]);
      for (int r = 0; r < R; r++) acc[r] = fused_lanes(offset, set1(rows[r].sums[i / SPAN]), acc[r]);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * os, acc[r]);
}

template <int SPAN, bool WIDE, bool OFFSET>
void strip_dots(const Strip& strip, int i0, int i1, const Octets& mid, int64_t padded, float* out, int64_t os,
                bool fresh) {
  int r = 0;
  for (; r + MANY <= mid.num_rows; r += MANY)
    strip_rows<SPAN, WIDE, OFFSET, MANY>(strip, i0, i1, mid, r, padded, out, os, fresh);
  for (; r < mid.num_rows; r++) strip_rows<SPAN, WIDE, OFFSET, 1>(strip, i0, i1, mid, r, padded, out, os, fresh);
}

#define FT_PANEL(SPAN, D, WIDE) template void panel_dots<SPAN, D, WIDE>(const Panel&, const Octets&, float*, int64_t);
FT_PANEL(32, 0, true)
FT_PANEL(32, 2, true)
FT_PANEL(32, 2, false)
FT_PANEL(16, 2, false)
FT_PANEL(16, 4, false)
#define FT_STRIP(SPAN, WIDE, OFFSET)                                                                            \
  template void strip_dots<SPAN, WIDE, OFFSET>(const Strip&, int, int, const Octets&, int64_t, float*, int64_t, bool);
FT_STRIP(32, true, false)
FT_STRIP(32, false, false)
FT_STRIP(32, false, true)
FT_STRIP(16, false, false)
FT_STRIP(16, false, true)

// W outputs of row r from i on.
FT_INLINE void put_lanes(const MatrixJob& job, int64_t r, int64_t i, F v) {
  float some[W];
  if (job.bias) {
    widen(job.bias, job.dtype, i, W, some);
    v = add(v, load(some));
  }
  const int64_t at = r * job.n + i;
  if (job.dtype == FT_F32) return store((float*)job.y + at, v);
#if defined(FT_AVX512)
  const __m256i half = job.dtype == FT_BF16
      ? _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(round_bf16(v)), 16)) : _mm512_cvtps_ph(v, 8);
  _mm256_storeu_si256((__m256i*)((uint16_t*)job.y + at), half);
#else
  store(some, v);
  for (int j = 0; j < W; j++)
    ((uint16_t*)job.y)[at + j] = job.dtype == FT_BF16 ? float_to_bf16(some[j]) : float_to_f16(some[j]);
#endif
}

void put_sums(const MatrixJob& job, int64_t r, int64_t i, int count, const float* sums) {
  for (int q = 0; q < count; q++)
    for (int lane = 0; lane < TALL; lane += W) put_lanes(job, r + q, i + lane, load(sums + q * TALL + lane));
}

#endif

}  // namespace FT_NS
