// NVFP4: four-bit e2m1 codes, an e4m3 scale for 16 elements along the summed dimension, a float32 scale for
// each matrix. A vector of 32 elements spans two scales: its lanes 0-7 and 8-15.
#include "../coded.h"

namespace FT_NS {

struct Nvfp4 {
  static constexpr int COLUMN_BITS = 4, GROUP = 8, BLOCK = 16;
  static constexpr bool HAS_EXTRA = false;
  static constexpr uint16_t TABLE[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                         0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
  const uint8_t *codes_gate, *codes_up, *codes_down, *scale_gate, *scale_up, *scale_down;
  float whole[3];  // gate, up, down
  int64_t hidden, row_bytes, blocks;

  Nvfp4(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    const int64_t w = l.tile_width;
    row_bytes = row_bytes4(hidden);
    blocks = hidden / 16;
    Streams s{tile};
    codes_gate = s.next(w * row_bytes);
    codes_up = s.next(w * row_bytes);
    codes_down = s.next(w * hidden / 2);
    scale_gate = s.next(w * blocks);
    scale_up = s.next(w * blocks);
    scale_down = s.next(w / 16 * hidden);
    memcpy(whole, s.next(12), 12);
  }

  FT_INLINE_MEMBER void near(int i) const {
    prefetch_near(scale_gate + i * blocks, blocks);
    prefetch_near(scale_up + i * blocks, blocks);
  }
  FT_INLINE_MEMBER void warm(int i) const { prefetch_near(scale_down + i * hidden / 16, hidden / 16); }

  FT_INLINE_MEMBER void row(const uint8_t* codes, const uint8_t* scale, float all, int i, int64_t k,
                            F (&w)[V]) const {
    row4<nibble_e2m1>(codes + i * row_bytes, k, w);
    const uint8_t* p = scale + i * blocks + k / 16;
    float two[2];
    for (int j = 0; j < 2; j++)
      two[j] = all * 256.0f * f16_to_float((uint16_t)((p[j] & 0x7F) << 7 | (p[j] & 0x80) << 8));
    for (int v = 0; v < V; v++) w[v] = mul(w[v], set1(two[v >= V / 2]));
  }
  FT_INLINE_MEMBER void gate(int i, int64_t k, F (&w)[V]) const { row(codes_gate, scale_gate, whole[0], i, k, w); }
  FT_INLINE_MEMBER void up(int i, int64_t k, F (&w)[V]) const { row(codes_up, scale_up, whole[1], i, k, w); }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    down4<nibble_e2m1>(codes_down, hidden, i, h, w);
    const uint8_t* p = scale_down + i / 16 * hidden + h;
    for (int v = 0; v < V; v++) w[v] = mul(w[v], mul(byte_e4m3(bytes_of(p + v * W)), set1(whole[2])));
  }

#if defined(FT_BF16_DOT)
  // The pairs of lane l are words 2 l and 2 l + 1: elements 0-15 lie in lanes 0-7.
  struct Span {
    F all;
    template <int Q>
    FT_INLINE_MEMBER F at() const {
      constexpr int A = 2 * Q, B = A + 1;
      return _mm512_permutexvar_ps(_mm512_setr_epi32(A, A, A, A, A, A, A, A, B, B, B, B, B, B, B, B), all);
    }
  };
  FT_INLINE_MEMBER Span span(int s, int i, int64_t k) const {
    const uint8_t* p = (s ? scale_up : scale_gate) + i * blocks + k / 16;
    const int64_t live = blocks - k / 16;
    const __m128i bytes = live >= 16 ? _mm_loadu_si128((const __m128i*)p)
                                     : _mm_maskz_loadu_epi8((__mmask16)((1u << live) - 1), p);
    return {mul(byte_e4m3(_mm512_cvtepu8_epi32(bytes)), set1(s ? whole[1] : whole[0]))};
  }
  FT_INLINE_MEMBER float extra(int, int, const float*) const { return 0; }
  FT_INLINE_MEMBER F down_scale(int i, int64_t h, int v) const {
    return mul(byte_e4m3(bytes_of(scale_down + i / 16 * hidden + h + 16 * v)), set1(whole[2]));
  }
  FT_INLINE_MEMBER F down_extra(int, int64_t, int) const { return zero(); }
#endif
};

static void run(const TileJob& job) {
#if defined(FT_BF16_DOT)
  if (job.x_dtype == FT_BF16) return run_tiles<Nibbles<Nvfp4>>(job);
#endif
  run_tiles<Coded<Nvfp4>>(job);
}

static uint64_t tile_bytes(uint32_t w, uint32_t h) {
  if (w % 16 || h % 32) return 0;
  Streams s{nullptr};
  for (int i = 0; i < 2; i++) s.next(w * row_bytes4(h));
  s.next((uint64_t)w * h / 2);
  for (int i = 0; i < 3; i++) s.next((uint64_t)w * h / 16);
  s.next(12);
  return s.at;
}

extern const TileFormat format_nvfp4;
const TileFormat format_nvfp4 = {"nvfp4", run, tile_bytes};

}  // namespace FT_NS
