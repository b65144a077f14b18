// Tensors inside the pickle of a torch checkpoint: storages, views and the functions that would
// rebuild them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/result.h"
#include "proto/manifest.h"
#include "server/loader/pickle.h"

namespace modelcache {

// A persistent id of torch.save: ('storage', type, key, location, count[, view]).
struct StorageId {
  std::string key;  // the record, or the key of the legacy format
  Dtype dtype = Dtype::kUint8;
  std::uint64_t size_bytes = 0;         // count x size of an element, checked
  std::uint64_t view_offset_bytes = 0;  // only the legacy format has views on storages
  std::uint64_t view_end_bytes = 0;     // tensors must end before it; size_bytes without a view
};

// Reads a kPersistent node. Errors: kBadFile with key and numbers, kUnsupported (the type).
Result<StorageId> ReadStorageId(const PickleDocument& document, const PickleNode& node);

// Makes a storage known to the plan and gives its number. Called once per use, so it must remember.
// Errors: kBadFile naming the record, needed and present bytes.
using ResolveStorage = std::function<Result<std::uint32_t>(const StorageId&)>;

// How a tensor's values are meant when it is quantized. Tensors are nodes of the document.
struct Quantization {
  std::string scheme;  // per_tensor_affine, per_channel_affine, …
  double scale = 0;
  std::int64_t zero_point = 0;
  PickleRef scales = kNoRef;
  PickleRef zero_points = kNoRef;
  std::int64_t axis = 0;
};

struct RebuiltTensor {
  TensorSpec spec;  // without a name
  std::optional<Quantization> quantization;
  std::string subclass;  // of torch.Tensor, when the checkpoint names another than Parameter
};

// True when the call is one of the functions that rebuild a dense tensor.
bool RebuildsTensor(const PickleDocument& document, const PickleNode& call);

// Errors: kBadFile (a view outside its storage, with record, needed and present bytes; negative
// sizes, strides, offsets; overflow; arguments of another form), kUnsupported (dtype).
// `storage_bytes` gives the size of a resolved storage.
class TensorRebuilder {
 public:
  TensorRebuilder(const PickleDocument& document, ResolveStorage resolve,
                  std::function<std::uint64_t(std::uint32_t)> storage_bytes)
      : document_(document),
        resolve_(std::move(resolve)),
        storage_bytes_(std::move(storage_bytes)) {}

  [[nodiscard]] Result<RebuiltTensor> Rebuild(const PickleNode& call) const {
    return Rebuild(call, 0);
  }

 private:
  using Arguments = std::vector<PickleRef>;
  // Positions of arguments; 0 where a function has none.
  struct ViewForm {
    std::size_t count = 0;  // fewest arguments
    std::size_t requires_grad = 0;
    std::size_t lazy_bits = 0;
    std::size_t dtype = 0;
    std::size_t quantizer = 0;
  };
  static ViewForm FormOf(std::string_view function);
  [[nodiscard]] Result<void> ReadView(const ViewForm& form, const Arguments& arguments,
                                      const StorageId& id, TensorSpec& spec) const;
  [[nodiscard]] std::uint32_t LazyBits(const PickleNode& bits) const;
  [[nodiscard]] Result<RebuiltTensor> Rebuild(const PickleNode& call, int depth) const;
  [[nodiscard]] Result<RebuiltTensor> RebuildView(const std::string& function,
                                                  const Arguments& arguments) const;
  [[nodiscard]] Result<RebuiltTensor> RebuildParameter(const Arguments& arguments, int depth) const;
  [[nodiscard]] Result<RebuiltTensor> RebuildTyped(const Arguments& arguments, int depth) const;
  [[nodiscard]] Result<RebuiltTensor> RebuildMeta(const Arguments& arguments) const;
  [[nodiscard]] Result<Quantization> ReadQuantizer(PickleRef ref) const;
  [[nodiscard]] Result<void> CheckBounds(const TensorSpec& spec, const StorageId& id) const;
  [[nodiscard]] Result<RebuiltTensor> RebuildInner(PickleRef ref, int depth) const;

  const PickleDocument& document_;
  ResolveStorage resolve_;
  std::function<std::uint64_t(std::uint32_t)> storage_bytes_;
};

// The dtype of a global like torch.float32. Nothing if it is none.
std::optional<Dtype> DtypeOfGlobal(const PickleNode& node);

}  // namespace modelcache
