// Depth-first, with the path kept for names and for finding cycles.
#include "server/loader/torch_checkpoint.h"

#include <cmath>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "server/loader/base64.h"
#include "server/loader/json_guard.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 200;
// Shared sub-objects are walked once per use: a few kilobytes of pickle could ask for 2^64 visits.
constexpr std::size_t kFreeVisits = 100'000;
constexpr std::size_t kMaxVisitsPerNode = 16;
constexpr std::int64_t kMostExactInteger = std::int64_t{1} << 53U;

Json FloatNode(double value) {
  if (std::isnan(value)) {
    return {{"float", "nan"}};
  }
  if (std::isinf(value)) {
    return {{"float", value > 0 ? "inf" : "-inf"}};
  }
  return value;
}

class Walker {
 public:
  Walker(const PickleDocument& document, const ResolveStorage& resolve, ModelPlan& plan)
      : document_(document),
        rebuilder_(document, resolve,
                   [&plan](std::uint32_t storage) { return plan.storages[storage].size_bytes; }),
        max_visits_(kFreeVisits + kMaxVisitsPerNode * document.nodes.size()),
        plan_(plan) {}

  Result<void> Run() {
    auto structure = Walk(document_.root, "");
    if (!structure.ok()) {
      return std::move(structure).error();
    }
    if (structure->is_object() && structure->contains("opaque")) {
      return Error{ErrorCode::kUnsupported,
                   "the checkpoint is one pickled object of class " +
                       (*structure)["opaque"].get<std::string>() +
                       ", not a collection of tensors: load it through Python "
                       "(modelcache.load(torch.load, path, weights_only=False))",
                   0};
    }
    Json metadata = Json::object();
    metadata["structure"] = std::move(*structure);
    if (!opaque_.empty()) {
      metadata["opaque"] = std::move(opaque_);
    }
    if (!quantization_.empty()) {
      metadata["quantization"] = std::move(quantization_);
    }
    plan_.metadata_json = DumpJson(metadata);
    return {};
  }

 private:
  // Recursion is bounded by kMaxDepth.
  Result<Json> Walk(PickleRef ref, const std::string& path) {
    if (on_path_.count(ref) != 0) {
      return Error{ErrorCode::kBadFile, "the checkpoint contains itself at " + Quoted(path), 0};
    }
    if (on_path_.size() >= static_cast<std::size_t>(kMaxDepth) || ++visits_ > max_visits_) {
      return Error{ErrorCode::kBadFile,
                   "the checkpoint is nested deeper than " + std::to_string(kMaxDepth) +
                       " levels or has more than " + std::to_string(max_visits_) + " values, at " +
                       Quoted(path),
                   0};
    }
    on_path_.insert(ref);
    auto node = WalkNode(ref, document_.At(ref), path);
    on_path_.erase(ref);
    return node;
  }

  Result<Json> WalkNode(PickleRef ref, const PickleNode& node, const std::string& path) {
    switch (node.kind) {
      case PickleKind::kNone:
        return Json(nullptr);
      case PickleKind::kBool:
        return Json(node.integer != 0);
      case PickleKind::kInt:
        return IntNode(node.integer);
      case PickleKind::kBigInt:
        return Json{{"int", node.text}};
      case PickleKind::kFloat:
        return FloatNode(node.number);
      case PickleKind::kBytes:
        return Json{{"bytes", Base64(node.text)}};
      case PickleKind::kText:
        return Json(node.text);
      case PickleKind::kList:
        return WalkItems("l", node, path);
      case PickleKind::kTuple:
        return WalkItems("u", node, path);
      case PickleKind::kSet:
        return WalkItems("set", node, path);
      case PickleKind::kDict:
        return WalkDict(node, path);
      case PickleKind::kGlobal:
        return WalkGlobal(node, path);
      case PickleKind::kCall:
        return WalkCall(ref, node, path);
      case PickleKind::kPersistent:
        return Opaque(path, "torch.UntypedStorage");
    }
    return Error{ErrorCode::kInternal, "unknown kind of pickle node", 0};
  }

  static Json IntNode(std::int64_t value) {
    if (value > kMostExactInteger || value < -kMostExactInteger) {
      return {{"int", std::to_string(value)}};
    }
    return value;
  }

