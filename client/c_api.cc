// The C functions: arguments checked, exceptions stopped, the last error kept.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "client/control.h"
#include "client/core.h"
#include "client/dlpack.h"
#include "client/include/modelcache/modelcache.h"
#include "common/c_boundary.h"
#include "common/error.h"
#include "common/socket_folder.h"
#include "common/utf8.h"
#include "proto/dtype.h"
#include "proto/manifest.h"
#include "proto/version.h"

using namespace modelcache;  // NOLINT(google-build-using-namespace): this file is the C side of it

static_assert(sizeof(mc_tensor_record) == sizeof(TensorRecord));
static_assert(offsetof(mc_tensor_record, nbytes) == offsetof(TensorRecord, extent_bytes));
static_assert(offsetof(mc_tensor_record, dtype) == offsetof(TensorRecord, dtype));
static_assert(offsetof(mc_tensor_record, flags) == offsetof(TensorRecord, flags));
static_assert(sizeof(mc_storage_record) == sizeof(StorageRecord));
static_assert(offsetof(mc_storage_record, nbytes) == offsetof(StorageRecord, size_bytes));
static_assert(MC_ALREADY_RUNNING == static_cast<int>(ErrorCode::kAlreadyRunning));
static_assert(MC_CORRUPT == static_cast<int>(ErrorCode::kCorrupt));
static_assert(MC_TENSOR_PARAMETER == kTensorParameter);
static_assert(MC_NO_STORAGE == kNoStorage);

struct mc_client {
  std::unique_ptr<Client> client;
  HelloReply hello;  // of the first connection; mc_client_get_info hands out its texts
};

struct mc_model {
  std::unique_ptr<Model> model;
  std::atomic<std::uint64_t> references{1};
};

namespace {

mc_status GiveText(const std::string& text, char** out) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) {
    return Fail(Error{ErrorCode::kLimit, "out of memory", 0});
  }
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return MC_OK;
}

