// The tier `amx`: few rows of bfloat16 times four-bit codes, as bytes. There `vdpbf16ps` is four operations for 32
// products, `vpdpbusd` one for 64.
//
// x becomes whole numbers: within a block of 256 elements (32 of the middle) X = x 2^k, |X| < 2^22, k as large as fits,
// so bfloat16 is exact unless it is 2^14 below the block's largest, and off by 2^-23 of that else. X is three signed
// bytes, X = 2^16 a + 2^8 b + c, and a level (digits.h) an unsigned one, so that sums of a span are exact integers.
// ORDER. A dot: of 512 elements, lane t of a sum holds sixteen products that share a step, as an exact integer; those times
// their steps, in order, times 2^-k are added to chain t; then one tree. Offsets have a chain of their own. Down is one
// chain over spans. Neither depends on how rows are grouped.
#include "digits.h"

#include "amx.h"
#include "engine.h"

namespace FT_NS {

constexpr int BLOCK = 256, FOUR_LINES = 512, VECTOR = 64;  // elements: of one power of two; of a step of a dot; of a vector
constexpr int ROWS_AT_ONCE = 4;          // of weights whose steps are made together
constexpr int LANES_AT_ONCE = 512;
#define FT_LAMBDA __attribute__((always_inline))

typedef __m128i Quarter;

// --- whole numbers --------------------------------------------------------------------------------

// 2^k for a block whose largest magnitude has these bits; `back` is 2^-k, or NaN if one isn't finite.
FT_INLINE float power_for(uint32_t largest, float& back) {
  const int e = (int)(largest >> 23);
  const int k = 148 - e < 126 ? 148 - e : 126;
  back = e == 255 ? bits_to_float(0x7FC00000u) : bits_to_float((uint32_t)(127 - k) << 23);
  return e == 255 ? 0.0f : bits_to_float((uint32_t)(127 + k) << 23);
}
FT_INLINE uint32_t largest_of(I bits) {
  return _mm512_reduce_max_epu32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
}
FT_INLINE I whole(F x, float power) {
  return _mm512_cvtps_epi32(mul(_mm512_maskz_mov_ps(power != 0 ? 0xFFFF : 0, x), set1(power)));
}
// The three bytes of sixteen numbers, from the highest on.
FT_INLINE void bytes_of_whole(I x, Quarter (&out)[3]) {
  const I half = _mm512_set1_epi32(128);
  out[2] = _mm512_cvtepi32_epi8(x);
  x = _mm512_srai_epi32(_mm512_add_epi32(x, half), 8);
  out[1] = _mm512_cvtepi32_epi8(x);
  out[0] = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x, half), 8));
}

// --- rows of x ------------------------------------------------------------------------------------

// For 512 elements: a vector for each of two halves of words' bytes (HALVES), four quarters of a line and three bytes,
// lanes as `turned` has them; what is taken off each sum; 2^-k times the levels' unit.
constexpr int HALVES = 2, QUARTERS = 4, BYTES = 3;
constexpr int LESS_AT = HALVES * QUARTERS * BYTES * VECTOR, BACK_AT = LESS_AT + HALVES * VECTOR, X_GROUP = BACK_AT + 64;
FT_INLINE int64_t row_bytes(int64_t padded) { return padded / FOUR_LINES * X_GROUP + padded / 16 * 4 + 64; }
FT_INLINE float* sums_at(const uint8_t* row, int64_t padded) { return (float*)(row + padded / FOUR_LINES * X_GROUP); }

