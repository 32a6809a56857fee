// Codes of at most six bits by bfloat16 pairs: a table turns 32 codes into bfloat16 numbers at once, products of
// pairs are exact, and steps multiply the sums of a block. Offsets meet sums of x, made once for all rows.
#pragma once
#include "blocks.h"

#if defined(FT_BF16_DOT)

namespace FT_NS {

// The numbers of 256 elements: eight in half a vector, or sixteen in a whole one. n may be read, the others are
// finite.
template <int N>
struct Numbers;
template <>
struct Numbers<8> {
  FT_INLINE __m256i bytes(const void* p, int64_t n) {
    return _mm256_cvtepu8_epi32(n >= 8 ? _mm_loadl_epi64((const __m128i*)p)
                                       : _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p));
  }
  FT_INLINE __m256 of(const uint8_t* p, int64_t n) { return _mm256_cvtepi32_ps(bytes(p, n)); }
  FT_INLINE __m256 of(const Less32* p, int64_t n) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(bytes(p, n), _mm256_set1_epi32(32)));
  }
  FT_INLINE __m256 of(const E8m0* p, int64_t n) {  // 2^-127, a subnormal, is what 0 means
    const __m256i e = _mm256_slli_epi32(bytes(p, n), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(e, _mm256_set1_epi32(0x00400000)));
  }
  FT_INLINE __m256 of(const Half* p, int64_t n) {
    return _mm256_cvtph_ps(n >= 8 ? _mm_loadu_si128((const __m128i*)p)
                                  : _mm_maskz_loadu_epi16((__mmask8)((1u << n) - 1), p));
  }
  FT_INLINE __m256 all(float v) { return _mm256_set1_ps(v); }
  template <int TIMES>
  FT_INLINE __m256 repeated(__m256 v) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_permutevar8x32_ps(v, _mm256_srli_epi32(lane, __builtin_ctz(TIMES)));
  }
  FT_INLINE F whole(__m256 v) { return _mm512_zextps256_ps512(v); }
};
template <>
struct Numbers<16> {
  FT_INLINE __m128i bytes(const void* p, int64_t n) {
    return n >= 16 ? _mm_loadu_si128((const __m128i*)p) : _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p);
  }
  FT_INLINE F of(const uint8_t* p, int64_t n) { return to_float(_mm512_cvtepu8_epi32(bytes(p, n))); }
  FT_INLINE F of(const int8_t* p, int64_t n) { return to_float(_mm512_cvtepi8_epi32(bytes(p, n))); }
  FT_INLINE F of(const E4m3* p, int64_t n) { return e4m3_of(bytes(p, n)); }
  FT_INLINE F of(const E8m0* p, int64_t n) {
    const I e = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes(p, n)), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(e, _mm512_set1_epi32(0x00400000)));
  }
  FT_INLINE F of(const Half* p, int64_t n) {
    return _mm512_cvtph_ps(n >= 16 ? _mm256_loadu_si256((const __m256i*)p)
                                   : _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
  }
  FT_INLINE F of(const Less32* p, int64_t n) {
    return to_float(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes(p, n)), _mm512_set1_epi32(32)));
  }
  FT_INLINE F of(const LowNibble* p, int64_t n) { return to_float(masked(_mm512_cvtepu8_epi32(bytes(p, n)), 15)); }
  FT_INLINE F of(const HighNibble* p, int64_t n) { return to_float(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes(p, n)), 4)); }
  FT_INLINE F all(float v) { return set1(v); }
  template <int TIMES>
  FT_INLINE F repeated(F v) {
    const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, __builtin_ctz(TIMES)), v);
  }
  // One number for eight lanes, another for the others.
  FT_INLINE F two(const Half* p) {
    const __m256i each = _mm256_setr_epi32(0x01000100, 0x01000100, 0x01000100, 0x01000100, 0x03020302, 0x03020302, 0x03020302, 0x03020302);
    int32_t both;
    memcpy(&both, p, 4);
    return _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32(both), each));
  }
  FT_INLINE F whole(F v) { return v; }
};

// Lane b: what holds for elements [SPAN b, SPAN (b + 1)) of those from k on, 256 or as many as told; n are left of the row.
template <int SPAN, int LANES = 256 / SPAN>
struct SpanAt {
  typedef Numbers<LANES> N;
  int m, i;
  int64_t k, n;
  template <class T, int C>
  FT_INLINE_MEMBER auto operator()(const Part<T, C>& p) const {
    if constexpr (C == 256 && LANES * SPAN > 256) {
      return n > 256 ? N::two(p.row(m, i, k)) : N::all(number(*p.row(m, i, k)));
    } else if constexpr (C >= 256) return N::all(number(*p.row(m, i, k)));
    else if constexpr (C == SPAN) return N::of(p.row(m, i, k), (uint64_t)n / C);
    else return N::template repeated<C / SPAN>(N::of(p.row(m, i, k), (uint64_t)n / C));
  }
  FT_INLINE_MEMBER auto operator()(const Whole& p) const { return N::all(p.of[m]); }
  FT_INLINE F sums(const float* p) {
    if constexpr (SPAN == 32) return N::whole(_mm256_loadu_ps(p));
    else return load(p);
  }
};

