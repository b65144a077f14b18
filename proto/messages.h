// One plain struct per message. docs/protocol.md says who sends which and when.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "common/ids.h"

namespace modelcache {

// ---- every connection --------------------------------------------------------------------------

struct HelloRequest {
  std::uint32_t min_version = 0;
  std::uint32_t max_version = 0;
  std::string program;  // for logs: "modelcachectl", "python3.11", …
};

struct HelloReply {
  std::uint32_t version = 0;  // the one both will speak
  std::string daemon_version;
  std::int64_t daemon_pid = 0;      // in the daemon's own PID namespace
  std::uint64_t pid_namespace = 0;  // inode of that namespace; 0 when unknown
};

struct ErrorReply {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::int32_t errno_value = 0;
  std::string detail{};  // of a failed Python call: opaque text of its loader
};

inline constexpr std::size_t kMaxDetailBytes = 384U << 10U;  // 256 KiB in base64, and some

// What failed, as it travels, and back.
ErrorReply ToReply(const Error& error);
Error ToError(ErrorReply reply);

struct EmptyReply {};

// ---- client -> daemon --------------------------------------------------------------------------

// A file of a model. Its descriptor travels with the message, in the order of `files`.
struct FileRef {
  std::string name;  // name inside the model: the base name; tells shards apart
  std::string path;  // absolute, for people and messages; never opened by the daemon
};

// A Python call whose result is to be kept, and how to start the interpreter that makes it. One
// descriptor travels with it: a sealed memfd with the call itself, which only the loader reads.
struct CallRequest {
  CallKey key;
  std::string name;                      // what people call it: function and short arguments
  std::vector<std::string> arguments;    // of the loader; the first is the program's absolute path
  std::vector<std::string> environment;  // "NAME=value", the whole of it
  std::string folder;                    // to start in; absolute
  std::optional<ModelId> stale;          // the entry that is out of date, as the caller found …
  std::string stale_reason;              // … and why, in words
};

// The path by which the entry of a call is known: "call:" and 32 digits.
std::string CallPath(const CallKey& key);

inline constexpr std::string_view kCallPrefix = "call:";
inline constexpr std::string_view kCallFormat = "python";

struct OpenRequest {
  std::vector<FileRef> files;  // either these, with as many descriptors …
  std::string model;           // … or the name, id or path of a model that must be resident …
  std::optional<CallRequest> call;  // … or this
  std::string name;                 // display name; the path when empty
  std::string format = "auto";      // auto|safetensors|torch|torchscript|npz
  std::string device = "cpu";       // cpu|cuda[:N], only for formats that are built on a device
  bool pin = false;
  bool count_hit = true;          // false: an open by name that only looks is no hit
  bool want_descriptors = false;  // the arenas' descriptors travel with the reply
  bool want_progress = false;
  std::uint64_t timeout_ms = 0;  // how long the caller waits for a cold load; 0 = no limit
};

// One arena in a reply. The client opens /proc/<daemon_pid>/fd/<fd> or asks for descriptors, and
// refuses anything whose inode or size differs.
struct ArenaRef {
  ArenaId id;
  std::int32_t fd = -1;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
};

struct OpenReply {
  ModelId model_id;
  std::string name;
  std::uint64_t lease = 0;
  bool hit = false;
  std::string reason;            // why it was a hit or a miss
  double load_seconds = 0;       // what the cold load took
  std::vector<ArenaRef> arenas;  // in the order of the manifest; the manifest is in the last
};

struct ReleaseRequest {  // an event
  std::uint64_t lease = 0;
};

struct ArenaDescriptorsRequest {
  std::uint64_t lease = 0;
  std::uint32_t first = 0;  // index of the first arena wanted
  std::uint32_t count = 0;  // at most kMaxDescriptors
};

struct ProgressEvent {
  std::uint64_t done_bytes = 0;
  std::uint64_t total_bytes = 0;
};

struct ModelRequest {            // kWhy, kEvict, kVerify
  std::string model;             // name, id (or unambiguous prefix of 6 digits or more), or path
  std::uint64_t timeout_ms = 0;  // how long a verify may take; 0 = no limit of the caller
};

struct PinRequest {
  std::string model;
  bool pinned = true;
};

struct ModelInfo {
  ModelId id;
  std::string name;
  std::string path;  // of the first file
  std::string format;
  std::string state;  // loading|resident
  std::uint64_t tensors = 0;
  std::uint64_t storages = 0;
  std::uint32_t arenas = 0;
  std::uint64_t storage_bytes = 0;   // sum of its storages, each once
  std::uint64_t resident_bytes = 0;  // kernel memory of the arenas made for it
  std::uint64_t borrowed_bytes = 0;  // bytes it reads from arenas of other models
  std::uint32_t leases = 0;
  bool pinned = false;
  std::uint64_t hits = 0;
  double load_seconds = 0;
  double idle_seconds = 0;  // since it was last opened or released
};

struct ListReply {
  std::vector<ModelInfo> models;
};

struct StatusReply {
  std::int64_t daemon_pid = 0;
  std::string version;
  std::string socket;
  std::uint64_t memory_budget_bytes = 0;
  std::uint64_t arena_bytes = 0;     // bytes of the storages in all arenas, each once
  std::uint64_t resident_bytes = 0;  // kernel memory of all arenas, held against the budget
  std::uint64_t reserved_bytes = 0;  // promised to loads in progress
  std::uint64_t entries = 0;         // resident models
  std::uint64_t loading = 0;
  std::uint64_t loads = 0;  // cold loads that succeeded
  std::uint64_t failed_loads = 0;
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t evictions = 0;
  std::uint64_t leases = 0;
  std::uint64_t clients = 0;  // connections, the asking one included
  double uptime_seconds = 0;
};

struct HistoryEvent {
  double seconds_ago = 0;
  std::string event;  // hit|miss|load|failed|evict|pin|unpin|superseded
  std::string reason;
};

struct WhyReply {
  std::string model;
  std::string state;                  // resident|loading|absent
  std::vector<HistoryEvent> history;  // oldest first
};

struct VerifyReply {
  bool ok = false;  // the memory is intact, and the disk does not differ
  std::uint64_t storages = 0;
  std::uint64_t bytes = 0;
  std::string disk;                      // same|differs|unavailable
  std::vector<std::string> differences;  // one sentence each, at most 100
  bool memory_ok = true;                 // every storage in memory is what was loaded
};

struct MetricsReply {
  std::string text;  // Prometheus text exposition format 0.0.4
};

// ---- loader channel ----------------------------------------------------------------------------

// An arena as a loader sees it.
struct ArenaSpecRef {
  ArenaId id;
  std::uint64_t size_bytes = 0;
};

enum class JobKind : std::uint8_t {
  kLoad = 1,      // read the files into new arenas
  kVerify = 2,    // re-hash the given arenas and compare them with the files
  kCollapse = 3,  // back the given arenas with huge pages
};

struct JobRequest {  // descriptors: the files in order, then the arenas in order
  JobKind kind = JobKind::kLoad;
  std::vector<FileRef> files;
  std::vector<ArenaSpecRef> arenas;
  ModelId model_id;
  std::string format = "auto";
  std::string device = "cpu";
  std::uint64_t arena_max_bytes = 0;
  bool share = true;  // may borrow storages from other models
};

// Asks which storages another model already holds.
struct StorageSample {
  std::uint32_t storage = 0;
  std::uint64_t size_bytes = 0;
  Digest sample;
};
struct CandidatesRequest {
  std::vector<StorageSample> storages;
};

// A place that may hold the same bytes; the loader compares before it borrows. The descriptors of
// `arenas` travel with the reply, in order.
struct StorageCandidate {
  std::uint32_t storage = 0;
  std::uint32_t arena = 0;  // index into `arenas`
  std::uint64_t offset_bytes = 0;
};
struct CandidatesReply {
  std::vector<ArenaSpecRef> arenas;
  std::vector<StorageCandidate> candidates;
};

struct ReserveArena {
  std::uint64_t size_bytes = 0;
  std::uint64_t charge_bytes = 0;
};
struct ReserveRequest {
  std::vector<ReserveArena> arenas;  // to be made
  std::vector<ArenaId> borrowed;     // candidates that will be used
};
struct ReserveReply {  // descriptors: the new arenas in order
  std::vector<ArenaId> arenas;
};

struct CommitRequest {
  std::uint64_t bytes_read = 0;  // of the files, for the model's history
};

using LoaderProgressEvent = ProgressEvent;
using JobFailedEvent = ErrorReply;
using VerifiedEvent = VerifyReply;

}  // namespace modelcache
