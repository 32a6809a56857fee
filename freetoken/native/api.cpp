// The C functions of api.h: arguments checked, then handed on.
#include "api.h"

#include <algorithm>
#include <string>
#include <vector>

#include "executor.h"
#include "formats/list.h"
#include "isa.h"
#include "poller.h"
#include "pool.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace ft;

struct ft_executor : Executor {
  using Executor::Executor;
};
struct ft_poller : Poller {
  using Poller::Poller;
};

namespace {

const TierKernels* tier_at(int index) {
  const auto& all = tiers();
  return index >= 0 && index < (int)all.size() ? all[index] : nullptr;
}

#define FT_COUNT(name) +1
constexpr int NUM_FORMATS = 0 FT_FORMATS(FT_COUNT);

// Pieces [0, count) of something, taken one by one.
struct Pieces : Job {
  explicit Pieces(int64_t n) : count(n) {}
  virtual void piece(int64_t index, int worker) = 0;
  void work(int worker) override {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(i, worker);
  }
  void run() {
    Pool& pool = Pool::instance();
    if (count > 1 && pool.threads() > 1 && pool.acquire()) {
      pooled = true;
      if (!pool.run(*this, 1000))
        while (!pool.quiet(1000)) {
        }
      pool.release();
    } else {
      work(0);
    }
  }
  int64_t count;
  bool pooled = false;
  std::atomic<int64_t> next{0};
};

struct Linear : Pieces {
  static constexpr int64_t BYTES = 128 << 10;
  Linear(const TierKernels& t, const LinearJob& j) : Pieces(0), tier(t), job(j) {
    const int64_t row = job.k * (job.dtype == FT_F32 ? 4 : 2);
    step = std::max<int64_t>(2, BYTES / std::max<int64_t>(row, 1) / 2 * 2);
    count = (job.n + step - 1) / step;
    scratch = (size_t)(job.rows * (ft_align(job.k, 256) * 9 / 8 + 64 + step) * 4 + 4096);
  }
  void piece(int64_t index, int worker) override {
    uint8_t* memory;
    if (pooled) {
      memory = Pool::instance().scratch(worker, scratch);
    } else {
      own.resize(scratch + 64);
      memory = (uint8_t*)ft_align((uint64_t)own.data(), 64);
    }
    tier.linear(job, index * step, std::min(job.n, (index + 1) * step), memory);
  }
  const TierKernels& tier;
  const LinearJob& job;
  int64_t step = 0;
  size_t scratch = 0;
  std::vector<uint8_t> own;
};

struct Reading : Pieces {
  static constexpr uint64_t BYTES = 1 << 20;
  Reading(const TierKernels& t, const uint8_t* d, uint64_t n)
      : Pieces((int64_t)((n + BYTES - 1) / BYTES)), tier(t), data(d), size(n) {}
  void piece(int64_t index, int) override {
    const uint64_t at = (uint64_t)index * BYTES;
    found.fetch_xor(tier.read(data + at, std::min(BYTES, size - at)), std::memory_order_relaxed);
  }
  const TierKernels& tier;
  const uint8_t* data;
  uint64_t size;
  std::atomic<uint64_t> found{0};
};

struct Ping : Pieces {
  using Pieces::Pieces;
  void piece(int64_t, int) override {}
};

}  // namespace

extern "C" {

int ft_api_version(void) { return FT_API_VERSION; }

const char* ft_tiers(void) {
  static const std::string names = tier_names();
  return names.c_str();
}

const char* ft_formats(void) {
#define FT_NAME(name) #name " "
  static const std::string names = [] {
    std::string all = FT_FORMATS(FT_NAME);
    all.pop_back();
    return all;
  }();
  return names.c_str();
}

uint64_t ft_tile_bytes(int format, uint32_t tile_width, uint32_t hidden) {
  if (format < 0 || format >= NUM_FORMATS) return 0;
  return tiers()[0]->formats[format]->tile_bytes(tile_width, hidden);
}

int ft_pool_start(int threads, const int* cpus, int num_cpus) {
  Pool::instance().start(threads, cpus, num_cpus);
  return Pool::instance().threads();
}

int ft_pool_threads(void) { return Pool::instance().threads(); }

void ft_pool_fault(int worker, int percent, int stall_ms) { Pool::instance().fault(worker, percent, stall_ms); }

int ft_pool_ping(int count) {
  for (int i = 0; i < count; i++) Ping(Pool::instance().threads()).run();
  return count;
}

ft_executor* ft_executor_new(int tier, const ft_layer* layers, int num_layers) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels || !layers || num_layers < 1) return nullptr;
  for (int i = 0; i < num_layers; i++) {
    const ft_layer& l = layers[i];
    const uint64_t bytes = ft_tile_bytes((int)l.format, l.tile_width, l.hidden);
    if (!bytes || bytes > l.tile_bytes || !l.num_experts || l.activation > FT_RELU) return nullptr;
    if (l.bias_offset &&
        (l.bias_offset < bytes || l.bias_offset + 8ull * l.tile_width > l.tile_bytes ||
         l.tiles_offset < 4ull * l.hidden))
      return nullptr;
  }
  return new ft_executor(*kernels, layers, num_layers);
}

int ft_executor_serve(ft_executor* executor, const ft_io* io, float* out, uint32_t deadline_ms) {
  return executor->serve(*io, out, deadline_ms);
}

ft_poller* ft_poller_new(ft_executor* executor, const ft_device_block* block) {
  return executor && block ? new ft_poller(*executor, *block) : nullptr;
}
void ft_poller_wake(ft_poller* poller) { poller->wake(); }
void ft_poller_rest(ft_poller* poller, int all) { poller->rest(all != 0); }
void ft_poller_free(ft_poller* poller) { delete poller; }

void ft_executor_free(ft_executor* executor) {
  if (executor && executor->idle(1000)) delete executor;  // else a stalled worker still reads it: let it live
}

int ft_linear(int tier, int dtype, const void* x, const void* w, const void* bias, void* y, int64_t rows,
              int64_t n, int64_t k) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels || dtype < FT_BF16 || dtype > FT_F32) return FT_FAILED;
  if (rows < 1 || n < 1 || k < 1) return FT_OK;
  const LinearJob job{x, w, bias, y, rows, n, k, dtype};
  Linear(*kernels, job).run();
  return FT_OK;
}

uint64_t ft_read(int tier, const void* data, uint64_t num_bytes) {
  const TierKernels* kernels = tier_at(tier);
  if (!kernels) return 0;
  Reading reading(*kernels, (const uint8_t*)data, num_bytes);
  reading.run();
  return reading.found.load();
}

int ft_advise_huge(void* data, uint64_t num_bytes) {
#if defined(__linux__)
  const uint64_t page = 4096, first = ft_align((uint64_t)data, page);
  const uint64_t last = ((uint64_t)data + num_bytes) / page * page;
  return last > first ? madvise((void*)first, last - first, MADV_HUGEPAGE) : 0;
#else
  (void)data, (void)num_bytes;
  return -1;
#endif
}

}  // extern "C"
