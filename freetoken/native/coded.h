// Tiles whose weights are codes with scales, in two forms: any tier by float32 weights (Coded), and by
// bfloat16 pairs where the CPU has them (Paired, for codes of at most six bits).
//
// STREAMS of a tile follow each other, each 64-byte aligned; quant/_coded.py writes the same. Codes of b = 1, 2
// or 4 bits, or planes of that many bits of wider codes:
//   rows   512 / b elements in 64 bytes: 32 words, digit q of word j = element 32 q + j
//   down   [w / (32 / b)][H] dwords: digit q of the low word = column 2 q, of the high word = column 2 q + 1
// Eight bits: rows alike; down [w / 2][H] words, low byte = column 0, high byte = column 1.
// Rows end at a multiple of a line; what pads them meets zeros of x.
#pragma once
#include "engine.h"

namespace FT_NS {

constexpr int V = STEP / W;       // vectors of one step
constexpr int SCALES_AHEAD = 8;  // rows whose scales are fetched in advance: each row's are a line or two of their own

// What the streams are of: gate and up [w, H] and down, or one matrix [w, H] alone.
struct Shape {
  int64_t w, h;
  int matrices = 3;
  explicit Shape(const ft_layer& l) : w(l.tile_width), h(l.hidden) {}
  Shape(int64_t w_, int64_t h_, int m) : w(w_), h(h_), matrices(m) {}
};

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
FT_INLINE int64_t line_bytes(int64_t n, int bits) { return (int64_t)ft_align(n, 512 / bits) * bits / 8; }

// --- codes to floats, W at a time -----------------------------------------------------------------

#if defined(FT_AVX512)
FT_INLINE I words_of(const uint8_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
FT_INLINE I dwords_of(const uint8_t* p) { return _mm512_loadu_si512(p); }
FT_INLINE I bytes_of(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE I shift_right(I v, int n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE I shift_left(I v, int n) { return _mm512_slli_epi32(v, n); }
FT_INLINE I masked(I v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
FT_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
FT_INLINE F nibble_e2m1(I v) {
  const F table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(v, table);  // the low four bits count
}
FT_INLINE F byte_e4m3(I v) {  // bits to half precision, which has the same subnormals, times 2^8
  I half = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x7F)), 7),
                           _mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x80)), 8));
  return mul(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), set1(256.0f));
}
FT_INLINE F e4m3_of(__m128i codes) {
  const __m256i words = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8), 1);
  return mul(_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xBF80))), set1(256.0f));
}
FT_INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
#elif defined(FT_AVX2)
FT_INLINE I words_of(const uint8_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
FT_INLINE I dwords_of(const uint8_t* p) { return _mm256_loadu_si256((const I*)p); }
FT_INLINE I bytes_of(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
FT_INLINE I shift_right(I v, int n) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE I shift_left(I v, int n) { return _mm256_slli_epi32(v, n); }
FT_INLINE I masked(I v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
FT_INLINE I either(I a, I b) { return _mm256_or_si256(a, b); }
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
#elif defined(FT_NEON)
FT_INLINE I words_of(const uint8_t* p) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))); }
FT_INLINE I dwords_of(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
FT_INLINE I bytes_of(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
FT_INLINE I shift_right(I v, int n) { return vshlq_u32(v, vdupq_n_s32(-n)); }
FT_INLINE I shift_left(I v, int n) { return vshlq_u32(v, vdupq_n_s32(n)); }
FT_INLINE I masked(I v, int mask) { return vandq_u32(v, vdupq_n_u32((uint32_t)mask)); }
FT_INLINE I either(I a, I b) { return vorrq_u32(a, b); }
FT_INLINE F halves(I v) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(v))); }
FT_INLINE F nibble_e2m1(I v) {  // bits to half precision, as below, times 2^14
  return mul(halves(either(shift_left(masked(v, 7), 9), shift_left(masked(v, 8), 12))), set1(16384.0f));
}
FT_INLINE F byte_e4m3(I v) {
  return mul(halves(either(shift_left(masked(v, 0x7F), 7), shift_left(masked(v, 0x80), 8))), set1(256.0f));
}
FT_INLINE F to_float(I v) { return vcvtq_f32_u32(v); }
#else
typedef uint32_t I;
FT_INLINE I words_of(const uint8_t* p) { return (I)(p[0] | p[1] << 8); }
FT_INLINE I dwords_of(const uint8_t* p) { return (I)p[0] | (I)p[1] << 8 | (I)p[2] << 16 | (I)p[3] << 24; }
FT_INLINE I bytes_of(const uint8_t* p) { return *p; }
FT_INLINE I shift_right(I v, int n) { return v >> n; }
FT_INLINE I shift_left(I v, int n) { return v << n; }
FT_INLINE I masked(I v, int mask) { return v & (I)mask; }
FT_INLINE I either(I a, I b) { return a | b; }
FT_INLINE F nibble_e2m1(I v) {
  const float table[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return v & 8 ? -table[v & 7] : table[v & 7];
}
FT_INLINE F byte_e4m3(I v) { return 256.0f * f16_to_float((uint16_t)((v & 0x7F) << 7 | (v & 0x80) << 8)); }
FT_INLINE F to_float(I v) { return (float)v; }
#endif

typedef F (*Lookup)(I);

// 32 codes of an 8-bit row at element k.
template <Lookup Table>
FT_INLINE void row8(const uint8_t* row, int64_t k, F (&w)[V]) {
  const uint8_t* words = row + k / 64 * 64;
  const int q = (int)(k / 32 % 2);
  if (q == 0) FT_PREFETCH(words + AHEAD);
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(words_of(words + 2 * v * W), 8 * q));
}
// Column i at h, 32 codes.
template <Lookup Table>
FT_INLINE void down8(const uint8_t* codes, int64_t hidden, int i, int64_t h, F (&w)[V]) {
  const uint8_t* p = codes + (i / 2 * hidden + h) * 2;
  for (int v = 0; v < V; v++) w[v] = Table(shift_right(words_of(p + 2 * v * W), i % 2 * 8));
}
// --- any tier -------------------------------------------------------------------------------------

