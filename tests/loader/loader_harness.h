// The daemon's end of a loader channel, and loads driven through it, inside this process or not.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/mapping.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/manifest.h"
#include "proto/messages.h"
#include "tests/support/temp_dir.h"

namespace modelcache {

// A model as a loader left it: sealed arenas, borrowed ones first, mapped read-only.
class LoadedModel {
 public:
  // Seals the arenas as the daemon would. Errors: kInUse when the loader left a map, kCorrupt.
  static Result<LoadedModel> Make(std::vector<UniqueFd> arenas);

  [[nodiscard]] const Manifest& manifest() const { return manifest_; }
  [[nodiscard]] std::vector<std::string> Names() const;
  [[nodiscard]] bool Has(const std::string& name) const { return manifest_.Find(name).has_value(); }
  // REQUIRES that the tensor exists.
  [[nodiscard]] const TensorRecord& Tensor(const std::string& name) const;
  [[nodiscard]] std::vector<std::int64_t> Shape(const std::string& name) const;
  [[nodiscard]] std::vector<std::int64_t> Stride(const std::string& name) const;
  // All bytes of the storage behind a tensor.
  [[nodiscard]] std::span<const std::byte> StorageBytes(std::uint32_t storage) const;
  // The bytes a tensor reaches.
  [[nodiscard]] std::span<const std::byte> Bytes(const std::string& name) const;
  [[nodiscard]] std::string Raw(const std::string& name) const;
  // The elements of a tensor as they lie in memory.
  template <typename T>
  [[nodiscard]] std::vector<T> Values(const std::string& name) const {
    const auto bytes = Bytes(name);
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
  // Sum of the allocated bytes of the arenas.
  [[nodiscard]] std::uint64_t AllocatedBytes() const;
  [[nodiscard]] std::vector<UniqueFd> DuplicateArenas() const;
  [[nodiscard]] std::vector<ArenaSpecRef> ArenaRefs() const;

 private:
  std::vector<UniqueFd> fds_;
  std::vector<Mapping> mappings_;
  Manifest manifest_;
};

// What the fake daemon answers, and what it saw.
struct DaemonScript {
  const LoadedModel* lender = nullptr;  // offers the equal storages of this model
  std::uint64_t budget_bytes = UINT64_MAX;
  std::function<void()> on_reserve;  // runs before the reservation is answered
  std::function<void()> on_progress;
};

struct JobOutcome {
  Result<void> result;  // what the job came to, as the daemon heard it
  std::vector<UniqueFd> arenas;
  std::vector<ReserveArena> reserved;
  std::optional<VerifiedEvent> verified;
  std::string detail;  // of a failure
  std::uint64_t bytes_read = 0;
  int progress_events = 0;
  int exit_status = 0;                 // of the process; 128 + signal when one killed it
  std::uint64_t peak_private_kib = 0;  // of the process
};

// Runs `loader` in a thread with its end of the channel, on which the job waits.
JobOutcome RunWith(const std::function<void(UniqueFd socket)>& loader, const JobRequest& request,
                   const std::vector<int>& descriptors, const DaemonScript& script = {});

// Runs a job with RunJob in this process.
JobOutcome RunHere(const JobRequest& request, const std::vector<int>& descriptors,
                   const DaemonScript& script = {});

// Runs it in a modelcached-loader process.
JobOutcome RunProcess(const JobRequest& request, const std::vector<int>& descriptors,
                      const DaemonScript& script = {});

// A load of files by path.
struct LoadRequest {
  std::vector<std::string> paths;
  std::string format = "auto";
  std::string device = "cpu";
  std::uint64_t arena_max_bytes = 1U << 30U;
  bool share = true;
  bool in_process = true;
};

JobOutcome RunLoadJob(const LoadRequest& request, const DaemonScript& script = {});

// The model, or the loader's error.
Result<LoadedModel> Load(const LoadRequest& request, const DaemonScript& script = {});
Result<LoadedModel> Load(const std::string& path);

// The error message of a load that must fail; "(loaded)" when it did not.
std::string LoadError(const std::string& path);

// The job that verifies `model` against its recorded files.
JobOutcome RunVerifyJob(const LoadedModel& model);

// Bytes of files, built by hand.
std::string LittleEndian(std::uint64_t value, std::size_t bytes);
// 8-byte length, the header padded with spaces to a multiple of 8, the data.
std::string SafetensorsFile(std::string header, const std::string& data, bool pad = true);
// A zip archive of stored or deflated records.
struct ZipEntry {
  std::string name;
  std::string content;
  bool deflated = false;
};
std::string ZipFile(const std::vector<ZipEntry>& entries);
template <typename T>
std::string RawBytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

}  // namespace modelcache
