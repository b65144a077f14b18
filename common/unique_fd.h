// UniqueFd: the only owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace modelcache {

// Closes its descriptor when destroyed. Move-only; not synchronised.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset(std::exchange(other.fd_, -1));
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { Reset(); }

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }

  // Gives the descriptor up to the caller, who must close it.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }

  void Reset(int fd = -1) {
    if (fd_ >= 0) {
      (void)::close(fd_);  // on Linux the descriptor is gone whatever close answers
    }
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace modelcache
