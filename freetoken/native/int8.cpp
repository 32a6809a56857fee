// Every format's int8 products: the specs of formats/ once more, for other kernels. One file, since each is small.
#include "int8_run.h"
#include "prepared.h"
#include "q8_0.h"

#define FT_INT8(name, Format, Tile, tile_bytes)                                                  \
  namespace FT_NS {                                                                              \
  static uint64_t name##_row(int64_t k) { return x8_bytes(ft_align(k, 256), Format::SPAN); }     \
  extern const PreparedFormat int8_##name;                                                           \
  const PreparedFormat int8_##name = {                                                               \
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

#if defined(FT_AVX512)
template <int HIGH>
FT_INLINE I unpacked8(I a, I b) { return HIGH ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b); }
template <int HIGH>
FT_INLINE I unpacked16(I a, I b) { return HIGH ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b); }
// 128 bits l of vector v go to 128 bits v of vector l.
FT_INLINE void turn_lanes(I (&t)[4]) {
  const I x = _mm512_shuffle_i64x2(t[0], t[1], 0x44), y = _mm512_shuffle_i64x2(t[2], t[3], 0x44);
  const I z = _mm512_shuffle_i64x2(t[0], t[1], 0xEE), w = _mm512_shuffle_i64x2(t[2], t[3], 0xEE);
  t[0] = _mm512_shuffle_i64x2(x, y, 0x88);
  t[1] = _mm512_shuffle_i64x2(x, y, 0xDD);
  t[2] = _mm512_shuffle_i64x2(z, w, 0x88);
  t[3] = _mm512_shuffle_i64x2(z, w, 0xDD);
}
#elif defined(FT_AVX2)
template <int HIGH>
FT_INLINE I unpacked8(I a, I b) { return HIGH ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b); }
template <int HIGH>
FT_INLINE I unpacked16(I a, I b) { return HIGH ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b); }
// 128 bits l of vector v go to place 4 l + v of eight.
FT_INLINE void turn_lanes(I (&t)[4]) {
  const I a = t[0], b = t[1], c = t[2], d = t[3];
  t[0] = _mm256_permute2x128_si256(a, b, 0x20);
  t[1] = _mm256_permute2x128_si256(c, d, 0x20);
  t[2] = _mm256_permute2x128_si256(a, b, 0x31);
  t[3] = _mm256_permute2x128_si256(c, d, 0x31);
}
#endif

// Codes plus 128, in the order in which they lie.
struct Int8Q8_0 {
  static constexpr int SPAN = 32, D = 0, LEAST = 128;
  static constexpr bool OFFSET = false, WIDE = true, FAR = false;
  static constexpr float UNIT = 1;
  static constexpr int LINE = 256, WIDTH = W == 16 ? 64 : STEP, PASSES = 8;
  static constexpr int TURNED = W == 1 ? 0 : 4;  // vectors that are summed in another order
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
  FT_INLINE_MEMBER void near(int m, int i) const { tile.near(m, i); }
  FT_INLINE_MEMBER E8 steps(const EightAt<32>& at) const { return at(tile.scale); }
  FT_INLINE_MEMBER E8 offsets(const EightAt<32>&) const { return E8{}; }
  FT_INLINE_MEMBER F down_step(int i, int h) const { return lanes(tile.scale.down(i, h)); }
  FT_INLINE_MEMBER F down_offset(int, int) const { return zero(); }

  // Column c and those 8, 16 and 24 further at h, a dword each: four runs of memory, which eight passes walk.
  FT_INLINE_MEMBER const uint8_t* run(int i, int c, int h) const { return tile.codes[2] + (i + c) * hidden + h; }
  FT_INLINE_MEMBER I four(int i, int c, int h) const {
    const uint8_t* p = run(i, c, h);
    const int64_t apart = 8 * hidden;
#if defined(FT_AVX512)
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00F0, _mm_loadu_si128((const __m128i*)(p + apart)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0F00, _mm_loadu_si128((const __m128i*)(p + 2 * apart)));
    v = _mm512_mask_broadcast_i32x4(v, 0xF000, _mm_loadu_si128((const __m128i*)(p + 3 * apart)));
    v = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    const __m128i turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(turned));
#elif defined(FT_AVX2)
    const __m128i a = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)p), _mm_loadl_epi64((const __m128i*)(p + apart)));
    const __m128i b = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)(p + 2 * apart)),
                                        _mm_loadl_epi64((const __m128i*)(p + 3 * apart)));
    return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
#else
    return (I)p[0] | (I)p[apart] << 8 | (I)p[2 * apart] << 16 | (I)p[3 * apart] << 24;
#endif
  }
  template <class Each>
  FT_INLINE_MEMBER void columns(int i, int h, Each each) const {
    for (int c = 0; c < 8; c++) each(c, flip(four(i, c, h), TOPS));
  }
  // Four columns; TURNED vectors hold 16 lanes of them in each 128 bits, four of which go to each sum.
  template <int R, int N>
  FT_INLINE_MEMBER void span(int i, int pass, int h, const Row8 (&mid)[R], I (&sum)[R][N]) const {
    auto add = [&](int v, I codes) FT_LAMBDA {
      for (int r = 0; r < R; r++) sum[r][v] = dot4<true>(sum[r][v], codes, same(mid[r].dword(i / 4 + pass)));
    };
#if defined(FT_AVX512) || defined(FT_AVX2)
    if constexpr (N == TURNED) {
      const uint8_t* p = run(i, pass, h);
      const int64_t apart = 8 * hidden;
      const I a = flip(dwords_of(p), TOPS), b = flip(dwords_of(p + apart), TOPS);
      const I c = flip(dwords_of(p + 2 * apart), TOPS), d = flip(dwords_of(p + 3 * apart), TOPS);
      const I low = unpacked8<0>(a, b), high = unpacked8<1>(a, b), low2 = unpacked8<0>(c, d), high2 = unpacked8<1>(c, d);
      add(0, unpacked16<0>(low, low2));
      add(1, unpacked16<1>(low, low2));
      add(2, unpacked16<0>(high, high2));
      add(3, unpacked16<1>(high, high2));
      return;
    }
#endif
    for (int v = 0; v < N; v++) add(v, flip(four(i, pass, h + v * W), TOPS));
  }
  template <int N>
  FT_INLINE void settle([[maybe_unused]] I (&sum)[N]) {
#if defined(FT_AVX512) || defined(FT_AVX2)
    if constexpr (N == TURNED) turn_lanes(sum);
#endif
  }
  FT_INLINE_MEMBER void ahead(int i, int pass, int h) const {
    if (h % 64) return;
    const int64_t at = pass * hidden + h + NEAR;
    const uint8_t* p = tile.codes[2] + (i + (at < 8 * hidden ? 0 : 24)) * hidden + at - NEAR;
    for (int r = 0; r < 4; r++) prefetch_walk<false>(p + 8 * r * hidden, 64);
  }
  void prefetch(int i1, int count, int64_t h) const { prefetch_next(tile.codes[2], hidden, i1, count * STEP, h); }

  static void place_row(const int8_t* q, uint8_t* row, int64_t block) { memcpy(row + 32 * block, q, 32); }
  static void place_middle(const int8_t* q, uint8_t* row, int64_t block) {
    for (int c = 0; c < 32; c++) row[32 * block + c] = (uint8_t)q[c % 4 * 8 + c / 4];
  }
};

}  // namespace FT_NS

FT_INT8(q8_0, Int8Q8_0, Q8_0, q8_0_bytes)
