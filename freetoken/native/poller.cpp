#include "poller.h"

#include <chrono>
#include <cstring>

#include "isa.h"

namespace ft {

namespace {
struct Move {
  int32_t from, route;
};
}  // namespace

Poller::Poller(Executor& executor, const ft_device_block& block) : executor_(executor), block_(block) {
  const uint64_t routes = (uint64_t)block.max_rows * block.top_k;
  const uint64_t items = sizeof(ft_io), rows = ft_align(items + block.num_experts * sizeof(ft_item), 64);
  const uint64_t x = ft_align(rows + routes * 4, 64);
  io_.assign(x + (uint64_t)block.max_rows * block.hidden * 4 + 64, 0);
  ft_io* io = (ft_io*)io_.data();
  io->layout = {FT_ABI_MAGIC,         FT_ABI_VERSION, block.hidden, block.x_dtype, block.num_experts,
                (uint32_t)routes,     block.max_rows, (uint32_t)routes * 2, items, rows, x, 0};
  io->request.whole_sums = 1;
  thread_ = std::thread([this] { loop(); });
}

Poller::~Poller() {
  stopping_ = true;
  wake();
  thread_.join();
}

void Poller::rest(bool all) {
  if (all) in_flight_.store(0);
  else if (in_flight_.fetch_sub(1) <= 0) in_flight_.fetch_add(1);
}

void Poller::wake() {
  in_flight_.fetch_add(1);
  if (awake_.load(std::memory_order_acquire)) return;
  {
    std::lock_guard<std::mutex> held(mutex_);
    awake_.store(true, std::memory_order_release);
  }
  bell_.notify_one();
}

void Poller::loop() {
  const auto* sequence = (const std::atomic<uint32_t>*)(block_.data + 64);
  uint32_t served = 0;
  while (!stopping_) {
    {
      std::unique_lock<std::mutex> held(mutex_);
      bell_.wait(held, [this] { return awake_.load() || stopping_.load(); });
    }
    uint64_t idle_since = now_ns();
    for (uint32_t turn = 1; !stopping_; turn++) {
      const uint32_t now = sequence->load(std::memory_order_acquire);
      if (now != served) {
        served = now;
        answer(now);
        idle_since = now_ns();
        continue;
      }
      pause();
      if (turn % 256) continue;
      if (in_flight_.load() > 0) idle_since = now_ns();
      if (now_ns() - idle_since > PARK_NS) {
        awake_.store(false);
        if (in_flight_.load() == 0) break;  // else wake() saw us awake
        awake_.store(true);
      }
    }
  }
}

void Poller::answer(uint32_t sequence) {
  const uint64_t began = now_ns();
  units_ = 0;
  auto* reply = (uint32_t*)(block_.data + 128);
  const auto* poison = (const std::atomic<uint32_t>*)(block_.data + 192);
  const int status = poison->load() ? (int)FT_POISONED : compute((const uint32_t*)(block_.data + 64));
  reply[1] = (uint32_t)status;
  uint64_t* totals = (uint64_t*)(reply + 4);  // only ever grow
  const uint64_t took = now_ns() - began;
  totals[0] += took, totals[1] += units_, totals[2] += 1, totals[3] += units_ * units_, totals[4] += units_ * took;
  // A failed answer is none: the device's deadline turns it into an error.
  if (status == FT_OK) ((std::atomic<uint32_t>*)reply)->store(sequence, std::memory_order_release);
}

int Poller::compute(const uint32_t* request) {
  const uint32_t layer = request[1], count = request[2], rows = request[3], top_k = request[4];
  if (count > block_.num_experts || rows > block_.max_rows || top_k != block_.top_k) return FT_FAILED;
  const int32_t* items = (const int32_t*)(block_.data + block_.items_offset);
  const int32_t* ids = (const int32_t*)(block_.data + block_.ids_offset);
  float* out = (float*)(block_.data + block_.out_offset);
  ft_io* io = (ft_io*)io_.data();
  ft_item* work = (ft_item*)(io_.data() + io->layout.items_offset);
  int32_t* list = (int32_t*)(io_.data() + io->layout.rows_offset);
  const uint64_t size = block_.x_dtype == FT_F32 ? 4 : 2;
  memcpy(io_.data() + io->layout.x_offset, block_.data + block_.x_offset, rows * block_.hidden * size);
  std::vector<Move> moves;
  int32_t at = 0, staged = (int32_t)(block_.max_rows * top_k);
  for (uint32_t i = 0; i < count; i++) {
    const int32_t expert = items[4 * i], first = at;
    int32_t route = 0;
    for (uint32_t r = 0; r < rows; r++)
      for (uint32_t j = 0; j < top_k; j++)
        if (ids[r * top_k + j] == expert) {
          route = (int32_t)(r * top_k + j);
          moves.push_back({staged + at - first, route});
          list[at++] = (int32_t)r;
        }
    // One row is written where the device will look; several are staged and moved.
    const bool alone = at - first == 1;
    work[i] = {(int32_t)(layer * block_.num_experts) + expert, items[4 * i + 1], items[4 * i + 2], first,
               at - first, alone ? route : staged, 0};
    units_ += (uint64_t)(items[4 * i + 2] - items[4 * i + 1]) * (ROW_UNITS - 1 + (uint64_t)(at - first));
    if (alone) moves.pop_back();
    else staged += at - first;
  }
  io->request.layer = layer;
  io->request.num_items = count;
  io->request.num_rows = (uint32_t)at;
  io->request.num_tokens = rows;
  const int status = executor_.serve(*io, out, block_.deadline_ms);
  for (const Move& m : moves)
    memcpy(out + (uint64_t)m.route * block_.hidden, out + (uint64_t)m.from * block_.hidden, block_.hidden * 4);
  return status;
}

}  // namespace ft
