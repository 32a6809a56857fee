// IQ3_S: 512 points, all signs; a four-bit scale for 32 elements, a float16 factor for 256:
// weight = d (1 + 2 sc) sign magnitude.
#include "../grid.h"

namespace FT_NS {

struct Iq3S {
  static constexpr int POINTS = 512;
  static constexpr uint8_t MAGNITUDES[8] = {1, 3, 5, 7, 9, 11, 13, 15};
  Part<uint8_t, 4> index;
  Part<uint8_t, 32> high;
  Part<uint32_t, 32> sign;
  Part<uint8_t, 64> scales;  // nibbles
  Part<Half, 256> d;
  FT_PARTS(index, high, sign, scales, d)

  FT_INLINE_MEMBER uint32_t ninth(int m, int i, int64_t k) const { return *high.row(m, i, k); }
  FT_INLINE_MEMBER uint32_t signs(int m, int i, int64_t k) const { return *sign.row(m, i, k); }
  FT_INLINE_MEMBER float scale(int m, int i, int64_t k) const {
    return (float)(1 + 2 * (*scales.row(m, i, k) >> k / 32 % 2 * 4 & 15));
  }
  FT_INLINE_MEMBER I down_ninth(int i, int64_t h) const {
    return shift_left(masked(shift_right(bytes_of(high.down(i, h)), i % 32 / 4), 1), 8);
  }
  FT_INLINE_MEMBER I down_signs(int i, int64_t h) const {
    return shift_right(dwords_of((const uint8_t*)sign.down(i, h)), i % 32);
  }
  FT_INLINE_MEMBER F down_scale(int i, int64_t h) const {
    const F sc = to_float(masked(shift_right(bytes_of(scales.down(i, h)), i / 32 % 2 * 4), 15));
    return add(add(sc, sc), set1(1.0f));
  }
  static constexpr const char* gaps() {
    return
        "01132111222146523222527331112414334247D456142133343463222D386432723642D243B4236636FA2C245642F5B32EHF"
        "722C245D4K1124122212732E239612324573672E62A3214663A3A7331366145H6B252D27424L73672Fd43D2R2527C4H68122"
        "212223241272232D13232634334367O33A2572A4A34234925276EB693734P3759D1BD825AS4K4D2B5Q722237225232A68227"
        "52DGA42A6A2CP7452419246E86547H64D72B5AADJJW2D2BZ46643377GA522765664K2554A5F36C525274Z2IB1PC2AXPHKO5B"
        "B6P646E433C6522579W69A56DN51FD5C663CACaCJ2tW2Et22C2LGG7TMI6B568C5FrEFE3PKLRf2r4392C2C6G7BF2S34637HPO"
        "3EM465OgGWNd";
  }
};

}  // namespace FT_NS

FT_POINTS(iq3_s, Iq3S)
