// Answers a device that rings: a thread that watches one word of memory the device writes.
//
// MEMORY MAP of the block (host memory, mapped into the device; python: experts/device_io.py)
//   0    layout, unused here         64  request: sequence, layer, num_items, rows T, top_k
//   128  reply: done, status, -, -, then 64-bit sums over all answers: ns, units, requests, units^2, units x ns
//   192  poison
//   items  int32 [E][4]   expert of the layer, first tile, last tile, 0
//   ids    int32 [T][k]   the routing of all rows; x [T][H] 16-bit; out float32 [2 T k][H]
// The answer to route r is out[r]: the sum over its item's tiles, in the executor's fixed order. Rows T k and
// up of `out` are ours. A tile of one row counts as ROW_UNITS units, each further row as one more, which is
// about what they cost. ORDER: as in abi.h: an acquire load sees the sequence, a release store says done.
// PARKING: the device can't wake anybody, so whoever launches a step says so first (wake) and tells when it is
// over (rest). While steps are in flight the thread spins, else it sleeps after PARK_NS without a request.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"
#include "executor.h"

namespace ft {

class Poller {
 public:
  Poller(Executor& executor, const ft_device_block& block);
  ~Poller();
  void wake();
  void rest(bool all);

 private:
  static constexpr uint64_t PARK_NS = 5000000, ROW_UNITS = 12;
  void loop();
  void answer(uint32_t sequence);
  int compute(const uint32_t* request);

  Executor& executor_;
  const ft_device_block block_;
  std::vector<uint8_t> io_;  // the executor's own block: work list, rows, a copy of x
  std::mutex mutex_;
  std::condition_variable bell_;
  std::atomic<int> in_flight_{0};
  std::atomic<bool> awake_{false}, stopping_{false};
  std::thread thread_;
  uint64_t units_ = 0;  // of the request being answered
};

}  // namespace ft
