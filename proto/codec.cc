// JSON bodies: one Write and one Read per message, over a reader that remembers its first error.
#include "proto/codec.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

namespace modelcache {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxNestedJson = 16;  // bodies are flat; deeper ones are hostile

// A struct with a Members function of its own, as opposed to text, numbers and ids.
template <typename T>
struct IsId : std::false_type {};
template <typename Tag>
struct IsId<Id128<Tag>> : std::true_type {};
template <typename T>
concept Struct = std::is_class_v<T> && !std::is_same_v<T, std::string> && !IsId<T>::value;

// Members of one object. A member that is missing keeps the default of the struct; one of the wrong
// type or range sets the error, after which nothing else is read.
class Reader {
 public:
  explicit Reader(const Json& json, std::string where = "")
      : json_(json), where_(std::move(where)) {
    Expect(json_.is_object(), "", "an object");
  }

  template <typename T>
  Reader& Member(const char* name, T& out) {
    if (const auto found = json_.find(name); !error_ && found != json_.end()) {
      Read(*found, name, out);
    }
    return *this;
  }

  // As Member, but the member must be there.
  template <typename T>
  Reader& Required(const char* name, T& out) {
    Expect(error_ || json_.contains(name), name, "to be present");
    return Member(name, out);
  }

  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

 private:
  // Remembers what was wrong unless `holds`; gives `holds` back.
  bool Expect(bool holds, std::string_view name, std::string_view expected) {
    if (!holds) {
      std::string message = "message member '" + PathOf(name) + "': expected ";
      error_ = Error{ErrorCode::kProtocol, message.append(expected), 0};
    }
    return holds;
  }

  [[nodiscard]] std::string PathOf(std::string_view name) const {
    std::string path = where_;
    return path.append(where_.empty() || name.empty() ? "" : ".").append(name);
  }

  void Read(const Json& json, std::string_view name, std::string& out) {
    if (Expect(json.is_string(), name, "a string")) {
      out = json.get_ref<const std::string&>();
    }
  }

  void Read(const Json& json, std::string_view name, bool& out) {
    if (Expect(json.is_boolean(), name, "true or false")) {
      out = json.get<bool>();
    }
  }

  void Read(const Json& json, std::string_view name, double& out) {
    if (Expect(json.is_number(), name, "a number")) {
      out = json.get<double>();
    }
  }

  template <typename T>
  requires std::is_integral_v<T>
  void Read(const Json& json, std::string_view name, T& out) {
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
    if (json.is_number_unsigned() && json.get<std::uint64_t>() <= kMost) {
      out = static_cast<T>(json.get<std::uint64_t>());
      return;
    }
    if constexpr (std::is_signed_v<T>) {
      if (json.is_number_integer() && !json.is_number_unsigned() &&
          json.get<std::int64_t>() >= std::numeric_limits<T>::min()) {
        out = static_cast<T>(json.get<std::int64_t>());
        return;
      }
    }
    Expect(false, name,
           std::string(std::is_signed_v<T> ? "an integer" : "a non-negative integer") +
               " of at most " + std::to_string(kMost));
  }

  template <typename Tag>
  void Read(const Json& json, std::string_view name, Id128<Tag>& out) {
    const auto id =
        json.is_string() ? Id128<Tag>::FromHex(json.get_ref<const std::string&>()) : std::nullopt;
    if (Expect(id.has_value(), name, "32 hexadecimal digits")) {
      out = *id;
    }
  }

  void Read(const Json& json, std::string_view name, JobKind& out) {
    std::uint8_t number = 0;
    Read(json, name, number);
    const bool known = number >= 1 && number <= static_cast<std::uint8_t>(JobKind::kCollapse);
    if (!error_ && Expect(known, name, "a job kind from 1 to 3, found " + std::to_string(number))) {
      out = static_cast<JobKind>(number);
    }
  }

