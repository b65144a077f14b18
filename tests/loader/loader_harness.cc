// The fake daemon's loop and the builders of files.
#include "tests/loader/loader_harness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <utility>

#include "common/digest.h"
#include "common/memfd.h"
#include "common/socket.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/codec.h"
#include "proto/frame_channel.h"
#include "server/loader/job.h"
#include "server/loader/loader_channel.h"

namespace modelcache {
namespace {

constexpr std::chrono::seconds kPatience{60};

ArenaId RandomArenaId() {
  static std::mt19937_64 random(std::random_device{}());
  ArenaId id;
  for (auto& byte : id.bytes) {
    byte = static_cast<std::uint8_t>(random());
  }
  return id;
}

// Serves one loader until it is done or gone.
class FakeDaemon {
 public:
  FakeDaemon(UniqueFd socket, const DaemonScript& script)
      : channel_(std::move(socket)), script_(script) {}

  void SendJob(const JobRequest& request, const std::vector<int>& descriptors) {
    FrameHeader header;
    header.type = MessageType::kJob;
    header.request_id = 7;
    (void)channel_.Send(header, Encode(request), descriptors, DeadlineAfter(kPatience));
  }

  JobOutcome Serve() {
    outcome_.result = Error{ErrorCode::kLoaderFailed, "the loader went without a word", 0};
    while (!done_) {
      auto frame = channel_.Receive(DeadlineAfter(kPatience));
      if (!frame.ok()) {
        break;
      }
      Handle(*frame);
    }
    return std::move(outcome_);
  }

 private:
  void Handle(const Frame& frame) {
    switch (frame.header.type) {
      case MessageType::kCandidates:
        return Offer(frame);
      case MessageType::kReserve:
        return Reserve(frame);
      case MessageType::kLoaderProgress:
        ++outcome_.progress_events;
        return script_.on_progress ? script_.on_progress() : void();
      case MessageType::kCommit:
        outcome_.bytes_read = Decode<CommitRequest>(frame.body)->bytes_read;
        outcome_.result = {};
        Reply(frame, EmptyReply{}, {});
        done_ = true;
        return;
      case MessageType::kVerified:
        outcome_.verified = *Decode<VerifiedEvent>(frame.body);
        outcome_.result = {};
        done_ = true;
        return;
      case MessageType::kJobFailed: {
        const auto event = *Decode<ErrorReply>(frame.body);
        outcome_.result = Error{event.code, event.message, event.errno_value};
        outcome_.detail = event.detail;
        done_ = true;
        return;
      }
      default:
        outcome_.result = Error{ErrorCode::kProtocol, "unexpected message", 0};
        done_ = true;
    }
  }

  template <typename Message>
  void Reply(const Frame& request, const Message& message, const std::vector<int>& descriptors) {
    FrameHeader header = request.header;
    header.flags = kFlagReply;
    (void)channel_.Send(header, Encode(message), descriptors, DeadlineAfter(kPatience));
  }

  void Offer(const Frame& frame) {
    const auto request = *Decode<CandidatesRequest>(frame.body);
    CandidatesReply reply;
    std::vector<int> descriptors;
    std::vector<UniqueFd> owned;
    if (script_.lender != nullptr) {
      reply.arenas = script_.lender->ArenaRefs();
      owned = script_.lender->DuplicateArenas();
      for (const UniqueFd& fd : owned) {
        descriptors.push_back(fd.get());
      }
      for (const StorageSample& sample : request.storages) {
        OfferStorage(sample, reply);
      }
    }
    Reply(frame, reply, descriptors);
    lent_ = std::move(owned);
    lent_refs_ = reply.arenas;
  }

  void OfferStorage(const StorageSample& sample, CandidatesReply& reply) const {
    for (const StorageRecord& record : script_.lender->manifest().storages()) {
      if (record.size_bytes == sample.size_bytes &&
          std::memcmp(record.sample, sample.sample.bytes.data(), 16) == 0) {
        reply.candidates.push_back({sample.storage, record.arena, record.offset_bytes});
        return;
      }
    }
  }

  void Reserve(const Frame& frame) {
    if (script_.on_reserve) {
      script_.on_reserve();
    }
    const auto request = *Decode<ReserveRequest>(frame.body);
    std::uint64_t needed = 0;
    for (const ReserveArena& arena : request.arenas) {
      needed += arena.charge_bytes;
    }
    outcome_.reserved = request.arenas;
    if (needed > script_.budget_bytes) {
      FrameHeader header = frame.header;
      header.flags = kFlagReply | kFlagError;
      const ErrorReply reply{ErrorCode::kNoRoom,
                             "needs " + std::to_string(needed) + " bytes, budget " +
                                 std::to_string(script_.budget_bytes),
                             0};
      (void)channel_.Send(header, Encode(reply), {}, DeadlineAfter(kPatience));
      return;
    }
    ReserveReply reply;
    std::vector<int> descriptors;
    for (const ArenaId& id : request.borrowed) {
      for (std::size_t i = 0; i < lent_refs_.size(); ++i) {
        if (lent_refs_[i].id == id) {
          outcome_.arenas.push_back(std::move(lent_[i]));
        }
      }
    }
    for (const ReserveArena& arena : request.arenas) {
      outcome_.arenas.push_back(std::move(*CreateMemfd("arena", arena.size_bytes)));
      descriptors.push_back(outcome_.arenas.back().get());
      reply.arenas.push_back(RandomArenaId());
    }
    Reply(frame, reply, descriptors);
  }