std::string TextOr(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

bool ToOptions(const mc_client_options& from, ClientOptions& to) {
  if (from.timeout_ms < 0 || from.autostart > MC_AUTOSTART_ALWAYS) {
    return false;
  }
  to.socket_path = TextOr(from.socket_path, "");
  to.daemon_path = TextOr(from.daemon_path, "");
  to.autostart = static_cast<Autostart>(from.autostart);
  if (from.timeout_ms > 0) {
    to.timeout = std::chrono::milliseconds(std::min<std::int64_t>(from.timeout_ms, 1LL << 40));
  }
  return true;
}

bool ToOptions(const mc_open_options& from, OpenOptions& to) {
  if (from.timeout_ms < 0 || (from.flags & ~static_cast<std::uint32_t>(MC_OPEN_PIN)) != 0) {
    return false;
  }
  to.name = TextOr(from.name, "");
  to.format = TextOr(from.format, "auto");
  to.device = TextOr(from.device, "cpu");
  to.pin = (from.flags & MC_OPEN_PIN) != 0;
  to.timeout_ms = static_cast<std::uint64_t>(from.timeout_ms);
  if (from.progress != nullptr) {
    to.progress = [call = from.progress, user = from.progress_user](const ProgressEvent& event) {
      return call(user, event.done_bytes, event.total_bytes) == 0;
    };
  }
  return true;
}

// What an entry is opened with like any model.
mc_open_options OpenPart(const mc_entry_options& from) {
  mc_open_options options = {};
  options.flags = from.flags;
  options.timeout_ms = from.timeout_ms;
  options.progress = from.progress;
  options.progress_user = from.progress_user;
  return options;
}

bool ToTexts(const char* const* from, std::size_t count, std::vector<std::string>& to) {
  if (count > 0 && (from == nullptr || std::find(from, from + count, nullptr) != from + count)) {
    return false;
  }
  to.assign(from, from + count);
  return true;
}

bool ToCall(const mc_entry_options& from, CallRequest& to) {
  const auto key = CallKey::FromHex(TextOr(from.key, ""));
  if (!key || (from.payload == nullptr && from.payload_bytes > 0) ||
      !ToTexts(from.arguments, from.argument_count, to.arguments) ||
      !ToTexts(from.environment, from.environment_count, to.environment)) {
    return false;
  }
  to.key = *key;
  to.name = TextOr(from.name, "");
  to.folder = TextOr(from.folder, "");
  to.stale_reason = TextOr(from.stale_reason, "");
  if (from.stale != nullptr) {
    to.stale = ModelId::FromHex(from.stale);
    return to.stale.has_value();
  }
  return true;
}

mc_status GiveModel(Result<std::unique_ptr<Model>> model, mc_model** out) {
  if (!model.ok()) {
    return Fail(model.error());
  }
  auto handle = std::make_unique<mc_model>();
  handle->model = std::move(*model);
  *out = handle.release();
  return MC_OK;
}

mc_tensor Describe(const Model& model, std::uint32_t index) {
  const Manifest& manifest = model.manifest();
  const TensorRecord& record = manifest.tensors()[index];
  mc_tensor tensor = {};
  tensor.dtype = record.dtype;
  tensor.name = manifest.Name(record).data();
  tensor.name_bytes = record.name_bytes;
  tensor.shape = manifest.Shape(record).data();
  tensor.stride = manifest.Stride(record).data();
  tensor.ndim = record.dimension_count;
  tensor.flags = record.flags;
  tensor.nbytes = record.extent_bytes;
  tensor.storage = record.storage;
  tensor.index = index;
  if (record.storage != kNoStorage) {
    tensor.storage_data = model.storage_data()[record.storage];
    tensor.storage_bytes = manifest.storages()[record.storage].size_bytes;
    tensor.offset_bytes = record.data_offset_bytes;
    tensor.data = static_cast<std::byte*>(tensor.storage_data) + record.data_offset_bytes;
  }
  return tensor;
}

mc_status NoSuch(const char* what, std::uint64_t index, std::uint64_t count) {
  return Fail(Error{ErrorCode::kNotFound,
                    std::string("no ") + what + " " + std::to_string(index) + ", the model has " +
                        std::to_string(count),
                    0});
}

// Runs `body` with the model's TorchScript description.
template <typename Body>
mc_status WithScript(const mc_model* model, const Body& body) {
  return Guarded([&] {
    if (model == nullptr) {
      return FailArgument("the model is NULL");
    }
    Result<const ModelDescription*> description = model->model->description();
    if (!description.ok()) {
      return Fail(description.error());
    }
    if (!(*description)->script) {
      return Fail(Error{ErrorCode::kNotFound, "the model is no TorchScript module", 0});
    }
    return body(*(*description)->script);
  });
}

}  // namespace

const char* mc_status_text(mc_status status) {
  const bool known = status >= 0 && status <= UINT16_MAX;
  return ErrorCodeName(known ? static_cast<ErrorCode>(status) : ErrorCode{UINT16_MAX}).data();
}

const char* mc_last_error(void) { return Last().message.c_str(); }

int32_t mc_last_errno(void) { return Last().errno_value; }

const char* mc_last_error_detail(void) { return Last().detail.c_str(); }

const char* mc_version(void) { return kProductVersion; }

void mc_free(void* text) { std::free(text); }

uint32_t mc_dtype_count(void) { return kDtypeCount; }

const char* mc_dtype_name(uint32_t dtype) {
  const std::string_view name =
      dtype <= kDtypeCount ? DtypeName(static_cast<Dtype>(dtype)) : std::string_view();
  return name.empty() ? "" : name.data();
}

uint32_t mc_dtype_bits(uint32_t dtype) {
  return dtype <= kDtypeCount ? DtypeBits(static_cast<Dtype>(dtype)) : 0;
}

mc_status mc_client_connect(const mc_client_options* options, mc_client** out) {
  return Guarded([&] {
    mc_client_options given = {};
    ClientOptions converted;
    if (out == nullptr || !CopyIn(options, given) || !ToOptions(given, converted)) {
      return FailArgument("mc_client_connect: out is NULL or an option is out of range");
    }
    Result<std::unique_ptr<Client>> client = Client::Connect(std::move(converted));
    if (!client.ok()) {
      return Fail(client.error());
    }
    Result<HelloReply> hello = (*client)->Hello();
    if (!hello.ok()) {
      return Fail(hello.error());
    }
    auto handle = std::make_unique<mc_client>();
    handle->client = std::move(*client);
    handle->hello = std::move(*hello);
    *out = handle.release();
    return static_cast<mc_status>(MC_OK);
  });
}

