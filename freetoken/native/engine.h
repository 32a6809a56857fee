// Tiles of an expert over a few rows: gate and up as dot products along H, down as lanes over H.
//
// A format gives a class over one tile's bytes:
//   X                                        how it wants x and the middle: float, or uint16_t (bf16)
//   Format(const ft_layer&, const uint8_t*)  a view of the tile
//   columns<R, C>(i, x, xs, g, u, gs)        g and u of columns [i, i + C) for R rows
//   IN_ORDER, two<R>(m, i, x, xs, to, gs)    whether gate is walked before up; columns i and i + 1 of either, for columns()
//   AS_THEY_LIE, alone(m, i, x, out)         whether ALONE rows are; column i of gate (0) or up (1)
//   LEADS, lead, column_bytes()              whether IN_ORDER or ALONE walks and down prefetch by a Lead
//   down<R>(i0, i1, h, n, mid, ms, out, os)  out[r][h..h+STEP) (+)= sum of columns [i0, i1), ascending, of
//                                            which n count; lanes in any order that finish() undoes
//   prepare(x, xs, width, rows)              fills x_sums() where the format needs them
//   prepare_middle(mid, ms, w, rows)         fills middle_sums() likewise
//   STREAMS                                  columns of down that are walked side by side while few rows share them
//   prefetch(i1, count, h, ahead)            without LEADS: what down needs later, being at h of the `count` columns
//                                            before i1; ahead: others follow them
//   warm(i)                                  likewise column i of down, all of it
//   finish(from, to, n)                      STEP lanes of down to n floats of the answer
// ORDER. A dot is one chain of vector sums along H and one fixed tree over its lanes; down is one chain over
// the columns. Neither depends on R, C or on how rows and columns are grouped: a row has the same bits alone
// and in a batch.
#pragma once
#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace FT_NS {

#if defined(FT_AVX512)
constexpr int RMAX = 6, CMAX = 2;
#elif defined(FT_AVX2) || defined(FT_NEON)
constexpr int RMAX = 2, CMAX = 2;
#else
constexpr int RMAX = 2, CMAX = 1;
#endif
constexpr int AHEAD = 4096;   // prefetch distance along a row, bytes
constexpr int64_t MOST_AHEAD = 256 << 10;
constexpr int STEP = 32;      // elements of H that one step of a plain row takes
// Rows of x up to which memory alone is the limit: they walk rows of plain weights as these lie. Narrow vectors need
// two chains at once even for one.
constexpr int ALONE = W >= 16 ? 1 : 0;

