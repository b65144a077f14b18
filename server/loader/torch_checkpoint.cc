// Depth-first, with the path kept for names and for finding cycles. Every byte that is copied on
// the way is counted.
#include "server/loader/torch_checkpoint.h"

#include <cmath>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "server/loader/base64.h"
#include "server/loader/byte_budget.h"
#include "server/loader/checkpoint_keys.h"
#include "server/loader/checkpoint_names.h"
#include "server/loader/json_guard.h"
#include "server/loader/tensor_numbers.h"

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

// How long `text` gets in JSON, at most: six characters for a control character, three for a byte
// that is not UTF-8.
std::uint64_t JsonBytes(std::string_view text) {
  std::uint64_t bytes = 2;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    bytes += code < 0x20 ? 6 : code < 0x80 ? 1 : 3;
  }
  return bytes;
}

// What the node of a value takes in memory and in the metadata, without the values inside of it.
std::uint64_t NodeBytes(const PickleNode& node) {
  constexpr std::uint64_t kScalarBytes = 8;
  constexpr std::uint64_t kObjectBytes = 64;
  switch (node.kind) {
    case PickleKind::kNone:
    case PickleKind::kBool:
    case PickleKind::kInt:
    case PickleKind::kFloat:
      return kScalarBytes;
    case PickleKind::kText:
      return kScalarBytes + JsonBytes(node.text);
    case PickleKind::kBytes:
    case PickleKind::kBigInt:
      return kObjectBytes + 2 * node.text.size();
    default:
      return kObjectBytes;
  }
}

// Storages that only a quantizer used are in the metadata already.
void DropUnusedStorages(ModelPlan& plan) {
  std::vector<std::uint32_t> numbers(plan.storages.size(), kNoStorage);
  for (const TensorSpec& tensor : plan.tensors) {
    if (tensor.storage != kNoStorage) {
      numbers[tensor.storage] = 0;
    }
  }
  std::vector<PlannedStorage> kept;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != kNoStorage) {
      numbers[i] = static_cast<std::uint32_t>(kept.size());
      kept.push_back(std::move(plan.storages[i]));
    }
  }
  plan.storages = std::move(kept);
  for (TensorSpec& tensor : plan.tensors) {
    tensor.storage = tensor.storage == kNoStorage ? kNoStorage : numbers[tensor.storage];
  }
}

class Walker {
 public:
  Walker(const PickleDocument& document, std::span<const SourceFile> files,
         const ResolveStorage& resolve, ModelPlan& plan)
      : document_(document),
        files_(files),
        rebuilder_(
            document, [this, &resolve](const StorageId& id) { return Resolve(resolve, id); },
            [&plan](std::uint32_t storage) { return plan.storages[storage].size_bytes; }),
        max_visits_(kFreeVisits + kMaxVisitsPerNode * document.nodes.size()),
        plan_(plan) {}

  Result<void> Run() {
    auto structure = Walk(document_.root);
    if (!structure.ok()) {
      return std::move(structure).error();
    }
    if (structure->is_object() && structure->contains("opaque")) {
      return Error{ErrorCode::kUnsupported,
                   "the checkpoint is one pickled object of class " +
                       (*structure)["opaque"].get<std::string>() +
                       ", not a collection of tensors: save its state_dict() instead, or "
                       "torch.jit.save it",
                   0};
    }
    Spend(names_.Disambiguate(plan_.tensors, ByteBudget::Limit(document_.consumed_bytes)));
    if (over_budget_) {
      return OverBudget();
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
    DropUnusedStorages(plan_);
    return {};
  }

 private:
  // Extends the path while it lives.
  class Step {
   public:
    Step(Walker& walker, const NameStep& step) : walker_(walker) {
      constexpr std::size_t kDigits = 6;
      walker.Spend(step.text.empty() ? kDigits : step.text.size());
      walker.names_.Enter(step);
    }
    ~Step() { walker_.Spend(walker_.names_.Leave() ? CheckpointNames::kStepBytes : 0); }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    Walker& walker_;
  };

  // Walk() refuses to go on once it was too much.
  void Spend(std::uint64_t bytes) {
    over_budget_ = !budget_.Charge(bytes, document_.consumed_bytes) || over_budget_;
  }

  [[nodiscard]] Error OverBudget() const {
    return Error{
        ErrorCode::kBadFile,
        "the checkpoint " + budget_.Complaint(document_.consumed_bytes) + ", at " + Quoted(path()),
        0};
  }

  // Recursion is bounded by kMaxDepth.
  Result<Json> Walk(PickleRef ref) {
    if (on_path_.count(ref) != 0) {
      return Error{ErrorCode::kBadFile, "the checkpoint contains itself at " + Quoted(path()), 0};
    }
    if (on_path_.size() >= static_cast<std::size_t>(kMaxDepth) || ++visits_ > max_visits_) {
      return Error{ErrorCode::kBadFile,
                   "the checkpoint is nested deeper than " + std::to_string(kMaxDepth) +
                       " levels or has more than " + std::to_string(max_visits_) + " values, at " +
                       Quoted(path()),
                   0};
    }
    Spend(NodeBytes(document_.At(ref)));
    if (over_budget_) {
      return OverBudget();
    }
    on_path_.insert(ref);
    auto node = WalkNode(ref, document_.At(ref));
    on_path_.erase(ref);
    return node;
  }

  Result<Json> WalkNode(PickleRef ref, const PickleNode& node) {
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
        return WalkItems("l", node);
      case PickleKind::kTuple:
        return WalkItems("u", node);
      case PickleKind::kSet:
        return WalkItems("set", node);
      case PickleKind::kDict:
        return WalkDict(node);
      case PickleKind::kGlobal:
        return WalkGlobal(node);
      case PickleKind::kCall:
        return WalkCall(ref, node);
      case PickleKind::kPersistent:
        return Opaque("torch.UntypedStorage");
    }
    return Error{ErrorCode::kInternal, "unknown kind of pickle node", 0};
  }

