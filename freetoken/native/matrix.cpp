// Dense products with coded matrices: rows of W cut into pieces that the pool's threads take.
#include "matrix_api.h"

#include <algorithm>
#include <memory>

#include "formats/list.h"
#include "isa.h"
#include "pieces.h"
#include "prepared.h"

using namespace ft;

namespace {

// Rows [first, end) of W, some at a time.
struct Rows : Pieces {
  Rows(const TileFormat& f, const MatrixJob& j, int64_t from, int64_t to, size_t scratch_bytes)
      : Pieces(0, scratch_bytes), format(f), job(j), first(from), end(to) {
    step = rows_at_once(std::max<int64_t>(1, (int64_t)f.matrix_bytes(job.n, job.k) / job.n), end - first);
    count = (end - first + step - 1) / step;
  }
  void piece(int64_t index, uint8_t* memory) override {
    const int64_t at = first + index * step;
    rows(at, std::min(end, at + step), memory);
  }
  virtual void rows(int64_t from, int64_t to, uint8_t* memory) = 0;
  const TileFormat& format;
  const MatrixJob& job;
  int64_t first, end, step = 0;
};

struct Product : Rows {
  Product(const TileFormat& f, const MatrixJob& j) : Rows(f, j, 0, j.n, scratch_bytes(j.k, 64)) {}
  void rows(int64_t from, int64_t to, uint8_t* memory) override { format.matrix(job, from, to, memory); }
};

struct Numbers : Rows {
  Numbers(const TileFormat& f, const MatrixJob& j, int64_t from, int64_t to) : Rows(f, j, from, to, 0) {}
  void rows(int64_t from, int64_t to, uint8_t*) override { format.numbers(job, from, to); }
};

// Rows of x are prepared once, by whoever is free.
struct Prepare : Pieces {
  static constexpr int64_t AT_ONCE = 16;
  Prepare(const PreparedFormat& f, const MatrixJob& j, uint8_t* to)
      : Pieces((j.rows + AT_ONCE - 1) / AT_ONCE, j.k * sizeof(float)), format(f), job(j), out(to) {}
  void piece(int64_t index, uint8_t* memory) override {
    format.rows(job, index * AT_ONCE, std::min(job.rows, (index + 1) * AT_ONCE), out, memory);
  }
  const PreparedFormat& format;
  const MatrixJob& job;
  uint8_t* out;
};

// Then any number of them meets W, whose panels of 16 rows, of which AMX takes two, are not to be cut.
struct PreparedProduct : Product {
  PreparedProduct(const TileFormat& f, const MatrixJob& j) : Product(f, j) {
    step = std::max<int64_t>(32, step / 32 * 32);
    count = (j.n + step - 1) / step;
  }
};

#define FT_COUNT(name) +1
constexpr int NUM_FORMATS = 0 FT_FORMATS(FT_COUNT);

// Null if there is no such tier or format, or the format is plain.
const TileFormat* coded(int tier, int format) {
  if (!tier_at(tier) || format < 0 || format > 2 * NUM_FORMATS) return nullptr;
  const TileFormat* found = tier_at(tier)->formats[format];
  return found && found->matrix ? found : nullptr;
}
// Null if the format's own product takes this.
const PreparedFormat* prepared(const TileFormat* f, int format, int dtype, int64_t rows) {
  if (format > NUM_FORMATS) return static_cast<const PreparedFormat*>(f);  // int8 activations
  return f->many && dtype == FT_BF16 && rows >= f->many->least_rows ? f->many : nullptr;
}

}  // namespace

extern "C" {

uint64_t ft_matrix_bytes(int format, int64_t rows, int64_t columns) {
  const TileFormat* f = coded(0, format);
  // Tiles of 256 columns are something that every coded format has, if its rows may be so long.
  if (!f || rows < 1 || columns < 1 || columns > INT32_MAX || !f->tile_bytes(256, (uint32_t)columns)) return 0;
  return f->matrix_bytes(rows, columns);
}

int ft_coded_linear(int tier, int format, int dtype, const void* x, const void* w, const void* bias, void* y,
                    int64_t rows, int64_t n, int64_t k) {
  const TileFormat* f = coded(tier, format);
  if (!f || !ft_matrix_bytes(format, n, k) || dtype < FT_BF16 || dtype > FT_F32) return FT_FAILED;
  if (rows > ft_coded_rows(tier, format, dtype)) return FT_FAILED;
  if (rows < 1) return FT_OK;
  MatrixJob job{x, w, bias, y, rows, n, k, dtype};
  const PreparedFormat* other = prepared(f, format, dtype, rows);
  if (!other) {
    Product(*f, job).run();
    return FT_OK;
  }
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[other->row_bytes(k) * ft_align(rows, Prepare::AT_ONCE) + 64]);
  uint8_t* ready = (uint8_t*)ft_align((uint64_t)memory.get(), 64);
  Prepare(*other, job, ready).run();
  job.x = ready;
  PreparedProduct(*other, job).run();
  return FT_OK;
}

int64_t ft_coded_rows(int tier, int format, int dtype) {
  const TileFormat* f = coded(tier, format);
  return !f ? 0 : prepared(f, format, dtype, INT64_MAX) ? INT64_MAX : FT_ROWS;
}

int ft_coded_numbers(int tier, int format, const void* w, float* y, int64_t n, int64_t k, int64_t first,
                     int64_t last) {
  const TileFormat* f = coded(tier, format);
  if (!f || !f->numbers || !ft_matrix_bytes(format, n, k) || first < 0 || last > n) return FT_FAILED;
  const MatrixJob job{nullptr, w, nullptr, y - first * k, 0, n, k, FT_F32};
  Numbers(*f, job, first, last).run();
  return FT_OK;
}

}  // extern "C"
