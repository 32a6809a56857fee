// MXFP4: four-bit e2m1 codes, one e8m0 scale (a power of two) for 32 elements along the summed dimension.
#include "../coded.h"

namespace FT_NS {

struct Mxfp4 {
  static constexpr int COLUMN_BITS = 4, GROUP = 8, BLOCK = 32;
  static constexpr bool HAS_EXTRA = false;
  static constexpr uint16_t TABLE[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                         0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
  const uint8_t *codes_gate, *codes_up, *codes_down, *scale_gate, *scale_up, *scale_down;
  int64_t hidden, row_bytes, blocks;

  Mxfp4(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    const int64_t w = l.tile_width;
    row_bytes = row_bytes4(hidden);
    blocks = hidden / 32;
    Streams s{tile};
    codes_gate = s.next(w * row_bytes);
    codes_up = s.next(w * row_bytes);
    codes_down = s.next(w * hidden / 2);
    scale_gate = s.next(w * blocks);
    scale_up = s.next(w * blocks);
    scale_down = s.next(w / 32 * hidden);
  }

  FT_INLINE_MEMBER void near(int i) const {
    prefetch_near(scale_gate + i * blocks, blocks);
    prefetch_near(scale_up + i * blocks, blocks);
  }
  FT_INLINE_MEMBER void warm(int i) const { prefetch_near(scale_down + i * hidden / 32, hidden / 32); }

  FT_INLINE_MEMBER void gate(int i, int64_t k, F (&w)[V]) const {
    row4<nibble_e2m1>(codes_gate + i * row_bytes, k, w);
    scale_all(w, e8m0(scale_gate[i * blocks + k / 32]));
  }
  FT_INLINE_MEMBER void up(int i, int64_t k, F (&w)[V]) const {
    row4<nibble_e2m1>(codes_up + i * row_bytes, k, w);
    scale_all(w, e8m0(scale_up[i * blocks + k / 32]));
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    down4<nibble_e2m1>(codes_down, hidden, i, h, w);
    for (int v = 0; v < V; v++) w[v] = mul(w[v], lanes(bytes_of(scale_down + i / 32 * hidden + h + v * W)));
  }

#if defined(FT_AVX512)
  FT_INLINE_MEMBER F lanes(I e) const {  // 2^(e - 127); e = 0 is the subnormal 2^-127
    F p = _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
    return _mm512_mask_blend_ps(_mm512_testn_epi32_mask(e, e), p, set1(5.877471754e-39f));
  }
#elif defined(FT_AVX2)
  FT_INLINE_MEMBER F lanes(I e) const {
    F p = _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
    I none = _mm256_cmpeq_epi32(e, _mm256_setzero_si256());
    return _mm256_blendv_ps(p, set1(5.877471754e-39f), _mm256_castsi256_ps(none));
  }
#else
  FT_INLINE_MEMBER F lanes(I e) const { return e8m0((uint8_t)e); }
#endif

#if defined(FT_BF16_DOT)
  typedef EightScales Span;
  FT_INLINE_MEMBER Span span(int s, int i, int64_t k) const {
    const __m256i e = eight_bytes((s ? scale_up : scale_gate) + i * blocks + k / 32, blocks - k / 32);
    // 2^-127, a subnormal, is what e = 0 means
    const __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000));
    return {_mm512_castps256_ps512(_mm256_castsi256_ps(bits))};
  }
  FT_INLINE_MEMBER float extra(int, int, const float*) const { return 0; }
  FT_INLINE_MEMBER F down_scale(int i, int64_t h, int v) const {
    return lanes(bytes_of(scale_down + i / 32 * hidden + h + 16 * v));
  }
  FT_INLINE_MEMBER F down_extra(int, int64_t, int) const { return zero(); }
#endif
};

static void run(const TileJob& job) {
#if defined(FT_BF16_DOT)
  if (job.x_dtype == FT_BF16) return run_tiles<Nibbles<Mxfp4>>(job);
#endif
  run_tiles<Coded<Mxfp4>>(job);
}

static uint64_t tile_bytes(uint32_t w, uint32_t h) {
  if (w % 32 || h % 32) return 0;
  Streams s{nullptr};
  for (int i = 0; i < 2; i++) s.next(w * row_bytes4(h));
  s.next((uint64_t)w * h / 2);
  for (int i = 0; i < 2; i++) s.next((uint64_t)w * h / 32);
  s.next((uint64_t)w * h / 32);
  return s.at;
}

extern const TileFormat format_mxfp4;
const TileFormat format_mxfp4 = {"mxfp4", run, tile_bytes};

}  // namespace FT_NS
