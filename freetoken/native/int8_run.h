// Tiles and matrices times quantised rows of x (int8.h). A format gives a class over one tile's bytes:
//
//   SPAN, D, LEAST, UNIT, OFFSET, WIDE       of int8.h; UNIT scales x's d where codes stand for halves
//   Int8(const Shape&, const uint8_t*)       a view of the tile
//   bytes(m, i, k, n, v)                     256 codes of row i of matrix m at k, of which n are left, as four vectors
//   steps(at), offsets(at)                   eight spans' (EightAt)
//   LINE, codes(m, i), FAR                   bytes of 256 codes; where row i begins; how a walk prefetches
//   near(m, i)                               prefetches the scales of row i of matrix m
//   place_row(q, row, block), place_middle   where 32 bytes of x go
//   WIDTH, PASSES                            lanes of down that it likes at once; walks along H that a span takes
//   span<R, N>(i, pass, h, mid, sum)         adds a pass of span i to N vectors at h for R rows, in an order of its own,
//   settle<N>(sum)                           which this undoes after the last
//   ahead(i, pass, h)                        prefetches what that walk needs later
//   columns(i, h, each)                      each(dword of the middle, W lanes at h of its four codes) of span i
//   down_step(i, h), down_offset(i, h)       W lanes
//
// One or two rows of x walk rows of weights as they lie, gate's and then up's, and down along H: what memory gives depends
// on that, and on prefetches into L2 that come just before the CPU's own would. From PANEL rows on, 16 rows of weights become a panel first, in
// which a vector holds four elements of each, so that sums stay in lanes. Both give the same bits.
#pragma once
#include "int8_panel.h"

