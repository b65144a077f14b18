// torch.hpp: the tensors of a mapped model as at::Tensor and torch::jit::Module, without a copy.
// Header only: compiled against the user's own libtorch, 2.3 or later.
//
//   auto client = modelcache::Client::Connect().ValueOrThrow();
//   auto model = client.Open("model.safetensors").ValueOrThrow();
//   at::Tensor weight = modelcache::TorchModel(model).Tensor("weight").ValueOrThrow();
//
// Memory: a tensor keeps the model's mapping and lease alive; the last tensor's death ends both.
// Tensors of one storage share it as they did when they were saved, within one TorchModel. Writing
// in place is allowed and is seen by this process alone.
// Errors: libtorch's exceptions are turned into failures; nothing here throws.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/storage_context.h>
#include <modelcache/client.hpp>
#if __has_include(<torch/version.h>)
#include <torch/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#define MODELCACHE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||             \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace modelcache {
inline namespace v0 {

// libtorch's name of a dtype as mc_dtype_name gives it; nothing when this libtorch has no such.
inline std::optional<c10::ScalarType> ToScalarType(std::string_view name) {
  using T = c10::ScalarType;
  struct Entry {
    std::string_view name;
    T type;
  };
  static constexpr Entry kTypes[] = {
    {"float32", T::Float},
    {"bfloat16", T::BFloat16},
    {"float16", T::Half},
    {"float64", T::Double},
    {"int64", T::Long},
    {"int32", T::Int},
    {"int16", T::Short},
    {"int8", T::Char},
    {"uint8", T::Byte},
    {"bool", T::Bool},
    {"uint16", T::UInt16},
    {"uint32", T::UInt32},
    {"uint64", T::UInt64},
    {"complex32", T::ComplexHalf},
    {"complex64", T::ComplexFloat},
    {"complex128", T::ComplexDouble},
    {"float8_e4m3fn", T::Float8_e4m3fn},
    {"float8_e5m2", T::Float8_e5m2},
    {"float8_e4m3fnuz", T::Float8_e4m3fnuz},
    {"float8_e5m2fnuz", T::Float8_e5m2fnuz},
#if MODELCACHE_TORCH_AT_LEAST(2, 7)
    {"float8_e8m0fnu", T::Float8_e8m0fnu},
#endif
#if MODELCACHE_TORCH_AT_LEAST(2, 8)
    {"float4_e2m1fn_x2", T::Float4_e2m1fn_x2},
#endif
    {"qint8", T::QInt8},
    {"quint8", T::QUInt8},
    {"qint32", T::QInt32},
    {"quint4x2", T::QUInt4x2},
    {"quint2x4", T::QUInt2x4},
    {"bits8", T::Bits8},
    {"bits16", T::Bits16},
    {"bits4x2", T::Bits4x2},
    {"bits2x4", T::Bits2x4},
    {"bits1x8", T::Bits1x8},
  };
  for (const Entry& entry : kTypes) {
    if (entry.name == name) {
      return entry.type;
    }
  }
  return std::nullopt;
}

// Names and tensors in the order of the file.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

// Builds tensors of one model. One thread at a time; the tensors it gives may go anywhere.
class TorchModel {
 public:
  explicit TorchModel(Model model)
      : model_(std::move(model)),
        storages_(static_cast<std::size_t>(mc_model_storage_count(model_.get()))) {}

  [[nodiscard]] const Model& model() const { return model_; }

  // The tensor with this name. Errors: MC_NOT_FOUND, MC_UNSUPPORTED (a dtype this libtorch lacks).
  [[nodiscard]] Result<at::Tensor> Tensor(const std::string& name) {
    Result<TensorView> view = model_.Find(name);
    return view.ok() ? Build(*view) : Result<at::Tensor>(view.error());
  }

  // Every tensor. Errors: as Tensor.
  [[nodiscard]] Result<StateDict> Tensors() {
    StateDict all;
    const std::size_t count = model_.size();
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const TensorView view = model_.At(i);
      Result<at::Tensor> tensor = Build(view);
      if (!tensor.ok()) {
        return tensor.error();
      }
      all.emplace_back(std::string(view.name()), std::move(*tensor));
    }
    return all;
  }

  // The TorchScript module of the model: parameters, buffers and constants point into the mapping.
  // Errors: MC_NOT_FOUND (the model is no module), MC_BAD_FILE (libtorch refuses it).
  [[nodiscard]] Result<::torch::jit::Module> Module() {
    mc_script script = {};
    script.struct_size = sizeof script;
    if (const mc_status status = mc_model_script(model_.get(), &script); status != MC_OK) {
      return Failure::Last(status);
    }
    try {
      return ImportModule(script);
    } catch (const std::exception& e) {
      return Failure{MC_BAD_FILE, std::string("libtorch cannot import the module: ") + e.what()};
    }
  }

  // The files that were saved with a TorchScript module, by name. Errors: MC_NOT_FOUND.
  [[nodiscard]] Result<std::map<std::string, std::string>> ExtraFiles() const {
    mc_script script = {};
    script.struct_size = sizeof script;
    if (const mc_status status = mc_model_script(model_.get(), &script); status != MC_OK) {
      return Failure::Last(status);
    }
    std::map<std::string, std::string> files;
    for (std::uint32_t i = 0; i < script.extra_file_count; ++i) {
      const char* name = "";
      const char* bytes = "";
      std::uint64_t count = 0;
      (void)mc_model_extra_file_at(model_.get(), i, &name, &bytes, &count);
      files.emplace(name, std::string(bytes, static_cast<std::size_t>(count)));
    }
    return files;
  }

 private:
  // Reads the archive of a module where it lies.
  class ArchiveReader final : public caffe2::serialize::ReadAdapterInterface {
   public:
    explicit ArchiveReader(c10::Storage storage) : storage_(std::move(storage)) {}
    size_t size() const override { return storage_.nbytes(); }
    size_t read(uint64_t offset, void* buffer, size_t count, const char*) const override {
      const uint64_t total = storage_.nbytes();
      if (offset >= total) {
        return 0;
      }
      const size_t length = std::min<size_t>(count, static_cast<size_t>(total - offset));
      std::memcpy(buffer, static_cast<const char*>(storage_.data()) + offset, length);
      return length;
    }

   private:
    c10::Storage storage_;
  };

  // The one storage object for this number. The mapping outlives it.
  const c10::Storage& StorageOf(std::uint32_t number) {
    c10::Storage& storage = storages_[number];
    if (!storage) {
      mc_storage raw = {};
      raw.struct_size = sizeof raw;
      (void)mc_model_storage_at(model_.get(), number, &raw);
      // Resizable with the usual allocator: growing a tensor copies it out of the mapping.
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(raw.nbytes),
          c10::DataPtr(raw.data, mc_model_retain(model_.get()), &CloseModel,
                       c10::Device(c10::DeviceType::CPU)),
          c10::GetCPUAllocator(), /*resizable=*/true));
    }
    return storage;
  }

  static void CloseModel(void* model) { mc_model_close(static_cast<mc_model*>(model)); }

  // libtorch's type for a dtype number; each is looked up by name once.
  std::optional<c10::ScalarType> TypeOf(std::uint32_t dtype) {
    if (dtype >= types_.size()) {
      types_.resize(dtype + 1);
    }
    if (!types_[dtype]) {
      types_[dtype] = ToScalarType(mc_dtype_name(dtype));
    }
    return types_[dtype];
  }

  Result<at::Tensor> Build(const TensorView& view) {
    const std::optional<c10::ScalarType> type = TypeOf(view.raw().dtype);
    if (!type) {
      return Failure{MC_UNSUPPORTED, "tensor '" + Shown(view.name()) + "' has dtype " +
                                         std::string(view.dtype()) + ", which libtorch " +
                                         TORCH_VERSION + " does not have"};
    }
    try {
      return c10::isQIntType(*type) ? BuildQuantized(view, *type) : BuildPlain(view, *type);
    } catch (const std::exception& e) {
      return Failure{MC_INTERNAL,
                     "libtorch cannot make tensor '" + Shown(view.name()) + "': " + e.what()};
    }
  }

  at::Tensor BuildPlain(const TensorView& view, c10::ScalarType type) {
    const mc_tensor& raw = view.raw();
    const c10::IntArrayRef shape(raw.shape, raw.ndim);
    const c10::IntArrayRef stride(raw.stride, raw.ndim);
    if (raw.storage == MC_NO_STORAGE) {
      return WithFlags(at::detail::empty_strided_meta(shape, stride, type), raw.flags);
    }
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(StorageOf(raw.storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(type));
    const auto offset = raw.offset_bytes / c10::elementSize(type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, stride,
                                                        static_cast<std::int64_t>(offset));
    return WithFlags(std::move(tensor), raw.flags);
  }

  static at::Tensor WithFlags(at::Tensor tensor, std::uint32_t flags) {
    if ((flags & MC_TENSOR_CONJUGATE) != 0) {
      tensor._set_conj(true);
    }
    if ((flags & MC_TENSOR_NEGATIVE) != 0) {
      tensor._set_neg(true);
    }
    if ((flags & MC_TENSOR_REQUIRES_GRAD) != 0) {
      tensor.set_requires_grad(true);
    }
    return tensor;
  }

  Result<at::Tensor> BuildQuantized(const TensorView& view, c10::ScalarType type) {
    const mc_tensor& raw = view.raw();
    mc_quantization scheme = {};
    scheme.struct_size = sizeof scheme;
    if (mc_model_quantization(model_.get(), raw.index, &scheme) != MC_OK) {
      return Failure{MC_UNSUPPORTED,
                     "quantized tensor '" + Shown(view.name()) + "' has no quantizer"};
    }
    if (raw.storage == MC_NO_STORAGE) {
      return Failure{MC_UNSUPPORTED, "quantized tensor '" + Shown(view.name()) + "' has no data"};
    }
    at::Tensor tensor = at::detail::make_tensor<at::QTensorImpl>(
        c10::Storage(StorageOf(raw.storage)), c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU),
        c10::scalarTypeToTypeMeta(type), MakeQuantizer(scheme, type));
    // Packed kinds count values, not bytes.
    const auto offset = raw.offset_bytes * 8 / mc_dtype_bits(raw.dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        {raw.shape, raw.ndim}, {raw.stride, raw.ndim}, static_cast<std::int64_t>(offset));
    return tensor;
  }

  static at::QuantizerPtr MakeQuantizer(const mc_quantization& scheme, c10::ScalarType type) {
    if (scheme.per_channel == 0) {
      return at::make_per_tensor_affine_quantizer(scheme.scale, scheme.zero_point, type);
    }
    // make_per_channel_affine_quantizer takes the scheme from the type of the zero points.
    const auto real = scheme.float_qparams != 0 ? c10::ScalarType::Float : c10::ScalarType::Double;
    const auto whole = scheme.float_qparams != 0 ? c10::ScalarType::Float : c10::ScalarType::Long;
    return at::make_per_channel_affine_quantizer(Values(scheme.scales, scheme.count, real),
                                                 Values(scheme.zero_points, scheme.count, whole),
                                                 scheme.axis, type);
  }

  static at::Tensor Values(const double* values, std::uint64_t count, c10::ScalarType type) {
    at::Tensor tensor = at::detail::empty_cpu({static_cast<std::int64_t>(count)}, type);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (type == c10::ScalarType::Long) {
        static_cast<std::int64_t*>(tensor.data_ptr())[i] = static_cast<std::int64_t>(values[i]);
      } else if (type == c10::ScalarType::Float) {
        static_cast<float*>(tensor.data_ptr())[i] = static_cast<float>(values[i]);
      } else {
        static_cast<double*>(tensor.data_ptr())[i] = values[i];
      }
    }
    return tensor;
  }

  ::torch::jit::Module ImportModule(const mc_script& script) {
    auto context = std::make_shared<::torch::jit::DeserializationStorageContext>();
    for (std::uint32_t i = 0; i < script.record_count; ++i) {
      const char* name = "";
      std::uint32_t storage = 0;
      (void)mc_model_script_record_at(model_.get(), i, &name, &storage);
      context->addStorage(name, StorageOf(storage));
    }
    auto reader = std::make_shared<caffe2::serialize::PyTorchStreamReader>(
        std::make_shared<ArchiveReader>(StorageOf(script.archive)));
    return ::torch::jit::import_ir_module(std::make_shared<::torch::jit::CompilationUnit>(),
                                          std::move(reader), std::move(context), std::nullopt,
                                          /*ts_id=*/"code");
  }

  Model model_;
  std::vector<c10::Storage> storages_;
  std::vector<std::optional<c10::ScalarType>> types_;  // by dtype number
};

// Every tensor of a model. Errors: as TorchModel::Tensor.
inline Result<StateDict> LoadStateDict(const Model& model) { return TorchModel(model).Tensors(); }

// The TorchScript module of a model. Errors: as TorchModel::Module.
inline Result<::torch::jit::Module> LoadModule(const Model& model) {
  return TorchModel(model).Module();
}

}  // namespace v0
}  // namespace modelcache