  static Json IntNode(std::int64_t value) {
    if (value > kMostExactInteger || value < -kMostExactInteger) {
      return {{"int", std::to_string(value)}};
    }
    return value;
  }

  Json Opaque(const std::string& what) {
    NoteOpaque(what);
    Spend(JsonBytes(what));
    return {{"opaque", what}};
  }

  void NoteOpaque(const std::string& what) {
    opaque_.push_back(path() + ": " + what);
    Spend(JsonBytes(path()) + JsonBytes(what));
  }

  Result<Json> WalkItems(const char* kind, const PickleNode& node) {
    Json items = Json::array();
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const Step step(*this, {StepKind::kNumber, {}, i});
      auto item = Walk(node.items[i]);
      if (!item.ok()) {
        return item;
      }
      items.push_back(std::move(*item));
    }
    return Json{{kind, std::move(items)}};
  }

  Result<Json> WalkStep(PickleRef ref, const NameStep& way) {
    const Step step(*this, way);
    return Walk(ref);
  }

  Result<Json> WalkDict(const PickleNode& node) {
    Json pairs = Json::array();
    std::size_t position = 0;
    for (const DictPair& pair : DictPairs(document_, node)) {
      auto key = WalkStep(pair.key, {StepKind::kKey, {}, position});
      if (!key.ok()) {
        return key;
      }
      auto value = WalkStep(pair.value, StepOfKey(pair.key, position++));
      if (!value.ok()) {
        return value;
      }
      pairs.push_back(Json::array({std::move(*key), std::move(*value)}));
    }
    Json dict{{"d", std::move(pairs)}, {"type", node.text}};
    if (auto attributes = WalkAttributes(node); !attributes.ok()) {
      return attributes;
    } else if (!attributes->empty()) {
      dict["attrs"] = std::move(*attributes);
    }
    return dict;
  }

  // Attributes of a dict (the _metadata of a state dict), from BUILD's state.
  Result<Json> WalkAttributes(const PickleNode& node) {
    Json attributes = Json::object();
    if (node.state == kNoRef || document_.At(node.state).kind != PickleKind::kDict) {
      return attributes;
    }
    for (const DictPair& pair : DictPairs(document_, document_.At(node.state))) {
      const PickleNode& key = document_.At(pair.key);
      Spend(JsonBytes(key.text));
      if (over_budget_) {
        return OverBudget();
      }
      if (key.kind != PickleKind::kText) {
        continue;
      }
      auto value = WalkStep(pair.value, {StepKind::kAttribute, key.text, 0});
      if (!value.ok()) {
        return value;
      }
      attributes[key.text] = std::move(*value);
    }
    return attributes;
  }

  Result<Json> WalkGlobal(const PickleNode& node) {
    if (const auto dtype = DtypeOfGlobal(node)) {
      return Json{{"dtype", DtypeName(*dtype)}};
    }
    return Opaque(node.text);
  }

  Result<Json> WalkCall(PickleRef ref, const PickleNode& node) {
    if (RebuildsTensor(document_, node)) {
      return WalkTensor(ref, node);
    }
    const PickleNode& callable = document_.At(node.items[0]);
    const PickleNode& arguments = document_.At(node.items[1]);
    const std::string& name = callable.text;
    if (callable.kind != PickleKind::kGlobal) {
      return Opaque("the result of a call");
    }
    if (name == "torch._utils._rebuild_sparse_tensor") {
      return WalkSparse(arguments);
    }
    if (name == "torch.Size" && arguments.items.size() == 1) {
      return WalkItems("size", document_.At(arguments.items[0]));
    }
    // With more arguments than these take, each use would copy them all.
    if (name == "torch.device" && arguments.items.size() <= 2) {
      return DeviceNode(arguments);
    }
    if ((name == "builtins.complex" || name == "__builtin__.complex") &&
        arguments.items.size() == 2) {
      return ComplexNode(arguments);
    }
    return Opaque(name == "copyreg._reconstructor" || name == "copy_reg._reconstructor"
                      ? ReconstructedClass(arguments)
                      : name);
  }

  [[nodiscard]] std::string ReconstructedClass(const PickleNode& arguments) const {
    return arguments.items.empty() ? "copyreg._reconstructor"
                                   : document_.At(arguments.items[0]).text;
  }

  Json DeviceNode(const PickleNode& arguments) {
    std::string device;
    for (const PickleRef item : arguments.items) {
      const PickleNode& part = document_.At(item);
      device += part.kind == PickleKind::kInt ? ":" + std::to_string(part.integer) : part.text;
    }
    Spend(JsonBytes(device));
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
  Result<Json> WalkSparse(const PickleNode& arguments) {
    Json node = Opaque("torch.sparse");
    if (arguments.items.size() == 2) {
      auto parts = WalkItems("u", document_.At(arguments.items[1]));
      if (!parts.ok()) {
        return parts;
      }
      node["parts"] = std::move(*parts);
    }
    return node;
  }

  // Its parts stay out of the table: they are numbers about a tensor, no tensors of the checkpoint.
  Result<RebuiltTensor> Rebuild(const PickleNode& node, std::string_view what) {
    auto rebuilt = rebuilder_.Rebuild(node);
    if (!rebuilt.ok()) {
      return Error{rebuilt.error().code,
                   std::string(what) + " " + Quoted(path()) + ": " + rebuilt.error().message, 0};
    }
    return rebuilt;
  }

  Result<Json> WalkTensor(PickleRef ref, const PickleNode& node) {
    const auto number = static_cast<std::uint32_t>(plan_.tensors.size());
    auto rebuilt = Rebuild(node, "tensor");
    if (!rebuilt.ok()) {
      return std::move(rebuilt).error();
    }
    rebuilt->spec.name = path().empty() ? "tensor" : path();
    names_.AddTensor();
    Spend(sizeof(TensorSpec) + 2 * rebuilt->spec.name.size() +
          2 * rebuilt->spec.shape.size() * sizeof(std::int64_t));
    const std::int64_t channels = ChannelsOf(*rebuilt);
    plan_.tensors.push_back(std::move(rebuilt->spec));
    Json leaf{{"t", number}};
    const auto [first, added] = first_seen_.emplace(ref, number);
    if (!added) {
      leaf["is"] = first->second;
    }
    if (!rebuilt->subclass.empty()) {
      NoteOpaque(rebuilt->subclass + " (kept as a plain tensor)");
    }
    if (rebuilt->quantization) {
      auto entry = QuantizerEntry(*rebuilt->quantization, channels);
      if (!entry.ok()) {
        return entry;
      }
      quantization_[std::to_string(number)] = std::move(*entry);
    }
    return leaf;
  }

  // -1 when the quantizer has no axis, or one that the tensor lacks.
  static std::int64_t ChannelsOf(const RebuiltTensor& tensor) {
    const std::int64_t axis = tensor.quantization ? tensor.quantization->axis : -1;
    const auto& shape = tensor.spec.shape;
    return axis >= 0 && static_cast<std::uint64_t>(axis) < shape.size()
               ? shape[static_cast<std::size_t>(axis)]
               : -1;
  }

  Result<Json> QuantizerEntry(const Quantization& quantizer, std::int64_t channels) {
    Json entry{{"scheme", quantizer.scheme}};
    if (quantizer.scales == kNoRef) {
      entry["scale"] = FloatNode(quantizer.scale);
      entry["zero_point"] = quantizer.zero_point;
      return entry;
    }
    auto scales = ChannelNumbers(quantizer.scales, "scales of", channels);
    if (!scales.ok()) {
      return scales;
    }
    auto zero_points = ChannelNumbers(quantizer.zero_points, "zero points of", channels);
    if (!zero_points.ok()) {
      return zero_points;
    }
    // torch.save calls both schemes by one name; the type of the zero points tells.
    if (!zero_points->empty() && zero_points->front().is_number_float()) {
      entry["scheme"] = "per_channel_affine_float_qparams";
    }
    entry["scale"] = std::move(*scales);
    entry["zero_point"] = std::move(*zero_points);
    entry["axis"] = quantizer.axis;
    return entry;
  }

  Result<Json> ChannelNumbers(PickleRef ref, const std::string& what, std::int64_t channels) {
    const PickleNode& node = document_.At(ref);
    if (!RebuildsTensor(document_, node)) {
      return Error{ErrorCode::kBadFile, what + " " + Quoted(path()) + " are no tensor", 0};
    }
    auto rebuilt = Rebuild(node, what);
    if (!rebuilt.ok()) {
      return std::move(rebuilt).error();
    }
    auto numbers = ReadNumbers(files_, plan_.storages, rebuilt->spec);
    if (!numbers.ok()) {
      return Error{numbers.error().code,
                   what + " " + Quoted(path()) + ": " + numbers.error().message, 0};
    }
    if (static_cast<std::int64_t>(numbers->size()) != channels) {
      return Error{ErrorCode::kBadFile,
                   what + " " + Quoted(path()) + ": " + std::to_string(numbers->size()) +
                       " values for " + std::to_string(channels) + " channels",
                   0};
    }
    constexpr std::uint64_t kNumberBytes = 24;
    Spend(kNumberBytes * numbers->size());
    return numbers;
  }

  // How the value of a key is reached.
  NameStep StepOfKey(PickleRef ref, std::size_t position) {
    const PickleNode& key = document_.At(ref);
    switch (key.kind) {
      case PickleKind::kText:
        return {StepKind::kText, key.text, position};
      case PickleKind::kInt:
        return {StepKind::kNumber,
                integers_.try_emplace(ref, std::to_string(key.integer)).first->second, position};
      default:
        return {StepKind::kOther, {}, position};
    }
  }

  // torch.load takes the first declaration of a storage for all its uses, and with it a wrong dtype
  // for some. torch.save refuses to write such a file, empty storages aside.
  Result<std::uint32_t> Resolve(const ResolveStorage& resolve, const StorageId& id) {
    const auto& first = declared_.try_emplace(id.key, id.dtype, id.size_bytes).first->second;
    const bool both_empty = id.size_bytes == 0 && first.second == 0;
    if (!both_empty && first != std::pair(id.dtype, id.size_bytes)) {
      const auto shown = [](Dtype dtype, std::uint64_t bytes) {
        return std::to_string(bytes) + " bytes of " + std::string(DtypeName(dtype));
      };
      return Error{ErrorCode::kBadFile,
                   "storage " + Quoted(id.key) + " is used as " + shown(first.first, first.second) +
                       " and as " + shown(id.dtype, id.size_bytes),
                   0};
    }
    return resolve(id);
  }

  [[nodiscard]] const std::string& path() const { return names_.path(); }

  const PickleDocument& document_;
  std::span<const SourceFile> files_;
  TensorRebuilder rebuilder_;
  std::size_t max_visits_;
  ModelPlan& plan_;
  ByteBudget budget_;
  bool over_budget_ = false;
  CheckpointNames names_;
  std::unordered_map<PickleRef, std::string> integers_;  // keys of dicts, as texts
  std::unordered_map<std::string, std::pair<Dtype, std::uint64_t>> declared_;  // by storage key
  std::unordered_set<PickleRef> on_path_;
  std::size_t visits_ = 0;
  std::unordered_map<PickleRef, std::uint32_t> first_seen_;
  Json opaque_ = Json::array();
  Json quantization_ = Json::object();
};

}  // namespace

Result<void> PlanCheckpoint(const PickleDocument& document, std::span<const SourceFile> files,
                            const ResolveStorage& resolve, ModelPlan& plan) {
  return Walker(document, files, resolve, plan).Run();
}

}  // namespace modelcache
