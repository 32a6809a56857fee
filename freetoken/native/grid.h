// IQ3: four neighbours along the summed dimension are one of 256 or 512 points, with a sign each. A point is four
// digits for eight magnitudes; as base-8 numbers, first neighbour lowest, points ascend, so a grid is the gaps
// before them, digits of base 85. A kind gives
//   POINTS, gaps(), MAGNITUDES   its grid
//   index, d, FT_PARTS(..)       its parts, numbers of points and factors among them
//   ninth(m, i, k)               the ninth bits of the eight points of a row at k
//   signs(m, i, k)               32 signs of a row
//   scale(m, i, k)               the number that d is multiplied with
//   down_ninth(i, h), down_signs(i, h), down_scale(i, h)   likewise W lanes of column i: the ninth bit in its
//                                place, or none; signs of columns i to i + 7, when i is a multiple of 8; numbers
#pragma once
#include "blocks.h"

namespace FT_NS {

// Every point's magnitudes: as bytes, and as bfloat16 numbers.
template <class Kind>
struct Grid {
  uint32_t bytes[Kind::POINTS];
  uint64_t pairs[Kind::POINTS];

  static constexpr int digit(char c) {
    const char* digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
    int i = 0;
    while (digits[i] != c) i++;
    return i;
  }
  constexpr Grid() : bytes(), pairs() {
    int point = 0;
    for (int p = 0; p < Kind::POINTS; p++) {
      point += digit(Kind::gaps()[p]);
      for (int j = 0; j < 4; j++) {
        const uint32_t magnitude = Kind::MAGNITUDES[point >> 3 * j & 7];
        bytes[p] |= magnitude << 8 * j;
        pairs[p] |= (uint64_t)(__builtin_bit_cast(uint32_t, (float)magnitude) >> 16) << 16 * j;
      }
    }
  }
};
template <class Kind>
constexpr Grid<Kind> GRID;

#if defined(FT_AVX512)
FT_INLINE I gather(const uint32_t* table, I index) { return _mm512_i32gather_epi32(index, table, 4); }
FT_INLINE F flipped(F v, I top) {  // by the top bits
  const I sign = _mm512_and_si512(top, _mm512_set1_epi32((int)0x80000000));
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), sign));
}
FT_INLINE I tops(uint32_t bits) {  // bit l on top of lane l
  const I lane = _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
  return _mm512_sllv_epi32(_mm512_set1_epi32((int)bits), lane);
}
FT_INLINE I shift_left_by(I v, int n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE I with_parity(I seven) {  // seven bits, and the one that makes their sum even on top
  I p = _mm512_xor_si512(seven, _mm512_srli_epi32(seven, 4));
  p = _mm512_xor_si512(p, _mm512_srli_epi32(p, 2));
  p = masked(_mm512_xor_si512(p, _mm512_srli_epi32(p, 1)), 1);
  return either(seven, shift_left(p, 7));
}
#elif defined(FT_AVX2)
FT_INLINE I gather(const uint32_t* table, I index) { return _mm256_i32gather_epi32((const int*)table, index, 4); }
FT_INLINE F flipped(F v, I top) {
  return _mm256_xor_ps(v, _mm256_castsi256_ps(_mm256_and_si256(top, _mm256_set1_epi32((int)0x80000000))));
}
FT_INLINE I tops(uint32_t bits) {
  return _mm256_sllv_epi32(_mm256_set1_epi32((int)bits), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
}
FT_INLINE I shift_left_by(I v, int n) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128(n)); }
FT_INLINE I with_parity(I seven) {
  I p = _mm256_xor_si256(seven, _mm256_srli_epi32(seven, 4));
  p = _mm256_xor_si256(p, _mm256_srli_epi32(p, 2));
  p = masked(_mm256_xor_si256(p, _mm256_srli_epi32(p, 1)), 1);
  return either(seven, shift_left(p, 7));
}
#elif defined(FT_NEON)
FT_INLINE I gather(const uint32_t* table, I index) {
  return I{table[vgetq_lane_u32(index, 0)], table[vgetq_lane_u32(index, 1)], table[vgetq_lane_u32(index, 2)],
           table[vgetq_lane_u32(index, 3)]};
}
FT_INLINE F flipped(F v, I top) { return of_bits(veorq_u32(bits_of(v), vandq_u32(top, vdupq_n_u32(0x80000000)))); }
FT_INLINE I tops(uint32_t bits) { return vshlq_u32(vdupq_n_u32(bits), int32x4_t{31, 30, 29, 28}); }
FT_INLINE I shift_left_by(I v, int n) { return shift_left(v, n); }
FT_INLINE I with_parity(I seven) {
  const I ones = vreinterpretq_u32_u8(vcntq_u8(vreinterpretq_u8_u32(seven)));
  return either(seven, shift_left(masked(ones, 1), 7));
}
#else
FT_INLINE I gather(const uint32_t* table, I index) { return table[index]; }
FT_INLINE F flipped(F v, I top) { return top >> 31 ? -v : v; }
FT_INLINE I tops(uint32_t bits) { return bits << 31; }
FT_INLINE I shift_left_by(I v, int n) { return v << n; }
FT_INLINE I with_parity(I seven) { return seven | (I)__builtin_parity(seven) << 7; }
#endif

