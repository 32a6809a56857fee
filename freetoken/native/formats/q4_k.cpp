// Q4_K: four-bit codes q; per 32 elements a six-bit scale and minimum, per 256 elements two float16 factors:
// weight = d sc q - dmin m. The six-bit numbers lie in bytes of their own.
#include "../coded.h"

namespace FT_NS {

struct Q4K {
  static constexpr int COLUMN_BITS = 4, GROUP = 8, BLOCK = 32;
  static constexpr bool HAS_EXTRA = true;
  static constexpr uint16_t TABLE[16] = {0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
                                         0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  // Streams of gate, up and down.
  const uint8_t *codes_gate, *codes_up, *codes_down, *sc[3], *mn[3];
  const uint16_t *d[3], *dmin[3];
  int64_t hidden, row_bytes, blocks;

  Q4K(const ft_layer& l, const uint8_t* tile) : hidden(l.hidden) {
    const int64_t w = l.tile_width;
    row_bytes = row_bytes4(hidden);
    blocks = hidden / 32;
    Streams s{tile};
    codes_gate = s.next(w * row_bytes);
    codes_up = s.next(w * row_bytes);
    codes_down = s.next(w * hidden / 2);
    for (auto& p : sc) p = s.next(w * blocks);
    for (auto& p : mn) p = s.next(w * blocks);
    for (auto& p : d) p = (const uint16_t*)s.next(w * blocks / 4);
    for (auto& p : dmin) p = (const uint16_t*)s.next(w * blocks / 4);
  }

  FT_INLINE_MEMBER void near(int i) const {
    for (int m = 0; m < 2; m++) {
      prefetch_near(sc[m] + i * blocks, blocks);
      prefetch_near(mn[m] + i * blocks, blocks);
      FT_PREFETCH(d[m] + i * blocks / 8);
      FT_PREFETCH(dmin[m] + i * blocks / 8);
    }
  }
  FT_INLINE_MEMBER void warm(int i) const {
    prefetch_near(sc[2] + i * hidden / 32, hidden / 32);
    prefetch_near(mn[2] + i * hidden / 32, hidden / 32);
    FT_PREFETCH(d[2] + i * hidden / 256);
    FT_PREFETCH(dmin[2] + i * hidden / 256);
  }

  FT_INLINE_MEMBER void row(const uint8_t* codes, int m, int i, int64_t k, F (&w)[V]) const {
    row4<nibble_int>(codes + i * row_bytes, k, w);
    const int64_t block = i * blocks + k / 32;
    const F scale = set1(f16_to_float(d[m][block / 8]) * sc[m][block]);
    const F least = set1(-f16_to_float(dmin[m][block / 8]) * mn[m][block]);
    for (int v = 0; v < V; v++) w[v] = fma(w[v], scale, least);
  }
  FT_INLINE_MEMBER void gate(int i, int64_t k, F (&w)[V]) const { row(codes_gate, 0, i, k, w); }
  FT_INLINE_MEMBER void up(int i, int64_t k, F (&w)[V]) const { row(codes_up, 1, i, k, w); }
  FT_INLINE_MEMBER F down_scale_at(int i, int64_t h) const {
    return mul(from_f16(d[2] + i / 256 * hidden + h), to_float(bytes_of(sc[2] + i / 32 * hidden + h)));
  }
  FT_INLINE_MEMBER F down_least_at(int i, int64_t h) const {
    F m = mul(from_f16(dmin[2] + i / 256 * hidden + h), to_float(bytes_of(mn[2] + i / 32 * hidden + h)));
    return sub(zero(), m);
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    down4<nibble_int>(codes_down, hidden, i, h, w);
    for (int v = 0; v < V; v++) w[v] = fma(w[v], down_scale_at(i, h + v * W), down_least_at(i, h + v * W));
  }

#if defined(FT_BF16_DOT)
  typedef EightScales Span;
  FT_INLINE_MEMBER Span span(int s, int i, int64_t k) const {
    const int64_t block = i * blocks + k / 32;
    const __m256 six = _mm256_cvtepi32_ps(eight_bytes(sc[s] + block, 8));
    return {_mm512_castps256_ps512(_mm256_mul_ps(six, _mm256_set1_ps(_cvtsh_ss(d[s][block / 8]))))};
  }
  // Minus the minima, times the sums of x over their 32 elements.
  FT_INLINE_MEMBER float extra(int s, int i, const float* sums) const {
    __m256 total = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b += 8) {
      const int64_t block = i * blocks + b;
      const __m256 least = _mm256_cvtepi32_ps(
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(mn[s] + block))));
      const __m256 factor = _mm256_set1_ps(-_cvtsh_ss(dmin[s][block / 8]));
      total = _mm256_fmadd_ps(_mm256_mul_ps(least, factor), _mm256_loadu_ps(sums + b), total);
    }
    return sum(_mm512_zextps256_ps512(total));
  }
  FT_INLINE_MEMBER F down_scale(int i, int64_t h, int v) const { return down_scale_at(i, h + 16 * v); }
  FT_INLINE_MEMBER F down_extra(int i, int64_t h, int v) const { return down_least_at(i, h + 16 * v); }
#endif
};

static void run(const TileJob& job) {
#if defined(FT_BF16_DOT)
  if (job.x_dtype == FT_BF16) return run_tiles<Nibbles<Q4K>>(job);
#endif
  run_tiles<Coded<Q4K>>(job);
}

static uint64_t tile_bytes(uint32_t w, uint32_t h) {
  if (w % 256 || h % 256 || w > 512) return 0;
  Streams s{nullptr};
  for (int i = 0; i < 2; i++) s.next(w * row_bytes4(h));
  s.next((uint64_t)w * h / 2);
  for (int i = 0; i < 6; i++) s.next((uint64_t)w * h / 32);
  for (int i = 0; i < 6; i++) s.next((uint64_t)w * h / 128);
  return s.at;
}

extern const TileFormat format_q4_k;
const TileFormat format_q4_k = {"q4_k", run, tile_bytes};

}  // namespace FT_NS
