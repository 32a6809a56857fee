// Four-bit integers, a scale for 128 elements.
#include "../int4.h"

FT_BLOCKS(int4_g128, Int4<128>, 128, 128)
