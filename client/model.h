// Model: a mapped model with its lease. What mc_model is made of.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/attach.h"
#include "client/connection.h"
#include "client/description.h"
#include "client/written_pages.h"
#include "common/ids.h"
#include "proto/messages.h"

namespace modelcache {

// Immutable once made: any thread may read it. Destroying it unmaps the memory, then ends the
// lease on the connection it came from.
class Model {
 public:
  // Takes over the lease in `reply`. REQUIRES that `mapped` was mapped from `reply`.
  Model(std::shared_ptr<Connection> connection, OpenReply reply, MappedModel mapped)
      : connection_(std::move(connection)),
        reply_(std::move(reply)),
        id_text_(reply_.model_id.Hex()),
        format_(mapped.manifest.format()),
        mapped_(std::move(mapped)) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model() {
    delete description_.load();
    mapped_ = MappedModel();
    connection_->Release(LeaseId{reply_.lease});
  }

  [[nodiscard]] const OpenReply& reply() const { return reply_; }
  [[nodiscard]] const Manifest& manifest() const { return mapped_.manifest; }
  [[nodiscard]] const std::vector<void*>& storage_data() const { return mapped_.storage_data; }
  // True when this process has written to the memory. Errors: kSystem when the kernel does not
  // tell.
  [[nodiscard]] Result<bool> written() const {
    Result<bool> arenas = AnyPageWritten(mapped_.arenas);
    return !arenas.ok() || *arenas ? arenas : AnyPageWritten(mapped_.copies);
  }
  [[nodiscard]] std::uint64_t payload_bytes() const { return mapped_.facts->payload_bytes; }
  [[nodiscard]] const std::string& id_text() const { return id_text_; }
  [[nodiscard]] const std::string& format() const { return format_; }

  // The parsed metadata; belongs to the model. Errors: kCorrupt.
  [[nodiscard]] Result<const ModelDescription*> description() const {
    if (const ModelDescription* known = description_.load()) {
      return known;
    }
    Result<ModelDescription> parsed = ParseDescription(
        manifest().metadata_json(), static_cast<std::uint32_t>(manifest().storages().size()));
    if (!parsed.ok()) {
      return std::move(parsed).error();
    }
    // No lock: one held by another thread during a fork would stay held in the child.
    auto mine = std::make_unique<const ModelDescription>(std::move(*parsed));
    const ModelDescription* first = nullptr;
    if (description_.compare_exchange_strong(first, mine.get())) {
      return mine.release();
    }
    return first;
  }

 private:
  std::shared_ptr<Connection> connection_;
  OpenReply reply_;
  std::string id_text_;
  std::string format_;
  MappedModel mapped_;
  mutable std::atomic<const ModelDescription*> description_{nullptr};
};

}  // namespace modelcache
