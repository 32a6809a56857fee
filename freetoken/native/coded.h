// Tiles whose weights are codes with scales, in two forms: any tier by float32 weights (Coded), and by
// bfloat16 pairs where the CPU has them (Nibbles, for four-bit codes).
//
// STREAMS of a tile follow each other, each 64-byte aligned; quant/_coded.py writes the same.
//   4-bit rows   128 elements in 64 bytes: 32 words, nibble q of word j = element 32 q + j
//   4-bit down   [w / 8][H] dwords: nibble q of the low word = column 2 q, of the high word = column 2 q + 1
//   8-bit rows   64 elements in 64 bytes: 32 words, byte q of word j = element 32 q + j
//   8-bit down   [w / 2][H] words: low byte = column 0, high byte = column 1
// Rows end at a multiple of a line; what pads them meets zeros of x.
#pragma once
#include "engine.h"

namespace FT_NS {

constexpr int V = STEP / W;       // vectors of one step
constexpr int SCALES_AHEAD = 8;  // rows whose scales are fetched in advance: each row's are a line or two of their own

// Hands out a tile's streams one after the other.
struct Streams {
  const uint8_t* base;
  uint64_t at = 0;
  const uint8_t* next(uint64_t num_bytes) {
    const uint8_t* p = base ? base + at : nullptr;  // sizes alone are asked for without a base
    at = ft_align(at + num_bytes, 64);
    return p;
  }
};
FT_INLINE int64_t row_bytes4(int64_t n) { return (int64_t)ft_align(n, 128) / 2; }
FT_INLINE int64_t row_bytes8(int64_t n) { return (int64_t)ft_align(n, 64); }
FT_INLINE F e8m0(uint8_t e) { return set1(e ? bits_to_float((uint32_t)e << 23) : 5.877471754e-39f); }

// --- codes to floats, W at a time -----------------------------------------------------------------

#if defined(FT_AVX512)
FT_INLINE I words_of(const uint8_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
FT_INLINE I dwords_of(const uint8_t* p) { return _mm512_loadu_si512(p); }
FT_INLINE I bytes_of(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE I shift_right(I v, int n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE F nibble_int(I v) { return _mm512_cvtepi32_ps(_mm512_and_si512(v, _mm512_set1_epi32(15))); }
FT_INLINE F nibble_e2m1(I v) {
  const F table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(v, table);  // the low four bits count
}
FT_INLINE F byte_e4m3(I v) {  // bits to half precision, which has the same subnormals, times 2^8
  I half = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x7F)), 7),
                           _mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x80)), 8));
  return mul(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), set1(256.0f));
}
FT_INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
#elif defined(FT_AVX2)
FT_INLINE I words_of(const uint8_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE I dwords_of(const uint8_t* p) { return _mm256_loadu_si256((const I*)p); }
FT_INLINE I bytes_of(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
FT_INLINE I shift_right(I v, int n) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE F nibble_int(I v) { return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(15))); }
FT_INLINE F nibble_e2m1(I v) {
  const F table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
  I sign = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, v), _mm256_castsi256_ps(sign));
}
FT_INLINE F byte_e4m3(I v) {
  I half = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x7F)), 7),
                           _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x80)), 8));
  I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xD8);
  return mul(_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), set1(256.0f));
}
FT_INLINE F to_float(I v) { return _mm256_cvtepi32_ps(v); }
#else
typedef uint32_t I;
FT_INLINE I words_of(const uint8_t* p) { return (I)(p[0] | p[1] << 8); }
FT_INLINE I dwords_of(const uint8_t* p) { return (I)p[0] | (I)p[1] << 8 | (I)p[2] << 16 | (I)p[3] << 24; }
FT_INLINE I bytes_of(const uint8_t* p) { return *p; }
FT_INLINE I shift_right(I v, int n) { return v >> n; }
FT_INLINE F nibble_int(I v) { return (float)(v & 15); }
FT_INLINE F nibble_e2m1(I v) {
  const float table[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return v & 8 ? -table[v & 7] : table[v & 7];
}
FT_INLINE F byte_e4m3(I v) { return 256.0f * f16_to_float((uint16_t)((v & 0x7F) << 7 | (v & 0x80) << 8)); }
FT_INLINE F to_float(I v) { return (float)v; }
#endif

typedef F (*Lookup)(I);

// 32 codes of a 4-bit row at element k.
template <Lookup Table>
FT_INLINE void row4(const uint8_t* row, int64_t k, F (&w)[V]) {
  const uint8_t* words = row + k / 128 * 64;
  const int q = (int)(k / 32 % 4);
  if (q == 0) FT_PREFETCH(words + AHEAD);
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(words_of(words + 2 * v * W), 4 * q));
}
template <Lookup Table>
FT_INLINE void row8(const uint8_t* row, int64_t k, F (&w)[V]) {
  const uint8_t* words = row + k / 64 * 64;
  const int q = (int)(k / 32 % 2);
  if (q == 0) FT_PREFETCH(words + AHEAD);
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(words_of(words + 2 * v * W), 8 * q));
}
// Column i at h, 32 codes.
template <Lookup Table>
FT_INLINE void down4(const uint8_t* codes, int64_t hidden, int i, int64_t h, F (&w)[V]) {
  const uint8_t* p = codes + (i / 8 * hidden + h) * 4;
  const int shift = i % 2 * 16 + i % 8 / 2 * 4;
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(dwords_of(p + 4 * v * W), shift));
}
template <Lookup Table>
FT_INLINE void down8(const uint8_t* codes, int64_t hidden, int i, int64_t h, F (&w)[V]) {
  const uint8_t* p = codes + (i / 2 * hidden + h) * 2;
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(words_of(p + 2 * v * W), i % 2 * 8));
}
FT_INLINE void scale_all(F (&w)[V], F scale) {
  for (int v = 0; v < V; v++) w[v] = mul(w[v], scale);
}

