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

// e4m3 in the low (high) byte of each word to bfloat16. Exponents gain 120; zero and the seven subnormals come
// from a table, which their low five bits index.
FT_INLINE I tiny_e4m3() {
  return _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3C60, 0x3C40,
                          0x3C20, 0x3C00, 0x3BC0, 0x3B80, 0x3B00, 0);
}
FT_INLINE I low_e4m3(I w) {
  I t = _mm512_and_si512(_mm512_slli_epi16(w, 4), _mm512_set1_epi16(0x07F0));
  t = _mm512_add_epi16(t, _mm512_set1_epi16(120 << 7));
  t = _mm512_mask_permutexvar_epi16(t, _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x78)), w, tiny_e4m3());
  return _mm512_ternarylogic_epi32(t, _mm512_slli_epi16(w, 8), _mm512_set1_epi16((short)0x8000), 0xF8);
}
FT_INLINE I high_e4m3(I w) {
  I t = _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi16(0x07F0));
  t = _mm512_add_epi16(t, _mm512_set1_epi16(120 << 7));
  t = _mm512_mask_permutexvar_epi16(t, _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x7800)),
                                    _mm512_srli_epi16(w, 8), tiny_e4m3());
  return _mm512_ternarylogic_epi32(t, w, _mm512_set1_epi16((short)0x8000), 0xF8);
}

// Where unpacklo and unpackhi leave 32 lanes.
FT_INLINE I low_lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
FT_INLINE I high_lanes() { return _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }

template <class Scales>
struct Fp8Pairs {
  typedef uint16_t X;
  static constexpr int GROUP = 32, STREAMS = 32;
  static constexpr bool AS_THEY_LIE = false;
  Fp8<Scales> t;
  int64_t hidden;
  Fp8Pairs(const Shape& shape, const uint8_t* tile) : t(shape, tile), hidden(shape.h) {}
  Fp8Pairs(const ft_layer& l, const uint8_t* tile) : Fp8Pairs(Shape(l), tile) {}

  template <int R, int N>
  FT_INLINE_MEMBER void dots(const int (&m)[N], const int (&i)[N], const uint16_t* x, int64_t xs,
                             float (&out)[N][R]) const {
    F acc[N][R];
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[n][r] = zero();
    for (int64_t k = 0; k < hidden; k += 128)
      for (int n = 0; n < N; n++) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = zero();
        for (int b = 0; b < 128 && k + b < hidden; b += 64) {
          const uint8_t* p = t.codes[m[n]] + i[n] * t.row_bytes + k + b;
          FT_PREFETCH(p + AHEAD);
          I words = _mm512_loadu_si512(p);
          I low = low_e4m3(words), high = high_e4m3(words);
          for (int r = 0; r < R; r++) {
            const uint16_t* at = x + r * xs + k + b;
            part[r] = dot2(part[r], low, _mm512_loadu_si512(at));
            part[r] = dot2(part[r], high, _mm512_loadu_si512(at + 32));
          }
        }
        const F scale = set1(t.scales.row(m[n], i[n], k));
        for (int r = 0; r < R; r++) acc[n][r] = fma(part[r], scale, acc[n][r]);
      }
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) out[n][r] = sum(acc[n][r]);
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const uint16_t* x, int64_t xs, float* g, float* u, int64_t gs) const {
    for (int c = 0; c < C; c++) {
      float out[2][R];
      dots<R, 2>({0, 1}, {i + c, i + c}, x, xs, out);
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = out[0][r];
        u[r * gs + c] = out[1][r];
      }
    }
  }

  // Lanes as unpacklo and unpackhi leave them, 32 columns to a partial sum.
  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    F acc[2][R];
    for (int v = 0; v < 2; v++)
      for (int r = 0; r < R; r++) acc[v][r] = fresh ? zero() : load(out + r * os + 16 * v);
    for (int i = i0; i < i1; i += 32) {
      F part[2][R];
      for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) part[v][r] = zero();
      for (int j = i; j < i1 && j < i + 32; j += 2) {
        I words = _mm512_loadu_si512(t.codes[2] + ((int64_t)(j / 2) * hidden + h) * 2);
        I low = low_e4m3(words), high = high_e4m3(words);
        I lo = _mm512_unpacklo_epi16(low, high), hi = _mm512_unpackhi_epi16(low, high);
        for (int r = 0; r < R; r++) {
          uint32_t two;
          memcpy(&two, mid + r * ms + j, 4);
          I m = _mm512_set1_epi32((int)two);
          part[0][r] = dot2(part[0][r], lo, m);
          part[1][r] = dot2(part[1][r], hi, m);
        }
      }
      const F first = t.scales.down(i, h), second = t.scales.down(i, h + 16);
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
  void prefetch(int i1, int count, int64_t h, bool ahead) const {
    if (ahead) prefetch_next(t.codes[2], hidden, i1, count * STEP, h);
  }
  void warm(int i) const { prefetch_next(t.codes[2], hidden, i, hidden, 0); }
  void finish(const float* from, float* to, int n) const { in_order(from, to, n); }
};

#endif

}  // namespace FT_NS
