// Tables and JSON of modelcachectl.
#include "client/ctl/render.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "client/ctl/text.h"
#include "proto/dtype.h"
#include "proto/manifest.h"

namespace modelcache {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kIdDigits = 8;  // more than the six that name a model
constexpr std::size_t kNameColumns = 31;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string List(std::span<const std::int64_t> numbers) {
  std::string text = "[";
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  }
  return text + "]";
}

std::string Line(const std::string& label, const std::string& value) {
  return label + std::string(18 - std::min<std::size_t>(label.size(), 17), ' ') + value + "\n";
}

std::string Counted(std::size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

Json ModelJson(const Model& model) {
  const Manifest& manifest = model.manifest();
  return {{"id", model.id_text()},
          {"name", model.reply().name},
          {"format", model.format()},
          {"tensor_count", manifest.tensors().size()},
          {"storages", manifest.storages().size()},
          {"arenas", manifest.arenas().size()},
          {"bytes", model.payload_bytes()},
          {"load_seconds", model.reply().load_seconds}};
}

std::string StateOf(const ModelInfo& model) { return model.pinned ? "pinned" : model.state; }

// Of a call the function and what it was given tell more than the module.
std::string ListedName(const ModelInfo& model) {
  const std::string name = Printable(model.name);
  const std::size_t colon = model.format == kCallFormat ? name.find(':') : std::string::npos;
  const bool has_module = colon < name.find('(');
  return Shortened(has_module ? name.substr(colon + 1) : name, kNameColumns);
}

Table NarrowList(const ListReply& reply) {
  Table table({{"ID"},
               {"NAME"},
               {"SIZE", Align::kRight},
               {"MEMORY", Align::kRight},
               {"LEASES", Align::kRight},
               {"HITS", Align::kRight},
               {"IDLE", Align::kRight},
               {"STATE"}});
  for (const ModelInfo& model : reply.models) {
    table.Add({model.id.Hex().substr(0, kIdDigits), ListedName(model),
               HumanBytes(model.storage_bytes), HumanBytes(model.resident_bytes),
               std::to_string(model.leases), std::to_string(model.hits),
               HumanSeconds(model.idle_seconds), StateOf(model)});
  }
  return table;
}

Table WideList(const ListReply& reply) {
  Table table({{"ID"},
               {"NAME"},
               {"FORMAT"},
               {"TENSORS", Align::kRight},
               {"SIZE", Align::kRight},
               {"MEMORY", Align::kRight},
               {"SHARED", Align::kRight},
               {"LEASES", Align::kRight},
               {"HITS", Align::kRight},
               {"LOADED IN", Align::kRight},
               {"IDLE", Align::kRight},
               {"STATE"},
               {"PATH"}});
  for (const ModelInfo& model : reply.models) {
    table.Add({model.id.Hex(), Printable(model.name), model.format, std::to_string(model.tensors),
               HumanBytes(model.storage_bytes), HumanBytes(model.resident_bytes),
               HumanBytes(model.borrowed_bytes), std::to_string(model.leases),
               std::to_string(model.hits), HumanSeconds(model.load_seconds),
               HumanSeconds(model.idle_seconds), StateOf(model), Printable(model.path)});
  }
  return table;
}

// One sentence on a verification, and what to do about it.
std::string Verdict(const VerifyReply& reply) {
  if (!reply.memory_ok || (!reply.ok && reply.disk != "differs")) {
    return "DAMAGED: the memory is not what was loaded; evict the model and load it again";
  }
  if (!reply.ok) {
    return "DIFFERS: the files on disk are not what was loaded";
  }
  return "ok: the memory is what was loaded";
}

std::string DiskText(const std::string& disk) {
  return disk == "unavailable" ? "could not be read, so they were not compared" : disk;
}

bool IsContiguous(std::span<const std::int64_t> shape, std::span<const std::int64_t> stride) {
  const std::vector<std::int64_t> usual = ContiguousStride(shape);
  return std::equal(usual.begin(), usual.end(), stride.begin(), stride.end());
}

}  // namespace

std::string RenderList(const ListReply& reply, const ListStyle& style) {
  if (reply.models.empty()) {
    return "no models; 'modelcachectl load PATH' loads one\n";
  }
  return style.wide ? WideList(reply).Text(style.colour) : NarrowList(reply).Text(style.colour);
}

