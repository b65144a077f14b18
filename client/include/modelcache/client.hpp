// client.hpp: a C++17 wrapper of modelcache.h, header only.
//
//   auto model = modelcache::Open("model.safetensors");
//   if (!model.ok()) { std::cerr << model.error().message << '\n'; return 1; }
//   for (const modelcache::TensorView& tensor : *model) { std::cout << tensor.name() << '\n'; }
//   const float* weight = model->Find("weight").ValueOrThrow().As<float>().ValueOrThrow();
//
// Ownership: Client and Model are handles; copying a Model adds a reference to the same mapped
// memory. A TensorView points into its Model and must not outlive every handle to it.
// Threads: as modelcache.h says. Errors: nothing here throws but Result::ValueOrThrow and what
// the standard library throws when memory runs out.
#pragma once

#include <modelcache/modelcache.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace modelcache {
inline namespace v0 {

// A failure: the status of the C call and the whole message behind it.
struct Failure {
  mc_status status = MC_INTERNAL;
  std::string message;

  // "no_room", "bad_file", …
  [[nodiscard]] std::string_view name() const { return mc_status_text(status); }

  // What the last failing call of this thread left.
  static Failure Last(mc_status status) { return {status, mc_last_error()}; }
};

// A T or a Failure. value(), * and -> REQUIRE ok(); error() REQUIRES !ok().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}            // NOLINT
  Result(Failure failure) : state_(std::in_place_index<1>, std::move(failure)) {}  // NOLINT

  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  [[nodiscard]] T& value() & { return *std::get_if<0>(&state_); }
  [[nodiscard]] const T& value() const& { return *std::get_if<0>(&state_); }
  [[nodiscard]] T&& value() && { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }

  [[nodiscard]] const Failure& error() const { return *std::get_if<1>(&state_); }

  // The value, or std::runtime_error with the message.
  [[nodiscard]] T ValueOrThrow() && {
    if (!ok()) {
      throw std::runtime_error(error().message);
    }
    return std::move(*std::get_if<0>(&state_));
  }

 private:
  std::variant<T, Failure> state_;
};

// A name for messages: control characters, zero bytes included, as \xNN.
inline std::string Shown(std::string_view name) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string shown;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      shown += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
    } else {
      shown += c;
    }
  }
  return shown;
}

// A run of integers that belong to the model.
class Dimensions {
 public:
  Dimensions(const std::int64_t* data, std::size_t size) : data_(data), size_(size) {}
  [[nodiscard]] const std::int64_t* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] const std::int64_t* begin() const { return data_; }
  [[nodiscard]] const std::int64_t* end() const { return data_ + size_; }
  std::int64_t operator[](std::size_t i) const { return data_[i]; }

 private:
  const std::int64_t* data_;
  std::size_t size_;
};

// The dtype of a C++ type; does not compile for others.
template <typename T>
constexpr std::string_view DtypeOf() {
  if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    return sizeof(T) == 4 ? "float32" : "float64";
  } else {
    static_assert(std::is_integral_v<T>, "no dtype is a plain C++ type of this kind");
    constexpr std::string_view kNames[2][4] = {{"uint8", "uint16", "uint32", "uint64"},
                                               {"int8", "int16", "int32", "int64"}};
    constexpr int kSize = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return kNames[std::is_signed_v<T> ? 1 : 0][kSize];
  }
}

// One tensor: where its bytes are and what they mean. Cheap to copy; see the ownership rule above.
class TensorView {
 public:
  explicit TensorView(const mc_tensor& raw) : raw_(raw) {}

  [[nodiscard]] std::string_view name() const {
    return {raw_.name, static_cast<std::size_t>(raw_.name_bytes)};
  }
  [[nodiscard]] std::string_view dtype() const { return mc_dtype_name(raw_.dtype); }
  [[nodiscard]] Dimensions shape() const { return {raw_.shape, raw_.ndim}; }
  [[nodiscard]] Dimensions stride() const { return {raw_.stride, raw_.ndim}; }
  // Product of the shape.
  [[nodiscard]] std::uint64_t count() const {
    std::uint64_t product = 1;
    for (const std::int64_t size : shape()) {
      product *= static_cast<std::uint64_t>(size);
    }
    return product;
  }

  [[nodiscard]] void* data() const { return raw_.data; }