// --- any tier -------------------------------------------------------------------------------------

// Tile gives gate(i, k, w), up(i, k, w) and down(i, h, w): 32 weights as floats; COLUMN_BITS, codes_down; and
//   near(i)   prefetches the scales of rows i of gate and up
//   warm(i)   prefetches a w-th of the scales of down
template <class Tile>
struct Coded {
  typedef float X;
  static constexpr int GROUP = Tile::GROUP;
  Tile tile;
  int64_t hidden;

  Coded(const ft_layer& l, const uint8_t* bytes) : tile(l, bytes), hidden(l.hidden) {
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(i);
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const float* x, int64_t xs, float* g, float* u, int64_t gs) const {
    F acc[2 * C][R];
    for (int c = 0; c < C; c++) tile.near(i + c + SCALES_AHEAD);
    for (int c = 0; c < 2 * C; c++)
      for (int r = 0; r < R; r++) acc[c][r] = zero();
    for (int64_t k = 0; k < hidden; k += STEP)
      for (int c = 0; c < 2 * C; c++) {
        F w[V];
        if (c % 2 == 0) tile.gate(i + c / 2, k, w);
        else tile.up(i + c / 2, k, w);
        for (int v = 0; v < V; v++)
          for (int r = 0; r < R; r++) acc[c][r] = fma(w[v], load(x + r * xs + k + v * W), acc[c][r]);
      }
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = sum(acc[2 * c][r]);
        u[r * gs + c] = sum(acc[2 * c + 1][r]);
      }
  }

  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const float* mid, int64_t ms, float* out, int64_t os,
                             bool fresh) const {
    F acc[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = fresh ? zero() : load(out + r * os + v * W);
    for (int i = i0; i < i1; i++) {
      F w[V];
      tile.down(i, h, w);
      for (int v = 0; v < V; v++)
        for (int r = 0; r < R; r++) acc[r][v] = fma(set1(mid[r * ms + i]), w[v], acc[r][v]);
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(out + r * os + v * W, acc[r][v]);
  }

  static void prepare(float*, int64_t, int64_t, int) {}
  static void prepare_middle(float*, int64_t, int, int) {}
  void prefetch(int i1, int count, int64_t h) const {
    prefetch_next(tile.codes_down, hidden * Tile::COLUMN_BITS / 8, i1, count * STEP * Tile::COLUMN_BITS / 8, h);
  }
  void warm(int i) const {
    const int64_t column = hidden * Tile::COLUMN_BITS / 8;
    prefetch_next(tile.codes_down, column, i, column, 0);
    tile.warm(i);
  }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

// --- four-bit codes by bfloat16 pairs -------------------------------------------------------------

#if defined(FT_BF16_DOT)

// Eight scales, for 32 elements each. (Broadcasts from memory would wait for the store: measured, 16 against 19.)
struct EightScales {
  F all;
  template <int Q>
  FT_INLINE_MEMBER F at() const {
    return _mm512_permutexvar_ps(_mm512_set1_epi32(Q), all);
  }
};
// The first n <= 8 bytes, the others zero.
FT_INLINE __m256i eight_bytes(const uint8_t* p, int64_t n) {
  if (n >= 8) return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p));
}

