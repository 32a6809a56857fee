// Every format's int8 products: the specs of formats/ once more, for other kernels. One file, since each is small.
#include "int8_run.h"
#include "int8_table.h"
#include "q8_0.h"

#define FT_INT8(name, Format, Tile, tile_bytes)                                                  \
  namespace FT_NS {                                                                              \
  static uint64_t name##_row(int64_t k) { return x8_bytes(ft_align(k, 256), Format::SPAN); }     \
  extern const Int8Format int8_##name;                                                           \
  const Int8Format int8_##name = {                                                               \
      {#name, int8_tiles<Format>, tile_bytes, matrix_bytes<Tile>, int8_matrix<Format>, nullptr}, \
      name##_row,                                                                                \
      int8_rows<Format>};                                                                        \
  }

#undef FT_BLOCKS
#define FT_BLOCKS(name, Spec, columns, rows) \
  FT_INT8(name, Int8Blocks<Spec>, Blocks<Spec>, (block_bytes<Spec, columns, rows>))

#include "formats/int4_g128.cpp"
#include "formats/int4_g32.cpp"
#include "formats/int4_g64.cpp"
#include "formats/int4_zp_g128.cpp"
#include "formats/int4_zp_g32.cpp"
#include "formats/int4_zp_g64.cpp"
#include "formats/iq4_nl.cpp"
#include "formats/iq4_xs.cpp"
#include "formats/mxfp4.cpp"
#include "formats/nvfp4.cpp"
#include "formats/q2_k.cpp"
#include "formats/q3_k.cpp"
#include "formats/q4_0.cpp"
#include "formats/q4_1.cpp"
#include "formats/q4_k.cpp"
#include "formats/q5_0.cpp"
#include "formats/q5_1.cpp"
#include "formats/q5_k.cpp"
#include "formats/q6_k.cpp"

namespace FT_NS {

// Codes plus 128, in the order in which they lie.
struct Int8Q8_0 {
  static constexpr int SPAN = 32, D = 0, LEAST = 128;
  static constexpr bool OFFSET = false, WIDE = true;
  static constexpr float UNIT = 1;
  static constexpr int LINE = 256, WIDTH = W == 16 ? 64 : STEP;
  static constexpr int32_t TOPS = (int32_t)0x80808080;
  Q8_0 tile;
  int64_t hidden;

  Int8Q8_0(const Shape& shape, const uint8_t* bytes) : tile(shape, bytes), hidden(shape.h) {}
  FT_INLINE_MEMBER void bytes(int m, int i, int64_t k, int64_t n, Bytes (&v)[4]) const {
    const uint8_t* p = tile.codes[m] + i * hidden + k;
    uint8_t last[256];
    if (n < 256) {  // what follows the row may be the end of memory
      memset(last, 0, 256);
      memcpy(last, p, n);
      p = last;
    }
    for (int q = 0; q < 4; q++) {
      v[q] = load64(p + 64 * q);
      for (int j = 0; j < N64; j++) v[q].v[j] = flip(v[q].v[j], TOPS);
    }
  }
  FT_INLINE_MEMBER const uint8_t* codes(int m, int i) const { return tile.codes[m] + i * hidden; }
  FT_INLINE_MEMBER void near(int i) const { tile.near(i); }
  FT_INLINE_MEMBER E8 steps(const EightAt<32>& at) const { return at(tile.scale); }
  FT_INLINE_MEMBER E8 offsets(const EightAt<32>&) const { return E8{}; }
  FT_INLINE_MEMBER F down_step(int i, int h) const { return lanes(tile.scale.down(i, h)); }
  FT_INLINE_MEMBER F down_offset(int, int) const { return zero(); }