template <class Kind>
struct Points : Kind {
  static constexpr int COLUMN_BITS = 2, GROUP = 4;  // a byte is a point of four columns

  Points(const Shape& shape, const uint8_t* tile) { size(shape, tile); }
  uint64_t size(const Shape& shape, const uint8_t* tile) {
    Streams s{tile};
    Kind::parts([&](auto& part) { part.open(s, shape); });
    return s.at;
  }
  FT_INLINE_MEMBER void near(int i) const {
    Kind::parts([&](auto& part) { part.near(i); });
  }
  FT_INLINE_MEMBER void warm(int i) const {
    Kind::parts([&](auto& part) { part.warm(i); });
  }
  const uint8_t* codes_down() const { return Kind::index.of[2]; }

  FT_INLINE_MEMBER float step(int m, int i, int64_t k) const {
    return number(*Kind::d.row(m, i, k)) * Kind::scale(m, i, k);
  }
  FT_INLINE_MEMBER F down_step(int i, int64_t h) const { return mul(lanes(Kind::d.down(i, h)), Kind::down_scale(i, h)); }
  FT_INLINE_MEMBER I down_point(int i, int64_t h) const {
    return either(bytes_of(Kind::index.down(i, h)), Kind::down_ninth(i, h));
  }

  FT_INLINE_MEMBER void row(int m, int i, int64_t k, F (&w)[V]) const {
    uint8_t magnitudes[32];
    const uint8_t* at = Kind::index.row(m, i, k);
    if (k % 256 == 0) FT_PREFETCH(at + AHEAD);
    const uint32_t ninth = Kind::ninth(m, i, k), signs = Kind::signs(m, i, k);
    for (int j = 0; j < 8; j++) memcpy(magnitudes + 4 * j, &GRID<Kind>.bytes[at[j] | (ninth >> j & 1) << 8], 4);
    const F scale = set1(step(m, i, k));
    for (int v = 0; v < V; v++)
      w[v] = flipped(mul(to_float(bytes_of(magnitudes + v * W)), scale), tops(signs >> v * W));
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    for (int v = 0; v < V; v++) {
      const int64_t at = h + v * W;
      const I point = gather(GRID<Kind>.bytes, down_point(i, at));
      const F magnitude = to_float(masked(shift_right(point, i % 4 * 8), 255));
      w[v] = flipped(mul(magnitude, down_step(i, at)), shift_left_by(Kind::down_signs(i / 8 * 8, at), 31 - i % 8));
    }
  }
};

#if defined(FT_BF16_DOT)

template <class Kind>
struct PairedPoints {
  typedef uint16_t X;
  static constexpr int GROUP = 32, STREAMS = 32;
  static constexpr bool AS_THEY_LIE = false, IN_ORDER = false, LEADS = false;
  Points<Kind> tile;
  int64_t hidden;

  PairedPoints(const Shape& shape, const uint8_t* bytes) : tile(shape, bytes), hidden(shape.h) {
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(i);
  }
  PairedPoints(const ft_layer& l, const uint8_t* bytes) : PairedPoints(Shape(l), bytes) {}

  FT_INLINE_MEMBER I gather4(__m256i index) const {
    return _mm512_i32gather_epi64(index, (const long long*)GRID<Kind>.pairs, 8);
  }
  FT_INLINE_MEMBER I weights(int m, int i, int64_t k) const {
    const uint8_t* at = tile.index.row(m, i, k);
    if (k % 256 == 0) FT_PREFETCH(at + AHEAD);
    __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
    if (Kind::POINTS > 256)
      index = _mm256_or_si256(index, _mm256_maskz_set1_epi32((__mmask8)tile.ninth(m, i, k), 256));
    return _mm512_xor_si512(gather4(index), _mm512_maskz_set1_epi16(tile.signs(m, i, k), (short)0x8000));
  }

