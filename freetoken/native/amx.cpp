// The tier `amx`: what many rows of bfloat16 share is multiplied on AMX's tiles, all else as avx512_bf16 does.
//
// A tile register holds 16 rows of 32 bfloat16 numbers, or 16 x 16 float32 sums. Weights are the sum of two bfloat16
// numbers, high + low, off by at most 2^-17 of a weight: bfloat16 itself, and codes whose products with their scale
// are short, have no low part. Rows of gate and up become panels [lines of 32][16 rows], strips of down
// [16 of H][pairs of columns]; x is turned once, [blocks of 16 rows][lines][16 pairs][16 rows].
// ORDER. A dot is one chain of pairs along the summed dimension, high before low in each line. A row has the same
// bits in whatever company of LEAST rows or more; fewer take the other tier's path.
#include "amx.h"

#include "amx_tiles.h"
#include "engine.h"
#include "formats/list.h"
#include "prepared.h"

namespace FT_NS {

constexpr int LEAST_ROWS = 16, MOST_ROWS = 128;  // of x: fewer are faster otherwise, more share no more
constexpr int COLUMNS = 1024, STRIP = 128;      // of down at a time, and of H: what is made of them stays in L2
constexpr int LEAST_DENSE = 17, MOST_DENSE = 512;  // rows of x of a dense product
constexpr int64_t X_BYTES = 1 << 20;            // of turned rows of a dense product at a time, likewise

static const TileFormat *const *below, *const *floats;  // the tables of avx512_bf16 and avx512

// --- memory ---------------------------------------------------------------------------------------

struct Room {
  uint64_t at;  // an address
  template <class T>
  T* take(int64_t count) {
    T* p = (T*)at;
    at += ft_align(count * sizeof(T), 64);
    return p;
  }
};

struct Panel {
  uint16_t *high, *low;
  bool two;  // low isn't all zero

  void open(Room& room, int64_t numbers) { high = room.take<uint16_t>(numbers), low = room.take<uint16_t>(numbers); }
};

struct Memory {
  Panel gate, up, down;
  uint16_t *x, *middle;
  float *g, *u, *sums, *wide;
  uint64_t used;

  // rows: of x; direct: sums of whole blocks of 16 rows have their place in the answer
  Memory(uint8_t* scratch, int64_t hidden, int64_t width, int64_t rows, bool direct) {
    Room room{(uint64_t)scratch};
    const int64_t h = (int64_t)ft_align(hidden, LINE), w = (int64_t)ft_align(width, SIDE);
    gate.open(room, SIDE * h);
    up.open(room, SIDE * h);
    down.open(room, COLUMNS * STRIP);
    x = room.take<uint16_t>(rows * h);
    middle = room.take<uint16_t>(rows * COLUMNS);
    g = room.take<float>(rows * w);
    u = room.take<float>(rows * w);
    sums = room.take<float>((direct ? SIDE : rows) * h);
    wide = room.take<float>(h > LINE * STRIP ? h : LINE * STRIP);
    used = room.at - (uint64_t)scratch;
  }
};

static bool in_place(int64_t hidden) { return hidden % LINE == 0; }

static uint64_t amx_scratch(uint32_t hidden, uint32_t width) {
  const uint64_t own = Memory(nullptr, hidden, width, MOST_ROWS, in_place(hidden)).used, other = scratch_bytes(hidden, width);
  return own > other ? own : other;
}

// --- weights --------------------------------------------------------------------------------------

// Where weights come from: a tile of an expert, or a coded matrix.
struct Source {
  const TileFormat* format;  // null: bfloat16, as it lies
  const ft_layer* layer;
  const uint8_t* tile;
  const MatrixJob* job;
  int64_t hidden;