// Tile gives, besides Coded's streams: TABLE, 16 bf16 bit patterns; codes_gate, codes_up, row_bytes;
//   Span span(up, i, k)   the scales of 256 elements of a row from k on; Span::at<q>() those of elements 32 q
//   extra(up, i, sums)    what a row adds to the dot besides scaled codes, from x's sums over 32 elements
//   down_scale(i, h, v)   scale of 16 lanes at h + 16 v for the BLOCK columns from i on
//   down_extra(i, h, v)   what a column of 1.0 adds there, for each column of the block
template <class Tile>
struct Nibbles {
  typedef uint16_t X;
  static constexpr int GROUP = 32;
  Tile tile;
  int64_t hidden;
  I table;

  Nibbles(const ft_layer& l, const uint8_t* bytes) : tile(l, bytes), hidden(l.hidden) {
    uint16_t both[32];
    for (int i = 0; i < 32; i++) both[i] = Tile::TABLE[i % 16];
    table = _mm512_loadu_si512(both);
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(i);
  }

  // Bit 4 of the index is the next nibble's; the table holds everything twice.
  FT_INLINE_MEMBER I look_up(I words) const { return _mm512_permutexvar_epi16(words, table); }

  // 128 elements, whose scales are those from Q on.
  template <int Q, int R>
  FT_INLINE_MEMBER void half(const uint8_t* codes, const typename Tile::Span& span, const uint16_t* x, int64_t xs,
                             F (&acc)[R]) const {
    FT_PREFETCH(codes + AHEAD);
    const I words = _mm512_loadu_si512(codes);
    one<Q, R>(look_up(words), span, x, xs, acc);
    one<Q + 1, R>(look_up(_mm512_srli_epi16(words, 4)), span, x + 32, xs, acc);
    one<Q + 2, R>(look_up(_mm512_srli_epi16(words, 8)), span, x + 64, xs, acc);
    one<Q + 3, R>(look_up(_mm512_srli_epi16(words, 12)), span, x + 96, xs, acc);
  }
  template <int Q, int R>
  FT_INLINE_MEMBER void one(I w, const typename Tile::Span& span, const uint16_t* x, int64_t xs,
                            F (&acc)[R]) const {
    const F scale = span.template at<Q>();
    for (int r = 0; r < R; r++) acc[r] = fma(dot2(zero(), w, _mm512_loadu_si512(x + r * xs)), scale, acc[r]);
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const uint16_t* x, int64_t xs, float* g, float* u, int64_t gs) const {
    for (int c = 0; c < C; c++) {
      tile.near(i + c + SCALES_AHEAD);
      F acc[2][R];
      for (int s = 0; s < 2; s++)
        for (int r = 0; r < R; r++) acc[s][r] = zero();
      const uint8_t* rows[2] = {tile.codes_gate + (i + c) * tile.row_bytes,
                                tile.codes_up + (i + c) * tile.row_bytes};
      for (int64_t k = 0; k < hidden; k += 256)
        for (int s = 0; s < 2; s++) {
          const typename Tile::Span span = tile.span(s, i + c, k);
          half<0, R>(rows[s] + k / 2, span, x + k, xs, acc[s]);
          if (k + 128 < hidden) half<4, R>(rows[s] + k / 2 + 64, span, x + k + 128, xs, acc[s]);
        }
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = sum(acc[0][r]) + tile.extra(0, i + c, x_sums(x + r * xs, hidden));
        u[r * gs + c] = sum(acc[1][r]) + tile.extra(1, i + c, x_sums(x + r * xs, hidden));
      }
    }
  }

  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    constexpr int B = Tile::BLOCK;
    for (int v = 0; v < 2; v++) {
      F acc[R];
      for (int r = 0; r < R; r++) acc[r] = fresh ? zero() : load(out + r * os + 16 * v);
      for (int i = i0; i < i1; i += B) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = zero();
        for (int j = i; j < i + B; j += 8) {
          I words = _mm512_loadu_si512(tile.codes_down + ((int64_t)(j / 8) * hidden + h + 16 * v) * 4);
          I w[4] = {look_up(words), look_up(_mm512_srli_epi16(words, 4)), look_up(_mm512_srli_epi16(words, 8)),
                    look_up(_mm512_srli_epi16(words, 12))};
          for (int q = 0; q < 4; q++)
            for (int r = 0; r < R; r++) {
              uint32_t two;
              memcpy(&two, mid + r * ms + j + 2 * q, 4);
              part[r] = dot2(part[r], w[q], _mm512_set1_epi32((int)two));
            }
        }
        const F scale = tile.down_scale(i, h, v);
        for (int r = 0; r < R; r++) acc[r] = fma(part[r], scale, acc[r]);
        if (Tile::HAS_EXTRA) {
          const F extra = tile.down_extra(i, h, v);
          for (int r = 0; r < R; r++)
            acc[r] = fma(extra, set1(middle_sums(mid + r * ms, ms)[i / 32]), acc[r]);
        }
      }
      for (int r = 0; r < R; r++) store(out + r * os + 16 * v, acc[r]);
    }
  }

  static void prepare_middle(uint16_t* mid, int64_t ms, int w, int num_rows) {
    if (!Tile::HAS_EXTRA) return;
    const I ones = _mm512_set1_epi16(0x3F80);
    for (int r = 0; r < num_rows; r++)
      for (int b = 0; b < w / 32; b++)
        middle_sums(mid + r * ms, ms)[b] = sum(dot2(zero(), _mm512_loadu_si512(mid + r * ms + 32 * b), ones));
  }
  static void prepare(uint16_t* x, int64_t xs, int64_t width, int num_rows) {
    if (!Tile::HAS_EXTRA) return;
    const I ones = _mm512_set1_epi16(0x3F80);
    for (int r = 0; r < num_rows; r++)
      for (int64_t b = 0; b < width / 32; b++)
        x_sums(x + r * xs, width)[b] = sum(dot2(zero(), _mm512_loadu_si512(x + r * xs + 32 * b), ones));
  }
  void prefetch(int i1, int count, int64_t h) const {
    prefetch_next(tile.codes_down, hidden / 2, i1, count * STEP / 2, h);
  }
  void warm(int i) const {
    prefetch_next(tile.codes_down, hidden / 2, i, hidden / 2, 0);
    tile.warm(i);
  }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

#endif

}  // namespace FT_NS
