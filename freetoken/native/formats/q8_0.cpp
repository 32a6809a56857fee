// Q8_0: signed bytes, one float16 scale for 32 elements along the summed dimension. Bytes lie as they come:
// rows [w][H], down [w][H]; scales [w][H / 32] and [w / 32][H].
#include "../coded.h"

namespace FT_NS {

struct Q8_0 {
  static constexpr int COLUMN_BITS = 8, GROUP = 1;
  const int8_t *codes_gate, *codes_up;
  const uint8_t* codes_down;
  const uint16_t *scale_gate, *scale_up, *scale_down;
  int64_t hidden, blocks;

  Q8_0(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    const int64_t w = l.tile_width;
    blocks = hidden / 32;
    Streams s{tile};
    codes_gate = (const int8_t*)s.next(w * hidden);
    codes_up = (const int8_t*)s.next(w * hidden);
    codes_down = s.next(w * hidden);
    scale_gate = (const uint16_t*)s.next(w * blocks * 2);
    scale_up = (const uint16_t*)s.next(w * blocks * 2);
    scale_down = (const uint16_t*)s.next(w / 32 * hidden * 2);
  }

  FT_INLINE_MEMBER void near(int i) const {
    prefetch_near(scale_gate + i * blocks, blocks * 2);
    prefetch_near(scale_up + i * blocks, blocks * 2);
  }
  FT_INLINE_MEMBER void warm(int i) const { prefetch_near(scale_down + i * hidden / 32, hidden / 16); }

  FT_INLINE_MEMBER void row(const int8_t* codes, const uint16_t* scale, int i, int64_t k, F (&w)[V]) const {
    const int8_t* p = codes + i * hidden + k;
    if (k % 64 == 0) FT_PREFETCH(p + AHEAD);
    const F s = set1(f16_to_float(scale[i * blocks + k / 32]));
    for (int v = 0; v < V; v++) w[v] = mul(from_i8(p + v * W), s);
  }
  FT_INLINE_MEMBER void gate(int i, int64_t k, F (&w)[V]) const { row(codes_gate, scale_gate, i, k, w); }
  FT_INLINE_MEMBER void up(int i, int64_t k, F (&w)[V]) const { row(codes_up, scale_up, i, k, w); }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    const int8_t* p = (const int8_t*)codes_down + i * hidden + h;
    const uint16_t* s = scale_down + i / 32 * hidden + h;
    for (int v = 0; v < V; v++) w[v] = mul(from_i8(p + v * W), from_f16(s + v * W));
  }
};

static void run(const TileJob& job) { run_tiles<Coded<Q8_0>>(job); }

static uint64_t tile_bytes(uint32_t w, uint32_t h) {
  if (w % 32 || h % 32) return 0;
  Streams s{nullptr};
  for (int i = 0; i < 3; i++) s.next((uint64_t)w * h);
  for (int i = 0; i < 3; i++) s.next((uint64_t)w * h / 16);
  return s.at;
}

extern const TileFormat format_q8_0;
const TileFormat format_q8_0 = {"q8_0", run, tile_bytes};

}  // namespace FT_NS