  const uint16_t* plain(int m, int64_t i) const {
    return (const uint16_t*)tile + (m * (int64_t)layer->tile_width + i) * hidden;
  }
  // Row i, zeros to the end of a line.
  void row(int m, int64_t i, float* out) const {
    if (job) {
      MatrixJob one = *job;
      one.y = out - i * one.k;
      format->numbers(one, i, i + 1);
    } else {
      format->weights({layer, tile, m, (int)i, (int)i + 1, 0, hidden, out});
    }
    for (int64_t k = hidden; k % LINE; k++) out[k] = 0;
  }
};

FT_INLINE __mmask32 live(int64_t left) { return left >= LINE ? 0xFFFFFFFFu : (__mmask32)((1u << left) - 1); }

// `count` rows of matrix m from i on, zeros where there are fewer than 16.
static void fill_rows(const Source& s, int m, int64_t i, int count, float* wide, Panel& to) {
  const int64_t lines = (s.hidden + LINE - 1) / LINE;
  I any = _mm512_setzero_si512();
  for (int r = 0; r < SIDE; r++) {
    uint16_t *high = to.high + r * LINE, *low = to.low + r * LINE;
    if (r >= count) {
      for (int64_t n = 0; n < lines; n++) memset(high + n * TILE, 0, 64), memset(low + n * TILE, 0, 64);
    } else if (!s.format) {
      const uint16_t* p = s.plain(m, i + r);
      for (int64_t n = 0; n < lines; n++) {
        prefetch_row(p + n * LINE);
        _mm512_store_si512(high + n * TILE, _mm512_maskz_loadu_epi16(live(s.hidden - n * LINE), p + n * LINE));
      }
    } else {
      s.row(m, i + r, wide);
      for (int64_t n = 0; n < lines; n++) {
        const F a = load(wide + n * LINE), b = load(wide + n * LINE + W);
        const I h = pack(a, b), l = pack(sub(a, first_half(h)), sub(b, second_half(h)));
        _mm512_store_si512(high + n * TILE, h);
        _mm512_store_si512(low + n * TILE, l);
        any = _mm512_or_si512(any, l);
      }
    }
  }
  to.two = _mm512_test_epi32_mask(any, any) != 0;
}

// `count` columns of down from i on, at [h, h + width) and column c of `all` in the strip. Returns what low has.
static I fill_columns(const Source& s, int i, int count, int64_t h, int width, int c, int all, float* wide, Panel& to) {
  I any = _mm512_setzero_si512();
  if (s.format) s.format->weights({s.layer, s.tile, 2, i, i + count, h, h + width, wide});
  for (int e = i + count; i < e; i += 2, c += 2, wide += 2 * width) {
    const int64_t place = (int64_t)(c / LINE) * TILE + c % LINE * SIDE;
    uint16_t *high = to.high + place, *low = to.low + place;
    for (int n = 0; n < width; n += SIDE, high += all * SIDE, low += all * SIDE) {
      if (!s.format) {
        const uint16_t *a = s.plain(2, i) + h + n, *b = a + s.hidden;
        const int64_t left = s.hidden - h - n;
        __builtin_prefetch(a + STRIP, 0, 2);
        __builtin_prefetch(b + STRIP, 0, 2);
        const __mmask16 mask = left >= SIDE ? 0xFFFF : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        const I even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, a));
        const I odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
        _mm512_store_si512(high, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      } else {
        const F a = load(wide + n), b = load(wide + width + n);
        const I twos = woven(pack(a, b));
        const I rest = woven(pack(sub(a, even_numbers(twos)), sub(b, odd_numbers(twos))));
        _mm512_store_si512(high, twos);
        _mm512_store_si512(low, rest);
        any = _mm512_or_si512(any, rest);
      }
    }
  }
  return any;
}

// --- x --------------------------------------------------------------------------------------------

// 16 rows of x as lines of pairs; what isn't there is null.
static void turn_rows(const uint16_t* const (&rows)[SIDE], int64_t width, uint16_t* to) {
  for (int64_t k = 0; k < width; k += LINE, to += TILE) {
    I v[SIDE];
    for (int r = 0; r < SIDE; r++)
      v[r] = rows[r] ? _mm512_maskz_loadu_epi16(live(width - k), rows[r] + k) : _mm512_setzero_si512();
    turn(v);
    for (int r = 0; r < SIDE; r++) _mm512_store_si512(to + r * LINE, v[r]);
  }
}

static void turn_x(const TileJob& job, int rows, uint16_t* to) {
  const int64_t width = job.layer->hidden;
  for (int r = 0; r < rows; r += SIDE, to += SIDE * ft_align(width, LINE)) {
    const uint16_t* at[SIDE];
    for (int q = 0; q < SIDE; q++)
      at[q] = r + q < rows && job.rows[r + q] >= 0 ? (const uint16_t*)job.x + job.rows[r + q] * width : nullptr;
    turn_rows(at, width, to);
  }
}

// The middle, [rows][stride] floats that are bfloat16 numbers, as blocks of lines; columns from `first` on of `all`.
static void store_middle(const float* g, int64_t stride, int rows, int width, int first, int all, uint16_t* to) {
  for (int r = 0; r < rows; r++, g += stride) {
    uint16_t* row = to + (r / SIDE * (all / LINE) * SIDE + r % SIDE) * LINE;
    for (int i = 0; i < width; i += 8) {
      const int c = first + i;
      _mm_storeu_si128((__m128i*)(row + c / LINE * TILE + c % LINE), (__m128i)_mm256_cvtneps_pbh(_mm256_loadu_ps(g + i)));
    }
  }
}