  // data() as T*, for the types C++ itself has. Strides are as they are.
  // Errors: MC_INVALID_ARGUMENT when the tensor's dtype is not T's.
  template <typename T>
  [[nodiscard]] Result<T*> As() const {
    if (dtype() != DtypeOf<T>()) {
      return Failure{MC_INVALID_ARGUMENT, "tensor '" + Shown(name()) + "' is " +
                                              std::string(dtype()) + ", not " +
                                              std::string(DtypeOf<T>())};
    }
    return static_cast<T*>(raw_.data);
  }
  [[nodiscard]] std::uint64_t nbytes() const { return raw_.nbytes; }
  [[nodiscard]] const mc_tensor& raw() const { return raw_; }

 private:
  mc_tensor raw_;
};

struct ModelOptions {
  std::string name;  // display name; the path when empty
  std::string format = "auto";
  std::string device = "cpu";
  bool pin = false;
  std::int64_t timeout_ms = 0;  // 0: $MODELCACHE_LOAD_TIMEOUT, else without limit
  // Called during a cold load in the opening thread; false gives up waiting. Must not throw.
  std::function<bool(std::uint64_t done_bytes, std::uint64_t total_bytes)> progress;
};

// One reference to a mapped model.
class Model {
 public:
  // Takes over one reference.
  explicit Model(mc_model* model) : model_(model) {}
  Model(const Model& other) : model_(mc_model_retain(other.model_)) {}
  Model(Model&& other) noexcept : model_(std::exchange(other.model_, nullptr)) {}
  Model& operator=(Model other) noexcept {
    std::swap(model_, other.model_);
    return *this;
  }
  ~Model() { mc_model_close(model_); }

  [[nodiscard]] mc_model* get() const { return model_; }

  [[nodiscard]] std::size_t size() const {
    return static_cast<std::size_t>(mc_model_tensor_count(model_));
  }

  // Errors: MC_NOT_FOUND.
  [[nodiscard]] Result<TensorView> Find(const std::string& name) const {
    if (name.find('\0') != std::string::npos) {  // would end a C string: "a" is not "a\0b"
      return Failure{MC_NOT_FOUND, "the model has no tensor '" + Shown(name) + "'"};
    }
    mc_tensor raw = {};
    raw.struct_size = sizeof raw;
    const mc_status status = mc_model_tensor_by_name(model_, name.c_str(), &raw);
    return status == MC_OK ? Result<TensorView>(TensorView(raw)) : Failure::Last(status);
  }

  // REQUIRES index < size().
  [[nodiscard]] TensorView At(std::size_t index) const {
    mc_tensor raw = {};
    raw.struct_size = sizeof raw;
    (void)mc_model_tensor_at(model_, index, &raw);
    return TensorView(raw);
  }

  // for (const TensorView& tensor : model): in the order of the file.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = TensorView;
    using difference_type = std::ptrdiff_t;
    using pointer = void;
    using reference = TensorView;

    Iterator(const Model* model, std::size_t index) : model_(model), index_(index) {}
    TensorView operator*() const { return model_->At(index_); }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }
    bool operator!=(const Iterator& other) const { return index_ != other.index_; }

   private:
    const Model* model_;
    std::size_t index_;
  };
  [[nodiscard]] Iterator begin() const { return {this, 0}; }
  [[nodiscard]] Iterator end() const { return {this, size()}; }

  // All tensors in the order of the file.
  [[nodiscard]] std::vector<TensorView> Tensors() const {
    std::vector<TensorView> all;
    const std::size_t count = size();
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      all.push_back(At(i));
    }
    return all;
  }

  // Hit or miss, identity, sizes. The texts belong to the model.
  [[nodiscard]] mc_info Info() const {
    mc_info info = {};
    info.struct_size = sizeof info;
    (void)mc_model_info(model_, &info);
    return info;
  }

  // JSON; belongs to the model.
  [[nodiscard]] std::string_view Metadata() const {
    const char* text = "";
    std::uint64_t bytes = 0;
    (void)mc_model_metadata(model_, &text, &bytes);
    return {text, static_cast<std::size_t>(bytes)};
  }

 private:
  mc_model* model_;
};