namespace FT_NS {

constexpr int PANEL = 6;  // rows of x that a panel pays for
constexpr int AT_ONCE = 32;  // rows of weights that a call takes
constexpr int PAIR = W > 1 ? 2 : 1;  // rows of x that share what is decoded
// CALL(R) for groups of rows.
#define FT_PAIRS(rows, CALL)                  \
  for (int r = 0; r < (rows);)                \
    if (PAIR == 2 && (rows) - r >= 2) { CALL(PAIR); r += PAIR; } \
    else { CALL(1); r += 1; }

// How a walk prefetches: into L2 just before the CPU would itself, which leaves it to its own prefetching but takes it
// across pages, is best while memory is what a format waits for; where decoding takes as long, into L1 and farther.
constexpr int NEAR = 2048;
template <bool FAR>
FT_INLINE void prefetch_walk(const uint8_t* p, int64_t num_bytes) {
  for (int64_t b = 0; b < num_bytes; b += 64) {
    if (FAR) FT_PREFETCH(p + b + AHEAD);
    else __builtin_prefetch(p + b + NEAR, 0, 2);
  }
}

// --- a few rows -------------------------------------------------------------------------------------

template <int R>
struct Rows8 {
  Row8 of[R];
};
template <int R>
FT_INLINE Rows8<R> x8_rows(const uint8_t* at, int64_t stride, int64_t padded, int span) {
  Rows8<R> out;
  for (int r = 0; r < R; r++) out.of[r] = x8_row(at + r * stride, padded, span);
  return out;
}

// Elements [k, k + 256) of row i of weights, of which n are left: their spans' sums go to eight chains for each row of x.
template <class Format, int R>
FT_INLINE void int8_block(const Format& f, int m, int64_t i, int64_t k, int64_t n, const Rows8<R>& x, E8 (&chain)[R], E8 (&extra)[R]) {
  constexpr int SPAN = Format::SPAN;
  Bytes v[4];
  f.bytes(m, (int)i, k, n, v);
  Totals<SPAN, Format::D> sums[R];
  for (int r = 0; r < R; r++) sums[r] = block_sums<SPAN, Format::D, Format::WIDE>(v, x.of[r].q + k);
  for (int part = 0; part < 32 / SPAN; part++) {
    const int64_t s = k / SPAN + 8 * part;
    const EightAt<SPAN> at{m, (int)i, k + 8 * SPAN * part, n - 8 * SPAN * part};
    const E8 steps = f.steps(at);
    for (int r = 0; r < R; r++) {
      T8 sum = sums[r].of[part];
      if (Format::LEAST) sum -= load8(x.of[r].less + s);
      chain[r] = fused(floats(sum), steps * load8(x.of[r].d + s), chain[r]);
    }
    if constexpr (Format::OFFSET) {
      const E8 offsets = f.offsets(at);
      for (int r = 0; r < R; r++) extra[r] = fused(offsets, load8(x.of[r].sums + s), extra[r]);
    }
  }
}
// The last elements of a row, fewer than 256.
template <class Format>
static FT_APART void int8_rest(const Format& f, int m, int64_t i, int64_t k, int64_t n, const Row8& x, E8 (&sums)[2]) {
  E8 chain[1] = {sums[0]}, extra[1] = {sums[1]};
  int8_block<Format, 1>(f, m, i, k, n, {{x}}, chain, extra);
  sums[0] = chain[0], sums[1] = extra[0];
}

// Rows [i, end) of matrix m times R rows of x: out[r * stride], then the next.
template <class Format, int R>
static FT_APART void int8_dots(const Format& f, int m, int64_t i, int64_t end, int64_t width, const Rows8<R>& at, float* out,
                               int64_t stride) {
  constexpr int LINE = Format::LINE;
  const Rows8<R> x = at;
  const int64_t whole = width / 256 * 256;
  for (; i < end; i++, out++) {
    E8 chain[R] = {}, extra[R] = {};
    const uint8_t* codes = f.codes(m, (int)i);
    f.near(m, (int)i + SCALES_AHEAD);
    for (int64_t k = 0; k < whole; k += 256, codes += LINE) {
      prefetch_walk<Format::FAR>(codes, LINE);
      int8_block(f, m, i, k, 256, x, chain, extra);
    }
    for (int r = 0; r < R && whole < width; r++) {
      E8 sums[2] = {chain[r], extra[r]};
      int8_rest(f, m, i, whole, width - whole, x.of[r], sums);
      chain[r] = sums[0], extra[r] = sums[1];
    }
    for (int r = 0; r < R; r++) out[r * stride] = tree(Format::OFFSET ? chain[r] + extra[r] : chain[r]);
  }
}

// --- many rows --------------------------------------------------------------------------------------

// 16 rows of 16 dwords, turned.
FT_INLINE void turn(const uint32_t* from, uint32_t* to) {
#if defined(FT_AVX512)
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {  // column 4 l + j of rows 4 i.. is lane l of a[4 i + j]
    const __m512i x = _mm512_shuffle_i64x2(a[j], a[4 + j], 0x88), y = _mm512_shuffle_i64x2(a[8 + j], a[12 + j], 0x88);
    const __m512i z = _mm512_shuffle_i64x2(a[j], a[4 + j], 0xDD), w = _mm512_shuffle_i64x2(a[8 + j], a[12 + j], 0xDD);
    _mm512_storeu_si512(to + 16 * j, _mm512_shuffle_i64x2(x, y, 0x88));
    _mm512_storeu_si512(to + 16 * (4 + j), _mm512_shuffle_i64x2(z, w, 0x88));
    _mm512_storeu_si512(to + 16 * (8 + j), _mm512_shuffle_i64x2(x, y, 0xDD));
    _mm512_storeu_si512(to + 16 * (12 + j), _mm512_shuffle_i64x2(z, w, 0xDD));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[16 * j + i] = from[16 * i + j];
#endif
}

template <class Format>
FT_INLINE Panel panel_at(uint8_t* memory, int64_t padded) {
  float* steps = (float*)(memory + padded * TALL);
  return {(uint32_t*)memory, steps, Format::OFFSET ? steps + padded / Format::SPAN * TALL : nullptr, padded};
}

template <class Format>
static FT_APART void make_panel(const Format& f, int m, int i, int64_t width, const Panel& to) {
  constexpr int SPAN = Format::SPAN;
  for (int64_t k = 0; k < width; k += 256) {
    alignas(64) uint32_t codes[4][TALL][16];
    for (int r = 0; r < TALL; r++) {
      Bytes v[4];
      for (int b = 0; b < Format::LINE; b += 64) FT_PREFETCH(f.codes(m, i + r) + k / 256 * Format::LINE + b + AHEAD);
      f.bytes(m, i + r, k, width - k, v);
      for (int p = 0; p < 4; p++) store64(codes[p][r], v[p]);
      for (int part = 0; part < 32 / SPAN; part++) {
        const int64_t s = k / SPAN + 8 * part;
        const EightAt<SPAN> at{m, i + r, k + 8 * SPAN * part, width - k - 8 * SPAN * part};
        const E8 steps = f.steps(at);
        for (int b = 0; b < 8; b++) to.steps[(s + b) * TALL + r] = steps[b];
        if constexpr (Format::OFFSET) {
          const E8 offsets = f.offsets(at);
          for (int b = 0; b < 8; b++) to.offsets[(s + b) * TALL + r] = offsets[b];
        }
      }
    }
    for (int p = 0; p < 4; p++) turn(codes[p][0], to.codes + (k / 64 + p) * 256);
  }
}

// --- tiles of experts -------------------------------------------------------------------------------

template <class Format>
static void int8_gate_up(const Format& f, int w, int64_t h, int num_rows, const uint8_t* x, int64_t xs, float* g,
                         float* u, int64_t gs, uint8_t* panel) {
  const int64_t padded = (int64_t)ft_align(h, 256);
  int i = 0;
  if (num_rows >= PANEL)
    for (; i + TALL <= w; i += TALL)
      for (int m = 0; m < 2; m++) {
        const Panel p = panel_at<Format>(panel, padded);
        make_panel(f, m, i, h, p);
        panel_dots<Format::SPAN, Format::D, Format::WIDE>(p, {x, xs, num_rows}, (m ? u : g) + i, gs);
      }
  for (int m = 0; m < 2; m++) {
    if (m == 0)
      for (int n = i; n < SCALES_AHEAD; n++) f.near(0, n);
    for (int at = i; at < w; at += AT_ONCE) {
      const int end = at + AT_ONCE < w ? at + AT_ONCE : w;
#define FT_CALL(R) int8_dots(f, m, at, end, h, x8_rows<R>(x + r * xs, xs, padded, Format::SPAN), (m ? u : g) + r * gs + at, gs)
      FT_PAIRS(num_rows, FT_CALL)
#undef FT_CALL
    }
  }
}

// A pass of span i of down at N vectors from h on; the last one brings the sums to `out`. Sums of R rows lie `os` apart.
template <class Format, int R, int N>
FT_INLINE void int8_lanes(const Format& f, int i, int pass, int h, const Rows8<R>& mid, float* out, int64_t os, bool fresh, int32_t* sums) {
  const int s = i / Format::SPAN;
  I sum[R][N];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) {
      if (pass > 0) memcpy(&sum[r][v], sums + r * os + h + v * W, sizeof(I));
      else sum[r][v] = same(-mid.of[r].less[s]);
    }
  f.template span<R, N>(i, pass, h, mid.of, sum);
  if (pass + 1 < Format::PASSES) {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < N; v++) memcpy(sums + r * os + h + v * W, &sum[r][v], sizeof(I));
    return;
  }
  for (int r = 0; r < R; r++) f.template settle<N>(sum[r]);
  for (int v = 0; v < N; v++) {
    const F step = f.down_step(i, h + v * W);
    [[maybe_unused]] F offset = zero();
    if constexpr (Format::OFFSET) offset = f.down_offset(i, h + v * W);
    for (int r = 0; r < R; r++) {
      float* to = out + r * os + h + v * W;
      F acc = fused_lanes(signed_floats(sum[r][v]), mul(step, set1(mid.of[r].d[s])), fresh ? zero() : load(to));
      if constexpr (Format::OFFSET) acc = fused_lanes(offset, set1(mid.of[r].sums[s]), acc);
      store(to, acc);
    }
  }
}