  Json Opaque(const std::string& path, const std::string& what) {
    opaque_.push_back(path + ": " + what);
    return {{"opaque", what}};
  }

  Result<Json> WalkItems(const char* kind, const PickleNode& node, const std::string& path) {
    Json items = Json::array();
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      auto item = Walk(node.items[i], Join(path, std::to_string(i)));
      if (!item.ok()) {
        return item;
      }
      items.push_back(std::move(*item));
    }
    return Json{{kind, std::move(items)}};
  }

  Result<Json> WalkDict(const PickleNode& node, const std::string& path) {
    Json pairs = Json::array();
    for (std::size_t i = 0; i + 1 < node.items.size(); i += 2) {
      auto key = Walk(node.items[i], Join(path, "key"));
      if (!key.ok()) {
        return key;
      }
      auto value = Walk(node.items[i + 1], Join(path, KeyText(node.items[i], i / 2)));
      if (!value.ok()) {
        return value;
      }
      pairs.push_back(Json::array({std::move(*key), std::move(*value)}));
    }
    Json dict{{"d", std::move(pairs)}, {"type", node.text}};
    if (auto attributes = WalkAttributes(node, path); !attributes.ok()) {
      return attributes;
    } else if (!attributes->empty()) {
      dict["attrs"] = std::move(*attributes);
    }
    return dict;
  }

  // Attributes of a dict (the _metadata of a state dict), from BUILD's state.
  Result<Json> WalkAttributes(const PickleNode& node, const std::string& path) {
    Json attributes = Json::object();
    if (node.state == kNoRef || document_.At(node.state).kind != PickleKind::kDict) {
      return attributes;
    }
    const PickleNode& state = document_.At(node.state);
    for (std::size_t i = 0; i + 1 < state.items.size(); i += 2) {
      const PickleNode& key = document_.At(state.items[i]);
      if (key.kind != PickleKind::kText) {
        continue;
      }
      auto value = Walk(state.items[i + 1], Join(path, key.text));
      if (!value.ok()) {
        return value;
      }
      attributes[key.text] = std::move(*value);
    }
    return attributes;
  }

  Result<Json> WalkGlobal(const PickleNode& node, const std::string& path) {
    if (const auto dtype = DtypeOfGlobal(node)) {
      return Json{{"dtype", DtypeName(*dtype)}};
    }
    return Opaque(path, node.text);
  }

  Result<Json> WalkCall(PickleRef ref, const PickleNode& node, const std::string& path) {
    if (RebuildsTensor(document_, node)) {
      return WalkTensor(ref, node, path);
    }
    const PickleNode& callable = document_.At(node.items[0]);
    const PickleNode& arguments = document_.At(node.items[1]);
    const std::string& name = callable.text;
    if (callable.kind != PickleKind::kGlobal) {
      return Opaque(path, "the result of a call");
    }
    if (name == "torch._utils._rebuild_sparse_tensor") {
      return WalkSparse(arguments, path);
    }
    if (name == "torch.Size" && arguments.items.size() == 1) {
      auto sizes = WalkItems("size", document_.At(arguments.items[0]), path);
      return sizes;
    }
    if (name == "torch.device") {
      return DeviceNode(arguments);
    }
    if (name == "builtins.complex" || name == "__builtin__.complex") {
      return ComplexNode(arguments);
    }
    return Opaque(path, name == "copyreg._reconstructor" || name == "copy_reg._reconstructor"
                            ? ReconstructedClass(arguments)
                            : name);
  }

  [[nodiscard]] std::string ReconstructedClass(const PickleNode& arguments) const {
    return arguments.items.empty() ? "copyreg._reconstructor"
                                   : document_.At(arguments.items[0]).text;
  }

  [[nodiscard]] Json DeviceNode(const PickleNode& arguments) const {
    std::string device;
    for (const PickleRef item : arguments.items) {
      const PickleNode& part = document_.At(item);
      device += part.kind == PickleKind::kInt ? ":" + std::to_string(part.integer) : part.text;
    }
    return {{"device", device}};
  }

  [[nodiscard]] Json ComplexNode(const PickleNode& arguments) const {
    Json parts = Json::array();
    for (const PickleRef item : arguments.items) {
      const PickleNode& part = document_.At(item);
      parts.push_back(part.kind == PickleKind::kInt ? Json(part.integer) : FloatNode(part.number));
    }
    return {{"complex", std::move(parts)}};
  }

  // (layout, (indices, values, size, …)): the parts are dense tensors of their own.
  Result<Json> WalkSparse(const PickleNode& arguments, const std::string& path) {
    Json node = Opaque(path, "torch.sparse");
    if (arguments.items.size() == 2) {
      auto parts = WalkItems("u", document_.At(arguments.items[1]), path);
      if (!parts.ok()) {
        return parts;
      }
      node["parts"] = std::move(*parts);
    }
    return node;
  }

  Result<Json> WalkTensor(PickleRef ref, const PickleNode& node, const std::string& path) {
    const auto number = static_cast<std::uint32_t>(plan_.tensors.size());
    auto rebuilt = rebuilder_.Rebuild(node);
    if (!rebuilt.ok()) {
      return Error{rebuilt.error().code, "tensor " + Quoted(path) + ": " + rebuilt.error().message,
                   0};
    }
    rebuilt->spec.name = UniqueName(path.empty() ? "tensor" : path);
    plan_.tensors.push_back(std::move(rebuilt->spec));
    Json leaf{{"t", number}};
    const auto [first, added] = first_seen_.emplace(ref, number);
    if (!added) {
      leaf["is"] = first->second;
    }
    if (!rebuilt->subclass.empty()) {
      opaque_.push_back(path + ": " + rebuilt->subclass + " (kept as a plain tensor)");
    }
    if (rebuilt->quantization) {
      auto kept = KeepQuantization(*rebuilt->quantization, number, path);
      if (!kept.ok()) {
        return std::move(kept).error();
      }
    }
    return leaf;
  }

  Result<void> KeepQuantization(const Quantization& quantization, std::uint32_t number,
                                const std::string& path) {
    Json entry{{"scheme", quantization.scheme}};
    if (quantization.scales == kNoRef) {
      entry["scale"] = FloatNode(quantization.scale);
      entry["zero_point"] = quantization.zero_point;
    } else {
      auto scales = Walk(quantization.scales, Join(path, "scales"));
      if (!scales.ok()) {
        return std::move(scales).error();
      }
      auto zero_points = Walk(quantization.zero_points, Join(path, "zero_points"));
      if (!zero_points.ok()) {
        return std::move(zero_points).error();
      }
      entry["scales"] = std::move(*scales);
      entry["zero_points"] = std::move(*zero_points);
      entry["axis"] = quantization.axis;
    }
    quantization_[std::to_string(number)] = std::move(entry);
    return {};
  }

  static std::string Join(const std::string& path, const std::string& part) {
    return path.empty() ? part : path + "." + part;
  }

  // How a key appears in names.
  [[nodiscard]] std::string KeyText(PickleRef ref, std::size_t position) const {
    const PickleNode& key = document_.At(ref);
    switch (key.kind) {
      case PickleKind::kText:
        return key.text;
      case PickleKind::kInt:
        return std::to_string(key.integer);
      default:
        return "key" + std::to_string(position);
    }
  }

  std::string UniqueName(const std::string& wanted) {
    const std::size_t count = ++name_uses_[wanted];
    if (count == 1) {
      return wanted;
    }
    // "a#2" may itself be the name of another tensor.
    const std::string numbered = wanted + "#" + std::to_string(count);
    return name_uses_.count(numbered) == 0 ? UniqueName(numbered) : UniqueName(wanted);
  }

  const PickleDocument& document_;
  TensorRebuilder rebuilder_;
  std::size_t max_visits_;
  ModelPlan& plan_;
  std::unordered_set<PickleRef> on_path_;
  std::size_t visits_ = 0;
  std::unordered_map<PickleRef, std::uint32_t> first_seen_;
  std::unordered_map<std::string, std::size_t> name_uses_;
  Json opaque_ = Json::array();
  Json quantization_ = Json::object();
};

}  // namespace

Result<void> PlanCheckpoint(const PickleDocument& document, const ResolveStorage& resolve,
                            ModelPlan& plan) {
  return Walker(document, resolve, plan).Run();
}

}  // namespace modelcache