// --- an expert ------------------------------------------------------------------------------------

// Two panels of weights times all rows of x: g and u [rows][stride], 16 columns from their places on.
static void two_panels(const Panel& a, const Panel& b, const uint16_t* x, int64_t lines, int rows, float* g, float* u,
                       int64_t stride, Ahead ahead = {}) {
  for (int r = 0; r < rows; r += 2 * SIDE) {
    alignas(64) float c[4][SIDE * SIDE];
    const bool both = r + SIDE < rows;
    multiply({a.high, a.two ? a.low : nullptr}, {b.high, b.two ? b.low : nullptr}, x + r * lines * LINE,
             both ? x + (r + SIDE) * lines * LINE : nullptr, lines, c, ahead);
    for (int q = 0; q < 2 + 2 * both; q++) {
      I v[SIDE];
      for (int i = 0; i < SIDE; i++) v[i] = _mm512_load_si512(c[q] + SIDE * i);
      turn(v);
      float* to = (q % 2 ? u : g) + (r + q / 2 * SIDE) * stride;
      for (int i = 0; i < SIDE; i++, to += stride) _mm512_storeu_si512(to, v[i]);
    }
  }
}

// Rows of gate and up from i on, or the next tile's.
static Ahead next_rows(const Source& s, int i, int rows) {
  if (s.format) return {};
  const int w = (int)s.layer->tile_width, blocks = (rows + 2 * SIDE - 1) / (2 * SIDE);
  Source next = s;
  if (i >= w) i = 0, next.tile += s.layer->tile_bytes;
  return {{(const uint8_t*)next.plain(0, i), (const uint8_t*)next.plain(1, i)}, (int64_t)ft_align(SIDE * LINE * 2 / blocks, 64)};
}

static void gate_up(const Source& s, const Memory& m, int rows, Panel& gate, Panel& up) {
  const int w = (int)s.layer->tile_width;
  const int64_t lines = (s.hidden + LINE - 1) / LINE, stride = (int64_t)ft_align(w, SIDE);
  for (int i = 0; i < w; i += SIDE) {
    const int count = w - i < SIDE ? w - i : SIDE;
    fill_rows(s, 0, i, count, m.wide, gate);
    fill_rows(s, 1, i, count, m.wide, up);
    two_panels(gate, up, m.x, lines, rows, m.g + i, m.u + i, stride, next_rows(s, i + SIDE, rows));
  }
}

// Rows of the middle that a line of columns lacks are zeros, of the middle and of down.
static void zero_middle(uint16_t* middle, int columns, int all, int rows) {
  for (int r = 0; columns < all && r < rows; r++)
    for (int c = columns; c < all; c++)
      middle[((r / SIDE * (all / LINE) + c / LINE) * SIDE + r % SIDE) * LINE + c % LINE] = 0;
}
static void zero_down(const Panel& down, int width, int columns, int all) {
  for (int h = 0; columns < all && h < width; h += SIDE)
    for (int c = columns; c < all; c += 2) {
      const int64_t at = h * all + (int64_t)(c / LINE) * TILE + c % LINE * SIDE;
      memset(down.high + at, 0, 64);
      memset(down.low + at, 0, 64);
    }
}

// Columns [first, first + count) of tiles of w: what of each tile they are.
template <class Each>
FT_INLINE void each_tile(int first, int count, int w, Each each) {
  for (int c = 0; c < count;) {
    const int t = (first + c) / w, i = (first + c) % w, some = w - i < count - c ? w - i : count - c;
    each(t, i, some, c);
    c += some;
  }
}