  // Four columns at h, a dword each.
  FT_INLINE_MEMBER I four(int i, int h) const {
    const uint8_t* p = tile.codes[2] + i * hidden + h;
#if defined(FT_AVX512)
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00F0, _mm_loadu_si128((const __m128i*)(p + hidden)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0F00, _mm_loadu_si128((const __m128i*)(p + 2 * hidden)));
    v = _mm512_mask_broadcast_i32x4(v, 0xF000, _mm_loadu_si128((const __m128i*)(p + 3 * hidden)));
    v = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    const __m128i turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(turned));
#elif defined(FT_AVX2)
    const __m128i a = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)p), _mm_loadl_epi64((const __m128i*)(p + hidden)));
    const __m128i b = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)(p + 2 * hidden)),
                                        _mm_loadl_epi64((const __m128i*)(p + 3 * hidden)));
    return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
#else
    return (I)p[0] | (I)p[hidden] << 8 | (I)p[2 * hidden] << 16 | (I)p[3 * hidden] << 24;
#endif
  }
  template <class Each>
  FT_INLINE_MEMBER void columns(int i, int h, Each each) const {
    for (int j = 0; j < 32; j += 4) each(j / 4, flip(four(i + j, h), TOPS));
  }
  // Columns lie a row of H bytes apart, so that many of them meet in few places of the nearest cache: each line is
  // read once, whole.
  template <int N>
  FT_INLINE_MEMBER void span(int i, int h, const Row8& mid, I (&sum)[N]) const {
#if defined(FT_AVX512)
    if constexpr (N == 4) {
      I turned[4];  // lane 4 l + j of vector q is h + 16 l + 4 q + j
      for (int q = 0; q < 4; q++) turned[q] = sum[q];
      for (int j = 0; j < 32; j += 4) {
        const uint8_t* p = tile.codes[2] + (i + j) * hidden + h;
        const I a = flip(dwords_of(p), TOPS), b = flip(dwords_of(p + hidden), TOPS);
        const I c = flip(dwords_of(p + 2 * hidden), TOPS), d = flip(dwords_of(p + 3 * hidden), TOPS);
        const I low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
        const I low2 = _mm512_unpacklo_epi8(c, d), high2 = _mm512_unpackhi_epi8(c, d);
        const I m = same(mid.dword((i + j) / 4));
        turned[0] = dot4<true>(turned[0], _mm512_unpacklo_epi16(low, low2), m);
        turned[1] = dot4<true>(turned[1], _mm512_unpackhi_epi16(low, low2), m);
        turned[2] = dot4<true>(turned[2], _mm512_unpacklo_epi16(high, high2), m);
        turned[3] = dot4<true>(turned[3], _mm512_unpackhi_epi16(high, high2), m);
      }
      const I x = _mm512_shuffle_i64x2(turned[0], turned[1], 0x44), y = _mm512_shuffle_i64x2(turned[2], turned[3], 0x44);
      const I z = _mm512_shuffle_i64x2(turned[0], turned[1], 0xEE), w = _mm512_shuffle_i64x2(turned[2], turned[3], 0xEE);
      sum[0] = _mm512_shuffle_i64x2(x, y, 0x88);
      sum[1] = _mm512_shuffle_i64x2(x, y, 0xDD);
      sum[2] = _mm512_shuffle_i64x2(z, w, 0x88);
      sum[3] = _mm512_shuffle_i64x2(z, w, 0xDD);
      return;
    }
#endif
    for (int v = 0; v < N; v++)
      columns(i, h + v * W, [&](int dword, I w) FT_LAMBDA { sum[v] = dot4<true>(sum[v], w, same(mid.dword(i / 4 + dword))); });
  }
  void prefetch(int i1, int count, int64_t h) const { prefetch_next(tile.codes[2], hidden, i1, count * STEP, h); }

  void warm(int i) const {
    prefetch_next(tile.codes[2], hidden, i, hidden, 0);
    tile.warm(i);
  }

  static void place_row(const int8_t* q, uint8_t* row, int64_t block) { memcpy(row + 32 * block, q, 32); }
  static void place_middle(const int8_t* q, uint8_t* row, int64_t block) { place_row(q, row, block); }
};

}  // namespace FT_NS

FT_INT8(q8_0, Int8Q8_0, Q8_0, q8_0_bytes)