// A line holds four spans of 32 elements, digit q of its words span q: the low and the high half of even bytes the first
// two, of odd ones the others. Vector (half, quarter) of 512 elements: of line L, in 16 bytes from 16 L on, elements 8
// quarter and up of span `half`, then of span 2 + half. Of spans of 16 it is elements 4 quarter and up of either half of
// these, so that a lane has one span here, too.
static void place_x(const uint16_t* x, int64_t width, int64_t padded, const DigitCodes& codes, uint8_t* row) {
  float* sums = sums_at(row, padded);
  for (int64_t k = 0; k < padded; k += BLOCK) {
    F wide[BLOCK / 16];
    I largest = _mm512_setzero_si512();
    for (int b = 0; b < BLOCK / 16; b++) {
      const int64_t left = width - k - 16 * b;
      wide[b] = left >= 16 ? from_bf16(x + k + 16 * b) : left > 0 ? load_some<uint16_t, from_bf16>(x + k + 16 * b, (int)left) : zero();
      largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(wide[b]), _mm512_set1_epi32(0x7FFFFFFF)));
    }
    float back;
    const float power = power_for(largest_of(largest), back);
    uint8_t* to = row + k / FOUR_LINES * X_GROUP;
    const int block = (int)(k % FOUR_LINES) / BLOCK;
    _mm256_storeu_ps((float*)(to + BACK_AT) + 8 * block, _mm256_set1_ps(back * codes.unit));
    for (int b = 0; b < BLOCK / 16; b++) {
      const I X = whole(wide[b], power);
      Quarter digits[BYTES];
      bytes_of_whole(X, digits);
      const int line = block * 2 + b / 8, span = b % 8 / 2, half = span % 2, quarter = b % 2 * 2;
      for (int d = 0; d < BYTES; d++) {
        uint8_t* p = to + (half * QUARTERS * BYTES + d) * VECTOR + line * 16 + span / 2 * 8;
        if (codes.span == 16) {
          int32_t fours[4];
          _mm_storeu_si128((__m128i*)fours, digits[d]);
          for (int q = 0; q < QUARTERS; q++) memcpy(p + q * BYTES * VECTOR + b % 2 * 4, fours + q, 4);
        } else {
          _mm_storel_epi64((__m128i*)(p + quarter * BYTES * VECTOR), digits[d]);
          _mm_storel_epi64((__m128i*)(p + (quarter + 1) * BYTES * VECTOR), _mm_unpackhi_epi64(digits[d], digits[d]));
        }
      }
      if (!codes.offset) continue;
      const float sum = (float)_mm512_reduce_add_epi32(X) * back;
      if (codes.span == 16) sums[k / 16 + b] = sum;
      else if (b % 2 == 0) sums[k / 32 + b / 2] = sum;
      else sums[k / 32 + b / 2] += sum;
    }
    if (!block) continue;
    const I ones = _mm512_set1_epi8(1), less = _mm512_set1_epi32(-codes.least);
    for (int n = 0; n < HALVES; n++) {
      I all = _mm512_setzero_si512();
      for (int d = 0; d < BYTES; d++) {
        all = _mm512_slli_epi32(all, 8);
        for (int q = 0; q < QUARTERS; q++) all = _mm512_dpbusd_epi32(all, ones, _mm512_loadu_si512(to + ((n * QUARTERS + q) * BYTES + d) * VECTOR));
      }
      _mm512_storeu_si512(to + LESS_AT + n * VECTOR, _mm512_mullo_epi32(all, less));
    }
  }
}

// --- the middle -----------------------------------------------------------------------------------

// For each eight columns two dwords of three bytes' fours: columns 0 4 1 5 and 2 6 3 7; what is taken off a span's sums
// of each byte; of each span its 2^-k and its sum.
struct Middle {
  const int32_t *fours, *less;
  const float *back, *sums;
};
FT_INLINE int64_t middle_bytes(int64_t w) { return w * 3 + w / 16 * 20 + 64; }
FT_INLINE Middle middle_at(const uint8_t* at, int64_t w) {
  const int32_t *fours = (const int32_t*)at, *less = fours + w / 4 * 3;
  const float* back = (const float*)(less + w / 16 * 3);
  return {fours, less, back, back + w / 16};
}

