// Four-bit integers, a scale and a zero for 32 elements.
#include "../int4.h"

FT_BLOCKS(int4_zp_g32, Int4Zeros<32>, 32, 32)
