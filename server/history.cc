// Bounded event lists per path and the reasons of misses.
#include "server/history.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

namespace modelcache {
namespace {

std::string Ago(TimePoint then, TimePoint now) {
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), "%.1f s ago", Seconds(now - then));
  return text.data();
}

}  // namespace

std::string_view MissKindName(MissKind kind) {
  switch (kind) {
    case MissKind::kNeverLoaded:
      return "never_loaded";
    case MissKind::kFileChanged:
      return "file_changed";
    case MissKind::kEvicted:
      return "evicted";
    case MissKind::kFailedBefore:
      return "failed_before";
    case MissKind::kOtherOptions:
      return "other_options";
    case MissKind::kJoinedLoad:
      return "joined_load";
  }
  return "unknown";
}

History::Record& History::Touch(const std::string& path) {
  auto found = by_path_.find(path);
  if (found != by_path_.end()) {
    records_.splice(records_.begin(), records_, found->second);
    return records_.front();
  }
  if (records_.size() >= kMaxHistoryPaths) {
    const Record& oldest = records_.back();
    for (const Attempt& attempt : oldest.attempts) {
      Forget(oldest, attempt);
    }
    by_path_.erase(oldest.path);
    records_.pop_back();
  }
  records_.push_front(Record{});
  records_.front().path = path;
  by_path_.emplace(path, records_.begin());
  return records_.front();
}

void History::Append(Record& record, Event event) {
  record.events.push_back(std::move(event));
  if (record.events.size() > kMaxHistoryEvents) {
    record.events.pop_front();
  }
}

const History::Attempt* History::FindAttempt(const Record& record, const LoadOptions& options) {
  auto found = std::find_if(record.attempts.begin(), record.attempts.end(),
                            [&](const Attempt& attempt) { return attempt.options == options; });
  return found == record.attempts.end() ? nullptr : &*found;
}

// The id may belong to another path by now.
void History::Forget(const Record& record, const Attempt& attempt) {
  auto found = path_of_id_.find(attempt.id);
  if (found != path_of_id_.end() && found->second == record.path) {
    path_of_id_.erase(found);
  }
}

void History::Decide(Record& record, Attempt outcome) {
  for (Attempt& attempt : record.attempts) {
    if (attempt.options == outcome.options) {
      outcome.id = attempt.id;
      attempt = std::move(outcome);
      return;
    }
  }
}

void History::Load(const Wanted& wanted, std::string_view reason, TimePoint now) {
  Record& record = Touch(wanted.path);
  const bool same_files = SameFiles(record.files, wanted.files);
  std::erase_if(record.attempts, [&](const Attempt& attempt) {
    const bool over = !same_files || attempt.options == wanted.options;
    if (over) {
      Forget(record, attempt);
    }
    return over;
  });
  if (record.attempts.size() >= kMaxHistoryOptions) {
    Forget(record, record.attempts.front());
    record.attempts.pop_front();
  }
  path_of_id_[wanted.id] = wanted.path;
  record.attempts.push_back({wanted.options, wanted.id, Fate::kUnknown, {}, now});
  record.files = wanted.files;
  record.name = wanted.name;
  Append(record, Event{now, "miss", std::string(reason)});
}

void History::Failed(const std::string& path, const LoadOptions& options,
                     const std::string& message, TimePoint now) {
  Record& record = Touch(path);
  Decide(record, {options, {}, Fate::kFailed, message, now});
  Append(record, Event{now, "failed", message});
}

void History::Evicted(const std::string& path, const LoadOptions& options, const std::string& why,
                      TimePoint now) {
  Record& record = Touch(path);
  Decide(record, {options, {}, Fate::kEvicted, why, now});
  Append(record, Event{now, "evict", why});
}

void History::Add(const std::string& path, std::string_view event, const std::string& reason,
                  TimePoint now) {
  Append(Touch(path), Event{now, std::string(event), reason});
}

void History::Hit(const std::string& path, TimePoint now) {
  Record& record = Touch(path);
  if (!record.events.empty() && record.events.back().event == "hit") {
    record.events.back().at = now;
    ++record.events.back().repeats;
    return;
  }
  Append(record, Event{now, "hit", "resident"});
}

const History::Record* History::Find(const Wanted& wanted) const {
  // The id first: the same file may have been asked for by another spelling of its path.
  auto same_id = path_of_id_.find(wanted.id);
  auto found = by_path_.find(same_id != path_of_id_.end() ? same_id->second : wanted.path);
  return found == by_path_.end() ? nullptr : &*found->second;
}

MissReason History::ExplainMiss(const Wanted& wanted, TimePoint now) const {
  const Record* record = Find(wanted);
  if (record == nullptr || record->attempts.empty()) {
    return {MissKind::kNeverLoaded, "never loaded"};
  }
  if (!wanted.stale.empty()) {
    return {MissKind::kFileChanged, wanted.stale};
  }
  if (!SameFiles(record->files, wanted.files)) {
    return {MissKind::kFileChanged, "file changed: " + DescribeChange(record->files, wanted.files)};
  }
  const Attempt* attempt = FindAttempt(*record, wanted.options);
  if (attempt == nullptr) {
    return {MissKind::kOtherOptions, "never loaded with format " + wanted.options.format +
                                         " on device " + wanted.options.device};
  }
  const std::string when = Ago(attempt->fate_at, now);
  if (attempt->fate == Fate::kEvicted) {
    return {MissKind::kEvicted, "evicted " + when + ": " + attempt->fate_reason};
  }
  if (attempt->fate == Fate::kFailed) {
    return {MissKind::kFailedBefore, "failed " + when + ": " + attempt->fate_reason};
  }
  return {MissKind::kNeverLoaded, "never loaded to the end"};
}

std::vector<HistoryEvent> History::Of(const std::string& path, TimePoint now) const {
  std::vector<HistoryEvent> events;
  auto found = by_path_.find(path);
  if (found == by_path_.end()) {
    return events;
  }
  for (const Event& event : found->second->events) {
    std::string reason = event.reason;
    if (event.repeats > 1) {
      reason += ", " + std::to_string(event.repeats) + " times in a row";
    }
    events.push_back({Seconds(now - event.at), event.event, std::move(reason)});
  }
  return events;
}

std::string History::PathOf(const ModelId& id) const {
  auto found = path_of_id_.find(id);
  return found == path_of_id_.end() ? std::string() : found->second;
}

std::string History::PathOfName(std::string_view name) const {
  auto found = std::find_if(records_.begin(), records_.end(),
                            [&](const Record& record) { return record.name == name; });
  return found == records_.end() ? std::string() : found->path;
}

}  // namespace modelcache
