// Four-bit integers in groups of 32, 64 or 128 along the summed dimension: a float16 scale, a power of two for all
// of a matrix, and where groups have zeros of their own, a byte: weight = d whole (code - zero).
#pragma once
#include "blocks.h"

namespace FT_NS {

template <int COUNT>
struct Int4 : Integers<4, 0, 8> {
  static constexpr int SPAN = 32;
  Part<Half, COUNT> d;
  Whole whole;
  FT_PARTS(d, whole)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(whole);
  }
};

template <int COUNT>
struct Int4Zeros : Integers<4> {
  static constexpr int SPAN = 32;
  static constexpr bool OFFSET = true;
  Part<Half, COUNT> d;
  Part<uint8_t, COUNT> zero;
  Whole whole;
  FT_PARTS(d, zero, whole)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(whole);
  }
  template <class At>
  FT_INLINE_MEMBER auto offset(At at) const {
    return -step(at) * at(zero);
  }
};

}  // namespace FT_NS