// g: w numbers, w a multiple of 32 of which those beyond the tile's are zero.
static void place_middle(const float* g, int64_t w, const DigitCodes& codes, uint8_t* row) {
  const Middle at = middle_at(row, w);
  int32_t *fours = const_cast<int32_t*>(at.fours), *less = const_cast<int32_t*>(at.less);
  float *back = const_cast<float*>(at.back), *sums = const_cast<float*>(at.sums);
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (int64_t i = 0; i < w; i += 32) {
    const F low = load(g + i), high = load(g + i + 16);
    float inverse;
    const float power = power_for(largest_of(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), _mm512_set1_epi32(0x7FFFFFFF)),
                                                              _mm512_and_si512(_mm512_castps_si512(high), _mm512_set1_epi32(0x7FFFFFFF)))), inverse);
    const int spans = 32 / codes.span;
    int32_t total[2][3];
    float sum[2];
    for (int b = 0; b < 2; b++) {
      const I X = whole(b ? high : low, power);
      Quarter digits[3];
      bytes_of_whole(X, digits);
      for (int d = 0; d < 3; d++) {
        int32_t four[4];
        _mm_storeu_si128((__m128i*)four, _mm_shuffle_epi8(digits[d], order));
        for (int n = 0; n < 4; n++) fours[((i + 16 * b) / 8 * 2 + n) * 3 + d] = four[n];
        total[b][d] = _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(digits[d]));
      }
      sum[b] = (float)_mm512_reduce_add_epi32(X) * inverse;
    }
    for (int s = 0; s < spans; s++) {
      const int64_t to = i / codes.span + s;
      for (int d = 0; d < 3; d++) less[to * 3 + d] = -codes.least * (spans == 2 ? total[s][d] : total[0][d] + total[1][d]);
      back[to] = inverse * codes.unit;
      sums[to] = spans == 2 ? sum[s] : sum[0] + sum[1];
    }
  }
}

// --- a tile ---------------------------------------------------------------------------------------

struct Tile {
  const DigitCodes& codes;
  const ft_layer& layer;
  const uint8_t* bytes;
  int64_t hidden, row_bytes, padded;
  Lead lead;
  I levels;

  Tile(const DigitCodes& c, const ft_layer& l, const Lead& ahead) : codes(c), layer(l), hidden(l.hidden), lead(ahead) {
    row_bytes = (int64_t)ft_align(hidden, 128) / 2;
    padded = (int64_t)ft_align(hidden, FOUR_LINES);
    levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)c.levels));
  }
  const uint8_t* row(int m, int64_t i) const {
    return bytes + m * (int64_t)ft_align(layer.tile_width * row_bytes, 64) + i * row_bytes;
  }
  const uint8_t* column(int64_t i) const { return row(2, 0) + i / 8 * hidden * 4; }
  // What is prefetched goes on at `next` behind `end`.
  void lead_over(const uint8_t* end, const uint8_t* next) { lead.end = end, lead.next = next; }
  static constexpr int64_t column_bytes(int64_t hidden) { return hidden / 2; }
  static constexpr int GROUP = 32, STREAMS = 32;
};

// The low or the high digits of 64 bytes as levels. The table is one of 64, so what lies above a digit is of no account.
template <bool LOOKED_UP, bool HIGH>
FT_INLINE I level(I words, I levels) {
  const I code = HIGH ? _mm512_srli_epi16(words, 4) : words;
  return LOOKED_UP ? _mm512_permutexvar_epi8(code, levels) : _mm512_and_si512(code, _mm512_set1_epi8(15));
}
// Four lines of a row as place_x has them: 16 bytes of each in each vector, those at even places before those at odd ones.
FT_INLINE I pair(const uint8_t* a, const uint8_t* b) {  // of 32 bytes, by loads: shuffles are what there is too much of
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a)), _mm256_loadu_si256((const __m256i*)b), 1);
}
template <int SPAN>
FT_INLINE void turned(const uint8_t* const (&lines)[4], I (&out)[QUARTERS]) {
  const I order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  auto joined = [&](I a, I b, int q, int step) FT_LAMBDA {
    out[q] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(a, b, 0x88), order);
    out[q + step] = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(a, b, 0xDD), order);
  };
  if constexpr (SPAN == 32) {
    for (int q = 0; q < QUARTERS; q += 2) joined(pair(lines[0] + 16 * q, lines[1] + 16 * q), pair(lines[2] + 16 * q, lines[3] + 16 * q), q, 1);
  } else {
    const I a = pair(lines[0], lines[1]), b = pair(lines[2], lines[3]), c = pair(lines[0] + 32, lines[1] + 32), d = pair(lines[2] + 32, lines[3] + 32);
    joined(_mm512_unpacklo_epi64(a, c), _mm512_unpacklo_epi64(b, d), 0, 2);
    joined(_mm512_unpackhi_epi64(a, c), _mm512_unpackhi_epi64(b, d), 1, 2);
  }
}