  void Read(const Json& json, std::string_view name, ErrorCode& out) {
    std::uint16_t number = 0;
    Read(json, name, number);
    out = static_cast<ErrorCode>(number);  // a code of a newer peer prints as "unknown"
  }

  template <typename T>
  void Read(const Json& json, std::string_view name, std::vector<T>& out) {
    if (!Expect(json.is_array(), name, "an array")) {
      return;
    }
    out.clear();
    out.reserve(json.size());
    for (const Json& element : json) {
      const std::string position = "[" + std::to_string(out.size()) + "]";
      Read(element, std::string(name) + position, out.emplace_back());
      if (error_) {
        return;
      }
    }
  }

  template <typename T>
  void Read(const Json& json, std::string_view name, std::optional<T>& out) {
    Read(json, name, out.emplace());
  }

  template <Struct T>
  void Read(const Json& json, std::string_view name, T& out);

  const Json& json_;
  std::string where_;
  std::optional<Error> error_;
};

// Each struct's members, once, for both directions: `a` is a Reader or a Writer.
void Members(auto& a, HelloRequest& m) {
  a.Required("min_version", m.min_version).Required("max_version", m.max_version);
  a.Member("program", m.program);
}
void Members(auto& a, HelloReply& m) {
  a.Required("version", m.version).Member("daemon_version", m.daemon_version);
  a.Required("daemon_pid", m.daemon_pid).Member("pid_namespace", m.pid_namespace);
}
void Members(auto& a, ErrorReply& m) {
  a.Required("code", m.code).Member("message", m.message).Member("errno", m.errno_value);
  a.Member("detail", m.detail);
}
void Members(auto&, EmptyReply&) {}
void Members(auto& a, FileRef& m) { a.Required("name", m.name).Member("path", m.path); }
void Members(auto& a, CallRequest& m) {
  a.Required("key", m.key).Member("name", m.name).Required("arguments", m.arguments);
  a.Member("environment", m.environment).Required("folder", m.folder);
  a.Member("stale", m.stale).Member("stale_reason", m.stale_reason);
}
void Members(auto& a, OpenRequest& m) {
  a.Member("files", m.files).Member("model", m.model).Member("call", m.call);
  a.Member("name", m.name);
  a.Member("format", m.format).Member("device", m.device).Member("pin", m.pin);
  a.Member("count_hit", m.count_hit);
  a.Member("want_descriptors", m.want_descriptors).Member("want_progress", m.want_progress);
  a.Member("timeout_ms", m.timeout_ms);
}
void Members(auto& a, ArenaRef& m) {
  a.Required("id", m.id).Required("fd", m.fd).Required("inode", m.inode);
  a.Required("size_bytes", m.size_bytes);
}
void Members(auto& a, OpenReply& m) {
  a.Required("model_id", m.model_id).Member("name", m.name).Required("lease", m.lease);
  a.Member("hit", m.hit).Member("reason", m.reason).Member("load_seconds", m.load_seconds);
  a.Required("arenas", m.arenas);
}
void Members(auto& a, ReleaseRequest& m) { a.Required("lease", m.lease); }
void Members(auto& a, ArenaDescriptorsRequest& m) {
  a.Required("lease", m.lease).Required("first", m.first).Required("count", m.count);
}
void Members(auto& a, ProgressEvent& m) {
  a.Required("done_bytes", m.done_bytes).Required("total_bytes", m.total_bytes);
}
void Members(auto& a, ModelRequest& m) {
  a.Required("model", m.model).Member("timeout_ms", m.timeout_ms);
}
void Members(auto& a, PinRequest& m) { a.Required("model", m.model).Required("pinned", m.pinned); }
void Members(auto& a, ModelInfo& m) {
  a.Required("id", m.id).Member("name", m.name).Member("path", m.path).Member("format", m.format);
  a.Member("state", m.state).Member("tensors", m.tensors).Member("storages", m.storages);
  a.Member("arenas", m.arenas).Member("storage_bytes", m.storage_bytes);
  a.Member("resident_bytes", m.resident_bytes).Member("borrowed_bytes", m.borrowed_bytes);
  a.Member("leases", m.leases).Member("pinned", m.pinned).Member("hits", m.hits);
  a.Member("load_seconds", m.load_seconds).Member("idle_seconds", m.idle_seconds);
}
void Members(auto& a, ListReply& m) { a.Required("models", m.models); }
void Members(auto& a, StatusReply& m) {
  a.Member("daemon_pid", m.daemon_pid).Member("version", m.version).Member("socket", m.socket);
  a.Member("memory_budget_bytes", m.memory_budget_bytes).Member("arena_bytes", m.arena_bytes);
  a.Member("resident_bytes", m.resident_bytes).Member("reserved_bytes", m.reserved_bytes);
  a.Member("entries", m.entries).Member("loading", m.loading).Member("loads", m.loads);
  a.Member("failed_loads", m.failed_loads).Member("hits", m.hits).Member("misses", m.misses);
  a.Member("evictions", m.evictions).Member("leases", m.leases).Member("clients", m.clients);
  a.Member("uptime_seconds", m.uptime_seconds);
}
void Members(auto& a, HistoryEvent& m) {
  a.Member("seconds_ago", m.seconds_ago).Required("event", m.event).Member("reason", m.reason);
}
void Members(auto& a, WhyReply& m) {
  a.Member("model", m.model).Member("state", m.state).Member("history", m.history);
}
void Members(auto& a, VerifyReply& m) {
  a.Required("ok", m.ok).Member("storages", m.storages).Member("bytes", m.bytes);
  a.Member("disk", m.disk).Member("differences", m.differences).Member("memory_ok", m.memory_ok);
}
void Members(auto& a, MetricsReply& m) { a.Required("text", m.text); }
void Members(auto& a, ArenaSpecRef& m) {
  a.Required("id", m.id).Required("size_bytes", m.size_bytes);
}
void Members(auto& a, JobRequest& m) {
  a.Required("kind", m.kind).Member("files", m.files).Member("arenas", m.arenas);
  a.Required("model_id", m.model_id).Member("format", m.format).Member("device", m.device);
  a.Member("arena_max_bytes", m.arena_max_bytes).Member("share", m.share);
}
void Members(auto& a, StorageSample& m) {
  a.Required("storage", m.storage).Required("size_bytes", m.size_bytes);
  a.Required("sample", m.sample);
}
void Members(auto& a, CandidatesRequest& m) { a.Required("storages", m.storages); }
void Members(auto& a, StorageCandidate& m) {
  a.Required("storage", m.storage).Required("arena", m.arena);
  a.Required("offset_bytes", m.offset_bytes);
}
void Members(auto& a, CandidatesReply& m) {
  a.Required("arenas", m.arenas).Required("candidates", m.candidates);
}
void Members(auto& a, ReserveArena& m) {
  a.Required("size_bytes", m.size_bytes).Required("charge_bytes", m.charge_bytes);
}
void Members(auto& a, ReserveRequest& m) {
  a.Required("arenas", m.arenas).Member("borrowed", m.borrowed);
}
void Members(auto& a, ReserveReply& m) { a.Required("arenas", m.arenas); }
void Members(auto& a, CommitRequest& m) { a.Member("bytes_read", m.bytes_read); }

template <Struct T>
void Reader::Read(const Json& json, std::string_view name, T& out) {
  Reader nested(json, PathOf(name));
  if (!nested.error()) {
    Members(nested, out);
  }
  error_ = nested.error();
}

// Builds the JSON of a struct.
class Writer {
 public:
  template <typename T>
  Writer& Member(const char* name, T& value) {
    json_[name] = ToJson(value);
    return *this;
  }
  // Nothing is written as nothing.
  template <typename T>
  Writer& Member(const char* name, std::optional<T>& value) {
    return value ? Member(name, *value) : *this;
  }
  template <typename T>
  Writer& Required(const char* name, T& value) {
    return Member(name, value);
  }