// Step of elements 32 Q and up, whose pairs are the lanes. (Broadcasts from memory would wait for the store of
// the steps: measured, 16 against 19 GB/s.)
template <int SPAN, int Q>
FT_INLINE F step_of(F all) {
  if constexpr (SPAN == 32) return _mm512_permutexvar_ps(_mm512_set1_epi32(Q), all);
  constexpr int A = 2 * Q, B = A + 1;
  return _mm512_permutexvar_ps(_mm512_setr_epi32(A, A, A, A, A, A, A, A, B, B, B, B, B, B, B, B), all);
}

template <class Spec>
struct Paired {
  typedef uint16_t X;
  typedef Plane<Spec::LOW> Low;
  typedef Plane<Spec::HIGH> High;
  typedef SpanAt<Spec::SPAN> Span;
  static constexpr bool AS_THEY_LIE = false, IN_ORDER = false, LEADS = false;
  static constexpr int GROUP = 32, STREAMS = 32, LOW = Spec::LOW, HIGH = Spec::HIGH, BITS = LOW + HIGH, SPAN = Spec::SPAN;
  Blocks<Spec> tile;
  int64_t hidden;
  I table[2];

  Paired(const Shape& shape, const uint8_t* bytes) : tile(shape, bytes), hidden(shape.h) {
    uint16_t all[64];  // bits above a code's index copies of the table: no mask is needed
    for (int i = 0; i < 64; i++) all[i] = (uint16_t)(float_to_bits(Spec::number(i % (1 << BITS))) >> 16);
    table[0] = _mm512_loadu_si512(all);
    table[1] = _mm512_loadu_si512(all + 32);
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(i);
  }
  Paired(const ft_layer& l, const uint8_t* bytes) : Paired(Shape(l), bytes) {}