#if defined(FT_BF16_DOT)
FT_INLINE F dot2(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#endif

// What a walk along single rows needs soon, into L2.
FT_INLINE void prefetch_row(const void* p) { __builtin_prefetch((const uint8_t*)p + ft_row_near, 0, 2); }
// What a walk that computes a tile's bytes in their order prefetches into L2, a line for each line that it reads: those
// `bytes` further on, over the ends of rows, matrices and tiles. So memory is never idle, and down, whose columns are
// walked side by side, lies in L2 once its turn comes. What is met SOON along a row (bf16: or a column) goes into the
// nearest cache (Emerald Rapids, mxfp4: 10 % more than without), the first of a chunk with it.
struct Lead {
  int64_t bytes = AHEAD;
  const uint8_t *end = (const uint8_t*)INT64_MAX, *next = nullptr;  // of the chunk; where the next one begins
  // What lies `bytes` behind num_bytes from p on; beyond the end the next chunk's, or `none`, which is in the nearest cache.
  FT_INLINE_MEMBER const uint8_t* far(const uint8_t* p, int64_t num_bytes, const void* none) const {
    if (p + num_bytes + bytes <= end) return p + bytes;
    return next ? next + (p + bytes - end) : (const uint8_t*)none;
  }
};
constexpr int SOON = 2048, SOON_DOWN = 512;
constexpr int BESIDE = 384;  // more than whole rows, so that lines of one burst are not all of one bank (1.03 to 1.06 times as fast)
FT_INLINE void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// num_bytes from p on into the nearest cache.
FT_INLINE void prefetch_near(const void* p, int64_t num_bytes) {
  for (int64_t b = 0; b < num_bytes; b += 64) FT_PREFETCH((const uint8_t*)p + b);
}

// A row of x: padded with zeros, then room for its sums over 16 elements. Not a multiple of a page.
FT_INLINE int64_t x_stride(int64_t width) { return (int64_t)ft_align(width, 256) * 9 / 8 + 64; }
template <class X>
FT_INLINE float* x_sums(X* x, int64_t width) {
  return (float*)(x + ft_align(width, 256) + 32);
}
FT_INLINE const float* x_sums(const uint16_t* x, int64_t width) {
  return (const float*)(x + ft_align(width, 256) + 32);
}

// A row of gate, up or the middle: padded, then room for 16 sums of the middle over 32 columns.
FT_INLINE int64_t middle_stride(int64_t w) { return (int64_t)ft_align(w, 64) + 32; }
FT_INLINE float* middle_sums(uint16_t* mid, int64_t ms) { return (float*)(mid + ms - 32); }
FT_INLINE const float* middle_sums(const uint16_t* mid, int64_t ms) { return (const float*)(mid + ms - 32); }

// Call f.op<R>() for groups of rows; written once here so that engines stay short.
#define FT_ROW_GROUPS(rows, CALL)                     \
  for (int r = 0; r < (rows);) {                      \
    const int left = (rows) - r;                      \
    if (RMAX >= 6 && left >= 6) { CALL(6); r += 6; }  \
    else if (RMAX >= 4 && left >= 4) { CALL(4); r += 4; } \
    else if (RMAX >= 2 && left >= 2) { CALL(2); r += 2; } \
    else { CALL(1); r += 1; }                         \
  }

// --- x --------------------------------------------------------------------------------------------

FT_INLINE void widen(const void* x, int dtype, int64_t at, int64_t width, float* out) {
  int64_t k = 0;
  if (dtype == FT_BF16) {
    const uint16_t* p = (const uint16_t*)x + at;
    for (; k + W <= width; k += W) store(out + k, from_bf16(p + k));
    for (; k < width; k++) out[k] = bf16_to_float(p[k]);
  } else if (dtype == FT_F16) {
    const uint16_t* p = (const uint16_t*)x + at;
    for (; k + W <= width; k += W) store(out + k, from_f16(p + k));
    for (; k < width; k++) out[k] = f16_to_float(p[k]);
  } else {
    memcpy(out, (const float*)x + at, width * sizeof(float));
  }
}

// Gather rows of x, zero to the end of each padded row.
[[maybe_unused]] static void gather(const TileJob& job, int num_rows, int64_t stride, float* out) {
  const int64_t width = job.layer->hidden;
  for (int r = 0; r < num_rows; r++, out += stride) {
    memset(out + width, 0, (stride - width) * sizeof(float));
    if (job.rows[r] < 0) memset(out, 0, width * sizeof(float));
    else widen(job.x, job.x_dtype, job.rows[r] * width, width, out);
  }
}
[[maybe_unused]] static void gather(const TileJob& job, int num_rows, int64_t stride, uint16_t* out) {
  const int64_t width = job.layer->hidden;
  for (int r = 0; r < num_rows; r++, out += stride) {
    memset(out + width, 0, (stride - width) * 2);
    if (job.rows[r] < 0) memset(out, 0, width * 2);
    else memcpy(out, (const uint16_t*)job.x + job.rows[r] * width, width * 2);
  }
}

FT_INLINE void to_x(const float* from, float* to, int n) { (void)from, (void)to, (void)n; }
FT_INLINE void to_x(const float* from, uint16_t* to, int n) {
  for (int i = 0; i < n; i++) to[i] = (uint16_t)(float_to_bits(from[i]) >> 16);  // rounded before
}
FT_INLINE float* middle(float* g, float*) { return g; }
FT_INLINE uint16_t* middle(float*, uint16_t* own) { return own; }

#if defined(FT_BF16_DOT)
// R rows of x times one of bfloat16 weights. far, soon: what to prefetch meanwhile, into L2 and L1.
template <int R>
FT_INLINE void row_dots(const uint16_t* row, const uint16_t* x, int64_t xs, int64_t k_size, const uint8_t* far,
                        const uint8_t* soon, float (&out)[R]) {
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = zero();
  int64_t k = 0;
  for (; k + 32 <= k_size; k += 32) {
    fetch(far + 2 * k);
    FT_PREFETCH(soon + 2 * k);
    const I weight = _mm512_loadu_si512(row + k);
    for (int r = 0; r < R; r++) acc[r] = dot2(acc[r], weight, _mm512_loadu_si512(x + r * xs + k));
  }
  if (k < k_size) {
    const I weight = _mm512_maskz_loadu_epi16((__mmask32)((1ull << (k_size - k)) - 1), row + k);
    for (int r = 0; r < R; r++) acc[r] = dot2(acc[r], weight, _mm512_loadu_si512(x + r * xs + k));
  }
  for (int r = 0; r < R; r++) out[r] = sum(acc[r]);
}

// 32 floats in the order that unpacklo and unpackhi leave, put right; n of them count.
FT_INLINE void in_order(const float* from, float* to, int n) {
  const I first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const I second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  float both[32];
  store(both, _mm512_permutex2var_ps(load(from), first, load(from + 16)));
  store(both + 16, _mm512_permutex2var_ps(load(from), second, load(from + 16)));
  memcpy(to, both, n * sizeof(float));
}
#endif

// --- a tile ---------------------------------------------------------------------------------------

// Columns of down that are walked side by side: few while few rows of x share them, else all of the tile.
template <class Format>
FT_INLINE int group_size(int w, int num_rows) {
  const int few = (int)ft_align(Format::STREAMS, Format::GROUP);
  return num_rows <= RMAX && few < w ? few : w;
}

// Far enough for the columns that are walked side by side, near enough to stay in L2.
template <class Format>
FT_INLINE Lead lead_of(const TileJob& job, int num_rows) {
  const ft_layer& l = *job.layer;
  const int64_t columns = group_size<Format>((int)l.tile_width, num_rows) * Format::column_bytes(l.hidden) + 8192 + BESIDE;
  return {columns < MOST_AHEAD ? columns : MOST_AHEAD, job.record + l.tiles_offset + job.last * l.tile_bytes, job.next};
}

// Without LEADS the last columns bring the first group of down along, which nothing else would prefetch.
template <class Format>
static void gate_up(const Format& f, int from, int to, int num_rows, const typename Format::X* x, int64_t xs, float* g,
                    float* u, int64_t gs) {
  if constexpr (Format::IN_ORDER) {
    for (int m = 0; m < 2; m++)
      for (int i = from; i < to; i += 2) {
#define FT_CALL(R) f.template two<R>(m, i, x + r * xs, xs, (m ? u : g) + r * gs + i, gs)
        FT_ROW_GROUPS(num_rows, FT_CALL)
#undef FT_CALL
      }
  } else {
    const int warm = to - group_size<Format>(to - from, num_rows);  // from there on
    if constexpr (Format::AS_THEY_LIE)
      if (num_rows <= ALONE) {
        for (int m = 0; m < 2; m++)
          for (int i = from; i < to; i++) {
            if (!Format::LEADS && m == 1 && i >= warm) f.warm(from + i - warm);
            f.alone(m, i, x, (m ? u : g) + i);
          }
        return;
      }
    int i = from;
    if (CMAX >= 2 && num_rows > 2)
      for (; i + 2 <= to; i += 2) {
#define FT_CALL(R) f.template columns<R, CMAX>(i, x + r * xs, xs, g + r * gs + i, u + r * gs + i, gs)
        FT_ROW_GROUPS(num_rows, FT_CALL)
#undef FT_CALL
      }
    for (; i < to; i++) {
      if (i >= warm) f.warm(from + i - warm);
#define FT_CALL(R) f.template columns<R, 1>(i, x + r * xs, xs, g + r * gs + i, u + r * gs + i, gs)
      FT_ROW_GROUPS(num_rows, FT_CALL)
#undef FT_CALL
    }
  }
}

// Columns lie one after the other, so walking some of them side by side is no linear walk through memory. What
// is prefetched is: the next group of columns, num_bytes at each step, into L2 (measured: 22 GB/s against 11).
FT_INLINE void prefetch_next(const uint8_t* columns, int64_t column_bytes, int i1, int64_t num_bytes, int64_t h) {
  const uint8_t* p = columns + i1 * column_bytes + h / STEP * num_bytes;
  for (int64_t b = 0; b < num_bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

// Few columns side by side are runs of memory that the CPU's own prefetching follows; what comes a little ahead of it
// in each takes it across pages, and in the end to the next columns (Emerald Rapids: 5 % more than the above).
FT_INLINE void prefetch_runs(const uint8_t* columns, int64_t column_bytes, int i1, int count, int64_t at,
                             int num_bytes, bool ahead) {
  constexpr int SOON = 1024;
  const bool next = at + SOON >= column_bytes;
  if (next && !ahead) return;
  const uint8_t* p = columns + at + SOON + (i1 - (next ? 1 : count)) * column_bytes;
  for (int c = 0; c < count; c++, p += column_bytes)
    for (int b = 0; b < num_bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

template <class Format>
static void down(const Format& f, int from, int to, int h_size, int num_rows, const typename Format::X* mid, int64_t ms,
                 float* out, int64_t os, bool first, bool more) {
  const int group = group_size<Format>(to - from, num_rows);
  for (int i = from; i < to; i += group) {
    const int end = i + group < to ? i + group : to;
    const bool fresh = first && i == from, ahead = end < to || more;
    for (int h = 0; h < h_size; h += STEP) {
      const int n = h_size - h < STEP ? h_size - h : STEP;
      if constexpr (!Format::LEADS) f.prefetch(end, end - i, h, ahead);
#define FT_CALL(R) f.template down<R>(i, end, h, n, mid + r * ms, ms, out + r * os + h, os, fresh)
      FT_ROW_GROUPS(num_rows, FT_CALL)
#undef FT_CALL
    }
  }
}

template <class Format>
static void finish_rows(const Format& f, int h_size, int num_rows, const float* from, int64_t os, float* to) {
  for (int r = 0; r < num_rows; r++, from += os, to += h_size) {
    int h = 0;
    for (; h + STEP <= h_size; h += STEP) f.finish(from + h, to + h, STEP);  // a constant makes it plain stores
    if (h < h_size) f.finish(from + h, to + h, h_size - h);
  }
}

// to[r][i] += bias[i] for i < n.
[[maybe_unused]] static void add_bias(float* to, int64_t stride, const uint8_t* bias, int n, int num_rows) {
  const float* b = (const float*)bias;
  for (int r = 0; r < num_rows; r++, to += stride)
    for (int i = 0; i < n; i++) to[i] += b[i];
}

template <class Format>
static void run_tiles(const TileJob& job) {
  typedef typename Format::X X;
  const ft_layer& l = *job.layer;
  const int h = (int)l.hidden, w = (int)l.tile_width;
  int rows = job.num_rows;
  while (rows > 0 && job.rows[rows - 1] < 0) rows--;
  if (rows < job.num_rows)
    memset(job.out + (int64_t)rows * h, 0, (int64_t)(job.num_rows - rows) * h * sizeof(float));
  if (!rows) return;
  const int64_t xs = x_stride(h), gs = middle_stride(w);
  float* g = (float*)job.scratch;
  float* u = g + FT_ROWS * gs;
  X* own = (X*)(u + FT_ROWS * gs);
  float* sums = (float*)own + FT_ROWS * gs;
  X* x = (X*)(sums + FT_ROWS * xs);
  if (!job.same_rows) {
    gather(job, rows, xs, x);
    Format::prepare(x, xs, h, rows);
  }
  X* mid = middle(g, own);
  Lead lead;
  if constexpr (Format::LEADS) lead = lead_of<Format>(job, rows);
  for (int t = job.first; t < job.last; t++) {
    const uint8_t* tile = job.record + l.tiles_offset + t * l.tile_bytes;
    Format f(l, tile);
    if constexpr (Format::LEADS) f.lead = lead;
    gate_up(f, job.from, job.to, rows, x, xs, g, u, gs);
    if (l.bias_offset) {
      add_bias(g, gs, tile + l.bias_offset, w, rows);
      add_bias(u, gs, tile + l.bias_offset + 4 * w, w, rows);
    }
    activate(l, job.x_dtype, g, u, (int)(rows * gs));
    to_x(g, mid, (int)(rows * gs));
    Format::prepare_middle(mid, gs, w, rows);
    if constexpr (Format::LEADS)
      if (const uint8_t* next = t + 1 < job.last ? tile + l.tile_bytes : lead.next) Format(l, next);  // prefetches its first scales
    down(f, job.from, job.to, h, rows, mid, gs, sums, xs, t == job.first, t + 1 < job.last);
    if (t + 1 == job.last) finish_rows(f, h, rows, sums, xs, job.out);
  }
  if (l.bias_offset && job.first == 0 && job.from == 0) add_bias(job.out, h, job.record, h, rows);
}

// --- plain rows -----------------------------------------------------------------------------------

// R rows of x times C rows of plain weights. T is the stored type. ADJACENT: the rows follow each other.
template <class T, F (*Convert)(const T*), int R, int C, bool ADJACENT = false>
FT_INLINE void plain_dots(const T* const (&rows)[C], const float* x, int64_t xs, int64_t width,
                          float (&out)[C][R]) {
  F acc[C][R];
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) acc[c][r] = zero();
  int64_t k = 0;
  for (; k + STEP <= width; k += STEP) {
    for (int c = 0; c < C; c++) {
      const char* p = (const char*)(ADJACENT ? rows[0] + C * k + c * STEP : rows[c] + k);
      for (int b = 0; b < STEP * (int)sizeof(T); b += 64) {
        if (C == 1) prefetch_row(p + b);
        else FT_PREFETCH(p + b + (C == 2 && !ADJACENT ? ft_row_ahead : AHEAD));
      }
    }
    for (int v = 0; v < STEP; v += W)
      for (int c = 0; c < C; c++) {
        F weight = Convert(rows[c] + k + v);
        for (int r = 0; r < R; r++) acc[c][r] = fma(weight, load(x + r * xs + k + v), acc[c][r]);
      }
  }
  for (; k < width; k += W) {
    const int n = width - k < W ? (int)(width - k) : W;
    for (int c = 0; c < C; c++) {
      F weight = n < W ? load_some<T, Convert>(rows[c] + k, n) : Convert(rows[c] + k);
      for (int r = 0; r < R; r++) acc[c][r] = fma(weight, load(x + r * xs + k), acc[c][r]);
    }
  }
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) out[c][r] = sum(acc[c][r]);
}

// gate [w, H], up [w, H], down [w, H] of one stored type.
template <class T, F (*Convert)(const T*)>
struct Plain {
  typedef float X;
  static constexpr int GROUP = 1, STREAMS = 4;
  static constexpr bool AS_THEY_LIE = true, IN_ORDER = false, LEADS = false;
  const T *gate, *up, *down_t;
  int64_t hidden;

  Plain(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    gate = (const T*)tile;
    up = gate + (int64_t)l.tile_width * hidden;
    down_t = up + (int64_t)l.tile_width * hidden;
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const float* x, int64_t xs, float* g, float* u, int64_t gs) const {
    const T* rows[2 * C];
    for (int c = 0; c < C; c++) {
      rows[2 * c] = gate + (i + c) * hidden;
      rows[2 * c + 1] = up + (i + c) * hidden;
    }
    float dots[2 * C][R];
    plain_dots<T, Convert, R, 2 * C>(rows, x, xs, hidden, dots);
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = dots[2 * c][r];
        u[r * gs + c] = dots[2 * c + 1][r];
      }
  }

  FT_INLINE_MEMBER void alone(int m, int i, const float* x, float* out) const {
    const T* rows[1] = {(m ? up : gate) + i * hidden};
    float dots[1][1];
    plain_dots<T, Convert, 1, 1>(rows, x, 0, hidden, dots);
    *out = dots[0][0];
  }

  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int n, const float* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    constexpr int V = STEP / W;
    const T* w = down_t + i0 * hidden + h;
    F acc[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = fresh ? zero() : load(out + r * os + v * W);
    for (int i = i0; i < i1; i++, w += hidden)
      for (int v = 0; v < V; v++) {
        if (v * W >= n) break;
        F weight = v * W + W <= n ? Convert(w + v * W) : load_some<T, Convert>(w + v * W, n - v * W);
        for (int r = 0; r < R; r++) acc[r][v] = fma(set1(mid[r * ms + i]), weight, acc[r][v]);
      }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(out + r * os + v * W, acc[r][v]);
  }

  static void prepare(float*, int64_t, int64_t, int) {}
  static void prepare_middle(float*, int64_t, int, int) {}
  void prefetch(int i1, int count, int64_t h, bool ahead) const {
    constexpr int BYTES = STEP * (int)sizeof(T);
    const uint8_t* columns = (const uint8_t*)down_t;
    if (count <= STREAMS) prefetch_runs(columns, hidden * sizeof(T), i1, count, h * sizeof(T), BYTES, ahead);
    else if (ahead) prefetch_next(columns, hidden * sizeof(T), i1, count * BYTES, h);
  }
  void warm(int i) const { prefetch_next((const uint8_t*)down_t, hidden * sizeof(T), i, hidden * sizeof(T), 0); }
  void finish(const float* from, float* to, int n) const { memcpy(to, from, n * sizeof(float)); }
};

template <class T>
static uint64_t plain_bytes(uint32_t w, uint32_t h) {
  return 3ull * w * h * sizeof(T);
}

}  // namespace FT_NS
