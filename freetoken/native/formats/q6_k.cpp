// Q6_K: six-bit codes; a signed byte as scale for 16 elements, a float16 factor for 256:
// weight = d sc (code - 32).
#include "../blocks.h"

namespace FT_NS {

struct Q6K : Integers<4, 2, 32> {
  static constexpr int SPAN = 16;
  Part<int8_t, 16> sc;
  Part<Half, 256> d;
  FT_PARTS(sc, d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(sc);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q6_k, Q6K, 256, 256)