void mc_client_close(mc_client* client) { delete client; }

mc_status mc_client_get_info(mc_client* client, mc_client_info* out) {
  return Guarded([&] {
    if (client == nullptr || out == nullptr) {
      return FailArgument("mc_client_get_info: an argument is NULL");
    }
    mc_client_info info = {};
    info.protocol_version = client->hello.version;
    info.socket_path = client->client->socket_path().c_str();
    info.daemon_version = client->hello.daemon_version.c_str();
    info.daemon_pid = client->hello.daemon_pid;
    info.started = client->client->started_daemon() ? 1 : 0;
    return CopyOut(info, out);
  });
}

mc_status mc_default_socket_path(char** out) {
  return Guarded([&] {
    if (out == nullptr) {
      return FailArgument("mc_default_socket_path: out is NULL");
    }
    Result<std::string> path = DefaultSocketPath();
    return path.ok() ? GiveText(*path, out) : Fail(path.error());
  });
}

mc_status mc_call(mc_client* client, const char* method, const char* argument, char** reply) {
  return Guarded([&] {
    if (client == nullptr || method == nullptr || reply == nullptr) {
      return FailArgument("mc_call: an argument is NULL");
    }
    Result<std::string> text = CallControl(*client->client, method, TextOr(argument, ""));
    return text.ok() ? GiveText(*text, reply) : Fail(text.error());
  });
}

mc_status mc_model_open(mc_client* client, const char* const* paths, size_t path_count,
                        const mc_open_options* options, mc_model** out) {
  return Guarded([&] {
    mc_open_options given = {};
    OpenOptions converted;
    if (client == nullptr || paths == nullptr || out == nullptr ||
        std::find(paths, paths + path_count, nullptr) != paths + path_count) {
      return FailArgument("mc_model_open: an argument is NULL");
    }
    if (!CopyIn(options, given) || !ToOptions(given, converted)) {
      return FailArgument("mc_model_open: an option is out of range");
    }
    return GiveModel(client->client->Open({paths, paths + path_count}, converted), out);
  });
}

mc_status mc_model_open_resident(mc_client* client, const char* model, mc_model** out) {
  return Guarded([&] {
    if (client == nullptr || model == nullptr || out == nullptr) {
      return FailArgument("mc_model_open_resident: an argument is NULL");
    }
    return GiveModel(client->client->OpenResident(model), out);
  });
}

mc_status mc_model_is_written(const mc_model* model, uint32_t* written) {
  return Guarded([&] {
    if (model == nullptr || written == nullptr) {
      return FailArgument("mc_model_is_written: an argument is NULL");
    }
    Result<bool> any = model->model->written();
    if (!any.ok()) {
      return Fail(any.error());
    }
    *written = *any ? 1 : 0;
    return static_cast<mc_status>(MC_OK);
  });
}

mc_status mc_entry_find(mc_client* client, const char* key, mc_model** out) {
  return Guarded([&] {
    const auto parsed = CallKey::FromHex(TextOr(key, ""));
    if (client == nullptr || out == nullptr || !parsed) {
      return FailArgument("mc_entry_find: an argument is NULL or the key is not 32 digits");
    }
    return GiveModel(client->client->FindCall(*parsed), out);
  });
}

mc_status mc_entry_make(mc_client* client, const mc_entry_options* options, mc_model** out) {
  return Guarded([&] {
    mc_entry_options given = {};
    OpenOptions converted;
    CallRequest call;
    if (client == nullptr || options == nullptr || out == nullptr) {
      return FailArgument("mc_entry_make: an argument is NULL");
    }
    if (!CopyIn(options, given) || !ToOptions(OpenPart(given), converted) || !ToCall(given, call)) {
      return FailArgument("mc_entry_make: an option is missing or out of range");
    }
    const std::span payload(static_cast<const std::byte*>(given.payload), given.payload_bytes);
    return GiveModel(client->client->MakeCall(std::move(call), payload, converted), out);
  });
}

