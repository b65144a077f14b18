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
    path_of_id_.erase(oldest.id);
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

void History::Load(const Wanted& wanted, std::string_view reason, TimePoint now) {
  Record& record = Touch(wanted.path);
  path_of_id_.erase(record.id);
  path_of_id_[wanted.id] = wanted.path;
  record.id = wanted.id;
  record.files = wanted.files;
  record.options = wanted.options;
  record.name = wanted.name;
  record.fate = Fate::kUnknown;
  Append(record, Event{now, "miss", std::string(reason)});
}

void History::Failed(const std::string& path, const std::string& message, TimePoint now) {
  Record& record = Touch(path);
  record.fate = Fate::kFailed;
  record.fate_reason = message;
  record.fate_at = now;
  Append(record, Event{now, "failed", message});
}

void History::Evicted(const std::string& path, const std::string& why, TimePoint now) {
  Record& record = Touch(path);
  record.fate = Fate::kEvicted;
  record.fate_reason = why;
  record.fate_at = now;
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
  if (record == nullptr || record->files.empty()) {
    return {MissKind::kNeverLoaded, "never loaded"};
  }
  if (!SameFiles(record->files, wanted.files)) {
    return {MissKind::kFileChanged, "file changed: " + DescribeChange(record->files, wanted.files)};
  }
  if (record->options != wanted.options) {
    return {MissKind::kOtherOptions, "never loaded with format " + wanted.options.format +
                                         " on device " + wanted.options.device};
  }
  const std::string when = Ago(record->fate_at, now);
  if (record->fate == Fate::kEvicted) {
    return {MissKind::kEvicted, "evicted " + when + ": " + record->fate_reason};
  }
  if (record->fate == Fate::kFailed) {
    return {MissKind::kFailedBefore, "failed " + when + ": " + record->fate_reason};
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
