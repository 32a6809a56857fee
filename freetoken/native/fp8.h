// FP8 e4m3 whatever its scales cover. Scales give
//   open(streams, shape)   where they lie
//   row(m, i, k)           the one of a row at k
//   down(i, h)             those of W lanes at h of column i
//   fits(w)                whether tiles of w columns hold whole ones
#pragma once
#include "blocks.h"

namespace FT_NS {

template <class Scales>
struct Fp8 {
  static constexpr int COLUMN_BITS = 8, GROUP = 2;
  const uint8_t* codes[3];
  Scales scales;
  int64_t hidden, row_bytes;

  Fp8(const Shape& shape, const uint8_t* tile) { size(shape, tile); }
  uint64_t size(const Shape& shape, const uint8_t* tile) {
    Streams s{tile};
    hidden = shape.h;
    row_bytes = line_bytes(hidden, 8);
    for (int m = 0; m < shape.matrices; m++) codes[m] = s.next(shape.w * (m < 2 ? row_bytes : hidden));
    scales.open(s, shape);
    return s.at;
  }

  FT_INLINE_MEMBER void near(int) const {}  // few scales: they stay in the cache
  FT_INLINE_MEMBER void warm(int) const {}
  const uint8_t* codes_down() const { return codes[2]; }

  FT_INLINE_MEMBER void row(int m, int i, int64_t k, F (&w)[V]) const {
    row8<byte_e4m3>(codes[m] + i * row_bytes, k, w);
    const F scale = set1(scales.row(m, i, k));
    for (int v = 0; v < V; v++) w[v] = mul(w[v], scale);
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    down8<byte_e4m3>(codes[2], hidden, i, h, w);
    for (int v = 0; v < V; v++) w[v] = mul(w[v], scales.down(i, h + v * W));
  }
};

template <class Scales>
static uint64_t fp8_bytes(uint32_t w, uint32_t h) {
  if (w % 2 || h % 32 || !Scales::fits(w)) return 0;
  const Shape shape(w, h, 3);
  return Fp8<Scales>(shape, nullptr).size(shape, nullptr);
}

#if defined(FT_BF16_DOT)

// e4m3 to bfloat16, times 2^8, which costs a shift less and is what scales take back: exponents gain 128 by one bit.
constexpr float UNSCALED = 0x1p-8f;

// The low and the high byte of each word. Zero and the seven subnormals, 1 weight in 10^4, come from a table.
struct Halves {
  I low, high;
  explicit FT_INLINE_MEMBER Halves(I words) {
    const I bits = _mm512_set1_epi16((short)0x87F0), more = _mm512_set1_epi16(0x4000);
    low = _mm512_ternarylogic_epi32(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 4), bits, more, 0xEA);
    high = _mm512_ternarylogic_epi32(_mm512_srai_epi16(words, 4), bits, more, 0xEA);
    if (__builtin_expect(_mm512_testn_epi8_mask(words, _mm512_set1_epi8(0x78)) != 0, 0)) {
      low = tiny(low, _mm512_slli_epi16(words, 8), words);
      high = tiny(high, words, _mm512_srli_epi16(words, 8));
    }
  }
  // Words whose exponent is zero: `index` has what to look up in its low five bits, `sign` the sign on top.
  FT_INLINE I tiny(I all, I sign, I index) {
    const I table = _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4020, 0x4040, 0x4060));
    all = _mm512_mask_permutexvar_epi16(all, _mm512_testn_epi16_mask(index, _mm512_set1_epi16(0x78)), index, table);
    return _mm512_ternarylogic_epi32(all, sign, _mm512_set1_epi16((short)0x8000), 0xF8);
  }
};

// Where unpacklo and unpackhi leave 32 lanes.
FT_INLINE I low_lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
FT_INLINE I high_lanes() { return _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }

template <class Scales>
struct Fp8Pairs {
  typedef uint16_t X;
  static constexpr int GROUP = 32, STREAMS = 32;
  static constexpr bool AS_THEY_LIE = false, IN_ORDER = true, LEADS = true;
  static constexpr int64_t column_bytes(int64_t hidden) { return hidden; }
  Lead lead;
  Fp8<Scales> t;
  int64_t hidden;
  Fp8Pairs(const Shape& shape, const uint8_t* tile) : t(shape, tile), hidden(shape.h) {}
  Fp8Pairs(const ft_layer& l, const uint8_t* tile) : Fp8Pairs(Shape(l), tile) {}