  // Digit Q of each word as a bfloat16; `more` holds the high bits from its lowest on.
  template <int Q>
  FT_INLINE_MEMBER I look_up(I words, I more) const {
    I index = _mm512_srli_epi16(words, LOW * Q);
    if constexpr (HIGH > 0) {
      constexpr int LEFT = LOW - HIGH * Q;
      const I bits = LEFT >= 0 ? _mm512_slli_epi16(more, LEFT) : _mm512_srli_epi16(more, -LEFT);
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)(((1 << HIGH) - 1) << LOW)), bits, index, 0xCA);
    }
    if constexpr (BITS > 5) return _mm512_permutex2var_epi16(table[0], index, table[1]);
    else return _mm512_permutexvar_epi16(index, table[0]);
  }

  // A line of row i from element k on, whose steps are those from B on.
  template <int B, int R>
  FT_INLINE_MEMBER void line(int m, int i, int64_t k, F steps, const uint16_t* x, int64_t xs, F (&acc)[R]) const {
    const uint8_t* p = tile.low.line(m, i, k);
    FT_PREFETCH(p + AHEAD);
    const I words = _mm512_loadu_si512(p);
    I more = words;
    if constexpr (HIGH > 0) {
      const uint8_t* h = tile.high.line(m, i, k);
      if (k % High::LINE == 0) FT_PREFETCH(h + AHEAD);
      more = _mm512_srl_epi16(_mm512_loadu_si512(h), _mm_cvtsi32_si128(HIGH * (int)((uint64_t)k / 32 % High::DIGITS)));
    }
    x += k;
    one<B, R>(look_up<0>(words, more), steps, x, xs, acc);
    one<B + 1, R>(look_up<1>(words, more), steps, x + 32, xs, acc);
    one<B + 2, R>(look_up<2>(words, more), steps, x + 64, xs, acc);
    one<B + 3, R>(look_up<3>(words, more), steps, x + 96, xs, acc);
    if constexpr (LOW == 2) {
      one<B + 4, R>(look_up<4>(words, more), steps, x + 128, xs, acc);
      one<B + 5, R>(look_up<5>(words, more), steps, x + 160, xs, acc);
      one<B + 6, R>(look_up<6>(words, more), steps, x + 192, xs, acc);
      one<B + 7, R>(look_up<7>(words, more), steps, x + 224, xs, acc);
    }
  }
  template <int B, int R>
  FT_INLINE_MEMBER void one(I w, F steps, const uint16_t* x, int64_t xs, F (&acc)[R]) const {
    const F step = step_of<SPAN, B>(steps);
    for (int r = 0; r < R; r++) acc[r] = fma(dot2(zero(), w, _mm512_loadu_si512(x + r * xs)), step, acc[r]);
  }

  // What the offsets of a row add.
  template <int R>
  FT_INLINE_MEMBER void extra(int m, int i, const uint16_t* x, int64_t xs, F (&acc)[R]) const {
    F more[R];
    for (int r = 0; r < R; r++) more[r] = zero();
    for (int64_t k = 0; k < hidden; k += 256) {
      const F offsets = Span::N::whole(tile.offset(Span{m, i, k, hidden - k}));
      for (int r = 0; r < R; r++)
        more[r] = fma(offsets, Span::sums(x_sums(x + r * xs, hidden) + k / SPAN), more[r]);
    }
    for (int r = 0; r < R; r++) acc[r] = add(acc[r], more[r]);
  }

  template <int R, int N>
  FT_APART void dots(const int (&m)[N], const int (&i)[N], const uint16_t* x, int64_t xs,
                             float (&out)[N][R]) const {
    F acc[N][R];
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[n][r] = zero();
    for (int64_t k = 0; k < hidden; k += 256)
      for (int n = 0; n < N; n++) {
        const F steps = Span::N::whole(tile.step(Span{m[n], i[n], k, hidden - k}));
        line<0, R>(m[n], i[n], k, steps, x, xs, acc[n]);
        if (Low::LINE < 256 && k + 128 < hidden) line<4, R>(m[n], i[n], k + 128, steps, x, xs, acc[n]);
      }
    if constexpr (Spec::OFFSET)
      for (int n = 0; n < N; n++) extra<R>(m[n], i[n], x, xs, acc[n]);
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

  template <int Q, int R>
  FT_INLINE_MEMBER void pair(I words, I more, const uint16_t* mid, int64_t ms, F (&part)[R]) const {
    const I w = look_up<Q>(words, more);
    for (int r = 0; r < R; r++) {
      uint32_t two;
      memcpy(&two, mid + r * ms + 2 * Q, 4);
      part[r] = dot2(part[r], w, _mm512_set1_epi32((int)two));
    }
  }

  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    for (int v = 0; v < 2; v++) {
      F acc[R];
      for (int r = 0; r < R; r++) acc[r] = fresh ? zero() : load(out + r * os + 16 * v);
      for (int i = i0; i < i1; i += SPAN) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = zero();
        for (int j = i; j < i + SPAN; j += Low::COLUMNS) {
          const I words = _mm512_loadu_si512(tile.low.column(j, h + 16 * v));
          I more = words;
          if constexpr (HIGH > 0)
            more = _mm512_srl_epi16(_mm512_loadu_si512(tile.high.column(j, h + 16 * v)),
                                    _mm_cvtsi32_si128(HIGH * (j % High::COLUMNS / 2)));
          pair<0, R>(words, more, mid + j, ms, part);
          pair<1, R>(words, more, mid + j, ms, part);
          pair<2, R>(words, more, mid + j, ms, part);
          pair<3, R>(words, more, mid + j, ms, part);
          if constexpr (LOW == 2) {
            pair<4, R>(words, more, mid + j, ms, part);
            pair<5, R>(words, more, mid + j, ms, part);
            pair<6, R>(words, more, mid + j, ms, part);
            pair<7, R>(words, more, mid + j, ms, part);
          }
        }
        const DownAt at{i, h + 16 * v};
        const F step = tile.step(at);
        for (int r = 0; r < R; r++) acc[r] = fma(part[r], step, acc[r]);
        if constexpr (Spec::OFFSET) {
          const F offset = tile.offset(at);
          for (int r = 0; r < R; r++) acc[r] = fma(offset, set1(middle_sums(mid + r * ms, ms)[i / SPAN]), acc[r]);
        }
      }
      for (int r = 0; r < R; r++) store(out + r * os + 16 * v, acc[r]);
    }
  }

  // Sums over SPAN elements.
  FT_INLINE void sums_of(const uint16_t* x, int64_t width, float* sums) {
    for (int64_t k = 0; k < width; k += 32) {
      const F both = dot2(zero(), _mm512_loadu_si512(x + k), _mm512_set1_epi16(0x3F80));
      if constexpr (SPAN == 32) sums[k / 32] = sum(both);
      else {
        sums[k / 16] = sum(_mm512_maskz_mov_ps(0x00FF, both));
        sums[k / 16 + 1] = sum(_mm512_maskz_mov_ps(0xFF00, both));
      }
    }
  }
  static void prepare(uint16_t* x, int64_t xs, int64_t width, int num_rows) {
    for (int r = 0; Spec::OFFSET && r < num_rows; r++) {
      const int64_t padded = (int64_t)ft_align(width, 256);  // with zeros
      sums_of(x + r * xs, padded, x_sums(x + r * xs, width));
    }
  }
  static void prepare_middle(uint16_t* mid, int64_t ms, int w, int num_rows) {
    for (int r = 0; Spec::OFFSET && r < num_rows; r++) sums_of(mid + r * ms, w, middle_sums(mid + r * ms, ms));
  }
  void prefetch(int i1, int count, int64_t h, bool ahead) const {
    if (ahead) prefetch_next(tile.low.of[2], hidden * LOW / 8, i1, count * STEP * LOW / 8, h);
  }
  void warm(int i) const {
    prefetch_next(tile.low.of[2], hidden * LOW / 8, i, hidden * LOW / 8, 0);
    tile.warm(i);
  }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

}  // namespace FT_NS

#endif
