// Pieces [0, count) of something, computed by the pool's threads, neighbours by the same one, or all by the caller if
// the pool is taken or the work too small to share. Which thread takes a piece never changes its result.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace ft {

struct Pieces : Job {
  Pieces(int64_t n, size_t scratch_bytes) : count(n), scratch(scratch_bytes) {}
  virtual void piece(int64_t index, uint8_t* memory) = 0;

  void work(int worker) override {
    if (!pooled) {
      own.resize(scratch + 64);
      uint8_t* memory = (uint8_t*)ft_align((uint64_t)own.data(), 64);
      for (int64_t i = 0; i < count; i++) piece(i, memory);
      return;
    }
    Pool& pool = Pool::instance();
    uint8_t* memory = nullptr;
    bool more;
    for (uint32_t number; pool.take(worker, number, more);) {
      if (!memory) memory = pool.scratch(worker, scratch);
      const bool faulty = pool.has_faults();
      const uint64_t began = faulty ? now_ns() : 0;
      piece(number, memory);
      if (faulty) pool.suffer(worker, now_ns() - began);
    }
  }
  // `small`: not worth waking anybody.
  void run(bool small = false) {
    Pool& pool = Pool::instance();
    if (!small && count > 1 && pool.threads() > 1 && pool.acquire()) {
      pooled = true;
      pool.deal((uint32_t)count);
      if (!pool.run(*this, 1000))
        while (!pool.quiet(1000)) {
        }
      pool.release();
    } else {
      work(0);
    }
  }

  int64_t count;
  size_t scratch;
  bool pooled = false;
  std::vector<uint8_t> own;
};

// Rows of weights in a piece, an even number. Memory idles for half a microsecond where a piece ends: few pieces, but
// enough that a slow thread takes less.
inline int64_t rows_at_once(int64_t row_bytes, int64_t num_rows) {
  constexpr int64_t LEAST = 128 << 10, MOST = 1 << 20, EACH = 16;
  const int64_t share = row_bytes * num_rows / (EACH * Pool::instance().threads());
  return std::max<int64_t>(2, std::clamp(share, LEAST, MOST) / std::max<int64_t>(row_bytes, 1) / 2 * 2);
}

// A dense product, cut into runs of weight rows.
struct Linear : Pieces {
  Linear(const TierKernels& t, const LinearJob& j) : Pieces(0, 0), tier(t), job(j) {
    step = rows_at_once(job.k * (job.dtype == FT_F32 ? 4 : 2), job.n);
    count = (job.n + step - 1) / step;
    scratch = (size_t)(job.rows * (ft_align(job.k, 256) * 9 / 8 + 64 + step) * 4 + 4096);
  }
  void piece(int64_t index, uint8_t* memory) override {
    tier.linear(job, index * step, std::min(job.n, (index + 1) * step), memory);
  }
  const TierKernels& tier;
  const LinearJob& job;
  int64_t step = 0;
};

}  // namespace ft