// Tile gives row(m, i, k, w), 32 weights of row i of matrix m (0 = gate, 1 = up) as floats, and down(i, h, w);
// COLUMN_BITS, codes_down(); and
//   near(i)   prefetches the scales of row i of gate and up
//   warm(i)   prefetches a w-th of the scales of down
template <class Tile_>
struct Coded {
  typedef Tile_ Tile;
  typedef float X;
  static constexpr int GROUP = Tile::GROUP, STREAMS = 8;
  static constexpr bool AS_THEY_LIE = false, IN_ORDER = false, LEADS = false;
  Tile tile;
  int64_t hidden;

  Coded(const Shape& shape, const uint8_t* bytes) : tile(shape, bytes), hidden(shape.h) {
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(i);
  }
  Coded(const ft_layer& l, const uint8_t* bytes) : Coded(Shape(l), bytes) {}

  // Rows i of matrices m times R rows of x.
  template <int R, int N>
  FT_APART void dots(const int (&ms)[N], const int (&is)[N], const float* x, int64_t xs, float (&out)[N][R]) const {
    const Tile own = tile;  // in registers
    int m[N], i[N];
    for (int n = 0; n < N; n++) m[n] = ms[n], i[n] = is[n];
    F acc[N][R];
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[n][r] = zero();
    for (int64_t k = 0, end = hidden; k < end; k += STEP)
      for (int n = 0; n < N; n++) {
        F w[V];
        own.row(m[n], i[n], k, w);
        for (int v = 0; v < V; v++)
          for (int r = 0; r < R; r++) acc[n][r] = fma(w[v], load(x + r * xs + k + v * W), acc[n][r]);
      }
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) out[n][r] = sum(acc[n][r]);
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const float* x, int64_t xs, float* g, float* u, int64_t gs) const {
    constexpr int AT_ONCE = R > 2 ? 1 : C;  // many rows are chains enough
    for (int from = 0; from < C; from += AT_ONCE) {
      int m[2 * AT_ONCE], at[2 * AT_ONCE];
      for (int c = 0; c < AT_ONCE; c++) {
        tile.near(i + from + c + SCALES_AHEAD);
        m[2 * c] = 0, m[2 * c + 1] = 1;
        at[2 * c] = at[2 * c + 1] = i + from + c;
      }
      float out[2 * AT_ONCE][R];
      dots<R, 2 * AT_ONCE>(m, at, x, xs, out);
      for (int c = 0; c < AT_ONCE; c++)
        for (int r = 0; r < R; r++) {
          g[r * gs + from + c] = out[2 * c][r];
          u[r * gs + from + c] = out[2 * c + 1][r];
        }
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
  void prefetch(int i1, int count, int64_t h, bool ahead) const {
    if (ahead) prefetch_next(tile.codes_down(), hidden * Tile::COLUMN_BITS / 8, i1, count * STEP * Tile::COLUMN_BITS / 8, h);
  }
  void warm(int i) const {
    const int64_t column = hidden * Tile::COLUMN_BITS / 8;
    prefetch_next(tile.codes_down(), column, i, column, 0);
    tile.warm(i);
  }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

}  // namespace FT_NS

#if defined(FT_AVX512) && !defined(FT_BF16_DOT)  // AMX decodes by them
#define FT_WEIGHTS(Tile) tile_weights<Tile>
#else
#define FT_WEIGHTS(Tile) nullptr
#endif

namespace FT_NS {
// Steps and words of columns cover no more, but a walk that prefetches along memory goes through whole tiles.
template <class Format>
constexpr int cut_of() { return Format::LEADS ? 0 : 64; }
}  // namespace FT_NS

#if defined(FT_BF16_DOT)
namespace FT_NS {
template <class Format>
struct DigitsOf {  // digits_of.h has more of them
  static constexpr const DigitCodes* codes() { return nullptr; }
};
}  // namespace FT_NS
#endif

// A format of a tile by floats and, where the CPU multiplies bfloat16 pairs, by those. What isn't bfloat16 is
// computed there as the tier below does, by its code.
#if defined(FT_BF16_DOT)
#define FT_CODED(name, Floats, Pairs, tile_bytes)                                                   \
  namespace ft_avx512 {                                                                             \
  extern const TileFormat format_##name;                                                            \
  }                                                                                                 \
  namespace FT_NS {                                                                                 \
  static void name##_run(const TileJob& job) {                                                      \
    if (job.x_dtype != FT_BF16) return ft_avx512::format_##name.run(job);                           \
    run_tiles<Pairs>(job);                                                                          \
  }                                                                                                 \
  static void name##_matrix(const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch) {  \
    if (job.dtype != FT_BF16) return ft_avx512::format_##name.matrix(job, first, last, scratch);    \
    run_matrix<Pairs>(job, first, last, scratch);                                                   \
  }                                                                                                 \
  static void name##_numbers(const MatrixJob& job, int64_t first, int64_t last) {                   \
    ft_avx512::format_##name.numbers(job, first, last);                                             \
  }                                                                                                 \
  extern const TileFormat format_##name;                                                            \
  const TileFormat format_##name = {#name,         name##_run,     tile_bytes, matrix_bytes<Floats::Tile>, \
                                    name##_matrix, name##_numbers, nullptr,    FT_ROWS,                     \
                                    nullptr,       nullptr,        DigitsOf<Pairs>::codes(), cut_of<Pairs>()}; \
  }
#else
#define FT_CODED(name, Floats, Pairs, tile_bytes)                                                   \
  namespace FT_NS {                                                                                 \
  extern const TileFormat format_##name;                                                            \
  const TileFormat format_##name = {#name, run_tiles<Floats>, tile_bytes, matrix_bytes<Floats::Tile>, \
                                    run_matrix<Floats>, matrix_numbers<Floats::Tile>, FT_WEIGHTS(Floats::Tile),  \
                                    FT_ROWS, nullptr, nullptr, nullptr, cut_of<Floats>()};               \
  }
#endif

#include "matrix.h"