  template <int R, int N>
  FT_INLINE_MEMBER void dots(const int (&m)[N], const int (&i)[N], const uint16_t* x, int64_t xs,
                             float (&out)[N][R]) const {
    F acc[N][R];
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[n][r] = zero();
    for (int64_t k = 0; k < hidden; k += 32)
      for (int n = 0; n < N; n++) {
        const I w = weights(m[n], i[n], k);
        const F step = set1(tile.step(m[n], i[n], k));
        for (int r = 0; r < R; r++) acc[n][r] = fma(dot2(zero(), w, _mm512_loadu_si512(x + r * xs + k)), step, acc[n][r]);
      }
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) out[n][r] = sum(acc[n][r]);
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const uint16_t* x, int64_t xs, float* g, float* u, int64_t gs) const {
    for (int c = 0; c < C; c++) {
      tile.near(i + c + SCALES_AHEAD);
      float out[2][R];
      dots<R, 2>({0, 1}, {i + c, i + c}, x, xs, out);
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = out[0][r];
        u[r * gs + c] = out[1][r];
      }
    }
  }

  // Columns j and j + 1, whose signs are bits 0 and 1, times the middle.
  template <int R>
  FT_INLINE_MEMBER void pair(I w, I signs, const uint16_t* mid, int64_t ms, F (&part)[R]) const {
    const I even = _mm512_and_si512(_mm512_slli_epi32(signs, 15), _mm512_set1_epi32(0x8000));
    const I odd = _mm512_and_si512(_mm512_slli_epi32(signs, 30), _mm512_set1_epi32((int)0x80000000));
    w = _mm512_xor_si512(w, _mm512_or_si512(even, odd));
    for (int r = 0; r < R; r++) {
      uint32_t two;
      memcpy(&two, mid + r * ms, 4);
      part[r] = dot2(part[r], w, _mm512_set1_epi32((int)two));
    }
  }

  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    const I evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int v = 0; v < 2; v++) {
      const int64_t at = h + 16 * v;
      F acc[R];
      for (int r = 0; r < R; r++) acc[r] = fresh ? zero() : load(out + r * os + 16 * v);
      for (int i = i0; i < i1; i += 32) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = zero();
        for (int j = i; j < i + 32; j += 8) {
          I signs = tile.down_signs(j, at);
          for (int c = j; c < j + 8; c += 4, signs = _mm512_srli_epi32(signs, 4)) {
            const I point = tile.down_point(c, at);
            const I a = gather4(_mm512_castsi512_si256(point)), b = gather4(_mm512_extracti64x4_epi64(point, 1));
            pair(_mm512_permutex2var_epi32(a, evens, b), signs, mid + c, ms, part);
            pair(_mm512_permutex2var_epi32(a, odds, b), _mm512_srli_epi32(signs, 2), mid + c + 2, ms, part);
          }
        }
        const F step = tile.down_step(i, at);
        for (int r = 0; r < R; r++) acc[r] = fma(part[r], step, acc[r]);
      }
      for (int r = 0; r < R; r++) store(out + r * os + 16 * v, acc[r]);
    }
  }

  static void prepare(uint16_t*, int64_t, int64_t, int) {}
  static void prepare_middle(uint16_t*, int64_t, int, int) {}
  void prefetch(int i1, int count, int64_t h, bool ahead) const {
    if (ahead) prefetch_next(tile.index.of[2], hidden / 4, i1, count * STEP / 4, h);
  }
  void warm(int i) const {
    prefetch_next(tile.index.of[2], hidden / 4, i, hidden / 4, 0);
    tile.warm(i);
  }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

#endif

template <class Kind>
static uint64_t point_bytes(uint32_t w, uint32_t h) {
  const Shape shape(w, h, 3);
  return w % 256 || h % 256 ? 0 : Points<Kind>(shape, nullptr).size(shape, nullptr);
}

}  // namespace FT_NS

#define FT_POINTS(name, Kind) FT_CODED(name, Coded<Points<Kind>>, PairedPoints<Kind>, point_bytes<Kind>)