// sums (+)= the middle times `columns` columns of down from `first` on.
static void down_strips(Source& s, const TileJob& job, Memory& m, int first, int columns, int rows, float* const* sums) {
  const int w = (int)s.layer->tile_width, all = (int)ft_align(columns, LINE), lines = all / LINE;
  const int64_t wide = (int64_t)ft_align(s.hidden, LINE);
  for (int64_t h = 0; h < wide; h += STRIP) {
    const int width = (int)(wide - h < STRIP ? wide - h : STRIP);
    I any = _mm512_setzero_si512();
    each_tile(first, columns, w, [&](int t, int i, int count, int c) {
      s.tile = job.record + s.layer->tiles_offset + (job.first + t) * s.layer->tile_bytes;
      for (int e = i + count; i < e; i += LINE, c += LINE) {
        const int some = e - i < LINE ? e - i : LINE;
        any = _mm512_or_si512(any, fill_columns(s, i, some, h, width, c, all, m.wide, m.down));
      }
    });
    m.down.two = _mm512_test_epi32_mask(any, any) != 0;
    zero_down(m.down, width, columns, all);
    for (int n = 0; n < width; n += 2 * SIDE) {
      const Split b{m.down.high + n * all, m.down.two ? m.down.low + n * all : nullptr};
      for (int r = 0; r < rows; r += 2 * SIDE) {
        const int block = r / SIDE;
        const bool both = r + SIDE < rows;
        const uint16_t* a = m.middle + (int64_t)block * lines * TILE;
        add_columns(a, both ? a + lines * TILE : nullptr, b, lines, sums[block] + h + n,
                    both ? sums[block + 1] + h + n : nullptr, wide, first == 0);
      }
    }
  }
}

static void run_expert(const TileFormat* format, const TileJob& job, int rows) {
  const ft_layer& l = *job.layer;
  const int w = (int)l.tile_width, blocks = (rows + SIDE - 1) / SIDE, padded = blocks * SIDE;
  const int64_t hidden = l.hidden, h = (int64_t)ft_align(hidden, LINE), stride = (int64_t)ft_align(w, SIDE);
  const bool direct = in_place(hidden);
  Memory m(job.scratch, hidden, w, MOST_ROWS, direct);
  float *sums[MOST_ROWS / SIDE], *own = m.sums;
  for (int b = 0; b < blocks; b++) {
    const bool whole = direct && (b + 1) * SIDE <= rows;
    sums[b] = whole ? job.out + b * SIDE * hidden : own;
    if (!whole) own += SIDE * h;
  }
  Source s{format, &l, nullptr, nullptr, hidden};
  turn_x(job, rows, m.x);
  const Tiles registers;
  const int total = (job.last - job.first) * w;
  for (int first = 0; first < total; first += COLUMNS) {
    const int columns = total - first < COLUMNS ? total - first : COLUMNS, all = (int)ft_align(columns, LINE);
    each_tile(first, columns, w, [&](int t, int i, int count, int c) {
      s.tile = job.record + l.tiles_offset + (job.first + t) * l.tile_bytes;
      if (i == 0) {
        gate_up(s, m, padded, m.gate, m.up);
        if (l.bias_offset) {
          add_bias(m.g, stride, s.tile + l.bias_offset, w, padded);
          add_bias(m.u, stride, s.tile + l.bias_offset + 4 * w, w, padded);
        }
        activate(l, FT_BF16, m.g, m.u, (int)(padded * stride));
      }
      store_middle(m.g + i, stride, padded, count, c, all, m.middle);
    });
    zero_middle(m.middle, columns, all, padded);
    down_strips(s, job, m, first, columns, padded, sums);
  }
  for (int b = 0; b < blocks; b++)
    for (int r = b * SIDE; sums[b] != job.out + b * SIDE * hidden && r < rows && r < (b + 1) * SIDE; r++)
      memcpy(job.out + r * hidden, sums[b] + (r - b * SIDE) * h, hidden * sizeof(float));
  if (l.bias_offset && job.first == 0) add_bias(job.out, hidden, job.record, (int)hidden, rows);
}

static void run(const TileJob& job) {
  const TileFormat& base = *below[job.layer->format];
  int rows = job.num_rows;
  while (rows > 0 && job.rows[rows - 1] < 0) rows--;
  if (job.x_dtype == FT_BF16 && rows >= LEAST_ROWS) {
    const int64_t hidden = job.layer->hidden;
    memset(job.out + rows * hidden, 0, (job.num_rows - rows) * hidden * sizeof(float));
    return run_expert(base.matrix ? floats[job.layer->format] : nullptr, job, rows);
  }
  if (job.x_dtype == FT_BF16 && base.digits && rows > 0) {
    const int64_t hidden = job.layer->hidden;
    memset(job.out + rows * hidden, 0, (job.num_rows - rows) * hidden * sizeof(float));
    return run_digits(*base.digits, job, rows);
  }
  TileJob some = job;
  some.same_rows &= job.num_rows <= FT_ROWS;
  for (int r = 0; r < job.num_rows; r += FT_ROWS) {
    some.rows = job.rows + r;
    some.num_rows = job.num_rows - r < FT_ROWS ? job.num_rows - r : FT_ROWS;
    some.out = job.out + (int64_t)r * job.layer->hidden;
    base.run(some);
  }
}

