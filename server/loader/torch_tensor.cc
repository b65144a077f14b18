// Every number of a rebuilt view is checked before the view is believed.
#include "server/loader/torch_tensor.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "common/checked_math.h"
#include "server/loader/named_dtype.h"
#include "server/loader/source_file.h"

namespace modelcache {
namespace {

// Parameters of parameters of subclasses …: deeper than any real checkpoint.
constexpr int kMaxWrapping = 16;
// Keys are numbers. They are copied at each use.
constexpr std::size_t kMaxKeyBytes = 1024;

constexpr std::array<NamedDtype, 20> kStorageTypes = {{
    {"UntypedStorage", Dtype::kUint8},
    {"ByteStorage", Dtype::kUint8},
    {"CharStorage", Dtype::kInt8},
    {"ShortStorage", Dtype::kInt16},
    {"IntStorage", Dtype::kInt32},
    {"LongStorage", Dtype::kInt64},
    {"HalfStorage", Dtype::kFloat16},
    {"BFloat16Storage", Dtype::kBfloat16},
    {"FloatStorage", Dtype::kFloat32},
    {"DoubleStorage", Dtype::kFloat64},
    {"ComplexHalfStorage", Dtype::kComplex32},
    {"ComplexFloatStorage", Dtype::kComplex64},
    {"ComplexDoubleStorage", Dtype::kComplex128},
    {"BoolStorage", Dtype::kBool},
    {"QInt8Storage", Dtype::kQint8},
    {"QUInt8Storage", Dtype::kQuint8},
    {"QInt32Storage", Dtype::kQint32},
    {"QUInt4x2Storage", Dtype::kQuint4x2},
    {"QUInt2x4Storage", Dtype::kQuint2x4},
    {"Storage", Dtype::kUint8},
}};

std::string_view LastPart(std::string_view name) { return name.substr(name.rfind('.') + 1); }

Error Malformed(const std::string& what) { return Error{ErrorCode::kBadFile, what, 0}; }

std::string List(const std::vector<std::int64_t>& values) {
  std::string text = "(";
  for (const std::int64_t value : values) {
    text += (text.size() > 1 ? "," : "") + std::to_string(value);
  }
  return text + ")";
}

bool IsTrue(const PickleNode& node) { return node.kind == PickleKind::kBool && node.integer != 0; }

Result<std::vector<std::int64_t>> ReadInts(const PickleDocument& document, PickleRef ref,
                                           const char* what) {
  const PickleNode* node = &document.At(ref);
  if (node->kind == PickleKind::kCall) {  // torch.Size((…))
    const PickleNode& arguments = document.At(node->items[1]);
    if (arguments.items.size() == 1) {
      node = &document.At(arguments.items[0]);
    }
  }
  if (node->kind != PickleKind::kTuple && node->kind != PickleKind::kList) {
    return Malformed(std::string("the ") + what + " of a tensor must be a tuple");
  }
  if (node->items.size() > kMaxDimensions) {
    return Malformed(std::string("the ") + what + " of a tensor has " +
                     std::to_string(node->items.size()) + " dimensions, limit " +
                     std::to_string(kMaxDimensions));
  }
  std::vector<std::int64_t> values;
  for (const PickleRef item : node->items) {
    const PickleNode& value = document.At(item);
    if (value.kind != PickleKind::kInt) {
      return Malformed(std::string("the ") + what +
                       " of a tensor must be whole numbers of 64 bits");
    }
    values.push_back(value.integer);
  }
  return values;
}

Result<void> CheckNotNegative(const TensorSpec& spec) {
  for (std::size_t i = 0; i < spec.shape.size(); ++i) {
    if (spec.shape[i] < 0 || spec.stride[i] < 0) {
      return Malformed("shape " + List(spec.shape) + " and stride " + List(spec.stride) +
                       " must not be negative");
    }
  }
  return {};
}

// Shape and stride of `spec` from two nodes.
Result<void> ReadGeometry(const PickleDocument& document, PickleRef shape, PickleRef stride,
                          TensorSpec& spec) {
  auto sizes = ReadInts(document, shape, "shape");
  if (!sizes.ok()) {
    return std::move(sizes).error();
  }
  auto strides = ReadInts(document, stride, "stride");
  if (!strides.ok()) {
    return std::move(strides).error();
  }
  if (sizes->size() != strides->size()) {
    return Malformed("shape " + List(*sizes) + " and stride " + List(*strides) +
                     " have different lengths");
  }
  spec.shape = std::move(*sizes);
  spec.stride = std::move(*strides);
  return CheckNotNegative(spec);
}

// (key, offset, count) in elements. False when it is none inside of the storage.
bool ReadStorageView(const PickleDocument& document, const PickleNode& view,
                     std::uint64_t element_bytes, StorageId& id) {
  const auto bytes = [&](std::size_t item) {
    const PickleNode& number = document.At(view.items[item]);
    return number.kind == PickleKind::kInt && number.integer >= 0
               ? CheckedMul(static_cast<std::uint64_t>(number.integer), element_bytes)
               : std::nullopt;
  };
  if (view.items.size() != 3) {
    return false;
  }
  const auto offset = bytes(1);
  const auto size = bytes(2);
  if (!offset || !size || !Within({*offset, *size}, id.size_bytes)) {
    return false;
  }
  id.view_offset_bytes = *offset;
  id.view_end_bytes = *offset + *size;
  return true;
}

}  // namespace

std::optional<Dtype> DtypeOfGlobal(const PickleNode& node) {
  constexpr std::string_view kPrefix = "torch.";
  if (node.kind != PickleKind::kGlobal || node.text.compare(0, kPrefix.size(), kPrefix) != 0) {
    return std::nullopt;
  }
  return DtypeFromName(std::string_view(node.text).substr(kPrefix.size()));
}

Result<StorageId> ReadStorageId(const PickleDocument& document, const PickleNode& node) {
  const PickleNode& tuple = document.At(node.items[0]);
  const auto item = [&](std::size_t i) -> const PickleNode& { return document.At(tuple.items[i]); };
  const bool right_form = tuple.kind == PickleKind::kTuple && tuple.items.size() >= 5 &&
                          item(0).text == "storage" && item(1).kind == PickleKind::kGlobal &&
                          item(2).kind == PickleKind::kText && item(4).kind == PickleKind::kInt;
  if (!right_form) {
    return Malformed("a persistent id is not ('storage', type, key, location, count)");
  }
  if (item(2).text.size() > kMaxKeyBytes) {
    return Malformed("a storage key of " + std::to_string(item(2).text.size()) + " bytes, limit " +
                     std::to_string(kMaxKeyBytes));
  }
  StorageId id;
  id.key = item(2).text;
  const auto dtype = FindDtype(kStorageTypes, LastPart(item(1).text));
  if (!dtype) {
    return Error{ErrorCode::kUnsupported,
                 "record " + Quoted(id.key) + ": unknown storage type " + Quoted(item(1).text), 0};
  }
  id.dtype = *dtype;
  const std::uint64_t element_bytes = DtypeBits(id.dtype) / 8;
  const std::int64_t count = item(4).integer;
  const auto size =
      count < 0 ? std::nullopt : CheckedMul(static_cast<std::uint64_t>(count), element_bytes);
  if (!size || *size > static_cast<std::uint64_t>(INT64_MAX)) {
    return Malformed("record " + Quoted(id.key) + ": " + std::to_string(count) + " elements of " +
                     std::to_string(element_bytes) + " bytes are no size");
  }
  id.size_bytes = *size;
  id.view_end_bytes = *size;
  if (tuple.items.size() > 5 && item(5).kind == PickleKind::kTuple) {
    if (!ReadStorageView(document, item(5), element_bytes, id)) {
      return Malformed("storage " + Quoted(id.key) + ": a view outside of its " +
                       std::to_string(id.size_bytes) + " bytes");
    }
  }
  return id;
}

bool RebuildsTensor(const PickleDocument& document, const PickleNode& call) {
  static constexpr std::array<std::string_view, 10> kFunctions = {
      "torch._utils._rebuild_tensor",
      "torch._utils._rebuild_tensor_v2",
      "torch._utils._rebuild_tensor_v3",
      "torch._utils._rebuild_qtensor",
      "torch._utils._rebuild_parameter",
      "torch._utils._rebuild_parameter_with_state",
      "torch._utils._rebuild_meta_tensor_no_storage",
      "torch._utils._rebuild_device_tensor_from_cpu_tensor",
      "torch._tensor._rebuild_from_type_v2",
      "torch._tensor._rebuild_from_type",
  };
  if (call.kind != PickleKind::kCall || call.items.size() < 2) {
    return false;
  }
  const PickleNode& callable = document.At(call.items[0]);
  return callable.kind == PickleKind::kGlobal &&
         std::find(kFunctions.begin(), kFunctions.end(), callable.text) != kFunctions.end();
}

Result<RebuiltTensor> TensorRebuilder::Rebuild(const PickleNode& call, int depth) const {
  if (depth > kMaxWrapping) {
    return Malformed("a tensor wrapped more than " + std::to_string(kMaxWrapping) + " times");
  }
  const std::string& function = document_.At(call.items[0]).text;
  const std::string_view name = LastPart(function);
  const Arguments& arguments = document_.At(call.items[1]).items;
  if (name == "_rebuild_parameter" || name == "_rebuild_parameter_with_state") {
    return RebuildParameter(arguments, depth);
  }
  if (name == "_rebuild_from_type_v2" || name == "_rebuild_from_type") {
    return RebuildTyped(arguments, depth);
  }
  if (name == "_rebuild_meta_tensor_no_storage") {
    return RebuildMeta(arguments);
  }
  if (name == "_rebuild_device_tensor_from_cpu_tensor") {
    return arguments.empty() ? Malformed("a tensor without data")
                             : RebuildInner(arguments[0], depth + 1);
  }
  return RebuildView(std::string(name), arguments);
}

Result<RebuiltTensor> TensorRebuilder::RebuildInner(PickleRef ref, int depth) const {
  const PickleNode& inner = document_.At(ref);
  if (!RebuildsTensor(document_, inner)) {
    return Malformed("something that is no dense tensor stands where one must");
  }
  return Rebuild(inner, depth);
}

// Where the optional arguments of each function lie.
TensorRebuilder::ViewForm TensorRebuilder::FormOf(std::string_view function) {
  // (storage, offset, size, stride, …): v2 goes on with requires_grad, hooks, metadata; v3 has the
  // dtype after the hooks; qtensor has the quantizer before requires_grad.
  if (function == "_rebuild_qtensor") {
    return {6, 5, 0, 0, 4};
  }
  if (function == "_rebuild_tensor_v3") {
    return {7, 4, 7, 6, 0};
  }
  return {4, 4, 6, 0, 0};
}

Result<RebuiltTensor> TensorRebuilder::RebuildView(const std::string& function,
                                                   const Arguments& arguments) const {
  const ViewForm form = FormOf(function);
  if (arguments.size() < form.count || document_.At(arguments[0]).kind != PickleKind::kPersistent ||
      document_.At(arguments[1]).kind != PickleKind::kInt) {
    return Malformed(function +
                     " was called with other arguments than (storage, offset, size, stride, …)");
  }
  auto id = ReadStorageId(document_, document_.At(arguments[0]));
  if (!id.ok()) {
    return std::move(id).error();
  }
  RebuiltTensor rebuilt;
  auto read = ReadView(form, arguments, *id, rebuilt.spec);
  if (!read.ok()) {
    return Error{read.error().code,
                 "record " + Quoted(id->key) + " (" + std::to_string(id->size_bytes) +
                     " bytes): " + read.error().message,
                 0};
  }
  auto storage = resolve_(*id);
  if (!storage.ok()) {
    return std::move(storage).error();
  }
  rebuilt.spec.storage = *storage;
  if (auto checked = CheckBounds(rebuilt.spec, *id); !checked.ok()) {
    return std::move(checked).error();
  }
  if (form.quantizer > 0) {
    auto quantizer = ReadQuantizer(arguments[form.quantizer]);
    if (!quantizer.ok()) {
      return std::move(quantizer).error();
    }
    rebuilt.quantization = std::move(*quantizer);
  }
  return rebuilt;
}

// Everything of the tensor but its storage.
Result<void> TensorRebuilder::ReadView(const ViewForm& form, const Arguments& arguments,
                                       const StorageId& id, TensorSpec& spec) const {
  spec.dtype = id.dtype;
  if (form.dtype > 0) {
    const PickleNode& global = document_.At(arguments[form.dtype]);
    const auto dtype = DtypeOfGlobal(global);
    if (!dtype) {
      return Error{ErrorCode::kUnsupported, "unknown dtype " + Quoted(global.text), 0};
    }
    spec.dtype = *dtype;
  }
  if (auto read = ReadGeometry(document_, arguments[2], arguments[3], spec); !read.ok()) {
    return read;
  }
  const std::int64_t offset = document_.At(arguments[1]).integer;
  const auto offset_bytes =
      offset < 0 ? std::nullopt
                 : CheckedMul(static_cast<std::uint64_t>(offset), DtypeBits(spec.dtype) / 8);
  const auto total = offset_bytes ? CheckedAdd(*offset_bytes, id.view_offset_bytes) : std::nullopt;
  if (!total) {
    return Malformed("storage offset " + std::to_string(offset) + " is no offset");
  }
  spec.data_offset_bytes = *total;
  if (arguments.size() > form.requires_grad &&
      IsTrue(document_.At(arguments[form.requires_grad]))) {
    spec.flags |= kTensorRequiresGrad;
  }
  if (form.lazy_bits > 0 && arguments.size() > form.lazy_bits) {
    spec.flags |= LazyBits(document_.At(arguments[form.lazy_bits]));
  }
  return {};
}

// The conjugate and negative bits, a dict of booleans.
std::uint32_t TensorRebuilder::LazyBits(const PickleNode& bits) const {
  std::uint32_t flags = 0;
  for (std::size_t i = 0; bits.kind == PickleKind::kDict && i + 1 < bits.items.size(); i += 2) {
    const bool set = IsTrue(document_.At(bits.items[i + 1]));
    const std::string& key = document_.At(bits.items[i]).text;
    const std::uint32_t bit = key == "conj" ? kTensorConjugate : key == "neg" ? kTensorNegative : 0;
    flags = set ? flags | bit : flags & ~bit;  // of a key that is set twice, the last one counts
  }
  return flags;
}

Result<void> TensorRebuilder::CheckBounds(const TensorSpec& spec, const StorageId& id) const {
  auto extent = TensorExtentBytes(spec);
  const std::string what = "record " + Quoted(id.key) + ": shape " + List(spec.shape) +
                           " with stride " + List(spec.stride) + " at byte " +
                           std::to_string(spec.data_offset_bytes) + " of ";
  const std::uint64_t present = std::min(storage_bytes_(spec.storage), id.view_end_bytes);
  if (!extent.ok()) {
    return Malformed(what + std::to_string(present) + " bytes: " + extent.error().message);
  }
  if (!Within({spec.data_offset_bytes, *extent}, present)) {
    const auto needed = CheckedAdd(spec.data_offset_bytes, *extent);
    return Malformed(what + "its storage needs " +
                     (needed ? std::to_string(*needed) : "over 2^64") + " bytes, has " +
                     std::to_string(present));
  }
  return {};
}

Result<RebuiltTensor> TensorRebuilder::RebuildParameter(const Arguments& arguments,
                                                        int depth) const {
  if (arguments.size() < 2) {
    return Malformed("a parameter without data");
  }
  auto rebuilt = RebuildInner(arguments[0], depth + 1);
  if (rebuilt.ok()) {
    rebuilt->spec.flags |= kTensorParameter;
    rebuilt->spec.flags &= ~kTensorRequiresGrad;
    if (IsTrue(document_.At(arguments[1]))) {
      rebuilt->spec.flags |= kTensorRequiresGrad;
    }
  }
  return rebuilt;
}

// (function, type, arguments, state): the function rebuilds the data, the type is what it becomes.
Result<RebuiltTensor> TensorRebuilder::RebuildTyped(const Arguments& arguments, int depth) const {
  if (arguments.size() < 3 || document_.At(arguments[0]).kind != PickleKind::kGlobal ||
      document_.At(arguments[2]).kind != PickleKind::kTuple) {
    return Malformed("a typed tensor without function and arguments");
  }
  PickleNode inner;
  inner.kind = PickleKind::kCall;
  inner.items = {arguments[0], arguments[2]};
  if (!RebuildsTensor(document_, inner)) {
    return Error{ErrorCode::kUnsupported,
                 "a tensor that only " + document_.At(arguments[0]).text + " can rebuild", 0};
  }
  auto rebuilt = Rebuild(inner, depth + 1);
  if (rebuilt.ok()) {
    const std::string& type = document_.At(arguments[1]).text;
    if (type == "torch.nn.parameter.Parameter" || type == "torch.nn.Parameter") {
      rebuilt->spec.flags |= kTensorParameter;
    } else if (type != "torch.Tensor" && type != "torch._tensor.Tensor") {
      rebuilt->subclass = type;
    }
  }
  return rebuilt;
}

// (dtype, size, stride, requires_grad)
Result<RebuiltTensor> TensorRebuilder::RebuildMeta(const Arguments& arguments) const {
  if (arguments.size() < 4) {
    return Malformed("a tensor of the meta device without dtype, size and stride");
  }
  RebuiltTensor rebuilt;
  const auto dtype = DtypeOfGlobal(document_.At(arguments[0]));
  if (!dtype) {
    return Error{ErrorCode::kUnsupported,
                 "unknown dtype " + Quoted(document_.At(arguments[0]).text), 0};
  }
  rebuilt.spec.dtype = *dtype;
  if (auto read = ReadGeometry(document_, arguments[1], arguments[2], rebuilt.spec); !read.ok()) {
    return std::move(read).error();
  }
  if (IsTrue(document_.At(arguments[3]))) {
    rebuilt.spec.flags |= kTensorRequiresGrad;
  }
  return rebuilt;
}

// (torch.per_tensor_affine, scale, zero_point) or (torch.per_channel_affine, scales, zero_points,
// axis).
Result<Quantization> TensorRebuilder::ReadQuantizer(PickleRef ref) const {
  const PickleNode& tuple = document_.At(ref);
  if (tuple.items.size() < 3 || document_.At(tuple.items[0]).kind != PickleKind::kGlobal) {
    return Malformed("a quantized tensor without scale and zero point");
  }
  Quantization quantizer;
  quantizer.scheme = LastPart(document_.At(tuple.items[0]).text);
  if (tuple.items.size() > 3) {
    quantizer.scales = tuple.items[1];
    quantizer.zero_points = tuple.items[2];
    quantizer.axis = document_.At(tuple.items[3]).integer;
  } else {
    quantizer.scale = document_.At(tuple.items[1]).number;
    quantizer.zero_point = document_.At(tuple.items[2]).integer;
  }
  return quantizer;
}

}  // namespace modelcache
