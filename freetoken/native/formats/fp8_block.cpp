// FP8 e4m3 with one float32 scale for each 128 x 128 block of a matrix. A tile's columns lie in one block, or
// in whole ones; the scales of a block that several tiles share are in each of them.
#include "../coded.h"

namespace FT_NS {

struct Fp8Block {
  static constexpr int COLUMN_BITS = 8, GROUP = 2, SIDE = 128;
  const uint8_t* codes[3];
  const float* scale[3];  // [blocks of w][blocks of H]
  int64_t hidden, row_bytes, blocks;

  Fp8Block(const Shape& shape, const uint8_t* tile) { size(shape, tile); }
  uint64_t size(const Shape& shape, const uint8_t* tile) {
    Streams s{tile};
    hidden = shape.h;
    row_bytes = line_bytes(hidden, 8);
    blocks = (hidden + SIDE - 1) / SIDE;
    for (int m = 0; m < shape.matrices; m++) codes[m] = s.next(shape.w * (m < 2 ? row_bytes : hidden));
    for (int m = 0; m < shape.matrices; m++)
      scale[m] = (const float*)s.next((shape.w + SIDE - 1) / SIDE * blocks * 4);
    return s.at;
  }

  FT_INLINE_MEMBER void near(int) const {}  // few scales: they stay in the cache
  FT_INLINE_MEMBER void warm(int) const {}
  const uint8_t* codes_down() const { return codes[2]; }

  FT_INLINE_MEMBER void row(int m, int i, int64_t k, F (&w)[V]) const {
    row8<byte_e4m3>(codes[m] + i * row_bytes, k, w);
    scale_all(w, set1(scale[m][i / SIDE * blocks + k / SIDE]));
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    down8<byte_e4m3>(codes[2], hidden, i, h, w);
    scale_all(w, set1(scale[2][i / SIDE * blocks + h / SIDE]));
  }
};

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

struct Fp8Pairs {
  typedef uint16_t X;
  static constexpr int GROUP = 32;
  Fp8Block t;
  int64_t hidden;
  Fp8Pairs(const ft_layer& l, const uint8_t* tile) : t(Shape(l), tile), hidden(l.hidden) {}

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const uint16_t* x, int64_t xs, float* g, float* u, int64_t gs) const {
    for (int c = 0; c < C; c++) {
      F acc[2][R];
      for (int s = 0; s < 2; s++)
        for (int r = 0; r < R; r++) acc[s][r] = zero();
      const uint8_t* rows[2] = {t.codes[0] + (i + c) * t.row_bytes, t.codes[1] + (i + c) * t.row_bytes};
      const float* scales[2] = {t.scale[0] + (i + c) / 128 * t.blocks, t.scale[1] + (i + c) / 128 * t.blocks};
      for (int64_t k = 0; k < hidden; k += 128)
        for (int s = 0; s < 2; s++) {
          F part[R];
          for (int r = 0; r < R; r++) part[r] = zero();
          for (int b = 0; b < 128 && k + b < hidden; b += 64) {
            const uint8_t* p = rows[s] + k + b;
            FT_PREFETCH(p + AHEAD);
            I words = _mm512_loadu_si512(p);
            I low = low_e4m3(words), high = high_e4m3(words);
            for (int r = 0; r < R; r++) {
              const uint16_t* at = x + r * xs + k + b;
              part[r] = dot2(part[r], low, _mm512_loadu_si512(at));
              part[r] = dot2(part[r], high, _mm512_loadu_si512(at + 32));
            }
          }
          for (int r = 0; r < R; r++) acc[s][r] = fma(part[r], set1(scales[s][k / 128]), acc[s][r]);
        }
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = sum(acc[0][r]);
        u[r * gs + c] = sum(acc[1][r]);
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
      const F scale = set1(t.scale[2][i / 128 * t.blocks + h / 128]);
      for (int v = 0; v < 2; v++)
        for (int r = 0; r < R; r++) acc[v][r] = fma(part[v][r], scale, acc[v][r]);
    }
    for (int v = 0; v < 2; v++)
      for (int r = 0; r < R; r++) store(out + r * os + 16 * v, acc[v][r]);
  }

  static void prepare(uint16_t*, int64_t, int64_t, int) {}
  static void prepare_middle(uint16_t*, int64_t, int, int) {}
  void prefetch(int i1, int count, int64_t h) const {
    prefetch_next(t.codes[2], hidden, i1, count * STEP, h);
  }
  void warm(int i) const { prefetch_next(t.codes[2], hidden, i, hidden, 0); }
  void finish(const float* from, float* to, int n) const { in_order(from, to, n); }
};

#endif

static void run(const TileJob& job) {
#if defined(FT_BF16_DOT)
  if (job.x_dtype == FT_BF16) return run_tiles<Fp8Pairs>(job);
#endif
  run_tiles<Coded<Fp8Block>>(job);
}

static uint64_t tile_bytes(uint32_t w, uint32_t h) {
  if (w % 2 || h % 32 || (w > 128 ? w % 128 : 128 % w)) return 0;
  const Shape shape(w, h, 3);
  return Fp8Block(shape, nullptr).size(shape, nullptr);
}

extern const TileFormat format_fp8_block;
const TileFormat format_fp8_block = {"fp8_block", run, tile_bytes};

}  // namespace FT_NS