mc_model* mc_model_retain(mc_model* model) {
  if (model != nullptr) {
    model->references.fetch_add(1, std::memory_order_relaxed);
  }
  return model;
}

void mc_model_close(mc_model* model) {
  if (model != nullptr && model->references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    (void)Guarded([&] {
      delete model;
      return static_cast<mc_status>(MC_OK);
    });
  }
}

mc_status mc_model_info(const mc_model* model, mc_info* out) {
  return Guarded([&] {
    if (model == nullptr || out == nullptr) {
      return FailArgument("mc_model_info: an argument is NULL");
    }
    const OpenReply& reply = model->model->reply();
    const Manifest& manifest = model->model->manifest();
    mc_info info = {};
    info.hit = reply.hit ? 1 : 0;
    info.reason = reply.reason.c_str();
    info.name = reply.name.c_str();
    info.model_id = model->model->id_text().c_str();
    info.format = model->model->format().c_str();
    info.lease = reply.lease;
    info.load_seconds = reply.load_seconds;
    info.payload_bytes = model->model->payload_bytes();
    info.arena_count = static_cast<std::uint32_t>(manifest.arenas().size());
    info.tensor_count = static_cast<std::uint32_t>(manifest.tensors().size());
    info.storage_count = static_cast<std::uint32_t>(manifest.storages().size());
    return CopyOut(info, out);
  });
}

mc_status mc_model_metadata(const mc_model* model, const char** text, uint64_t* text_bytes) {
  return Guarded([&] {
    if (model == nullptr || text == nullptr || text_bytes == nullptr) {
      return FailArgument("mc_model_metadata: an argument is NULL");
    }
    const std::string_view json = model->model->manifest().metadata_json();
    *text = json.data();
    *text_bytes = json.size();
    return static_cast<mc_status>(MC_OK);
  });
}

uint64_t mc_model_tensor_count(const mc_model* model) {
  return model == nullptr ? 0 : model->model->manifest().tensors().size();
}

mc_status mc_model_tensor_at(const mc_model* model, uint64_t index, mc_tensor* out) {
  return Guarded([&] {
    if (model == nullptr || out == nullptr) {
      return FailArgument("mc_model_tensor_at: an argument is NULL");
    }
    const std::uint64_t count = mc_model_tensor_count(model);
    return index < count ? CopyOut(Describe(*model->model, static_cast<std::uint32_t>(index)), out)
                         : NoSuch("tensor", index, count);
  });
}

mc_status mc_model_tensor_by_name(const mc_model* model, const char* name, mc_tensor* out) {
  return Guarded([&] {
    if (model == nullptr || name == nullptr || out == nullptr) {
      return FailArgument("mc_model_tensor_by_name: an argument is NULL");
    }
    const auto index = model->model->manifest().Find(name);
    return index ? CopyOut(Describe(*model->model, *index), out)
                 : Fail(Error{ErrorCode::kNotFound,
                              "the model has no tensor '" + Printable(name) + "'", 0});
  });
}

uint64_t mc_model_storage_count(const mc_model* model) {
  return model == nullptr ? 0 : model->model->manifest().storages().size();
}

mc_status mc_model_storage_at(const mc_model* model, uint64_t index, mc_storage* out) {
  return Guarded([&] {
    if (model == nullptr || out == nullptr) {
      return FailArgument("mc_model_storage_at: an argument is NULL");
    }
    const std::uint64_t count = mc_model_storage_count(model);
    if (index >= count) {
      return NoSuch("storage", index, count);
    }
    const StorageRecord& record = model->model->manifest().storages()[index];
    mc_storage storage = {};
    storage.arena = record.arena;
    storage.data = model->model->storage_data()[index];
    storage.nbytes = record.size_bytes;
    storage.offset_bytes = record.offset_bytes;
    return CopyOut(storage, out);
  });
}

