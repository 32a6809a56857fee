#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace ft {

namespace {
constexpr uint64_t OPEN = 1ull << 31, ACTIVE = OPEN - 1;
constexpr uint64_t BRIEF_NS = 20000, LONGEST_NS = 2000000;
uint32_t generation(uint64_t state) { return (uint32_t)(state >> 32); }

void restrict_to(const std::vector<int>& cpus) {
#if defined(__linux__)
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal changes speed only
#else
  (void)cpus;
#endif
}
}  // namespace

uint64_t now_ns() {
  return (uint64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: its threads may outlive static objects
  return *pool;
}

void Pool::start(int threads, const int* cpus, int num_cpus) {
  std::lock_guard<std::mutex> guard(busy_);
  threads = std::max(1, std::min(threads, MOST_THREADS));
  if ((int)workers_.size() == threads) return limit(MOST_THREADS);
  stop();
  stopping_.store(false);
  limit_.store(MOST_THREADS);
  std::vector<int> allowed(cpus, cpus + std::max(0, num_cpus));
  workers_.clear();
  for (int i = 0; i < threads; i++) workers_.push_back(std::make_unique<Worker>());
  for (int i = 1; i < threads; i++) workers_[i]->thread = std::thread(&Pool::loop, this, i, allowed);
  threads_.store(threads);
}

void Pool::limit(int threads) {
  std::lock_guard<std::mutex> guard(limiting_);
  if (stopping_.load()) return;  // who shall end must not be sent to sleep
  if (limit_.exchange(std::max(1, std::min(threads, MOST_THREADS))) < threads) limit_.notify_all();
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> guard(limiting_);
    stopping_.store(true);
    limit_.store(MOST_THREADS + 1);  // another value than any that is waited for
  }
  limit_.notify_all();
  doorbell_.fetch_add(1);
  doorbell_.notify_all();
  for (auto& worker : workers_)
    if (worker->thread.joinable()) worker->thread.join();
}

void Pool::loop(int index, std::vector<int> cpus) {
  restrict_to(cpus);
  uint32_t seen = generation(state_.load());
  for (;;) {
    for (int most; index >= (most = limit_.load(std::memory_order_relaxed));) limit_.wait(most);
    uint32_t bell = doorbell_.load();
    uint64_t began = now_ns(), budget = spin_ns_.load(std::memory_order_relaxed);
    for (uint32_t turn = 1;; turn++) {
      uint64_t state = state_.load(std::memory_order_acquire);
      if (stopping_.load(std::memory_order_relaxed)) return;
      if (generation(state) != seen) {
        if (index >= limit_.load(std::memory_order_relaxed)) break;
        seen = generation(state);
        while ((state & OPEN) && generation(state) == seen)
          if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
            job_->work(index);
            state_.fetch_sub(1, std::memory_order_release);
            break;
          }
        break;  // spin anew
      }
      pause();
      if (turn % 64 == 0 && now_ns() - began > budget) {
        sleeping_.fetch_add(1);
        if (generation(state_.load()) == seen && !stopping_.load()) doorbell_.wait(bell);
        sleeping_.fetch_sub(1);
        break;
      }
    }
  }
}

bool Pool::acquire() {
  if (!busy_.try_lock()) return false;
  if (!(state_.load(std::memory_order_acquire) & ACTIVE)) return true;
  busy_.unlock();
  return false;
}

bool Pool::run(Job& job, uint32_t deadline_ms) {
  uint64_t now = now_ns();
  uint64_t gap = last_end_ns_ ? std::min<uint64_t>(now - last_end_ns_, 1000000000) : 1000000000;
  gap_ns_ += ((int64_t)gap - (int64_t)gap_ns_) / 4;
  spin_ns_.store(gap_ns_ < LONGEST_NS / 4 ? std::clamp(2 * gap_ns_, BRIEF_NS, LONGEST_NS) : BRIEF_NS,
                 std::memory_order_relaxed);
  job_ = &job;
  uint64_t state = state_.load(std::memory_order_relaxed);
  state_.store((uint64_t)(generation(state) + 1) << 32 | OPEN);  // sequentially consistent, as are sleepers
  doorbell_.fetch_add(1);
  if (sleeping_.load()) doorbell_.notify_all();
  job.work(0);
  state_.fetch_and(~OPEN, std::memory_order_acq_rel);
  bool done = quiet(deadline_ms);
  last_end_ns_ = now_ns();
  return done;
}

bool Pool::quiet(uint32_t deadline_ms) {
  uint64_t until = 0;
  for (uint32_t turn = 1; state_.load(std::memory_order_acquire) & ACTIVE; turn++) {
    pause();
    if (turn % 64) continue;
    uint64_t now = now_ns();
    if (!until) until = now + deadline_ms * 1000000ull;
    if (now > until) return false;
    if (turn > 4096) std::this_thread::yield();
  }
  return true;
}

uint8_t* Pool::scratch(int worker, size_t bytes) {
  Worker& own = *workers_[worker];
  if (own.bytes < bytes) {
    own.memory.reset(new uint8_t[bytes + 64]);
    own.bytes = bytes;
  }
  return (uint8_t*)(((uintptr_t)own.memory.get() + 63) & ~(uintptr_t)63);
}

void Pool::fault(int worker, int percent, int stall_ms) {
  std::lock_guard<std::mutex> guard(busy_);
  if (worker < 0 || worker >= (int)workers_.size()) return;
  workers_[worker]->slow_percent.store(percent);
  workers_[worker]->stall_ms.store(stall_ms);
  bool any = false;
  for (auto& one : workers_) any |= one->slow_percent.load() > 100 || one->stall_ms.load() > 0;
  faulty_.store(any);
}

void Pool::suffer(int worker, uint64_t ns) {
  Worker& own = *workers_[worker];
  if (int stall = own.stall_ms.exchange(0)) std::this_thread::sleep_for(std::chrono::milliseconds(stall));
  int percent = own.slow_percent.load(std::memory_order_relaxed);
  if (percent <= 100) return;
  for (uint64_t until = now_ns() + ns * (uint64_t)(percent - 100) / 100; now_ns() < until;) pause();
}

}  // namespace ft
