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

// Members of one object. A member that is missing keeps the default of the struct; one of the wrong
// type or range sets the error, after which nothing else is read.
class Reader {
 public:
  explicit Reader(const Json& json, std::string where = "")
      : json_(json), where_(std::move(where)) {
    if (!json_.is_object()) {
      Fail("", "an object");
    }
  }

  template <typename T>
  Reader& Member(const char* name, T& out) {
    if (error_) {
      return *this;
    }
    const auto found = json_.find(name);
    if (found != json_.end() && !ReadValue(*found, name, out) && !error_) {
      Fail(name, "another type");
    }
    return *this;
  }

  // As Member, but the member must be there.
  template <typename T>
  Reader& Required(const char* name, T& out) {
    if (!error_ && json_.find(name) == json_.end()) {
      Fail(name, "to be present");
    }
    return Member(name, out);
  }

  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

  void Fail(const std::string& name, const std::string& expected) {
    const std::string path = where_.empty() ? name : where_ + (name.empty() ? "" : "." + name);
    error_ = Error{ErrorCode::kProtocol, "message member '" + path + "': expected " + expected, 0};
  }

 private:
  bool ReadValue(const Json& json, const char* name, std::string& out) {
    if (!json.is_string()) {
      Fail(name, "a string");
      return false;
    }
    out = json.get_ref<const std::string&>();
    return true;
  }

  bool ReadValue(const Json& json, const char* name, bool& out) {
    if (!json.is_boolean()) {
      Fail(name, "true or false");
      return false;
    }
    out = json.get<bool>();
    return true;
  }

  bool ReadValue(const Json& json, const char* name, double& out) {
    if (!json.is_number()) {
      Fail(name, "a number");
      return false;
    }
    out = json.get<double>();
    return true;
  }

  template <typename T>
  requires std::is_integral_v<T>
  bool ReadValue(const Json& json, const char* name, T& out) {
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
    if (json.is_number_unsigned() && json.get<std::uint64_t>() <= kMost) {
      out = static_cast<T>(json.get<std::uint64_t>());
      return true;
    }
    if constexpr (std::is_signed_v<T>) {
      if (json.is_number_integer() && !json.is_number_unsigned() &&
          json.get<std::int64_t>() >= std::numeric_limits<T>::min()) {
        out = static_cast<T>(json.get<std::int64_t>());
        return true;
      }
    }
    Fail(name, std::string(std::is_signed_v<T> ? "an integer" : "a non-negative integer") +
                   " of at most " + std::to_string(kMost));
    return false;
  }

  template <typename Tag>
  bool ReadValue(const Json& json, const char* name, Id128<Tag>& out) {
    const auto id =
        json.is_string() ? Id128<Tag>::FromHex(json.get_ref<const std::string&>()) : std::nullopt;
    if (!id) {
      Fail(name, "32 hexadecimal digits");
      return false;
    }
    out = *id;
    return true;
  }

  bool ReadValue(const Json& json, const char* name, JobKind& out) {
    std::uint8_t number = 0;
    if (!ReadValue(json, name, number)) {
      return false;
    }
    if (number < 1 || number > static_cast<std::uint8_t>(JobKind::kCollapse)) {
      Fail(name, "a job kind from 1 to 3, found " + std::to_string(number));
      return false;
    }
    out = static_cast<JobKind>(number);
    return true;
  }

  bool ReadValue(const Json& json, const char* name, ErrorCode& out) {
    std::uint16_t number = 0;
    if (!ReadValue(json, name, number)) {
      return false;
    }
    out = static_cast<ErrorCode>(number);  // a code of a newer peer prints as "unknown"
    return true;
  }

  template <typename T>
  bool ReadValue(const Json& json, const char* name, std::vector<T>& out) {
    if (!json.is_array()) {
      Fail(name, "an array");
      return false;
    }
    out.clear();
    out.reserve(json.size());
    for (const Json& element : json) {
      T value{};
      if (!ReadElement(element, std::string(name) + "[" + std::to_string(out.size()) + "]",
                       value)) {
        return false;
      }
      out.push_back(std::move(value));
    }
    return true;
  }