mc_status mc_model_tables(const mc_model* model, mc_tables* out) {
  return Guarded([&] {
    if (model == nullptr || out == nullptr) {
      return FailArgument("mc_model_tables: an argument is NULL");
    }
    const Manifest& manifest = model->model->manifest();
    mc_tables tables = {};
    tables.tensor_count = static_cast<std::uint32_t>(manifest.tensors().size());
    tables.storage_count = static_cast<std::uint32_t>(manifest.storages().size());
    tables.base = reinterpret_cast<const char*>(manifest.bytes().data());
    tables.base_bytes = manifest.bytes().size();
    tables.tensors = reinterpret_cast<const mc_tensor_record*>(manifest.tensors().data());
    tables.storages = reinterpret_cast<const mc_storage_record*>(manifest.storages().data());
    tables.storage_data = model->model->storage_data().data();
    tables.dimensions = manifest.dimensions().data();
    tables.dimension_count = manifest.dimensions().size();
    return CopyOut(tables, out);
  });
}

mc_status mc_model_dlpack(mc_model* model, uint64_t count, void** out) {
  return Guarded([&] {
    mc_tables tables = {};
    tables.struct_size = sizeof tables;
    if (const mc_status status = mc_model_tables(model, &tables); status != MC_OK) {
      return status;
    }
    if (out == nullptr || count != tables.tensor_count) {
      return FailArgument("mc_model_dlpack: the count is not that of the tensors, or out is NULL");
    }
    MakeDlpack(model, tables, out);
    return static_cast<mc_status>(MC_OK);
  });
}

mc_status mc_model_quantization(const mc_model* model, uint64_t index, mc_quantization* out) {
  return Guarded([&] {
    if (model == nullptr || out == nullptr) {
      return FailArgument("mc_model_quantization: an argument is NULL");
    }
    Result<const ModelDescription*> description = model->model->description();
    if (!description.ok()) {
      return Fail(description.error());
    }
    const auto& all = (*description)->quantization;
    const auto found =
        index <= UINT32_MAX ? all.find(static_cast<std::uint32_t>(index)) : all.end();
    if (found == all.end()) {
      return Fail(
          Error{ErrorCode::kNotFound, "tensor " + std::to_string(index) + " has no quantizer", 0});
    }
    const Quantizer& known = found->second;
    mc_quantization quantization = {};
    quantization.per_channel = known.per_channel ? 1 : 0;
    quantization.float_qparams = known.float_qparams ? 1 : 0;
    quantization.scale = known.scales.front();
    quantization.zero_point = static_cast<std::int64_t>(known.zero_points.front());
    quantization.axis = known.axis;
    quantization.count = known.scales.size();
    quantization.scales = known.scales.data();
    quantization.zero_points = known.zero_points.data();
    return CopyOut(quantization, out);
  });
}

mc_status mc_model_script(const mc_model* model, mc_script* out) {
  return WithScript(model, [&](const Script& known) {
    if (out == nullptr) {
      return FailArgument("mc_model_script: out is NULL");
    }
    mc_script script = {};
    script.archive = known.archive;
    script.record_count = static_cast<std::uint32_t>(known.records.size());
    script.extra_file_count = static_cast<std::uint32_t>(known.extra_files.size());
    return CopyOut(script, out);
  });
}

mc_status mc_model_script_record_at(const mc_model* model, uint64_t index, const char** name,
                                    uint32_t* storage) {
  return WithScript(model, [&](const Script& script) {
    if (name == nullptr || storage == nullptr) {
      return FailArgument("mc_model_script_record_at: an argument is NULL");
    }
    if (index >= script.records.size()) {
      return NoSuch("record", index, script.records.size());
    }
    *name = script.records[index].first.c_str();
    *storage = script.records[index].second;
    return static_cast<mc_status>(MC_OK);
  });
}

mc_status mc_model_extra_file_at(const mc_model* model, uint64_t index, const char** name,
                                 const char** bytes, uint64_t* byte_count) {
  return WithScript(model, [&](const Script& script) {
    if (name == nullptr || bytes == nullptr || byte_count == nullptr) {
      return FailArgument("mc_model_extra_file_at: an argument is NULL");
    }
    if (index >= script.extra_files.size()) {
      return NoSuch("extra file", index, script.extra_files.size());
    }
    *name = script.extra_files[index].first.c_str();
    *bytes = script.extra_files[index].second.data();
    *byte_count = script.extra_files[index].second.size();
    return static_cast<mc_status>(MC_OK);
  });
}
