// libtorch reads the code and the structure; the bytes of large tensors stay in the file.
//
// The trick: records that are not compressed are read straight into the storage that will hold
// them. The adapter notes which storage got which range of the file and leaves large ranges
// unread, so that a model of any size costs no memory here. The module is then written in the
// unified format of torch.package, whose tensor records are dropped on the way.
#include "server/loader/torchscript_module.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/storage_context.h>

#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace modelcache {
namespace {

namespace jit = torch::jit;
using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;
using caffe2::serialize::ReadAdapterInterface;

// Smaller tensors are cheap to read.
constexpr std::size_t kLeaveUnreadBytes = 64U << 10U;
constexpr const char kConstants[] = "constants/";
constexpr const char kCodeFolder[] = ".data/ts_code/code/";
constexpr const char kModuleFolder[] = ".data/ts_code/0/";

// libtorch believes a checkpoint's element counts: a storage may claim more bytes than its record
// had. Every record lies in memory of its own, so the sizes of these allocations tell.
class SizingAllocator final : public c10::Allocator {
 public:
  SizingAllocator() { c10::SetCPUAllocator(this, kPriority); }
  ~SizingAllocator() override { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), kPriority); }
  SizingAllocator(const SizingAllocator&) = delete;
  SizingAllocator& operator=(const SizingAllocator&) = delete;

  c10::DataPtr allocate(std::size_t size) override {
    c10::DataPtr memory = c10::GetDefaultCPUAllocator()->allocate(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    sizes_[memory.get()] = size;
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return c10::GetDefaultCPUAllocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

  // Throws when `storage` claims more than was allocated for it.
  void Check(const c10::Storage& storage) const {
    if (const auto present = Shorter(storage.data(), storage.nbytes())) {
      throw std::runtime_error("a tensor needs " + std::to_string(storage.nbytes()) +
                               " bytes, its record has " + std::to_string(*present));
    }
  }

  // The size of the allocation that starts at `memory`, when it has less than `size` bytes.
  std::optional<std::size_t> Shorter(const void* memory, std::size_t size) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(memory);
    return found != sizes_.end() && found->second < size ? std::optional(found->second)
                                                         : std::nullopt;
  }

 private:
  static constexpr std::uint8_t kPriority = 255;

  mutable std::mutex mutex_;
  std::unordered_map<const void*, std::size_t> sizes_;
};

struct FileRange {
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
  bool constant = false;  // of the code: the serializer compares these by value
};

class NotingAdapter : public ReadAdapterInterface {
 public:
  NotingAdapter(const TorchscriptInput& input, std::vector<FileRange> tensor_records)
      : input_(input) {
    for (const FileRange& range : tensor_records) {
      tensor_records_.emplace(range.offset_bytes, range);
    }
  }

  size_t size() const override { return input_.size_bytes; }

