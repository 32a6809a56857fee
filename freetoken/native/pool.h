// The process's workers: one job at a time, its caller works too, nobody waits for a worker that sleeps.
//
// MEMORY MAP. One word says it all: generation (32 bits) | open (1) | active workers (31).
// ORDER. run() publishes the job, then stores generation + 1, open. A worker that sees a new open generation
// adds itself by compare-and-swap (acquire), works, and takes itself off (release). run() works too, then
// closes the word and waits until nobody is active. So a worker that wakes late, or never (after a fork),
// delays nothing, and job memory is free when run() returns true.
// PARKING. Workers spin for about twice the usual gap between jobs if gaps are short, else hardly at all,
// then sleep on the doorbell. No gap of 200 ms or more is ever spun through.
// LIMIT. Workers from limit() on take no part and sleep until it rises: where other programs run, a worker that
// is stopped amid its work keeps all others waiting. It may change at any time, and changes no result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ranges.h"

namespace ft {

struct Job {
  virtual ~Job() = default;
  // Take pieces of work until there are none. worker 0 is the caller.
  virtual void work(int worker) = 0;
};

class Pool {
 public:
  static Pool& instance();

  void start(int threads, const int* cpus, int num_cpus);
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void limit(int threads);

  // Before a job of numbers [0, count): each worker gets a run of them, then takes what is left of another's.
  void deal(uint32_t count) { left_.deal(count, threads(), std::min(threads(), limit_.load(std::memory_order_relaxed))); }
  bool take(int worker, uint32_t& number, bool& more) { return left_.take(worker, number, more); }

  // True: all of the job is done. False: a worker was still in it after deadline_ms; job must stay alive.
  bool run(Job& job, uint32_t deadline_ms);
  // Wait until no worker is in a job.
  bool quiet(uint32_t deadline_ms);

  // Private memory of a worker (64-byte aligned); grows, never shrinks.
  uint8_t* scratch(int worker, size_t bytes);

  void fault(int worker, int percent, int stall_ms);
  // Called after each piece of work that took `ns`: slows or stalls this worker if a fault says so.
  void suffer(int worker, uint64_t ns);
  bool has_faults() const { return faulty_.load(std::memory_order_relaxed); }

  // One caller at a time; a second one finds it taken and computes alone. So does everyone while a worker is
  // still in a job that was given up.
  bool acquire();
  void release() { busy_.unlock(); }

 private:
  struct Worker {
    std::thread thread;
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
    std::atomic<int> slow_percent{100}, stall_ms{0};
  };

  static constexpr int MOST_THREADS = 1024;

  Pool() = default;
  void loop(int index, std::vector<int> cpus);
  void stop();

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> doorbell_{0};
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<uint64_t> spin_ns_{20000};
  std::atomic<bool> stopping_{false}, faulty_{false};
  std::atomic<int> threads_{1}, limit_{MOST_THREADS};
  Job* job_ = nullptr;
  Ranges left_;
  uint64_t last_end_ns_ = 0, gap_ns_ = 1000000000;
  std::mutex busy_, limiting_;  // limiting_: no limit while workers are ended
  std::vector<std::unique_ptr<Worker>> workers_;
};

uint64_t now_ns();
void pause();

}  // namespace ft