  template <int R, int N>
  FT_APART void dots(const int (&m)[N], const int (&i)[N], const uint16_t* x, int64_t xs,
                             float (&out)[N][R]) const {
    F acc[N][R];
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[n][r] = zero();
    const uint8_t *row[N], *far[N];
    for (int n = 0; n < N; n++) {
      row[n] = t.codes[m[n]] + i[n] * t.row_bytes;
      far[n] = lead.far(row[n], t.row_bytes, x);
    }
    for (int64_t k = 0; k < hidden; k += 128)
      for (int n = 0; n < N; n++) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = zero();
        for (int b = 0; b < 128 && k + b < hidden; b += 64) {
          fetch(far[n] + k + b);
          const uint8_t* p = row[n] + k + b;
          FT_PREFETCH(p + SOON);
          const Halves w(_mm512_loadu_si512(p));
          for (int r = 0; r < R; r++) {
            const uint16_t* at = x + r * xs + k + b;
            part[r] = dot2(part[r], w.low, _mm512_loadu_si512(at));
            part[r] = dot2(part[r], w.high, _mm512_loadu_si512(at + 32));
          }
        }
        const F scale = set1(t.scales.row(m[n], i[n], k) * UNSCALED);
        for (int r = 0; r < R; r++) acc[n][r] = fma(part[r], scale, acc[n][r]);
      }
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) out[n][r] = sum(acc[n][r]);
  }

  template <int R>
  FT_INLINE_MEMBER void two(int m, int i, const uint16_t* x, int64_t xs, float* to, int64_t gs) const {
    float out[2][R];
    dots<R, 2>({m, m}, {i, i + 1}, x, xs, out);
    for (int r = 0; r < R; r++) to[r * gs] = out[0][r], to[r * gs + 1] = out[1][r];
  }

  // Lanes as unpacklo and unpackhi leave them, 32 columns to a partial sum.
  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    F acc[2][R];
    for (int v = 0; v < 2; v++)
      for (int r = 0; r < R; r++) acc[v][r] = fresh ? zero() : load(out + r * os + 16 * v);
    const uint8_t* at = t.codes[2] + (int64_t)i0 * hidden + h * (i1 - i0);
    at = lead.far(at, STEP * (i1 - i0), mid);
    for (int i = i0; i < i1; i += 32) {
      F part[2][R];
      for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) part[v][r] = zero();
      for (int j = i; j < i1 && j < i + 32; j += 2) {
        fetch(at + (j - i0) * STEP);
        const uint8_t* p = t.codes[2] + ((int64_t)(j / 2) * hidden + h) * 2;
        const Halves both(_mm512_loadu_si512(p));
        const I lo = _mm512_unpacklo_epi16(both.low, both.high), hi = _mm512_unpackhi_epi16(both.low, both.high);
        for (int r = 0; r < R; r++) {
          uint32_t two;
          memcpy(&two, mid + r * ms + j, 4);
          I m = _mm512_set1_epi32((int)two);
          part[0][r] = dot2(part[0][r], lo, m);
          part[1][r] = dot2(part[1][r], hi, m);
        }
      }
      const F first = mul(t.scales.down(i, h), set1(UNSCALED)), second = mul(t.scales.down(i, h + 16), set1(UNSCALED));
      const F scale[2] = {_mm512_permutex2var_ps(first, low_lanes(), second),
                          _mm512_permutex2var_ps(first, high_lanes(), second)};
      for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) acc[v][r] = fma(part[v][r], scale[v], acc[v][r]);
    }
    for (int v = 0; v < 2; v++)
      for (int r = 0; r < R; r++) store(out + r * os + 16 * v, acc[v][r]);
  }

  static void prepare(uint16_t*, int64_t, int64_t, int) {}
  static void prepare_middle(uint16_t*, int64_t, int, int) {}
  void finish(const float* from, float* to, int n) const { in_order(from, to, n); }
};

#endif

}  // namespace FT_NS