  size_t read(std::uint64_t position, void* buffer, size_t count,
              const char* /*what*/) const override {
    const auto record = tensor_records_.find(position);
    if (record == tensor_records_.end() || record->second.size_bytes != count) {
      return input_.read(position, buffer, count);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    places_[buffer] = record->second;
    if (count >= kLeaveUnreadBytes && !record->second.constant && !input_.read_everything) {
      return count;
    }
    return input_.read(position, buffer, count);
  }

  // The file range that was meant for this memory.
  std::optional<FileRange> PlaceOf(const void* memory) const {
    const auto found = places_.find(memory);
    return found == places_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  const TorchscriptInput& input_;
  std::map<std::uint64_t, FileRange> tensor_records_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<const void*, FileRange> places_;
};

// Reads everything as it is: for the directory.
class PlainAdapter : public ReadAdapterInterface {
 public:
  explicit PlainAdapter(const TorchscriptInput& input) : input_(input) {}
  size_t size() const override { return input_.size_bytes; }
  size_t read(std::uint64_t position, void* buffer, size_t count,
              const char* /*what*/) const override {
    return input_.read(position, buffer, count);
  }

 private:
  const TorchscriptInput& input_;
};

bool StartsWith(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

bool IsTensorRecord(const std::string& name) {
  return StartsWith(name, "data/") || StartsWith(name, kConstants);
}

std::vector<FileRange> TensorRecords(const TorchscriptInput& input) {
  PyTorchStreamReader reader(std::make_shared<PlainAdapter>(input));
  std::vector<FileRange> ranges;
  for (const std::string& name : reader.getAllRecords()) {
    const std::size_t size = IsTensorRecord(name) ? reader.getRecordSize(name) : 0;
    if (size > 0) {
      ranges.push_back({reader.getRecordOffset(name), size, StartsWith(name, kConstants)});
    }
  }
  return ranges;
}

// Collects what a writer writes, with the bytes of storages left out: the stream keeps its length.
class SparseSink {
 public:
  explicit SparseSink(const SizingAllocator& allocator) : allocator_(allocator) {}

  void Leave(const void* memory, std::size_t size) { left_out_[memory] = size; }

  std::size_t Write(const void* bytes, std::size_t size) {
    // Not thrown from here: the writer ends its file in its destructor.
    if (const auto present = allocator_.Shorter(bytes, size)) {
      fault_ = "a tensor needs " + std::to_string(size) + " bytes, its record has " +
               std::to_string(*present);
      length_ += size;
      return size;
    }
    const auto found = left_out_.find(bytes);
    if (found == left_out_.end() || found->second != size || size == 0) {
      pieces_[length_].assign(static_cast<const char*>(bytes), size);
    }
    length_ += size;
    return size;
  }

  [[nodiscard]] std::uint64_t length() const { return length_; }

  // Throws when something was written that is longer than its memory.
  void Check() const {
    if (!fault_.empty()) {
      throw std::runtime_error(fault_);
    }
  }

  // What was left out reads as zeros.
  std::size_t Read(std::uint64_t position, void* out, std::size_t size) const {
    std::memset(out, 0, size);
    auto piece = pieces_.upper_bound(position);
    if (piece != pieces_.begin()) {
      --piece;
    }
    for (; piece != pieces_.end() && piece->first < position + size; ++piece) {
      const std::uint64_t first = std::max(piece->first, position);
      const std::uint64_t last =
          std::min<std::uint64_t>(piece->first + piece->second.size(), position + size);
      if (first < last) {
        std::memcpy(static_cast<char*>(out) + (first - position),
                    piece->second.data() + (first - piece->first), last - first);
      }
    }
    return size;
  }

 private:
  const SizingAllocator& allocator_;
  std::string fault_;
  std::unordered_map<const void*, std::size_t> left_out_;
  std::map<std::uint64_t, std::string> pieces_;
  std::uint64_t length_ = 0;
};

class SparseAdapter : public ReadAdapterInterface {
 public:
  explicit SparseAdapter(const SparseSink& sink) : sink_(sink) {}
  size_t size() const override { return sink_.length(); }
  size_t read(std::uint64_t position, void* buffer, size_t count,
              const char* /*what*/) const override {
    return sink_.Read(position, buffer, count);
  }

 private:
  const SparseSink& sink_;
};

// The dtype of a tensor by PyTorch's own name. Nothing when this build does not know it.
std::optional<Dtype> DtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
#define MODELCACHE_DTYPE(scalar, name) \
  case at::ScalarType::scalar:         \
    return DtypeFromName(name);
    MODELCACHE_DTYPE(Bool, "bool")
    MODELCACHE_DTYPE(Byte, "uint8")
    MODELCACHE_DTYPE(Char, "int8")
    MODELCACHE_DTYPE(Short, "int16")
    MODELCACHE_DTYPE(Int, "int32")
    MODELCACHE_DTYPE(Long, "int64")
    MODELCACHE_DTYPE(UInt16, "uint16")
    MODELCACHE_DTYPE(UInt32, "uint32")
    MODELCACHE_DTYPE(UInt64, "uint64")
    MODELCACHE_DTYPE(Half, "float16")
    MODELCACHE_DTYPE(BFloat16, "bfloat16")
    MODELCACHE_DTYPE(Float, "float32")
    MODELCACHE_DTYPE(Double, "float64")
    MODELCACHE_DTYPE(ComplexHalf, "complex32")
    MODELCACHE_DTYPE(ComplexFloat, "complex64")
    MODELCACHE_DTYPE(ComplexDouble, "complex128")
    MODELCACHE_DTYPE(Float8_e4m3fn, "float8_e4m3fn")
    MODELCACHE_DTYPE(Float8_e5m2, "float8_e5m2")
    MODELCACHE_DTYPE(Float8_e4m3fnuz, "float8_e4m3fnuz")
    MODELCACHE_DTYPE(Float8_e5m2fnuz, "float8_e5m2fnuz")
    MODELCACHE_DTYPE(Float8_e8m0fnu, "float8_e8m0fnu")
    MODELCACHE_DTYPE(Float4_e2m1fn_x2, "float4_e2m1fn_x2")
    MODELCACHE_DTYPE(QInt8, "qint8")
    MODELCACHE_DTYPE(QUInt8, "quint8")
    MODELCACHE_DTYPE(QInt32, "qint32")
    MODELCACHE_DTYPE(QUInt4x2, "quint4x2")
    MODELCACHE_DTYPE(QUInt2x4, "quint2x4")
#undef MODELCACHE_DTYPE
    default:
      return std::nullopt;
  }
}

// Keeps libtorch's module alive while the caller reads storages that only exist in memory.
struct Kept {
  jit::Module module;
  std::vector<c10::Storage> storages;
  std::vector<at::DataPtr> written;
};

class ModuleReader {
 public:
  ModuleReader(const TorchscriptInput& input, TorchscriptModule& out)
      : input_(input), out_(out), kept_(std::make_shared<Kept>()) {}

