// The C functions: arguments checked and copied into a plan; the rest is that of every load.
#include "server/loader/python_job.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "common/c_boundary.h"
#include "server/loader/fill.h"
#include "server/loader/loader_channel.h"
#include "server/loader/parent.h"

using namespace modelcache;  // NOLINT(google-build-using-namespace): this file is the C side of it

struct mc_job {
  explicit mc_job(UniqueFd socket) : channel(std::move(socket)) {}

  std::mutex mutex;  // guards the channel
  LoaderChannel channel;
  JobRequest request;
  UniqueFd payload;
};

namespace {

constexpr std::int32_t kOk = 0;

bool IsSocket(int fd) {
  struct stat status = {};
  return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

std::int32_t StatusOf(const Result<void>& done) { return done.ok() ? kOk : Fail(done.error()); }

Error Invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message), 0};
}

Result<std::unique_ptr<mc_job>> Receive(int descriptor) {
  if (!TieToParent()) {
    return Error{ErrorCode::kUnavailable, "the process that started this loader is gone", 0};
  }
  (void)::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  auto job = std::make_unique<mc_job>(UniqueFd(descriptor));
  auto received = job->channel.ReceiveJob();
  if (!received.ok()) {
    return std::move(received).error();
  }
  if (received->request.kind != JobKind::kLoad || received->request.format != kCallFormat ||
      received->descriptors.size() != 1) {
    return Error{ErrorCode::kProtocol,
                 "expected the job of a Python call with 1 descriptor, got format '" +
                     received->request.format + "' and " +
                     std::to_string(received->descriptors.size()),
                 0};
  }
  job->request = std::move(received->request);
  job->payload = std::move(received->descriptors.front());
  return job;
}

Result<TensorSpec> ToTensor(const mc_job_tensor& from) {
  if (from.name == nullptr || from.dtype == nullptr ||
      (from.ndim > 0 && (from.shape == nullptr || from.stride == nullptr))) {
    return Invalid("a tensor without name, dtype, shape or stride");
  }
  TensorSpec tensor;
  tensor.name.assign(from.name, from.name_bytes);
  const auto dtype = DtypeFromName(from.dtype);
  if (!dtype) {
    return Error{ErrorCode::kUnsupported,
                 "tensor '" + tensor.name + "' has dtype '" + from.dtype + "'", 0};
  }
  if (from.ndim > kMaxDimensions || (from.flags & ~kTensorFlagMask) != 0) {
    return Invalid("tensor '" + tensor.name + "' has too many dimensions or unknown flags");
  }
  tensor.dtype = *dtype;
  tensor.shape.assign(from.shape, from.shape + from.ndim);
  tensor.stride.assign(from.stride, from.stride + from.ndim);
  tensor.storage = from.storage;
  tensor.data_offset_bytes = from.offset_bytes;
  tensor.flags = from.flags;
  return tensor;
}

Result<ModelPlan> ToPlan(const mc_job_result& result) {
  if ((result.storage_count > 0 && result.storages == nullptr) ||
      (result.tensor_count > 0 && result.tensors == nullptr) || result.metadata == nullptr) {
    return Invalid("a result without storages, tensors or metadata");
  }
  ModelPlan plan;
  plan.format = kCallFormat;
  plan.metadata_json.assign(result.metadata, result.metadata_bytes);
  for (const mc_job_storage& storage : std::span(result.storages, result.storage_count)) {
    if (storage.data == nullptr && storage.nbytes > 0) {
      return Invalid("storage " + std::to_string(plan.storages.size()) + " has no memory");
    }
    plan.storages.push_back({"storage " + std::to_string(plan.storages.size()), storage.nbytes,
                             MemoryBytes{static_cast<const std::byte*>(storage.data), nullptr}});
  }
  for (const mc_job_tensor& from : std::span(result.tensors, result.tensor_count)) {
    auto tensor = ToTensor(from);
    if (!tensor.ok()) {
      return std::move(tensor).error();
    }
    plan.tensors.push_back(std::move(*tensor));
  }
  return plan;
}

// kOk for a name that is none.
ErrorCode CodeOfName(std::string_view name) {
  constexpr auto kMost = static_cast<std::uint16_t>(ErrorCode::kAlreadyRunning);
  for (std::uint16_t number = 1; number <= kMost; ++number) {
    if (ErrorCodeName(static_cast<ErrorCode>(number)) == name) {
      return static_cast<ErrorCode>(number);
    }
  }
  return ErrorCode::kOk;
}

}  // namespace

int32_t mc_job_receive(int32_t descriptor, mc_job** out) {
  return Guarded([&] {
    if (out == nullptr || !IsSocket(descriptor)) {
      return FailArgument("mc_job_receive: the descriptor is no socket; a daemon starts loaders");
    }
    auto job = Receive(descriptor);
    if (!job.ok()) {
      return Fail(job.error());
    }
    *out = job->release();
    return kOk;
  });
}

int32_t mc_job_payload(const mc_job* job) { return job == nullptr ? -1 : job->payload.get(); }

int32_t mc_job_progress(mc_job* job, uint64_t done_bytes, uint64_t total_bytes) {
  return Guarded([&] {
    if (job == nullptr) {
      return FailArgument("mc_job_progress: the job is NULL");
    }
    const std::unique_lock lock(job->mutex, std::try_to_lock);
    return lock.owns_lock() ? StatusOf(job->channel.SendProgress({done_bytes, total_bytes})) : kOk;
  });
}

int32_t mc_job_commit(mc_job* job, const mc_job_result* result) {
  return Guarded([&] {
    mc_job_result given = {};
    if (job == nullptr || result == nullptr || !CopyIn(result, given)) {
      return FailArgument("mc_job_commit: an argument is NULL or of another version");
    }
    auto plan = ToPlan(given);
    if (!plan.ok()) {
      return Fail(plan.error());
    }
    const std::lock_guard lock(job->mutex);
    return StatusOf(FillAndCommit(job->channel, job->request, {}, std::move(*plan)));
  });
}

int32_t mc_job_fail(mc_job* job, const char* status, const char* message, const char* detail) {
  return Guarded([&] {
    if (job == nullptr || status == nullptr || message == nullptr) {
      return FailArgument("mc_job_fail: an argument is NULL");
    }
    Error error{CodeOfName(status), message, 0};
    if (error.code == ErrorCode::kOk) {
      return FailArgument("mc_job_fail: no status has that name");
    }
    if (detail != nullptr && std::strlen(detail) <= kMaxDetailBytes) {
      error.detail = detail;
    }
    const std::lock_guard lock(job->mutex);
    return StatusOf(job->channel.SendFailed(error));
  });
}

void mc_job_close(mc_job* job) { delete job; }

const char* mc_job_last_error(void) { return Last().message.c_str(); }

int32_t mc_job_last_errno(void) { return Last().errno_value; }
