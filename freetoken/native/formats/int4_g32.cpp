// Four-bit integers, a scale for 32 elements.
#include "../int4.h"

FT_BLOCKS(int4_g32, Int4<32>, 32, 32)