// --- dense matrices -------------------------------------------------------------------------------

static uint64_t turned_bytes(int64_t k) { return ft_align(k, LINE) * 2; }

// Rows [first, last) of x, first a multiple of 16, which have room for 16.
static void turn_some(const MatrixJob& job, int64_t first, int64_t last, uint8_t* to, uint8_t*) {
  const uint16_t* at[SIDE];
  for (int q = 0; q < SIDE; q++) at[q] = first + q < last ? (const uint16_t*)job.x + (first + q) * job.k : nullptr;
  turn_rows(at, job.k, (uint16_t*)(to + first * turned_bytes(job.k)));
}

// y of rows [r, r + count) and n columns from i on: sums [16][stride], the bias added, rounded once.
static void put(const MatrixJob& job, int64_t r, int count, int64_t i, int n, const float* sums, int64_t stride) {
  const __mmask16 mask = (__mmask16)((1u << n) - 1);
  F bias = zero();
  if (job.bias)
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, (const uint16_t*)job.bias + i)), 16));
  for (int q = 0; q < count; q++) {
    const I rounded = _mm512_castps_si512(round_bf16(add(load(sums + q * stride), bias)));
    _mm256_mask_storeu_epi16((uint16_t*)job.y + (r + q) * job.n + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
}

// Rows [first, last) of W times x as turn_some leaves it.
static void product(const TileFormat* format, const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch) {
  const int64_t lines = (job.k + LINE - 1) / LINE;
  int64_t most = X_BYTES / (lines * LINE * 2) / SIDE * SIDE;
  most = most < SIDE ? SIDE : most > MOST_DENSE ? MOST_DENSE : most;
  Room room{(uint64_t)scratch};
  Panel a, b;
  a.open(room, SIDE * lines * LINE);
  b.open(room, SIDE * lines * LINE);
  float* wide = room.take<float>(lines * LINE);
  float* sums = room.take<float>(MOST_DENSE * 2 * SIDE);
  const Source s{format, nullptr, nullptr, &job, job.k};
  const Tiles registers;
  for (int64_t r = 0; r < job.rows; r += most) {
    const int rows = (int)(job.rows - r < most ? job.rows - r : most);
    for (int64_t i = first; i < last; i += 2 * SIDE) {
      const int64_t left = last - i;
      const int n[2] = {(int)(left < SIDE ? left : SIDE), (int)(left < SIDE ? 0 : left < 2 * SIDE ? left - SIDE : SIDE)};
      fill_rows(s, 0, i, n[0], wide, a);
      fill_rows(s, 0, i + SIDE, n[1], wide, b);
      const uint16_t* x = (const uint16_t*)job.x + r * lines * LINE;
      two_panels(a, b, x, lines, rows, sums, sums + SIDE, 2 * SIDE);
      for (int m = 0; m < 2; m++) put(job, r, rows, i + m * SIDE, n[m], sums + m * SIDE, 2 * SIDE);
    }
  }
}

// --- the table ------------------------------------------------------------------------------------

#define FT_NUMBER(name) at_##name,
enum { FT_FORMATS(FT_NUMBER) COUNT };

template <int N>
static void product_of(const MatrixJob& job, int64_t first, int64_t last, uint8_t* scratch) {
  product(floats[N], job, first, last, scratch);
}

const TileFormat* const* formats(const TileFormat* const* table, const TileFormat* const* decoders) {
  static const TileFormat* all[2 * COUNT + 1];
  static TileFormat own[COUNT];
  static PreparedFormat many[COUNT];
  below = table, floats = decoders;
  for (int i = 0; i < 2 * COUNT + 1; i++) all[i] = table[i];
  void (*const products[])(const MatrixJob&, int64_t, int64_t, uint8_t*) = {
#define FT_PRODUCT(name) product_of<at_##name>,
      FT_FORMATS(FT_PRODUCT)};
  for (int i = 0; i < COUNT; i++) {
    if (i != at_bf16 && !table[i]->matrix) continue;  // float32 and float16 stay as they are
    own[i] = *table[i];
    own[i].run = run;
    own[i].most_rows = MOST_ROWS;
    own[i].scratch = amx_scratch;
    all[i] = &own[i];
    if (!table[i]->matrix) continue;
    static_cast<TileFormat&>(many[i]) = *table[i];
    many[i].matrix = products[i];
    many[i].row_bytes = turned_bytes;
    many[i].rows = turn_some;
    many[i].least_rows = LEAST_DENSE;
    own[i].many = &many[i];
  }
  return all;
}

}  // namespace FT_NS
