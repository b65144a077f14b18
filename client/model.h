// Model: a mapped model with its lease. What mc_model is made of.
#pragma once

#include <memory>
#include <string>

#include "client/attach.h"
#include "client/connection.h"
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
    mapped_ = MappedModel();
    connection_->Release(LeaseId{reply_.lease});
  }

  [[nodiscard]] const OpenReply& reply() const { return reply_; }
  [[nodiscard]] const Manifest& manifest() const { return mapped_.manifest; }
  [[nodiscard]] const std::vector<void*>& storage_data() const { return mapped_.storage_data; }
  [[nodiscard]] std::uint64_t payload_bytes() const { return mapped_.facts->payload_bytes; }
  [[nodiscard]] const std::string& id_text() const { return id_text_; }
  [[nodiscard]] const std::string& format() const { return format_; }

 private:
  std::shared_ptr<Connection> connection_;
  OpenReply reply_;
  std::string id_text_;
  std::string format_;
  MappedModel mapped_;
};

}  // namespace modelcache