// Down of R rows of x. sums: room for so many rows of them.
template <class Format, int R>
static FT_APART void int8_columns(const Format& f, int w, int h_size, const Rows8<R>& at, float* out, int64_t os, bool first, int32_t* sums) {
  const Rows8<R> mid = at;
  for (int i = 0; i < w; i += Format::SPAN) {
    const bool fresh = first && i == 0;
    for (int pass = 0; pass < Format::PASSES; pass++) {
      int h = 0;
      for (; h + Format::WIDTH <= h_size; h += Format::WIDTH) {
        f.ahead(i, pass, h);
        int8_lanes<Format, R, Format::WIDTH / W>(f, i, pass, h, mid, out, os, fresh, sums);
      }
      for (; h < h_size; h += STEP) int8_lanes<Format, R, V>(f, i, pass, h, mid, out, os, fresh, sums);
    }
  }
}

// Many rows: the codes become a strip of W lanes first.
template <class Format>
FT_INLINE void int8_strip(const Format& f, int i0, int i1, int h, const Octets& mid, int64_t padded, float* out,
                          int64_t os, bool fresh) {
  constexpr int SPAN = Format::SPAN;
  Strip strip;
  for (int v = 0; v < V; v++) {
    const int at = h + v * W;
    for (int i = i0; i < i1; i += SPAN) {
      const int s = (i - i0) / SPAN;
      f.columns(i, at, [&](int dword, I w) FT_LAMBDA { memcpy(strip.codes[(i - i0) / 4 + dword], &w, sizeof w); });
      store(strip.steps[s], f.down_step(i, at));
      if constexpr (Format::OFFSET) store(strip.offsets[s], f.down_offset(i, at));
    }
    strip_dots<SPAN, Format::WIDE, Format::OFFSET>(strip, i0, i1, mid, padded, out + v * W, os, fresh);
  }
}