struct ConnectOptions {
  std::string socket_path;  // empty: mc_default_socket_path
  std::string daemon_path;  // empty: found by the library
  std::uint32_t autostart = MC_AUTOSTART_DEFAULT;
  std::int64_t timeout_ms = 0;
};

// A connection to the daemon. Move-only.
class Client {
 public:
  static Result<Client> Connect(const ConnectOptions& options = {}) {
    mc_client_options raw = {};
    raw.struct_size = sizeof raw;
    raw.autostart = options.autostart;
    raw.socket_path = options.socket_path.empty() ? nullptr : options.socket_path.c_str();
    raw.daemon_path = options.daemon_path.empty() ? nullptr : options.daemon_path.c_str();
    raw.timeout_ms = options.timeout_ms;
    mc_client* client = nullptr;
    const mc_status status = mc_client_connect(&raw, &client);
    return status == MC_OK ? Result<Client>(Client(client)) : Failure::Last(status);
  }

  [[nodiscard]] mc_client* get() const { return client_.get(); }

  // A file, a folder or an index file; or the files of one model, as mc_model_open takes them.
  // Errors: those of mc_model_open.
  Result<Model> Open(const std::string& path, const ModelOptions& options = {}) {
    return Open(std::vector<std::string>{path}, options);
  }
  Result<Model> Open(const std::vector<std::string>& paths, const ModelOptions& options = {}) {
    std::vector<const char*> raw_paths;
    for (const std::string& path : paths) {
      raw_paths.push_back(path.c_str());
    }
    const mc_open_options raw = ToRaw(options);
    mc_model* model = nullptr;
    const mc_status status =
        mc_model_open(client_.get(), raw_paths.data(), raw_paths.size(), &raw, &model);
    return status == MC_OK ? Result<Model>(Model(model)) : Failure::Last(status);
  }

  // Open({"a", "b"}): without it, a list of two would also pass as one string, from iterators.
  Result<Model> Open(std::initializer_list<const char*> paths, const ModelOptions& options = {}) {
    return Open(std::vector<std::string>(paths.begin(), paths.end()), options);
  }

  // A model that is resident already, by name, id or path. Errors: MC_NOT_FOUND, as Open.
  Result<Model> OpenResident(const std::string& name) {
    mc_model* model = nullptr;
    const mc_status status = mc_model_open_resident(client_.get(), name.c_str(), &model);
    return status == MC_OK ? Result<Model>(Model(model)) : Failure::Last(status);
  }

  // A control request with JSON in and out: the table at mc_call.
  Result<std::string> Call(const std::string& method, const std::string& argument = "") {
    char* reply = nullptr;
    const mc_status status = mc_call(client_.get(), method.c_str(),
                                     argument.empty() ? nullptr : argument.c_str(), &reply);
    if (status != MC_OK) {
      return Failure::Last(status);
    }
    const std::unique_ptr<char, void (*)(void*)> owner(reply, &mc_free);
    return std::string(reply);
  }

 private:
  explicit Client(mc_client* client) : client_(client, &mc_client_close) {}

  // Points into `options`.
  static mc_open_options ToRaw(const ModelOptions& options) {
    mc_open_options raw = {};
    raw.struct_size = sizeof raw;
    raw.flags = options.pin ? static_cast<std::uint32_t>(MC_OPEN_PIN) : 0;
    raw.name = options.name.empty() ? nullptr : options.name.c_str();
    raw.format = options.format.c_str();
    raw.device = options.device.c_str();
    raw.timeout_ms = options.timeout_ms;
    if (options.progress) {
      raw.progress = [](void* user, std::uint64_t done, std::uint64_t total) -> std::int32_t {
        const auto& report = *static_cast<const ModelOptions*>(user);
        return report.progress(done, total) ? 0 : 1;
      };
      raw.progress_user = const_cast<ModelOptions*>(&options);  // read only, in the call above
    }
    return raw;
  }

  std::unique_ptr<mc_client, void (*)(mc_client*)> client_;
};

// Opens over a connection of its own, which the model keeps. Who opens many keeps a Client.
// Errors: those of Client::Connect and Client::Open.
inline Result<Model> Open(const std::string& path, const ModelOptions& options = {}) {
  Result<Client> client = Client::Connect();
  return client.ok() ? client->Open(path, options) : Result<Model>(client.error());
}

}  // namespace v0
}  // namespace modelcache
