// Numbers [0, count) dealt to workers as runs of neighbours, so that each walks through memory; who is done first takes
// half of what another one has left. Which worker takes a number never changes a result.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace ft {

class Ranges {
 public:
  // Before the workers begin: the first `active` of `workers` get equal runs.
  void deal(uint32_t count, int workers, int active) {
    if (workers_ < workers) own_.reset(new Own[workers]);
    workers_ = workers;
    for (int i = 0; i < workers; i++)
      own_[i].left.store(i < active ? pack((uint64_t)count * i / active, (uint64_t)count * (i + 1) / active) : 0,
                         std::memory_order_relaxed);
  }
  // The worker's next number, or false: all are in somebody's hands. `more`: the one behind it is its next one, unless
  // somebody takes it.
  bool take(int worker, uint32_t& number, bool& more) {
    std::atomic<uint64_t>& mine = own_[worker].left;
    for (uint64_t left = mine.load(std::memory_order_relaxed); size(left);)
      if (mine.compare_exchange_weak(left, left + (1ull << 32), std::memory_order_relaxed)) return give(left, number, more);
    for (;;) {
      int from = -1;
      uint64_t most = 0;
      for (int i = 0; i < workers_; i++) {
        const uint64_t left = own_[i].left.load(std::memory_order_relaxed);
        if (size(left) > size(most)) from = i, most = left;
      }
      if (from < 0) return false;
      const uint64_t middle = end(most) - (size(most) + 1) / 2;
      if (!own_[from].left.compare_exchange_strong(most, pack(begin(most), middle), std::memory_order_relaxed)) continue;
      mine.store(pack(middle + 1, end(most)), std::memory_order_relaxed);
      return give(pack(middle, end(most)), number, more);
    }
  }

 private:
  // begin << 32 | end. A number that was begun with never begins a run again, so no exchange mistakes a new run for an old.
  struct alignas(64) Own {
    std::atomic<uint64_t> left{0};
  };
  static uint64_t pack(uint64_t begin, uint64_t end) { return begin << 32 | end; }
  static uint64_t begin(uint64_t left) { return left >> 32; }
  static uint64_t end(uint64_t left) { return (uint32_t)left; }
  static uint64_t size(uint64_t left) { return end(left) - begin(left); }
  static bool give(uint64_t left, uint32_t& number, bool& more) {
    number = (uint32_t)begin(left);
    more = size(left) > 1;
    return true;
  }

  std::unique_ptr<Own[]> own_;
  int workers_ = 0;
};

}  // namespace ft