  template <typename T>
  static Json ToJson(T& value) {
    if constexpr (Struct<T>) {
      Writer writer;
      Members(writer, value);
      return std::move(writer.json_);
    } else if constexpr (IsId<T>::value) {
      return value.Hex();
    } else if constexpr (std::is_enum_v<T>) {
      return static_cast<std::underlying_type_t<T>>(value);
    } else {
      return value;
    }
  }
  template <typename T>
  static Json ToJson(std::vector<T>& values) {
    Json array = Json::array();
    for (T& value : values) {
      array.push_back(ToJson(value));
    }
    return array;
  }

 private:
  Json json_ = Json::object();
};

// Rejects text nested deeper than any message, before the parser recurses on its destruction.
bool TooDeep(std::string_view body) {
  std::size_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      i += c == '\\' ? 1 : 0;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxNestedJson) {
        return true;
      }
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}

}  // namespace

ErrorReply ToReply(const Error& error) {
  return ErrorReply{error.code, error.message, error.errno_value, error.detail};
}

Error ToError(ErrorReply reply) {
  return Error{reply.code, std::move(reply.message), reply.errno_value, std::move(reply.detail)};
}

std::string CallPath(const CallKey& key) { return std::string(kCallPrefix) + key.Hex(); }

template <typename Message>
std::string Encode(const Message& message) {
  // Members reads and writes through one signature; a Writer only looks.
  const Json json = Writer::ToJson(const_cast<Message&>(message));
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <typename Message>
Result<Message> Decode(std::string_view body) {
  if (TooDeep(body)) {
    return Error{ErrorCode::kProtocol,
                 "message body is nested deeper than " + std::to_string(kMaxNestedJson), 0};
  }
  const Json json = Json::parse(body, nullptr, false);
  if (json.is_discarded()) {
    return Error{ErrorCode::kProtocol,
                 "message body of " + std::to_string(body.size()) + " bytes is not JSON", 0};
  }
  Reader reader(json);
  Message message{};
  if (!reader.error()) {
    Members(reader, message);
  }
  if (reader.error()) {
    return *reader.error();
  }
  return message;
}

#define MODELCACHE_MESSAGE(Type)                  \
  template std::string Encode<Type>(const Type&); \
  template Result<Type> Decode<Type>(std::string_view)

MODELCACHE_MESSAGE(HelloRequest);
MODELCACHE_MESSAGE(HelloReply);
MODELCACHE_MESSAGE(ErrorReply);
MODELCACHE_MESSAGE(EmptyReply);
MODELCACHE_MESSAGE(OpenRequest);
MODELCACHE_MESSAGE(OpenReply);
MODELCACHE_MESSAGE(ReleaseRequest);
MODELCACHE_MESSAGE(ArenaDescriptorsRequest);
MODELCACHE_MESSAGE(ProgressEvent);
MODELCACHE_MESSAGE(ModelRequest);
MODELCACHE_MESSAGE(PinRequest);
MODELCACHE_MESSAGE(ModelInfo);
MODELCACHE_MESSAGE(ListReply);
MODELCACHE_MESSAGE(StatusReply);
MODELCACHE_MESSAGE(WhyReply);
MODELCACHE_MESSAGE(VerifyReply);
MODELCACHE_MESSAGE(MetricsReply);
MODELCACHE_MESSAGE(JobRequest);
MODELCACHE_MESSAGE(CandidatesRequest);
MODELCACHE_MESSAGE(CandidatesReply);
MODELCACHE_MESSAGE(ReserveRequest);
MODELCACHE_MESSAGE(ReserveReply);
MODELCACHE_MESSAGE(CommitRequest);

#undef MODELCACHE_MESSAGE

}  // namespace modelcache
