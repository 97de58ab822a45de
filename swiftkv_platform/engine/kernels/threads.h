// Thread pool that divides an operator into parts.
//
// At the end of each region, OpenMP waits for all threads. On a busy machine, each of a step's hundred regions would wait until
// the operating system has run all of them. Here threads take parts from a counter, so a late thread finds no parts left.

#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace {

constexpr int64_t kPartsOfThread = 4;  // parts per thread; fast threads take more parts
constexpr int kSpins = 20000;          // polls for new work, about a millisecond, before a thread sleeps
constexpr int kSpinsOfOwner = 200;     // polls for the end of the job between yields

// Number of threads for kernels that this thread calls; 0: as many as PyTorch's operators.
thread_local int64_t threads_of_kernels = 0;

int64_t num_threads() {
  return threads_of_kernels ? threads_of_kernels : at::get_num_threads();
}

class Threads {
 public:
  // The process's threads. They are never joined, because one may sleep when the process ends.
  static Threads& shared() {
    static Threads* const threads = new Threads;
    return *threads;
  }

  // Calls work(part) once for each part, 0 to count - 1, in this thread and up to num_threads() - 1 others. If those work for
  // another caller, this thread runs all parts.
  template <typename Work>
  void run(int64_t count, const Work& work) {
    const int64_t wanted = std::min<int64_t>(num_threads(), count);
    std::unique_lock<std::mutex> alone(owner_, std::defer_lock);
    if (wanted < 2 || !alone.try_lock()) {
      for (int64_t part = 0; part < count; ++part) work(part);
      return;
    }
    for (; started_ < wanted - 1; ++started_) std::thread([this, index = started_] { serve(index); }).detach();
    helpers_.store(wanted - 1, std::memory_order_relaxed);
    work_ = &work;
    call_ = [](const void* work, int64_t part) { (*static_cast<const Work*>(work))(part); };
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = ++job_;
    left_.store(job << 32 | static_cast<uint64_t>(count), std::memory_order_release);
    wakes_.fetch_add(1, std::memory_order_release);
    wakes_.notify_all();
    take_parts();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins % kSpinsOfOwner == kSpinsOfOwner - 1) std::this_thread::yield();
      _mm_pause();
    }
  }

 private:
  void serve(int64_t index) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; wakes_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins == kSpins) wakes_.wait(seen, std::memory_order_acquire), spins = 0;
        _mm_pause();
      }
      seen = wakes_.load(std::memory_order_acquire);
      if (index < helpers_.load(std::memory_order_relaxed)) take_parts();
    }
  }

  // A job cannot end while a thread runs one of its parts. So a thread may read the job only after it has taken a part.
  void take_parts() {
    for (uint64_t left = left_.load(std::memory_order_acquire); left & kCount;) {
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      call_(work_, count_ - static_cast<int64_t>(left & kCount));
      done_.fetch_add(1, std::memory_order_release);
      left = left_.load(std::memory_order_acquire);
    }
  }

  static constexpr uint64_t kCount = 0xffffffff;

  std::mutex owner_;  // held by the caller of the current job
  int64_t started_ = 0;
  uint64_t job_ = 0;
  const void* work_ = nullptr;
  void (*call_)(const void*, int64_t) = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> helpers_{0};
  alignas(64) std::atomic<uint64_t> left_{0};  // job number (high), number of parts not taken (low)
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> wakes_{0};
};

// Calls work(begin, end) for consecutive parts of 0 to size - 1, each of `grain` or more elements except the last.
template <typename Work>
void share(int64_t size, int64_t grain, const Work& work) {
  const int64_t most = kPartsOfThread * num_threads();
  const int64_t part_size = std::max((size + most - 1) / most, std::max<int64_t>(grain, 1));
  Threads::shared().run((size + part_size - 1) / part_size, [&](int64_t part) {
    work(part * part_size, std::min(size, (part + 1) * part_size));
  });
}

}  // namespace
