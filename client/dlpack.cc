// Tensors as DLPack structs, all of a model at once, over the C interface alone.
#include "client/dlpack.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace modelcache {
namespace {

// Source: DLPack, https://dmlc.github.io/dlpack, the unversioned structs ("dltensor").
struct DLDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};
static_assert(sizeof(DLManagedTensor) == 64);
static_assert(offsetof(DLManagedTensor, deleter) == 56);

constexpr std::int32_t kCpu = 1;

// All structs of one call; gone with the last of them.
struct Batch {
  mc_model* model = nullptr;
  std::atomic<std::uint64_t> references{1};
  std::vector<DLManagedTensor> tensors;
};

void Drop(Batch* batch) {
  if (batch->references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    mc_model_close(batch->model);
    delete batch;
  }
}

void DeleteTensor(DLManagedTensor* tensor) { Drop(static_cast<Batch*>(tensor->manager)); }

// The type codes every consumer knows. Younger ones (8-bit floats) are read by some and refused by
// others, so they are left out.
std::optional<DLDataType> TypeOf(std::uint32_t dtype) {
  const std::string_view name = mc_dtype_name(dtype);
  const auto bits = static_cast<std::uint8_t>(mc_dtype_bits(dtype));
  if (name == "bool") {
    return DLDataType{6, bits, 1};
  }
  if (name == "bfloat16") {
    return DLDataType{4, bits, 1};
  }
  if (name == "float16" || name == "float32" || name == "float64") {
    return DLDataType{2, bits, 1};
  }
  if (name == "complex64" || name == "complex128") {
    return DLDataType{5, bits, 1};
  }
  if (name.substr(0, 3) == "int") {
    return DLDataType{0, bits, 1};
  }
  if (name.substr(0, 4) == "uint") {
    return DLDataType{1, bits, 1};
  }
  return std::nullopt;
}

std::vector<std::optional<DLDataType>> AllTypes() {
  std::vector<std::optional<DLDataType>> types(mc_dtype_count() + std::size_t{1});
  for (std::uint32_t dtype = 1; dtype < types.size(); ++dtype) {
    types[dtype] = TypeOf(dtype);
  }
  return types;
}

std::vector<std::uint32_t> StorageUses(const mc_tables& tables) {
  std::vector<std::uint32_t> uses(tables.storage_count);
  for (std::uint32_t i = 0; i < tables.tensor_count; ++i) {
    if (tables.tensors[i].storage != MC_NO_STORAGE) {
      ++uses[tables.tensors[i].storage];
    }
  }
  return uses;
}

// Fills batch.tensors and `out`, one for one.
void Fill(const mc_tables& tables, Batch& batch, void** out) {
  const auto types = AllTypes();
  const auto uses = StorageUses(tables);
  std::uint64_t given = 0;
  for (std::uint32_t i = 0; i < tables.tensor_count; ++i) {
    const mc_tensor_record& record = tables.tensors[i];
    out[i] = nullptr;
    const bool alone = record.storage != MC_NO_STORAGE && uses[record.storage] == 1 &&
                       record.nbytes != 0 && record.offset_bytes == 0 &&
                       tables.storages[record.storage].nbytes == record.nbytes;
    if (!alone || record.flags != 0 || !types[record.dtype]) {
      continue;
    }
    DLManagedTensor& made = batch.tensors[i];
    // DLPack's pointers are not const, and consumers only read shapes and strides.
    auto* shape = const_cast<std::int64_t*>(tables.dimensions + record.dimensions_index);
    made.tensor = {tables.storage_data[record.storage],
                   {kCpu, 0},
                   record.ndim,
                   *types[record.dtype],
                   shape,
                   shape + record.ndim,
                   0};
    made.manager = &batch;
    made.deleter = &DeleteTensor;
    out[i] = &made;
    ++given;
  }
  batch.references.fetch_add(given, std::memory_order_relaxed);
}

}  // namespace

void MakeDlpack(mc_model* model, const mc_tables& tables, void** out) {
  auto batch = std::make_unique<Batch>();
  batch->tensors.resize(tables.tensor_count);
  Fill(tables, *batch, out);
  batch->model = mc_model_retain(model);
  Drop(batch.release());
}

}  // namespace modelcache