  FrameChannel channel_;
  const DaemonScript& script_;
  JobOutcome outcome_;
  std::vector<UniqueFd> lent_;
  std::vector<ArenaSpecRef> lent_refs_;
  bool done_ = false;
};

// The loader program next to this one.
std::string LoaderPath() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "modelcached-loader")
      .string();
}

[[noreturn]] void ExecLoader(int socket, const std::string& path) {
  // Moved to descriptor 3; everything else is close-on-exec.
  if (socket == 3) {
    (void)::fcntl(3, F_SETFD, 0);
  } else {
    (void)::dup2(socket, 3);
  }
  char* const arguments[] = {const_cast<char*>(path.c_str()), nullptr};
  (void)::execv(path.c_str(), arguments);
  ::_exit(127);
}

// Anonymous memory only: what a second copy of the model would be.
std::uint64_t PrivateKib(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, 8, "RssAnon:") == 0) {
      return std::strtoull(line.c_str() + 8, nullptr, 10);
    }
  }
  return 0;
}

}  // namespace

Result<LoadedModel> LoadedModel::Make(std::vector<UniqueFd> arenas) {
  LoadedModel model;
  for (const UniqueFd& fd : arenas) {
    auto info = InspectMemfd(fd.get());
    if (!info.ok()) {
      return std::move(info).error();
    }
    if (!IsSealed(*info)) {
      if (auto sealed = SealMemfd(fd.get()); !sealed.ok()) {
        return std::move(sealed).error();
      }
    }
    auto mapping = Mapping::Map(fd.get(), {0, info->size_bytes}, Access::kRead);
    if (!mapping.ok()) {
      return std::move(mapping).error();
    }
    model.mappings_.push_back(std::move(*mapping));
  }
  model.fds_ = std::move(arenas);
  const auto last = model.mappings_.back().bytes();
  auto header = DecodeArenaHeader(last, last.size());
  if (!header.ok()) {
    return std::move(header).error();
  }
  auto manifest =
      Manifest::Parse(last.subspan(header->manifest.offset_bytes, header->manifest.size_bytes));
  if (!manifest.ok()) {
    return std::move(manifest).error();
  }
  model.manifest_ = *manifest;
  return model;
}

std::vector<std::string> LoadedModel::Names() const {
  std::vector<std::string> names;
  for (const TensorRecord& tensor : manifest_.tensors()) {
    names.emplace_back(manifest_.Name(tensor));
  }
  return names;
}

const TensorRecord& LoadedModel::Tensor(const std::string& name) const {
  return manifest_.tensors()[manifest_.Find(name).value()];
}

std::vector<std::int64_t> LoadedModel::Shape(const std::string& name) const {
  const auto shape = manifest_.Shape(Tensor(name));
  return {shape.begin(), shape.end()};
}

std::vector<std::int64_t> LoadedModel::Stride(const std::string& name) const {
  const auto stride = manifest_.Stride(Tensor(name));
  return {stride.begin(), stride.end()};
}

std::span<const std::byte> LoadedModel::StorageBytes(std::uint32_t storage) const {
  const StorageRecord& record = manifest_.storages()[storage];
  return mappings_[record.arena].bytes().subspan(record.offset_bytes, record.size_bytes);
}

std::span<const std::byte> LoadedModel::Bytes(const std::string& name) const {
  const TensorRecord& tensor = Tensor(name);
  return StorageBytes(tensor.storage).subspan(tensor.data_offset_bytes, tensor.extent_bytes);
}

