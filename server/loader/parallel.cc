// A counter hands out items; a condition variable ends the wait of the caller.
#include "server/loader/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/digest.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxThreads = 4;
constexpr std::chrono::milliseconds kTickInterval{100};

Error ExceptionError(const std::exception& fault) {
  return Error{ErrorCode::kSystem, std::string("the loader failed: ") + fault.what(), 0};
}

class Pool {
 public:
  Pool(std::size_t count, const WorkItem& work) : count_(count), work_(work) {}

  Result<void> Run(const std::function<Result<void>()>& tick) {
    const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
    const std::size_t thread_count = std::min({kMaxThreads, cores, count_});
    std::vector<std::thread> threads;
    running_ = thread_count;
    for (std::size_t i = 0; i < thread_count; ++i) {
      threads.emplace_back([this] { WorkUntilEmpty(); });
    }
    WaitAndTick(tick);
    for (std::thread& thread : threads) {
      thread.join();
    }
    return error_ ? Result<void>(std::move(*error_)) : Result<void>();
  }

 private:
  void WorkUntilEmpty() {
    try {
      std::vector<std::byte> scratch(kDigestLeafBytes);
      for (std::size_t item = next_++; item < count_; item = next_++) {
        if (auto done = work_(item, scratch); !done.ok()) {
          Fail(std::move(done).error());
          break;
        }
      }
    } catch (const std::exception& fault) {
      Fail(ExceptionError(fault));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    changed_.notify_one();
  }

  void Fail(Error error) {
    next_ = count_;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = std::move(error);
    }
  }

  void WaitAndTick(const std::function<Result<void>()>& tick) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kTickInterval, [this] { return running_ == 0; })) {
      if (!tick) {
        continue;
      }
      lock.unlock();
      if (auto ticked = tick(); !ticked.ok()) {
        Fail(std::move(ticked).error());
      }
      lock.lock();
    }
  }

  const std::size_t count_;
  const WorkItem& work_;
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_ = 0;
  std::optional<Error> error_;
};

}  // namespace

Result<void> ParallelFor(std::size_t count, const WorkItem& work,
                         const std::function<Result<void>()>& tick) {
  return Pool(count, work).Run(tick);
}

}  // namespace modelcache
