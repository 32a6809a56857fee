// IQ4_XS: four-bit codes of uneven levels; a six-bit scale for 32 elements, a float16 factor for 256:
// weight = d (sc - 32) level[code]. The six-bit numbers lie in bytes of their own.
#include "../uneven.h"

namespace FT_NS {

struct Iq4Xs : Uneven {
  static constexpr int SPAN = 32;
  Part<Less32, 32> sc;
  Part<Half, 256> d;
  FT_PARTS(sc, d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(sc);
  }
};

}  // namespace FT_NS

FT_BLOCKS(iq4_xs, Iq4Xs, 256, 256)