  void Read() {
    const auto adapter = std::make_shared<NotingAdapter>(input_, TensorRecords(input_));
    kept_->module = jit::load(std::shared_ptr<ReadAdapterInterface>(adapter),
                              c10::Device(input_.device), /*load_debug_files=*/false);
    WriteUnified(*adapter);
    AddTensors();
    out_.keep_alive = kept_;
  }

 private:
  // Every storage the module holds, by value: parameters, buffers, attributes, constants.
  void WriteUnified(const NotingAdapter& adapter) {
    SparseSink sink(allocator_);
    PyTorchStreamWriter writer(
        [&sink](const void* bytes, std::size_t size) { return sink.Write(bytes, size); },
        /*compute_crc32=*/false);
    jit::ScriptModuleSerializer serializer(writer);
    CollectStorages(serializer, sink);
    serializer.serialize_unified_format(kept_->module, 0);
    serializer.writeFiles(kCodeFolder);
    writer.writeEndOfFile();
    sink.Check();
    Repack(sink);
    AddStorages(adapter);
  }

  // Numbers the storages before the serializer does, so that it finds and uses these numbers.
  void CollectStorages(jit::ScriptModuleSerializer& serializer, SparseSink& sink) {
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) {
        return;
      }
      const c10::Storage& storage = tensor.storage();
      const std::uint64_t number = serializer.storage_context().getOrAddStorage(storage);
      if (number == kept_->storages.size()) {
        allocator_.Check(storage);
        kept_->storages.push_back(storage);
        sink.Leave(storage.data(), storage.nbytes());
      }
    };
    for (const auto& parameter : kept_->module.named_parameters(/*recurse=*/true)) {
      Note(parameter.name, parameter.value, add);
    }
    for (const auto& buffer : kept_->module.named_buffers(/*recurse=*/true)) {
      Note(buffer.name, buffer.value, add);
    }
    c10::IValue(kept_->module._ivalue()).visit([&](const c10::IValue& value) {
      if (value.isTensor()) {
        add(value.toTensor());
      }
      return false;
    });
    for (const jit::Module& module : kept_->module.modules()) {
      for (const jit::Method& method : module.get_methods()) {
        NoteConstants(*method.graph(), add);
      }
    }
    CheckConstants();
  }

  // Constants of free functions and of classes that are no modules: the serializer compares their
  // values, so their sizes must be true before it runs.
  void CheckConstants() {
    const auto check = [this](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) {
        allocator_.Check(tensor.storage());
      }
    };
    for (jit::Function* function : kept_->module._ivalue()->compilation_unit()->get_functions()) {
      if (auto* code = jit::tryToGraphFunction(*function)) {
        CheckBlock(*code->graph()->block(), check);
      }
    }
  }

  template <typename Check>
  static void CheckBlock(jit::Block& block, const Check& check) {
    for (jit::Node* node : block.nodes()) {
      if (node->kind() == c10::prim::Constant) {
        CheckConstant(*node, check);
      }
      for (jit::Block* inner : node->blocks()) {
        CheckBlock(*inner, check);
      }
    }
  }

  template <typename Check>
  static void CheckConstant(const jit::Node& node, const Check& check) {
    const auto name = c10::Symbol::attr("value");
    if (!node.hasAttribute(name)) {
      return;
    }
    if (node.kindOf(name) == jit::AttributeKind::t) {
      check(node.t(name));
    } else if (node.kindOf(name) == jit::AttributeKind::ts) {
      for (const at::Tensor& tensor : node.ts(name)) {
        check(tensor);
      }
    } else if (node.kindOf(name) == jit::AttributeKind::ival) {
      node.ival(name).visit([&](const c10::IValue& value) {
        if (value.isTensor()) {
          check(value.toTensor());
        }
        return false;
      });
    }
  }

  template <typename Add>
  void Note(const std::string& name, const at::Tensor& tensor, const Add& add) {
    add(tensor);
    named_.emplace_back(name, tensor);
  }

  template <typename Add>
  void NoteConstants(jit::Graph& graph, const Add& add) {
    for (jit::Node* node : graph.nodes()) {
      NoteNode(node, add);
    }
  }

  template <typename Add>
  void NoteNode(jit::Node* node, const Add& add) {
    const auto value = c10::Symbol::attr("value");
    if (node->kind() == c10::prim::Constant && node->hasAttribute(value) &&
        node->kindOf(value) == jit::AttributeKind::t) {
      Note("__constants__." + std::to_string(constants_++), node->t(value), add);
    }
    for (jit::Block* block : node->blocks()) {
      for (jit::Node* inner : block->nodes()) {
        NoteNode(inner, add);
      }
    }
  }

  // Copies every record but the tensors' into an archive of its own.
  void Repack(const SparseSink& sink) {
    PyTorchStreamReader reader(std::make_shared<SparseAdapter>(sink));
    PyTorchStreamWriter writer([this](const void* bytes, std::size_t size) {
      out_.archive.append(static_cast<const char*>(bytes), size);
      return size;
    });
    writer.setMinVersion(reader.version());
    for (const std::string& name : reader.getAllRecords()) {
      const bool made_by_writer = name == ".data/version" || name == "version" ||
                                  name == ".data/serialization_id" || name == "byteorder" ||
                                  name == ".storage_alignment" || name == ".format_version";
      if (made_by_writer) {
        continue;
      }
      if (EndsWith(name, ".storage")) {
        NoteUncollected(reader, name);
        continue;
      }
      const auto [data, size] = reader.getRecord(name);
      // The client knows the code folder only; the module's pickles go next to the code.
      const std::string kept_name = StartsWith(name, kModuleFolder)
                                        ? kCodeFolder + name.substr(std::strlen(kModuleFolder))
                                        : name;
      writer.writeRecord(kept_name, data.get(), size);
    }
    writer.writeEndOfFile();
  }

  // Storages that only the serializer found (constants of free functions) are kept as it wrote
  // them.
  void NoteUncollected(PyTorchStreamReader& reader, const std::string& record) {
    const std::string name = record.substr(record.rfind('/') + 1);
    if (std::stoull(name) < kept_->storages.size()) {
      return;
    }
    auto [data, size] = reader.getRecord(record);
    TorchscriptStorage entry;
    entry.name = name;
    entry.size_bytes = size;
    entry.data = static_cast<const std::byte*>(data.get());
    kept_->written.push_back(std::move(data));
    uncollected_.push_back(std::move(entry));
  }

  void AddStorages(const NotingAdapter& adapter) {
    for (std::size_t i = 0; i < kept_->storages.size(); ++i) {
      const c10::Storage& storage = kept_->storages[i];
      TorchscriptStorage entry;
      entry.name = std::to_string(i) + ".storage";
      entry.size_bytes = storage.nbytes();
      const auto place = adapter.PlaceOf(storage.data());
      entry.in_file = place && place->size_bytes == entry.size_bytes;
      entry.offset_bytes = entry.in_file ? place->offset_bytes : 0;
      entry.data = static_cast<const std::byte*>(storage.data());
      out_.storages.push_back(std::move(entry));
    }
    out_.storages.insert(out_.storages.end(), uncollected_.begin(), uncollected_.end());
  }

  void AddTensors() {
    std::unordered_map<const c10::StorageImpl*, std::uint32_t> numbers;
    for (std::uint32_t i = 0; i < kept_->storages.size(); ++i) {
      numbers.emplace(kept_->storages[i].unsafeGetStorageImpl(), i);
    }
    for (const auto& [name, tensor] : named_) {
      const auto dtype = DtypeOf(tensor);
      if (!tensor.defined() || !tensor.has_storage() || !dtype) {
        continue;  // the module itself holds it; it only cannot be listed
      }
      TensorSpec spec;
      spec.name = name;
      spec.dtype = *dtype;
      spec.shape = tensor.sizes().vec();
      spec.stride = tensor.strides().vec();
      spec.storage = numbers.at(tensor.storage().unsafeGetStorageImpl());
      spec.data_offset_bytes =
          static_cast<std::uint64_t>(tensor.storage_offset()) * tensor.element_size();
      spec.flags = (tensor.requires_grad() ? kTensorRequiresGrad : 0U) |
                   (tensor.is_conj() ? kTensorConjugate : 0U) |
                   (tensor.is_neg() ? kTensorNegative : 0U);
      out_.tensors.push_back(std::move(spec));
    }
  }

  const TorchscriptInput& input_;
  TorchscriptModule& out_;
  SizingAllocator allocator_;
  std::shared_ptr<Kept> kept_;
  std::vector<std::pair<std::string, at::Tensor>> named_;
  std::vector<TorchscriptStorage> uncollected_;
  std::size_t constants_ = 0;
};

bool DeviceExists(const std::string& device, std::string& message) {
  if (device == "cpu") {
    return true;
  }
  if (!StartsWith(device, "cuda")) {
    message = "device '" + device + "' is neither cpu nor cuda";
    return false;
  }
  message = "device '" + device + "' was asked for, but this libtorch or this host has no CUDA";
  return at::hasCUDA();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) TorchscriptFault modelcache_read_torchscript(
    const TorchscriptInput& input, TorchscriptModule& module, std::string& message);

TorchscriptFault modelcache_read_torchscript(const TorchscriptInput& input,
                                             TorchscriptModule& module, std::string& message) {
  try {
    if (!DeviceExists(input.device, message)) {
      return TorchscriptFault::kUnsupported;
    }
    ModuleReader(input, module).Read();
    return TorchscriptFault::kNone;
  } catch (const c10::Error& fault) {
    message = fault.what_without_backtrace();
  } catch (const std::exception& fault) {
    message = fault.what();
  }
  return TorchscriptFault::kBadFile;
}

}  // namespace modelcache
