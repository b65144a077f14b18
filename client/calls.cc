// Entries of Python calls: found, or made by a loader that sees what this process sees.
#include <sys/stat.h>

#include <optional>
#include <string>
#include <utility>

#include "client/core.h"
#include "common/memfd.h"
#include "common/socket.h"

namespace modelcache {
namespace {

std::optional<struct stat> StatOf(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 ? std::optional(status) : std::nullopt;
}

// False only when both can be looked at and differ.
bool MayBeSame(const std::string& path, const std::string& other) {
  const auto a = StatOf(path);
  const auto b = StatOf(other);
  return !a || !b || (a->st_dev == b->st_dev && a->st_ino == b->st_ino);
}

// A loader in another container would load other files by the same paths.
Result<void> CheckSameFiles(const HelloReply& hello) {
  const std::string daemon = "/proc/" + std::to_string(hello.daemon_pid);
  const bool same_processes = hello.pid_namespace == PidNamespace();
  if (same_processes && MayBeSame(daemon + "/ns/mnt", "/proc/self/ns/mnt") &&
      MayBeSame(daemon + "/root/", "/")) {
    return {};
  }
  return Error{ErrorCode::kUnsupported,
               "the daemon lives in another container, where paths may mean other files", 0};
}

}  // namespace

Result<std::unique_ptr<Model>> Client::FindCall(const CallKey& key) {
  OpenOptions options;
  options.trusted_only = true;
  OpenRequest request;
  request.model = CallPath(key);
  return OpenWith(std::move(request), {}, options);
}

Result<std::unique_ptr<Model>> Client::MakeCall(CallRequest call,
                                                std::span<const std::byte> payload,
                                                const OpenOptions& options) {
  Result<HelloReply> hello = Hello();
  if (!hello.ok()) {
    return std::move(hello).error();
  }
  if (auto same = CheckSameFiles(*hello); !same.ok()) {
    return std::move(same).error();
  }
  Result<UniqueFd> memfd = MakeSealedMemfd("modelcache-call", payload);
  if (!memfd.ok()) {
    return std::move(memfd).error();
  }
  ModelFiles files;
  files.descriptors.push_back(std::move(*memfd));
  OpenRequest request;
  request.call = std::move(call);
  OpenOptions trusted = options;
  trusted.trusted_only = true;
  return OpenWith(std::move(request), files, trusted);
}

}  // namespace modelcache