// One half of words' bytes times R rows of x, times their steps, to part.
template <bool LOOKED_UP, bool HIGH, int R>
FT_INLINE void half_dots(const I (&words)[QUARTERS], I levels, const float* steps, const uint8_t* x, int64_t xs, F (&part)[R]) {
  I codes[QUARTERS];
  for (int q = 0; q < QUARTERS; q++) codes[q] = level<LOOKED_UP, HIGH>(words[q], levels);
  for (int r = 0; r < R; r++) {
    const uint8_t *p = x + r * xs + HIGH * QUARTERS * BYTES * VECTOR, *less = x + r * xs + LESS_AT + HIGH * VECTOR;
    I sum[BYTES];  // apart, since a chain of them all is longer than what the CPU looks ahead
    for (int d = 0; d < BYTES; d++) sum[d] = LOOKED_UP && d + 1 == BYTES ? _mm512_loadu_si512(less) : _mm512_setzero_si512();
    for (int q = 0; q < QUARTERS; q++)
      for (int d = 0; d < BYTES; d++) sum[d] = _mm512_dpbusd_epi32(sum[d], codes[q], _mm512_loadu_si512(p + (q * BYTES + d) * VECTOR));
    const I high = _mm512_add_epi32(_mm512_slli_epi32(sum[0], 8), sum[1]);
    const F number = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), sum[2])), step = load(steps + HIGH * 16);
    part[r] = HIGH ? fma(number, step, part[r]) : mul(number, step);
  }
}

// Row i of matrix m times R rows of x, to[r * gs]. One row after the other: two at once want less of x, and have to wait
// for memory longer.
template <int SPAN, bool LOOKED_UP, int R>
static FT_APART void dots(const Tile& t, int m, int64_t i, const float* steps, const float* offsets, const uint8_t* x, int64_t xs,
                          float* to, int64_t gs) {
  const int64_t row_bytes = t.row_bytes, quarter = (row_bytes + 255) / 256 * 64;
  const uint8_t *row = t.row(m, i), *far = t.lead.far(row, row_bytes, x), *of_x = x;
  const I levels = t.levels;
  int64_t next[3] = {64, 128, 192};
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = zero();
  for (int64_t at = 0; at < row_bytes; at += 256, far += 64, of_x += X_GROUP, steps += DIGIT_STEPS) {
    if (at + 256 > row_bytes)  // the last line is met again, by zeros of x
      for (int64_t& n : next) n = at + n < row_bytes ? n : row_bytes - 64 - at;
    const uint8_t* p = row + at;
    for (int b = 0; b < 4; b++) {
      fetch(far + b * quarter);  // four places: neighbours at once wait for each other
      FT_PREFETCH(p + b * 64 + SOON);
    }
    I words[QUARTERS];
    turned<SPAN>({p, p + next[0], p + next[1], p + next[2]}, words);
    F part[R];
    half_dots<LOOKED_UP, false, R>(words, levels, steps, of_x, xs, part);
    half_dots<LOOKED_UP, true, R>(words, levels, steps, of_x, xs, part);
    for (int r = 0; r < R; r++) acc[r] = fma(part[r], load((const float*)(of_x + r * xs + BACK_AT)), acc[r]);
  }
  for (int r = 0; r < R; r++) {
    if (t.codes.offset) {
      const float* sums = sums_at(x + r * xs, t.padded);
      F more = zero();
      for (int64_t s = 0; s < t.padded / SPAN; s += 16) more = fma(load(offsets + s), load(sums + s), more);
      acc[r] = add(acc[r], more);
    }
    to[r * gs] = sum(acc[r]);
  }
}