std::string RenderStatus(const StatusReply& reply) {
  return Line("daemon", "modelcached " + reply.version + ", pid " +
                            std::to_string(reply.daemon_pid) + ", up " +
                            HumanSeconds(reply.uptime_seconds)) +
         Line("socket", Printable(reply.socket)) +
         Line("memory", HumanBytes(reply.resident_bytes) + " of " +
                            HumanBytes(reply.memory_budget_bytes) + ", " +
                            HumanBytes(reply.reserved_bytes) + " reserved") +
         Line("models", std::to_string(reply.entries) + " resident (" +
                            HumanBytes(reply.arena_bytes) + "), " + std::to_string(reply.loading) +
                            " loading") +
         Line("opens",
              std::to_string(reply.hits) + " hits, " + std::to_string(reply.misses) + " misses") +
         Line("loads", std::to_string(reply.loads) + " done, " +
                           std::to_string(reply.failed_loads) + " failed, " +
                           std::to_string(reply.evictions) + " evictions") +
         Line("clients", std::to_string(reply.clients) + " connected, " +
                             std::to_string(reply.leases) + " leases");
}

std::string RenderWhy(const WhyReply& reply, bool colour) {
  std::string text = Printable(reply.model) + ": " + reply.state +
                     (reply.state == "absent" ? ", the next open loads it" : "") + "\n";
  Table table({{"AGO", Align::kRight}, {"EVENT"}, {"REASON"}});
  for (const HistoryEvent& event : reply.history) {
    table.Add({HumanSeconds(event.seconds_ago), event.event, Printable(event.reason)});
  }
  return reply.history.empty() ? text : text + table.Text(colour);
}

std::string RenderVerify(const VerifyReply& reply) {
  std::string text = Verdict(reply) + "\n";
  text += Line("  memory", Counted(reply.storages, "storage") + ", " + HumanBytes(reply.bytes) +
                               ", " + (reply.memory_ok ? "intact" : "damaged"));
  text += Line("  files on disk", DiskText(reply.disk));
  for (const std::string& difference : reply.differences) {
    text += "  " + Printable(difference) + "\n";
  }
  return text;
}

std::string RenderLoaded(const Model& model) {
  const OpenReply& reply = model.reply();
  std::string text = Printable(reply.name) + "\n";
  text += Line("  id", model.id_text());
  text += Line("  " + std::string(reply.hit ? "hit" : "miss"), Printable(reply.reason));
  text += Line("  format", model.format());
  text += Line("  size", HumanBytes(model.payload_bytes()) + ", " +
                             Counted(model.manifest().tensors().size(), "tensor") + ", " +
                             Counted(model.manifest().arenas().size(), "arena"));
  text += Line("  cold load", HumanSeconds(reply.load_seconds));
  return text;
}

std::string LoadedJson(const Model& model) {
  Json json = ModelJson(model);
  json["hit"] = model.reply().hit;
  json["reason"] = model.reply().reason;
  return Dump(json);
}

std::string RenderTensors(const Model& model, bool colour) {
  const Manifest& manifest = model.manifest();
  Table table({{"TENSOR"},
               {"DTYPE"},
               {"SHAPE"},
               {"STRIDE"},
               {"STORAGE", Align::kRight},
               {"OFFSET", Align::kRight},
               {"SIZE", Align::kRight}});
  for (const TensorRecord& tensor : manifest.tensors()) {
    const auto shape = manifest.Shape(tensor);
    const auto stride = manifest.Stride(tensor);
    table.Add({Printable(manifest.Name(tensor)),
               std::string(DtypeName(static_cast<Dtype>(tensor.dtype))), List(shape),
               IsContiguous(shape, stride) ? "" : List(stride),
               tensor.storage == kNoStorage ? "meta" : std::to_string(tensor.storage),
               std::to_string(tensor.data_offset_bytes), HumanBytes(tensor.extent_bytes)});
  }
  return RenderLoaded(model) + table.Text(colour);
}

std::string TensorsJson(const Model& model) {
  const Manifest& manifest = model.manifest();
  Json tensors = Json::array();
  for (const TensorRecord& tensor : manifest.tensors()) {
    const auto shape = manifest.Shape(tensor);
    const auto stride = manifest.Stride(tensor);
    const bool has_data = tensor.storage != kNoStorage;
    tensors.push_back({{"name", manifest.Name(tensor)},
                       {"dtype", DtypeName(static_cast<Dtype>(tensor.dtype))},
                       {"shape", std::vector(shape.begin(), shape.end())},
                       {"stride", std::vector(stride.begin(), stride.end())},
                       {"offset", tensor.data_offset_bytes},
                       {"storage", has_data ? Json(tensor.storage) : Json(nullptr)},
                       {"nbytes", tensor.extent_bytes}});
  }
  Json json = ModelJson(model);
  json["tensors"] = std::move(tensors);
  Json metadata = Json::parse(manifest.metadata_json(), nullptr, false);
  json["metadata"] = metadata.is_discarded() ? Json::object() : std::move(metadata);
  return Dump(json);
}

}  // namespace modelcache
