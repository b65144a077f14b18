// History: what happened to each model path, kept after the model itself is gone.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/ids.h"
#include "proto/messages.h"
#include "server/identity.h"

namespace modelcache {

inline constexpr std::size_t kMaxHistoryEvents = 64;   // per path; the oldest go first
inline constexpr std::size_t kMaxHistoryOptions = 16;  // per path; the oldest go first
inline constexpr std::size_t kMaxHistoryPaths = 1024;  // the least recently touched go first

// Why a request did not find its model.
enum class MissKind : std::uint8_t {
  kNeverLoaded,
  kFileChanged,
  kEvicted,
  kFailedBefore,
  kOtherOptions,  // the same files, another format or device
  kJoinedLoad,    // somebody else's load of it is running
};
inline constexpr std::size_t kMissKindCount = 6;

// "never_loaded", …: the label value of the metrics.
std::string_view MissKindName(MissKind kind);

struct MissReason {
  MissKind kind = MissKind::kNeverLoaded;
  std::string text;
};

// What a request asked for.
struct Wanted {
  ModelId id;
  std::string path;
  std::vector<FileIdentity> files;
  LoadOptions options;
  std::string name;     // what people call it
  std::string stale{};  // what the caller found to be out of date about the last one; may be empty
};

// Bounded; not synchronised; reads no clock.
class History {
 public:
  void Load(const Wanted& wanted, std::string_view reason, TimePoint now);
  // What became of the last load of this path with these options.
  void Failed(const std::string& path, const LoadOptions& options, const std::string& message,
              TimePoint now);
  void Evicted(const std::string& path, const LoadOptions& options, const std::string& why,
               TimePoint now);
  void Add(const std::string& path, std::string_view event, const std::string& reason,
           TimePoint now);

  // As Add of a hit; hits in a row become one event with a count.
  void Hit(const std::string& path, TimePoint now);

  // Why `wanted`, which is neither resident nor loading, has to be loaded.
  [[nodiscard]] MissReason ExplainMiss(const Wanted& wanted, TimePoint now) const;

  // Oldest first; empty for a path nobody asked for.
  [[nodiscard]] std::vector<HistoryEvent> Of(const std::string& path, TimePoint now) const;

  // The path last seen with this id, or with this name; else empty.
  [[nodiscard]] std::string PathOf(const ModelId& id) const;
  [[nodiscard]] std::string PathOfName(std::string_view name) const;

  [[nodiscard]] std::size_t path_count() const { return records_.size(); }

 private:
  struct Event {
    TimePoint at;
    std::string event;
    std::string reason;
    std::uint64_t repeats = 1;
  };
  enum class Fate : std::uint8_t { kUnknown, kEvicted, kFailed };
  // The last load of the record's files with these options.
  struct Attempt {
    LoadOptions options;
    ModelId id;
    Fate fate = Fate::kUnknown;
    std::string fate_reason;
    TimePoint fate_at;
  };
  struct Record {
    std::string path;
    std::string name;
    std::deque<Event> events;
    std::vector<FileIdentity> files;
    std::deque<Attempt> attempts;
  };

  Record& Touch(const std::string& path);
  static void Append(Record& record, Event event);
  static const Attempt* FindAttempt(const Record& record, const LoadOptions& options);
  void Forget(const Record& record, const Attempt& attempt);
  static void Decide(Record& record, Attempt outcome);
  [[nodiscard]] const Record* Find(const Wanted& wanted) const;

  std::list<Record> records_;  // most recently touched first
  std::unordered_map<std::string, std::list<Record>::iterator> by_path_;
  std::unordered_map<ModelId, std::string> path_of_id_;
};

}  // namespace modelcache