std::string LoadedModel::Raw(const std::string& name) const {
  const auto bytes = Bytes(name);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::uint64_t LoadedModel::AllocatedBytes() const {
  std::uint64_t sum = 0;
  for (const UniqueFd& fd : fds_) {
    sum += InspectMemfd(fd.get())->allocated_bytes;
  }
  return sum;
}

std::vector<UniqueFd> LoadedModel::DuplicateArenas() const {
  std::vector<UniqueFd> copies;
  for (const UniqueFd& fd : fds_) {
    copies.emplace_back(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
  }
  return copies;
}

std::vector<ArenaSpecRef> LoadedModel::ArenaRefs() const {
  std::vector<ArenaSpecRef> refs;
  for (const ArenaRecord& record : manifest_.arenas()) {
    ArenaSpecRef ref;
    std::memcpy(ref.id.bytes.data(), record.id, sizeof record.id);
    ref.size_bytes = record.size_bytes;
    refs.push_back(ref);
  }
  return refs;
}

JobOutcome RunWith(const std::function<void(UniqueFd socket)>& loader, const JobRequest& request,
                   const std::vector<int>& descriptors, const DaemonScript& script) {
  auto pair = MakeSocketPair();
  FakeDaemon daemon(std::move(pair->first), script);
  daemon.SendJob(request, descriptors);
  std::thread thread(
      [&loader, socket = std::move(pair->second)]() mutable { loader(std::move(socket)); });
  JobOutcome outcome = daemon.Serve();
  thread.join();
  return outcome;
}

JobOutcome RunHere(const JobRequest& request, const std::vector<int>& descriptors,
                   const DaemonScript& script) {
  const auto loader = [](UniqueFd socket) {
    LoaderChannel channel(std::move(socket));
    (void)RunJob(channel);  // the daemon's end hears of it
  };
  return RunWith(loader, request, descriptors, script);
}

JobOutcome RunProcess(const JobRequest& request, const std::vector<int>& descriptors,
                      const DaemonScript& script) {
  auto pair = MakeSocketPair();
  const std::string path = LoaderPath();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ExecLoader(pair->second.get(), path);
  }
  pair->second.Reset();
  std::uint64_t peak_kib = 0;
  DaemonScript observed = script;
  observed.on_progress = [&] {
    peak_kib = std::max(peak_kib, PrivateKib(pid));
    if (script.on_progress) {
      script.on_progress();
    }
  };
  FakeDaemon daemon(std::move(pair->first), observed);
  daemon.SendJob(request, descriptors);
  JobOutcome outcome = daemon.Serve();
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  outcome.exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.peak_private_kib = peak_kib;
  return outcome;
}

JobOutcome RunLoadJob(const LoadRequest& request, const DaemonScript& script) {
  JobRequest job;
  job.format = request.format;
  job.device = request.device;
  job.arena_max_bytes = request.arena_max_bytes;
  job.share = request.share;
  std::vector<UniqueFd> files;
  std::vector<int> descriptors;
  for (const std::string& path : request.paths) {
    job.files.push_back({std::filesystem::path(path).filename().string(), path});
    files.emplace_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    descriptors.push_back(files.back().get());
  }
  return request.in_process ? RunHere(job, descriptors, script)
                            : RunProcess(job, descriptors, script);
}

Result<LoadedModel> Load(const LoadRequest& request, const DaemonScript& script) {
  JobOutcome outcome = RunLoadJob(request, script);
  if (!outcome.result.ok()) {
    return std::move(outcome.result).error();
  }
  return LoadedModel::Make(std::move(outcome.arenas));
}

Result<LoadedModel> Load(const std::string& path) {
  LoadRequest request;
  request.paths = {path};
  return Load(request);
}

std::string LoadError(const std::string& path) {
  const auto loaded = Load(path);
  return loaded.ok() ? "(loaded)" : loaded.error().message;
}

JobOutcome RunVerifyJob(const LoadedModel& model) {
  JobRequest job;
  job.kind = JobKind::kVerify;
  job.arenas = model.ArenaRefs();
  const auto arenas = model.DuplicateArenas();
  std::vector<int> descriptors;
  for (const UniqueFd& fd : arenas) {
    descriptors.push_back(fd.get());
  }
  return RunHere(job, descriptors);
}

std::string LittleEndian(std::uint64_t value, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) {
    text += static_cast<char>(value & 0xFFU);
    value >>= 8U;
  }
  return text;
}

std::string SafetensorsFile(std::string header, const std::string& data, bool pad) {
  while (pad && header.size() % 8 != 0) {
    header += ' ';
  }
  return LittleEndian(header.size(), 8) + header + data;
}

std::string Deflated(const std::string& content) {
  z_stream stream = {};
  (void)::deflateInit2(&stream, 9, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string out(::deflateBound(&stream, content.size()), '\0');
  std::string in = content;
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  (void)::deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  (void)::deflateEnd(&stream);
  return out;
}

std::string ZipFile(const std::vector<ZipEntry>& entries) {
  std::string bytes;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const auto crc = ::crc32(0, reinterpret_cast<const Bytef*>(entry.content.data()),
                             static_cast<uInt>(entry.content.size()));
    const std::string stored = entry.deflated ? Deflated(entry.content) : entry.content;
    // Flags, method, time, date, CRC, both sizes, length of the name, no extra field.
    const std::string common = LittleEndian(0, 2) + LittleEndian(entry.deflated ? 8 : 0, 2) +
                               LittleEndian(0, 4) + LittleEndian(crc, 4) +
                               LittleEndian(stored.size(), 4) +
                               LittleEndian(entry.content.size(), 4) +
                               LittleEndian(entry.name.size(), 2) + LittleEndian(0, 2);
    directory += "PK\x01\x02" + LittleEndian(20, 2) + LittleEndian(20, 2) + common +
                 LittleEndian(0, 10) + LittleEndian(bytes.size(), 4) + entry.name;
    bytes += "PK\x03\x04" + LittleEndian(20, 2) + common + entry.name + stored;
  }
  return bytes + directory + "PK\x05\x06" + LittleEndian(0, 4) + LittleEndian(entries.size(), 2) +
         LittleEndian(entries.size(), 2) + LittleEndian(directory.size(), 4) +
         LittleEndian(bytes.size(), 4) + LittleEndian(0, 2);
}

}  // namespace modelcache