// sums: room for two rows of them.
template <class Format>
static void int8_down(const Format& f, int w, int h_size, const Octets& mid, float* out, int64_t os, bool first,
                      bool more, int32_t* sums) {
  const int64_t padded = (int64_t)ft_align(w, 64);
  if (mid.num_rows < PANEL) {
#define FT_CALL(R) int8_columns(f, w, h_size, x8_rows<R>(mid.rows + r * mid.stride, mid.stride, padded, Format::SPAN), out + r * os, os, first, sums)
    FT_PAIRS(mid.num_rows, FT_CALL)
#undef FT_CALL
  }
  const int group = w < STRIP ? w : STRIP;
  for (int i = 0; mid.num_rows >= PANEL && i < w; i += group) {
    const int end = i + group < w ? i + group : w;
    const bool fresh = first && i == 0, ahead = end < w || more;
    for (int h = 0; h < h_size; h += STEP) {
      if (ahead) f.prefetch(end, end - i, h);
      int8_strip(f, i, end, h, mid, padded, out + h, os, fresh);
    }
  }
}

template <class Format>
static void int8_tiles(const TileJob& job) {
  const ft_layer& l = *job.layer;
  const int h = (int)l.hidden, w = (int)l.tile_width;
  int rows = job.num_rows;
  while (rows > 0 && job.rows[rows - 1] < 0) rows--;
  if (rows < job.num_rows)
    memset(job.out + (int64_t)rows * h, 0, (int64_t)(job.num_rows - rows) * h * sizeof(float));
  if (!rows) return;
  // What engine.h keeps as numbers has room for these rows, a panel, and one row as floats.
  const int64_t padded = (int64_t)ft_align(h, 256), gs = middle_stride(w), os = x_stride(h);
  const int64_t xs = x8_bytes(padded, Format::SPAN), ms = x8_bytes((int64_t)ft_align(w, 64), Format::SPAN);
  float* g = (float*)job.scratch;
  float* u = g + FT_ROWS * gs;
  uint8_t* mid = (uint8_t*)(u + FT_ROWS * gs);
  float* sums = (float*)mid + FT_ROWS * gs;
  uint8_t* x = (uint8_t*)(sums + FT_ROWS * os);
  uint8_t* panel = x + FT_ROWS * xs;
  for (int r = 0; r < rows; r++) {
    float* wide = (float*)panel;
    if (job.rows[r] < 0) memset(wide, 0, h * sizeof(float));
    else widen(job.x, job.x_dtype, (int64_t)job.rows[r] * h, h, wide);
    quantise_row(wide, h, padded, x + r * xs, ROWS<Format>);
  }
  for (int t = job.first; t < job.last; t++) {
    const uint8_t* tile = job.record + l.tiles_offset + t * l.tile_bytes;
    const Format f(Shape(l), tile);
    int8_gate_up(f, w, h, rows, x, xs, g, u, gs, panel);
    if (l.bias_offset) {
      add_bias(g, gs, tile + l.bias_offset, w, rows);
      add_bias(u, gs, tile + l.bias_offset + 4 * w, w, rows);
    }
    activate(l, job.x_dtype, g, u, (int)(rows * gs));
    for (int r = 0; r < rows; r++)
      quantise_row(g + r * gs, w, (int64_t)ft_align(w, 64), mid + r * ms, MIDDLE<Format>);
    int8_down(f, w, h, {mid, ms, rows}, sums, os, t == job.first, t + 1 < job.last, (int32_t*)panel);
  }
  for (int r = 0; r < rows; r++) memcpy(job.out + (int64_t)r * h, sums + r * os, h * sizeof(float));
  if (l.bias_offset && job.first == 0) add_bias(job.out, h, job.record, h, rows);
}

