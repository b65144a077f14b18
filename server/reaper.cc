// The closing thread.
#include "server/reaper.h"

namespace modelcache {

Reaper::Reaper(std::function<void(ArenaId)> closed)
    : closed_(std::move(closed)), thread_([this] { Run(); }) {}

Reaper::~Reaper() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Reaper::Close(const ArenaId& id, UniqueFd fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace_back(id, std::move(fd));
  }
  changed_.notify_one();
}

void Reaper::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    auto [id, fd] = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    fd.Reset();
    closed_(id);
    lock.lock();
  }
}

}  // namespace modelcache
