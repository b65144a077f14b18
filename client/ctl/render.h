// Replies of the daemon as text for people and as JSON.
#pragma once

#include <string>

#include "client/model.h"
#include "proto/messages.h"

namespace modelcache {

// A wide list has every column and whole names; else it fits 100 columns at usual counts.
struct ListStyle {
  bool colour = false;
  bool wide = false;
};
std::string RenderList(const ListReply& reply, const ListStyle& style);
std::string RenderStatus(const StatusReply& reply);
std::string RenderWhy(const WhyReply& reply, bool colour);
std::string RenderVerify(const VerifyReply& reply);

// What `load` tells of the model it opened.
std::string RenderLoaded(const Model& model);
std::string LoadedJson(const Model& model);

// The tensor table. JSON: per tensor name, dtype, shape, stride (elements), offset (bytes from the
// start of its storage), storage (number, or null on the meta device) and nbytes.
std::string RenderTensors(const Model& model, bool colour);
std::string TensorsJson(const Model& model);

}  // namespace modelcache
