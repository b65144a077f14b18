// A loader whose behaviour is the first word of the file it is given: "ok", or a way to misbehave.
// Everything else in the file becomes the bytes of one uint8 tensor called "w".
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/digest.h"
#include "common/mapping.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/codec.h"
#include "proto/frame_channel.h"
#include "proto/manifest.h"

namespace modelcache {
namespace {

constexpr int kSocket = 3;

FrameHeader Header(MessageType type, std::uint8_t flags, std::uint32_t id) {
  FrameHeader header;
  header.type = type;
  header.flags = flags;
  header.request_id = id;
  return header;
}

std::string ReadAll(int fd) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) {
    return {};
  }
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  const ssize_t got = ::pread(fd, text.data(), text.size(), 0);
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return text;
}

struct Plan {
  ArenaLayout layout;
  ManifestSpec spec;
};

Plan MakePlan(const std::string& content) {
  Plan plan;
  plan.spec.format = "fake";
  StorageSpec storage;
  storage.size_bytes = content.size();
  storage.digest = HashStorage(std::as_bytes(std::span(content)));
  storage.sample = SampleStorage(std::as_bytes(std::span(content)));
  plan.spec.storages.push_back(storage);
  TensorSpec tensor;
  tensor.name = "w";
  tensor.dtype = Dtype::kUint8;
  tensor.shape = {static_cast<std::int64_t>(content.size())};
  tensor.stride = {1};
  tensor.storage = 0;
  plan.spec.tensors.push_back(tensor);
  const std::vector<std::uint64_t> sizes{content.size()};
  plan.layout = PlanLayout(sizes, ManifestBytes(plan.spec, 1), kDefaultArenaMaxBytes).value();
  return plan;
}

void Fill(Plan& plan, const std::string& content, const ArenaId& id, const ModelId& model,
          std::byte* base) {
  const std::uint64_t size_bytes = plan.layout.arenas[0].size_bytes;
  plan.spec.arenas = {{id, size_bytes}};
  plan.spec.storages[0].offset_bytes = plan.layout.placements[0].offset_bytes;
  const std::string manifest = EncodeManifest(plan.spec).value();
  std::memcpy(base + plan.layout.placements[0].offset_bytes, content.data(), content.size());
  std::memcpy(base + plan.layout.manifest_offset_bytes, manifest.data(), manifest.size());
  ArenaHeader header;
  header.arena_id = id;
  header.model_id = model;
  header.arena_count = 1;
  header.arena_bytes = size_bytes;
  header.manifest = {plan.layout.manifest_offset_bytes, manifest.size()};
  EncodeArenaHeader(header, {base, kArenaHeaderBytes});
}

int Finish(FrameChannel& channel) {
  (void)channel.Send(Header(MessageType::kCommit, 0, 2), Encode(CommitRequest{}), {}, kNoDeadline);
  return channel.Receive(kNoDeadline).ok() ? 0 : 1;
}

int Load(FrameChannel& channel, const JobRequest& job, const std::string& content,
         const std::string& how) {
  Plan plan = MakePlan(content);
  ReserveRequest reserve;
  reserve.arenas = {{plan.layout.arenas[0].size_bytes, plan.layout.arenas[0].charge_bytes}};
  (void)channel.Send(Header(MessageType::kReserve, 0, 1), Encode(reserve), {}, kNoDeadline);
  Result<Frame> frame = channel.Receive(kNoDeadline);
  if (!frame.ok() || frame->header.IsError()) {
    return 1;
  }
  const ArenaId id = Decode<ReserveReply>(frame->body).value().arenas.at(0);
  if (how == "crash") {
    (void)::raise(SIGKILL);
  }
  if (how == "hang") {
    (void)channel.Receive(kNoDeadline);
  }
  Mapping map = Mapping::Map(frame->descriptors.at(0).get(), {0, plan.layout.arenas[0].size_bytes},
                             Access::kWrite)
                    .value();
  Fill(plan, content, id, how == "liar" ? ModelId{} : job.model_id, map.data());
  (void)channel.Send(Header(MessageType::kLoaderProgress, kFlagEvent, 0),
                     Encode(LoaderProgressEvent{content.size(), content.size()}), {}, kNoDeadline);
  if (how != "mapped") {
    map = Mapping();
  }
  return Finish(channel);
}

int Misbehave(FrameChannel& channel, const std::string& how) {
  if (how == "exit") {
    (void)std::fputs("something on stderr\n", stderr);
    return 3;
  }
  if (how == "garbage") {
    (void)!::write(kSocket, "this is no frame at all", 23);
    (void)channel.Receive(kNoDeadline);
    return 0;
  }
  if (how == "environment") {
    std::string text;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      text += std::string(*entry) + "\n";
    }
    for (int fd = 0; fd < 64; ++fd) {
      text += ::fcntl(fd, F_GETFD) >= 0 ? "fd" + std::to_string(fd) + "\n" : "";
    }
    (void)std::fputs(text.c_str(), stderr);
    return 4;
  }
  (void)channel.Send(Header(MessageType::kJobFailed, kFlagEvent, 0),
                     Encode(ErrorReply{ErrorCode::kBadFile, "needs 72, has 69", 0}), {},
                     kNoDeadline);
  return 1;
}

int Run() {
  FrameChannel channel{UniqueFd(kSocket)};
  Result<Frame> frame = channel.Receive(kNoDeadline);
  if (!frame.ok()) {
    return 1;
  }
  const JobRequest job = Decode<JobRequest>(frame->body).value();
  if (job.kind == JobKind::kVerify) {
    VerifyReply verified;
    verified.ok = true;
    verified.disk = "same";
    (void)channel.Send(Header(MessageType::kVerified, kFlagEvent, 0), Encode(verified), {},
                       kNoDeadline);
    return 0;
  }
  if (job.kind == JobKind::kCollapse) {
    return 0;
  }
  const std::string text = ReadAll(frame->descriptors.at(0).get());
  frame->descriptors.clear();
  const std::string how = text.substr(0, text.find(' '));
  if (how == "fail" || how == "exit" || how == "garbage" || how == "environment") {
    return Misbehave(channel, how);
  }
  return Load(channel, job, text.substr(std::min(text.size(), how.size() + 1)), how);
}

}  // namespace
}  // namespace modelcache

int main() { return modelcache::Run(); }
