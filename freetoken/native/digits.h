// What the tier `amx` needs of a format whose codes have four bits, to multiply them as bytes (digits.cpp).
#pragma once
#include "kernels.h"

// weight = unit (level - least) step + offset, where `level` is a byte.
struct DigitCodes {
  int span, least;     // elements that share a step
  float unit;
  bool looked_up, offset;  // levels aren't the codes themselves; there are offsets
  uint8_t levels[16];
  // Rows [first, last) of gate (0) or up (1), padded to whole 512 elements. Steps as DIGIT_STEPS floats for 512: the lanes
  // of one sum after the other (digits.cpp). Offsets in order.
  void (*rows)(const ft_layer& layer, const uint8_t* tile, int m, int first, int last, float* steps, float* offsets);
  // Lanes [h, h + n) of the span of down that begins with column i; n a multiple of 32.
  void (*lanes)(const ft_layer& layer, const uint8_t* tile, int i, int h, int n, float* steps, float* offsets);
  void (*meet)(const ft_layer& layer, const uint8_t* tile, int first);  // prefetches scales of rows from `first` on
};

constexpr int MOST_LEVEL = 31;  // a sum's sixteen of them times 2^22 fit 32 bits
constexpr int DIGIT_STEPS = 32;  // floats for 512 elements