// Lanes [h0, h1) of the span from column i on, for R rows of the middle, N vectors at once. at: what to prefetch.
template <int SPAN, bool LOOKED_UP, int R, int N>
FT_INLINE void lanes(const Tile& t, int64_t i, int64_t& h, int64_t h0, int64_t h1, const float* steps, const float* offsets,
                     const uint8_t* mid, int64_t ms, int64_t w, float* out, int64_t os, bool fresh, const uint8_t*& at) {
  const I levels = t.levels;
  const int64_t s = i / SPAN;
  const bool offset = t.codes.offset;
  const uint8_t* runs[SPAN / 8];
  for (int j = 0; j < SPAN / 8; j++) runs[j] = t.column(i + 8 * j);
  Middle m[R];
  for (int r = 0; r < R; r++) m[r] = middle_at(mid + r * ms, w);
  for (; h + 16 * N <= h1; h += 16 * N) {
    I sum[N][R][3];
    for (int r = 0; r < R; r++)
      for (int d = 0; d < 3; d++) {
        const I less = LOOKED_UP ? _mm512_set1_epi32(m[r].less[s * 3 + d]) : _mm512_setzero_si512();
        for (int v = 0; v < N; v++) sum[v][r][d] = less;
      }
#pragma GCC unroll 4
    for (int j = 0; j < SPAN / 8; j++) {
      I codes[N][2];
      for (int v = 0; v < N; v++) {
        fetch(at + (v * (SPAN / 8) + j) * 64);
        const uint8_t* p = runs[j] + (h + 16 * v) * 4;
        const I words = _mm512_loadu_si512(p);
        codes[v][0] = level<LOOKED_UP, false>(words, levels);
        codes[v][1] = level<LOOKED_UP, true>(words, levels);
      }
      for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++)
          for (int d = 0; d < 3; d++) {
            const I four = _mm512_set1_epi32(m[r].fours[((i / 8 + j) * 2 + half) * 3 + d]);
            for (int v = 0; v < N; v++) sum[v][r][d] = _mm512_dpbusd_epi32(sum[v][r][d], codes[v][half], four);
          }
    }
    at += SPAN / 8 * N * 64;
    for (int v = 0; v < N; v++) {
      const F step = load(steps + h - h0 + 16 * v);
      for (int r = 0; r < R; r++) {
        float* to = out + r * os + h + 16 * v;
        const I high = _mm512_add_epi32(_mm512_slli_epi32(sum[v][r][0], 8), sum[v][r][1]);
        const F number = fma(_mm512_cvtepi32_ps(high), set1(256.0f), _mm512_cvtepi32_ps(sum[v][r][2]));
        F acc = fma(number, mul(step, set1(m[r].back[s])), fresh ? zero() : load(to));
        if (offset) acc = fma(load(offsets + h - h0 + 16 * v), set1(m[r].sums[s]), acc);
        store(to, acc);
      }
    }
  }
}

template <int SPAN, bool LOOKED_UP, int R>
static FT_APART void columns(const Tile& t, int64_t i, int64_t h0, int64_t h1, const float* steps, const float* offsets,
                             const uint8_t* mid, int64_t ms, int64_t w, float* out, int64_t os, bool fresh, const uint8_t* at) {
  constexpr int N = R <= 2 ? 4 : 1;
  int64_t h = h0;
  lanes<SPAN, LOOKED_UP, R, N>(t, i, h, h0, h1, steps, offsets, mid, ms, w, out, os, fresh, at);
  if (N > 1) lanes<SPAN, LOOKED_UP, R, 1>(t, i, h, h0, h1, steps, offsets, mid, ms, w, out, os, fresh, at);
}

// Groups of rows as FT_ROW_GROUPS has them; sums of six are more than the registers hold.
#define FT_FOURS(rows, CALL)             \
  for (int r = 0; r < (rows);) {         \
    const int left = (rows) - r;         \
    if (left >= 4) { CALL(4); r += 4; }  \
    else if (left >= 2) { CALL(2); r += 2; } \
    else { CALL(1); r += 1; }            \
  }

