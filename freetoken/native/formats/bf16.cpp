// bfloat16 weights. Where the CPU multiplies bfloat16 pairs, x stays bfloat16 and so do the products' inputs:
// a pair's products are exact, their sums are float32. Down pairs two columns of one lane.
#include "../engine.h"

namespace FT_NS {

#if defined(FT_BF16_DOT)

FT_INLINE I load16(const uint16_t* p) { return _mm512_loadu_si512(p); }
FT_INLINE I load16_some(const uint16_t* p, int n) {
  return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}

struct Pairs {
  typedef uint16_t X;
  static constexpr int GROUP = 2, STREAMS = 8;
  static constexpr bool AS_THEY_LIE = true, IN_ORDER = false, LEADS = true;
  static constexpr int64_t column_bytes(int64_t hidden) { return 2 * hidden; }
  Lead lead;
  const uint16_t *gate, *up, *down_t;
  int64_t hidden;

  Pairs(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    gate = (const uint16_t*)tile;
    up = gate + (int64_t)l.tile_width * hidden;
    down_t = up + (int64_t)l.tile_width * hidden;
  }

  template <int R, int C>
  FT_INLINE_MEMBER void columns(int i, const uint16_t* x, int64_t xs, float* g, float* u, int64_t gs) const {
    const uint16_t* rows[2 * C];
    F acc[2 * C][R];
    for (int c = 0; c < C; c++) {
      rows[2 * c] = gate + (i + c) * hidden;
      rows[2 * c + 1] = up + (i + c) * hidden;
    }
    for (int c = 0; c < 2 * C; c++)
      for (int r = 0; r < R; r++) acc[c][r] = zero();
    int64_t k = 0;
    for (; k + 32 <= hidden; k += 32)
      for (int c = 0; c < 2 * C; c++) {
        FT_PREFETCH((const char*)(rows[c] + k) + (C == 1 ? ft_row_ahead : AHEAD));
        I weight = load16(rows[c] + k);
        for (int r = 0; r < R; r++) acc[c][r] = dot2(acc[c][r], weight, load16(x + r * xs + k));
      }
    if (k < hidden)
      for (int c = 0; c < 2 * C; c++) {
        I weight = load16_some(rows[c] + k, (int)(hidden - k));
        for (int r = 0; r < R; r++) acc[c][r] = dot2(acc[c][r], weight, load16(x + r * xs + k));
      }
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) {
        g[r * gs + c] = sum(acc[2 * c][r]);
        u[r * gs + c] = sum(acc[2 * c + 1][r]);
      }
  }

  FT_INLINE_MEMBER void alone(int m, int i, const uint16_t* x, float* out) const {
    float dots[1];
    const uint16_t* row = (m ? up : gate) + i * hidden;
    const uint8_t *p = (const uint8_t*)row, *far = lead.far(p, 2 * hidden, x), *soon = p + SOON;
    if (!ft_row_near) soon = (const uint8_t*)x, far = far >= (const uint8_t*)down_t ? far : soon;
    row_dots<1>(row, x, 0, hidden, far, soon, dots);
    *out = dots[0];
  }

  // The two vectors of a step hold h as unpacklo and unpackhi leave it.
  template <int R>
  FT_INLINE_MEMBER void down(int i0, int i1, int h, int n, const uint16_t* mid, int64_t ms, float* out,
                             int64_t os, bool fresh) const {
    const uint16_t* w = down_t + i0 * hidden + h;
    const __mmask32 live = n >= 32 ? 0xFFFFFFFFu : (1u << n) - 1;
    F low[R], high[R];
    for (int r = 0; r < R; r++) {
      low[r] = fresh ? zero() : load(out + r * os);
      high[r] = fresh ? zero() : load(out + r * os + 16);
    }
    const uint8_t* at = (const uint8_t*)(down_t + i0 * hidden) + 2 * h * (i1 - i0);
    at = lead.far(at, 2 * STEP * (i1 - i0), mid);
    for (int i = i0; i < i1; i += 2, w += 2 * hidden, at += 128) {
      fetch(at);
      fetch(at + 64);
      FT_PREFETCH((const uint8_t*)w + SOON_DOWN);
      FT_PREFETCH((const uint8_t*)(w + hidden) + SOON_DOWN);
      I a = _mm512_maskz_loadu_epi16(live, w), b = _mm512_maskz_loadu_epi16(live, w + hidden);
      I lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
      for (int r = 0; r < R; r++) {
        uint32_t two;
        memcpy(&two, mid + r * ms + i, 4);
        I m = _mm512_set1_epi32((int)two);
        low[r] = dot2(low[r], lo, m);
        high[r] = dot2(high[r], hi, m);
      }
    }
    for (int r = 0; r < R; r++) {
      store(out + r * os, low[r]);
      store(out + r * os + 16, high[r]);
    }
  }

  static void prepare(uint16_t*, int64_t, int64_t, int) {}
  static void prepare_middle(uint16_t*, int64_t, int, int) {}
  void warm(int i) const { prefetch_next((const uint8_t*)down_t, 2 * hidden, i, 2 * hidden, 0); }
  void finish(const float* from, float* to, int n) const { in_order(from, to, n); }
};

#endif

static void bf16_run(const TileJob& job) {
#if defined(FT_BF16_DOT)
  if (job.x_dtype == FT_BF16) return run_tiles<Pairs>(job);
#endif
  run_tiles<Plain<uint16_t, from_bf16>>(job);
}

extern const TileFormat format_bf16;
const TileFormat format_bf16 = {"bf16", bf16_run, plain_bytes<uint16_t>, nullptr, nullptr, nullptr};

}  // namespace FT_NS
