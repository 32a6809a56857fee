// Q3_K: three-bit codes; a six-bit scale for 16 elements, a float16 factor for 256:
// weight = d (sc - 32) (code - 4). The six-bit numbers lie in bytes of their own.
#include "../blocks.h"

namespace FT_NS {

struct Q3K : Integers<2, 1, 4> {
  static constexpr int SPAN = 16;
  Part<Less32, 16> sc;
  Part<Half, 256> d;
  FT_PARTS(sc, d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(sc);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q3_k, Q3K, 256, 256)