template <int SPAN, bool LOOKED_UP>
static void run_digits(const DigitCodes& codes, const TileJob& job, int rows) {
  const ft_layer& l = *job.layer;
  const int64_t h = l.hidden, w = l.tile_width, padded = (int64_t)ft_align(h, FOUR_LINES), middle = (int64_t)ft_align(w, 32);
  const int64_t xs = (int64_t)ft_align(row_bytes(padded), 64) + 64, gs = middle_stride(w), ms = (int64_t)ft_align(middle_bytes(middle), 64), os = x_stride(h);
  uint8_t* p = job.scratch;
  auto take = [&](int64_t num_bytes) FT_LAMBDA {
    uint8_t* at = p;
    p += ft_align(num_bytes, 64);
    return at;
  };
  uint8_t *x = take(rows * xs), *mid = take(rows * ms);
  float *g = (float*)take(rows * gs * 4), *u = (float*)take(rows * gs * 4), *sums = (float*)take(rows * os * 4);
  const int64_t of_row = padded / FOUR_LINES * DIGIT_STEPS;
  float* steps = (float*)take((ROWS_AT_ONCE * of_row > LANES_AT_ONCE ? ROWS_AT_ONCE * of_row : LANES_AT_ONCE) * 4);
  float* offsets = (float*)take((ROWS_AT_ONCE * padded / 16 > LANES_AT_ONCE ? ROWS_AT_ONCE * padded / 16 : LANES_AT_ONCE) * 4);
  for (int r = 0; r < rows && !job.same_rows; r++) {
    if (job.rows[r] < 0) {
      memset(sums, 0, h * 2);
      place_x((const uint16_t*)sums, h, padded, codes, x + r * xs);
    } else {
      place_x((const uint16_t*)job.x + job.rows[r] * h, h, padded, codes, x + r * xs);
    }
  }
  memset(g, 0, rows * gs * 4);
  memset(u, 0, rows * gs * 4);
  Tile t(codes, l, lead_of<Tile>(job, 1));
  codes.meet(l, job.record + l.tiles_offset + job.first * l.tile_bytes, job.from);
  const bool piece = job.to - job.from < w;
  for (int n = job.first; n < job.last; n++) {
    const uint8_t* tile = t.bytes = job.record + l.tiles_offset + n * l.tile_bytes;
    for (int m = 0; m < 2; m++) {
      if (piece) t.lead_over(t.row(m, job.to), m ? t.column(job.from) : t.row(1, job.from));
      for (int64_t i = job.from; i < job.to; i += ROWS_AT_ONCE) {
        const int64_t end = i + ROWS_AT_ONCE < job.to ? i + ROWS_AT_ONCE : job.to;
        codes.rows(l, tile, m, (int)i, (int)end, steps, offsets);
        for (int64_t q = i; q < end; q++) {
#define FT_CALL(R) dots<SPAN, LOOKED_UP, R>(t, m, q, steps + (q - i) * of_row, offsets + (q - i) * padded / SPAN, x + r * xs, xs, (m ? u : g) + r * gs + q, gs)
          FT_FOURS(rows, FT_CALL)
#undef FT_CALL
        }
      }
    }
    if (l.bias_offset) {
      add_bias(g, gs, tile + l.bias_offset, (int)w, rows);
      add_bias(u, gs, tile + l.bias_offset + 4 * w, (int)w, rows);
    }
    activate(l, FT_BF16, g, u, (int)(rows * gs));
    for (int r = 0; r < rows; r++) {
      for (int64_t i = w; i < middle; i++) g[r * gs + i] = 0;
      place_middle(g + r * gs, middle, codes, mid + r * ms);
    }
    if (piece) t.lead_over(t.column(job.to), job.next ? job.next + (t.row(0, job.next_from) - tile) : nullptr);
    if (n + 1 < job.last) codes.meet(l, tile + l.tile_bytes, 0);
    else if (job.next) codes.meet(l, job.next, job.next_from);
    for (int64_t i = job.from; i < job.to; i += SPAN) {
      const bool fresh = n == job.first && i == job.from;
      for (int64_t from = 0; from < h; from += LANES_AT_ONCE) {
        const int64_t to = from + LANES_AT_ONCE < h ? from + LANES_AT_ONCE : h;
        codes.lanes(l, tile, (int)i, (int)from, (int)(to - from), steps, offsets);
        const uint8_t* at = t.lead.far(t.column(i) + from * (SPAN / 2), (to - from) * (SPAN / 2), mid);
#define FT_CALL(R) columns<SPAN, LOOKED_UP, R>(t, i, from, to, steps, offsets, mid + r * ms, ms, middle, sums + r * os, os, fresh, r ? mid : at)
        FT_FOURS(rows, FT_CALL)
#undef FT_CALL
      }
    }
  }
  for (int r = 0; r < rows; r++) memcpy(job.out + (int64_t)r * h, sums + r * os, h * sizeof(float));
  if (l.bias_offset && job.first == 0 && job.from == 0) add_bias(job.out, h, job.record, (int)h, rows);
}

void run_digits(const DigitCodes& codes, const TileJob& job, int rows) {
  if (codes.span == 16) run_digits<16, true>(codes, job, rows);
  else if (codes.looked_up || codes.least) run_digits<32, true>(codes, job, rows);
  else run_digits<32, false>(codes, job, rows);
}

}  // namespace FT_NS
