// Dense products that take rows of x prepared beforehand, and any number of them: quantised (int8 activations), or
// turned for AMX.
#pragma once
#include "kernels.h"

// `matrix` takes job.x as `rows` leaves it. There is no `numbers`.
struct PreparedFormat : TileFormat {
  uint64_t (*row_bytes)(int64_t k);
  // Rows [first, last) of job.x, prepared, into `to`, where all rows lie one after the other; first a multiple of 16.
  void (*rows)(const MatrixJob& job, int64_t first, int64_t last, uint8_t* to, uint8_t* scratch);
  int least_rows = 1;  // fewer are `matrix`'s of the format itself
};