// --- dense matrices ---------------------------------------------------------------------------------

// Rows [first, last) of job.x into `to`, where all rows lie one after the other. scratch: a row of floats.
template <class Format>
static void int8_rows(const MatrixJob& job, int64_t first, int64_t last, uint8_t* to, uint8_t* scratch) {
  const int64_t padded = (int64_t)ft_align(job.k, 256), xs = x8_bytes(padded, Format::SPAN);
  for (int64_t r = first; r < last; r++) {
    widen(job.x, job.dtype, r * job.k, job.k, (float*)scratch);
    quantise_row((const float*)scratch, job.k, padded, to + r * xs, ROWS<Format>);
  }
}

// job.x: rows as int8_rows leaves them. scratch: a panel.
template <class Format>
static void int8_matrix(const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch) {
  const Format f(Shape(job.n, job.k, 1), (const uint8_t*)job.w);
  const uint8_t* x = (const uint8_t*)job.x;
  const int64_t padded = (int64_t)ft_align(job.k, 256), xs = x8_bytes(padded, Format::SPAN);
  int64_t i = first;
  if (job.rows >= PANEL)
    for (; i + TALL <= last; i += TALL) {
      const Panel p = panel_at<Format>(scratch, padded);
      make_panel(f, 0, (int)i, job.k, p);
      for (int64_t r = 0; r < job.rows; r += FT_ROWS) {
        const int count = job.rows - r < FT_ROWS ? (int)(job.rows - r) : FT_ROWS;
        float sums[FT_ROWS * TALL];
        panel_dots<Format::SPAN, Format::D, Format::WIDE>(p, {x + r * xs, xs, count}, sums, TALL);
        put_sums(job, r, i, count, sums);
      }
    }
  for (int n = 0; i < last && n < SCALES_AHEAD; n++) f.near(0, (int)i + n);
  for (; i < last; i += AT_ONCE) {
    const int64_t end = i + AT_ONCE < last ? i + AT_ONCE : last;
#define FT_CALL(R)                                                                                   \
  float sums[R * AT_ONCE];                                                                           \
  int8_dots(f, 0, i, end, job.k, x8_rows<R>(x + r * xs, xs, padded, Format::SPAN), sums, AT_ONCE);    \
  for (int n = 0; n < R; n++)                                                                        \
    for (int64_t row = i; row < end; row++) put_number(job, r + n, row, sums[n * AT_ONCE + row - i])
    FT_PAIRS(job.rows, FT_CALL)
#undef FT_CALL
  }
}

