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
        rebuilder_(document, resolve,
                   [&plan](std::uint32_t storage) { return plan.storages[storage].size_bytes; }),
        max_visits_(kFreeVisits + kMaxVisitsPerNode * document.nodes.size()),
        plan_(plan) {}

  Result<void> Run() {
    auto structure = Walk(document_.root);
    if (!structure.ok()) {
      return std::move(structure).error();
    }
    if (over_budget_) {
      return OverBudget();
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
    DropUnusedStorages(plan_);
    return {};
  }

 private:
  // Extends the path while it lives.
  class Step {
   public:
    Step(Walker& walker, std::string_view part)
        : path_(walker.path_), length_(walker.path_.size()) {
      walker.Spend(part.size());
      path_ += path_.empty() ? "" : ".";
      path_ += part;
    }
    ~Step() { path_.resize(length_); }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    std::string& path_;
    std::size_t length_;
  };

  // Walk() refuses to go on once it was too much.
  void Spend(std::uint64_t bytes) {
    over_budget_ = !budget_.Charge(bytes, document_.consumed_bytes) || over_budget_;
  }

  [[nodiscard]] Error OverBudget() const {
    return Error{
        ErrorCode::kBadFile,
        "the checkpoint " + budget_.Complaint(document_.consumed_bytes) + ", at " + Quoted(path_),
        0};
  }

  // Recursion is bounded by kMaxDepth.
  Result<Json> Walk(PickleRef ref) {
    if (on_path_.count(ref) != 0) {
      return Error{ErrorCode::kBadFile, "the checkpoint contains itself at " + Quoted(path_), 0};
    }
    if (on_path_.size() >= static_cast<std::size_t>(kMaxDepth) || ++visits_ > max_visits_) {
      return Error{ErrorCode::kBadFile,
                   "the checkpoint is nested deeper than " + std::to_string(kMaxDepth) +
                       " levels or has more than " + std::to_string(max_visits_) + " values, at " +
                       Quoted(path_),
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
    opaque_.push_back(path_ + ": " + what);
    Spend(JsonBytes(path_) + JsonBytes(what));
  }

  Result<Json> WalkItems(const char* kind, const PickleNode& node) {
    Json items = Json::array();
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      const Step step(*this, std::to_string(i));
      auto item = Walk(node.items[i]);
      if (!item.ok()) {
        return item;
      }
      items.push_back(std::move(*item));
    }
    return Json{{kind, std::move(items)}};
  }

  Result<Json> WalkStep(PickleRef ref, std::string_view part) {
    const Step step(*this, part);
    return Walk(ref);
  }

  Result<Json> WalkDict(const PickleNode& node) {
    Json pairs = Json::array();
    for (std::size_t i = 0; i + 1 < node.items.size(); i += 2) {
      auto key = WalkStep(node.items[i], "key");
      if (!key.ok()) {
        return key;
      }
      auto value = WalkStep(node.items[i + 1], KeyText(node.items[i], i / 2));
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
    const PickleNode& state = document_.At(node.state);
    for (std::size_t i = 0; i + 1 < state.items.size(); i += 2) {
      const PickleNode& key = document_.At(state.items[i]);
      Spend(JsonBytes(key.text));
      if (over_budget_) {
        return OverBudget();
      }
      if (key.kind != PickleKind::kText) {
        continue;
      }
      auto value = WalkStep(state.items[i + 1], key.text);
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
                   std::string(what) + " " + Quoted(path_) + ": " + rebuilt.error().message, 0};
    }
    return rebuilt;
  }

  Result<Json> WalkTensor(PickleRef ref, const PickleNode& node) {
    const auto number = static_cast<std::uint32_t>(plan_.tensors.size());
    auto rebuilt = Rebuild(node, "tensor");
    if (!rebuilt.ok()) {
      return std::move(rebuilt).error();
    }
    rebuilt->spec.name = UniqueName(path_.empty() ? "tensor" : path_);
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
      return Error{ErrorCode::kBadFile, what + " " + Quoted(path_) + " are no tensor", 0};
    }
    auto rebuilt = Rebuild(node, what);
    if (!rebuilt.ok()) {
      return std::move(rebuilt).error();
    }
    auto numbers = ReadNumbers(files_, plan_.storages, rebuilt->spec);
    if (!numbers.ok()) {
      return Error{numbers.error().code,
                   what + " " + Quoted(path_) + ": " + numbers.error().message, 0};
    }
    if (static_cast<std::int64_t>(numbers->size()) != channels) {
      return Error{ErrorCode::kBadFile,
                   what + " " + Quoted(path_) + ": " + std::to_string(numbers->size()) +
                       " values for " + std::to_string(channels) + " channels",
                   0};
    }
    constexpr std::uint64_t kNumberBytes = 24;
    Spend(kNumberBytes * numbers->size());
    return numbers;
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

  // "a#2" may itself be the name of another tensor. The last number is kept per name: starting at 2
  // each time would make many tensors of one name cost the square of their count.
  std::string UniqueName(const std::string& wanted) {
    if (names_.insert(wanted).second) {
      return wanted;
    }
    std::size_t& last = last_numbers_.try_emplace(wanted, 1).first->second;
    std::string numbered;
    do {
      numbered = wanted + "#" + std::to_string(++last);
    } while (!names_.insert(numbered).second);
    return numbered;
  }

  const PickleDocument& document_;
  std::span<const SourceFile> files_;
  TensorRebuilder rebuilder_;
  std::size_t max_visits_;
  ModelPlan& plan_;
  ByteBudget budget_;
  bool over_budget_ = false;
  std::string path_;
  std::unordered_set<PickleRef> on_path_;
  std::size_t visits_ = 0;
  std::unordered_map<PickleRef, std::uint32_t> first_seen_;
  std::unordered_set<std::string> names_;
  std::unordered_map<std::string, std::size_t> last_numbers_;
  Json opaque_ = Json::array();
  Json quantization_ = Json::object();
};

}  // namespace

Result<void> PlanCheckpoint(const PickleDocument& document, std::span<const SourceFile> files,
                            const ResolveStorage& resolve, ModelPlan& plan) {
  return Walker(document, files, resolve, plan).Run();
}

}  // namespace modelcache