  template <typename T>
  bool ReadValue(const Json& json, const char* name, std::optional<T>& out) {
    return ReadElement(json, name, out.emplace());
  }

  template <typename T>
  bool ReadElement(const Json& json, const std::string& name, T& out);

  const Json& json_;
  std::string where_;
  std::optional<Error> error_;
};

// Each struct's members, once, for both directions. `Archive` is a Reader or a Writer.
template <typename A>
void Members(A& a, HelloRequest& m) {
  a.Required("min_version", m.min_version).Required("max_version", m.max_version);
  a.Member("program", m.program);
}
template <typename A>
void Members(A& a, HelloReply& m) {
  a.Required("version", m.version).Member("daemon_version", m.daemon_version);
  a.Required("daemon_pid", m.daemon_pid).Member("pid_namespace", m.pid_namespace);
}
template <typename A>
void Members(A& a, ErrorReply& m) {
  a.Required("code", m.code).Member("message", m.message).Member("errno", m.errno_value);
  a.Member("detail", m.detail);
}
template <typename A>
void Members(A&, EmptyReply&) {}
template <typename A>
void Members(A& a, FileRef& m) {
  a.Required("name", m.name).Member("path", m.path);
}
template <typename A>
void Members(A& a, CallRequest& m) {
  a.Required("key", m.key).Member("name", m.name).Required("arguments", m.arguments);
  a.Member("environment", m.environment).Required("folder", m.folder);
  a.Member("stale", m.stale).Member("stale_reason", m.stale_reason);
}
template <typename A>
void Members(A& a, OpenRequest& m) {
  a.Member("files", m.files).Member("model", m.model).Member("call", m.call);
  a.Member("name", m.name);
  a.Member("format", m.format).Member("device", m.device).Member("pin", m.pin);
  a.Member("count_hit", m.count_hit);
  a.Member("want_descriptors", m.want_descriptors).Member("want_progress", m.want_progress);
  a.Member("timeout_ms", m.timeout_ms);
}
template <typename A>
void Members(A& a, ArenaRef& m) {
  a.Required("id", m.id).Required("fd", m.fd).Required("inode", m.inode);
  a.Required("size_bytes", m.size_bytes);
}
template <typename A>
void Members(A& a, OpenReply& m) {
  a.Required("model_id", m.model_id).Member("name", m.name).Required("lease", m.lease);
  a.Member("hit", m.hit).Member("reason", m.reason).Member("load_seconds", m.load_seconds);
  a.Required("arenas", m.arenas);
}
template <typename A>
void Members(A& a, ReleaseRequest& m) {
  a.Required("lease", m.lease);
}
template <typename A>
void Members(A& a, ArenaDescriptorsRequest& m) {
  a.Required("lease", m.lease).Required("first", m.first).Required("count", m.count);
}
template <typename A>
void Members(A& a, ProgressEvent& m) {
  a.Required("done_bytes", m.done_bytes).Required("total_bytes", m.total_bytes);
}
template <typename A>
void Members(A& a, LoaderProgressEvent& m) {
  a.Required("done_bytes", m.done_bytes).Required("total_bytes", m.total_bytes);
}
template <typename A>
void Members(A& a, ModelRequest& m) {
  a.Required("model", m.model).Member("timeout_ms", m.timeout_ms);
}
template <typename A>
void Members(A& a, PinRequest& m) {
  a.Required("model", m.model).Required("pinned", m.pinned);
}
template <typename A>
void Members(A& a, ModelInfo& m) {
  a.Required("id", m.id).Member("name", m.name).Member("path", m.path).Member("format", m.format);
  a.Member("state", m.state).Member("tensors", m.tensors).Member("storages", m.storages);
  a.Member("arenas", m.arenas).Member("storage_bytes", m.storage_bytes);
  a.Member("resident_bytes", m.resident_bytes).Member("borrowed_bytes", m.borrowed_bytes);
  a.Member("leases", m.leases).Member("pinned", m.pinned).Member("hits", m.hits);
  a.Member("load_seconds", m.load_seconds).Member("idle_seconds", m.idle_seconds);
}
template <typename A>
void Members(A& a, ListReply& m) {
  a.Required("models", m.models);
}
template <typename A>
void Members(A& a, StatusReply& m) {
  a.Member("daemon_pid", m.daemon_pid).Member("version", m.version).Member("socket", m.socket);
  a.Member("memory_budget_bytes", m.memory_budget_bytes).Member("arena_bytes", m.arena_bytes);
  a.Member("resident_bytes", m.resident_bytes).Member("reserved_bytes", m.reserved_bytes);
  a.Member("entries", m.entries).Member("loading", m.loading).Member("loads", m.loads);
  a.Member("failed_loads", m.failed_loads).Member("hits", m.hits).Member("misses", m.misses);
  a.Member("evictions", m.evictions).Member("leases", m.leases).Member("clients", m.clients);
  a.Member("uptime_seconds", m.uptime_seconds);
}
template <typename A>
void Members(A& a, HistoryEvent& m) {
  a.Member("seconds_ago", m.seconds_ago).Required("event", m.event).Member("reason", m.reason);
}
template <typename A>
void Members(A& a, WhyReply& m) {
  a.Member("model", m.model).Member("state", m.state).Member("history", m.history);
}
template <typename A>
void Members(A& a, VerifyReply& m) {
  a.Required("ok", m.ok).Member("storages", m.storages).Member("bytes", m.bytes);
  a.Member("disk", m.disk).Member("differences", m.differences).Member("memory_ok", m.memory_ok);
}
template <typename A>
void Members(A& a, MetricsReply& m) {
  a.Required("text", m.text);
}
template <typename A>
void Members(A& a, ArenaSpecRef& m) {
  a.Required("id", m.id).Required("size_bytes", m.size_bytes);
}
template <typename A>
void Members(A& a, JobRequest& m) {
  a.Required("kind", m.kind).Member("files", m.files).Member("arenas", m.arenas);
  a.Required("model_id", m.model_id).Member("format", m.format).Member("device", m.device);
  a.Member("arena_max_bytes", m.arena_max_bytes).Member("share", m.share);
}
template <typename A>
void Members(A& a, StorageSample& m) {
  a.Required("storage", m.storage).Required("size_bytes", m.size_bytes);
  a.Required("sample", m.sample);
}
template <typename A>
void Members(A& a, CandidatesRequest& m) {
  a.Required("storages", m.storages);
}
template <typename A>
void Members(A& a, StorageCandidate& m) {
  a.Required("storage", m.storage).Required("arena", m.arena);
  a.Required("offset_bytes", m.offset_bytes);
}
template <typename A>
void Members(A& a, CandidatesReply& m) {
  a.Required("arenas", m.arenas).Required("candidates", m.candidates);
}
template <typename A>
void Members(A& a, ReserveArena& m) {
  a.Required("size_bytes", m.size_bytes).Required("charge_bytes", m.charge_bytes);
}
template <typename A>
void Members(A& a, ReserveRequest& m) {
  a.Required("arenas", m.arenas).Member("borrowed", m.borrowed);
}
template <typename A>
void Members(A& a, ReserveReply& m) {
  a.Required("arenas", m.arenas);
}
template <typename A>
void Members(A& a, CommitRequest& m) {
  a.Member("bytes_read", m.bytes_read);
}

// A struct with a Members function of its own, as opposed to text, numbers and ids.
template <typename T>
struct IsId : std::false_type {};
template <typename Tag>
struct IsId<Id128<Tag>> : std::true_type {};
template <typename T>
concept Struct = std::is_class_v<T> && !std::is_same_v<T, std::string> && !IsId<T>::value;

template <typename T>
bool Reader::ReadElement(const Json& json, const std::string& name, T& out) {
  if constexpr (Struct<T>) {
    Reader nested(json, where_.empty() ? name : where_ + "." + name);
    if (!nested.error()) {
      Members(nested, out);
    }
    error_ = nested.error();
    return !error_;
  } else {
    return ReadValue(json, name.c_str(), out);
  }
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
MODELCACHE_MESSAGE(LoaderProgressEvent);

#undef MODELCACHE_MESSAGE

}  // namespace modelcache