// --- formats of blocks ------------------------------------------------------------------------------

// number(code) = (byte - least) unit; even: bytes are the codes.
template <class Spec>
struct Levels {
  float unit = 1;
  int least = 0;
  bool even = true;
  constexpr Levels() {
    constexpr int count = 1 << (Spec::LOW + Spec::HIGH);
    float lowest = 0;
    for (int i = 0; i < count; i++) {
      const float v = Spec::number(i);
      if (v != (float)(int)v) unit = 0.5f;
      if (v < lowest) lowest = v;
      even = even && v == Spec::number(0) + (float)i;
    }
    least = (int)(-lowest / unit);
  }
};

template <class Spec>
struct Int8Blocks {
  static constexpr int SPAN = Spec::SPAN, LOW = Spec::LOW, HIGH = Spec::HIGH, D = 8 / LOW;
  static constexpr Levels<Spec> L{};
  static constexpr int LEAST = L.least;
  static constexpr bool OFFSET = Spec::OFFSET, WIDE = LEAST > 64, FAR = true;
  static constexpr float UNIT = L.unit;
  static constexpr int LINE = 256 * LOW / 8, WIDTH = STEP, PASSES = 1;
  typedef Plane<LOW> Low;
  typedef Plane<HIGH> High;
  Blocks<Spec> tile;
  uint8_t levels[16];

  Int8Blocks(const Shape& shape, const uint8_t* bytes) : tile(shape, bytes) {
    for (int i = 0; i < 16; i++) levels[i] = (uint8_t)((int)(Spec::number(i) / UNIT) + LEAST);
  }
  // Digits Q and Q + D of each word as its bytes; `more` holds the high bits from its lowest on.
  template <int Q>
  FT_INLINE_MEMBER I code(I words, I more) const {
    I low = both(words_left<-LOW * Q>(words), same(0x01010101 * ((1 << LOW) - 1)));
    if constexpr (HIGH > 0) {
      constexpr int MASK = ((1 << HIGH) - 1) << LOW;
      const I even = both(words_left<LOW - HIGH * Q>(more), same(MASK * 0x00010001));
      const I odd = both(words_left<8 + LOW - HIGH * (Q + D)>(more), same(MASK * 0x01000100));
      low = either(low, either(even, odd));
    }
    if constexpr (!L.even) return level(low, levels);
    else return low;
  }
  template <int Q>
  FT_INLINE_MEMBER void digits(const Bytes& words, const Bytes& more, Bytes& out) const {
    for (int j = 0; j < N64; j++) out.v[j] = code<Q>(words.v[j], more.v[j]);
    if constexpr (HIGH > 0) out = apart(out);
  }
  // Words of row i at k; without a plane of high bits their bytes may be put in order before digits are taken out.
  FT_INLINE_MEMBER Bytes words(int m, int i, int64_t k) const {
    const Bytes out = load64(tile.low.line(m, i, k));
    if constexpr (HIGH > 0) return out;
    else return apart(out);
  }
  // The high bits of words at k of row i, from the lowest on.
  FT_INLINE_MEMBER Bytes high_bits(int m, int i, int64_t k, const Bytes& none) const {
    if constexpr (HIGH == 0) return none;
    else {
      Bytes out = load64(tile.high.line(m, i, k));
      const int by = HIGH * (int)((uint64_t)k / 32 % High::DIGITS);
      for (int j = 0; j < N64; j++) out.v[j] = words_right(out.v[j], by);
      return out;
    }
  }
  FT_INLINE_MEMBER void bytes(int m, int i, int64_t k, int64_t n, Bytes (&v)[4]) const {
    const Bytes first = words(m, i, k), more = high_bits(m, i, k, first);
    digits<0>(first, more, v[0]);
    digits<1>(first, more, v[1]);
    if constexpr (LOW == 2) {
      digits<2>(first, more, v[2]);
      digits<3>(first, more, v[3]);
    } else {
      const int64_t next = n > 128 ? k + 128 : k;  // beyond a row x is zero
      const Bytes second = words(m, i, next), and_more = high_bits(m, i, next, second);
      digits<0>(second, and_more, v[2]);
      digits<1>(second, and_more, v[3]);
    }
  }
  FT_INLINE_MEMBER const uint8_t* codes(int m, int i) const { return tile.low.line(m, i, 0); }
  FT_INLINE_MEMBER void near(int m, int i) const { tile.near(m, i); }
  FT_INLINE_MEMBER E8 steps(const EightAt<SPAN>& at) const { return tile.step(at); }
  FT_INLINE_MEMBER E8 offsets(const EightAt<SPAN>& at) const { return tile.offset(at); }
  FT_INLINE_MEMBER F down_step(int i, int h) const { return tile.step(DownAt{i, h}); }
  FT_INLINE_MEMBER F down_offset(int i, int h) const { return tile.offset(DownAt{i, h}); }

  // each(dword of the span's bytes of the middle, W lanes of four codes)
  template <class Each>
  FT_INLINE_MEMBER void columns(int i, int h, Each each) const {
    for (int j = 0; j < SPAN; j += Low::COLUMNS) {
      const I words = dwords_of(tile.low.column(i + j, h));
      I more = words;
      if constexpr (HIGH > 0)
        more = words_right(dwords_of(tile.high.column(i + j, h)), HIGH * ((i + j) % High::COLUMNS / 2));
      each(j / 4, code<0>(words, more));
      each(j / 4 + 1, code<1>(words, more));
      if constexpr (LOW == 2) {
        each(j / 4 + 2, code<2>(words, more));
        each(j / 4 + 3, code<3>(words, more));
      }
    }
  }
  template <int R, int N>
  FT_INLINE_MEMBER void span(int i, int, int h, const Row8 (&mid)[R], I (&sum)[R][N]) const {
    for (int v = 0; v < N; v++)
      columns(i, h + v * W, [&](int dword, I w) FT_LAMBDA {
        for (int r = 0; r < R; r++) sum[r][v] = dot4<WIDE>(sum[r][v], w, same(mid[r].dword(i / 4 + dword)));
      });
  }
  template <int N>
  FT_INLINE void settle(I (&)[N]) {}
  // A span is a few runs of memory, walked side by side; behind each lies the next.
  FT_INLINE_MEMBER void ahead(int i, int, int h) const {
    constexpr int RUNS = SPAN / Low::COLUMNS;
    const int64_t run = tile.low.hidden * 4, at = 4 * h;
    const uint8_t* p = tile.low.column(i, 0) + at + (at + NEAR < run ? 0 : (RUNS - 1) * run);
    for (int r = 0; r < RUNS; r++) prefetch_walk<false>(p + r * run, 4 * WIDTH);
  }
  void prefetch(int i1, int count, int64_t h) const {
    prefetch_next(tile.low.of[2], tile.low.hidden * LOW / 8, i1, count * STEP * LOW / 8, h);
  }

  // The order in which digits<Q> and columns give them.
  static void place_row(const int8_t* q, uint8_t* row, int64_t block) {
    const int64_t line = block / (2 * D), in = block % (2 * D);
    uint8_t* to = row + (line * D + in % D) * 64 + in / D * 8;
    for (int c = 0; c < 4; c++) memcpy(to + 16 * c, q + 8 * c, 8);
  }
  static void place_middle(const int8_t* q, uint8_t* row, int64_t block) {
    for (int j = 0; j < 32; j += 4 * D)
      for (int d = 0; d < D; d++) {
        uint8_t* to = row + block * 32 + j + 4 * d;
        const int8_t* from = q + j + 2 * d;
        to[0] = (uint8_t)from[0], to[1] = (uint8_t)from[2 * D], to[2] = (uint8_t)from[1], to[3] = (uint8_t)from[2 * D + 1];
      }
  }
};

}  // namespace FT_NS
