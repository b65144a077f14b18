// Opens of Python calls.
#include <utility>

#include "server/dispatcher.h"

namespace modelcache {
namespace {

std::string StaleReason(const CallRequest& call) {
  return call.stale_reason.empty() ? "out of date, as its client found" : call.stale_reason;
}

}  // namespace

void Dispatcher::OpenCall(Waiter waiter, const OpenRequest& request, UniqueFd payload,
                          TimePoint now, Actions& out) {
  const CallRequest& call = *request.call;
  const std::string path = CallPath(call.key);
  if (const std::string* why = calls_.Uncacheable(path); why != nullptr) {
    out.emplace_back(RefusedReply(waiter, MessageType::kOpen, UncacheableError(*why)));
    return;
  }
  const ResidentModel* current = catalog_.FindCall(path);
  if (current != nullptr && current->id == call.stale) {
    catalog_.Retire(current->id, StaleReason(call), now);
    current = nullptr;
  }
  if (current != nullptr) {
    OpenResident(waiter, request, current->id, now, out);
    return;
  }
  const std::optional<ModelId> loading = jobs_.LoadingCall(path);
  if (!loading || !jobs_.Join(*loading, waiter, request.pin)) {
    StartCall(std::move(waiter), request, std::move(payload), now, out);
  }
}

void Dispatcher::StartCall(Waiter waiter, const OpenRequest& request, UniqueFd payload,
                           TimePoint now, Actions& out) {
  const CallRequest& call = *request.call;
  LoadSpec spec;
  spec.wanted.id = calls_.NewModel(call.key);
  spec.wanted.path = CallPath(call.key);
  spec.wanted.options.format = kCallFormat;
  spec.wanted.stale = call.stale ? StaleReason(call) : "";
  spec.name = call.name.empty() ? spec.wanted.path : call.name;
  spec.wanted.name = spec.name;
  spec.files.push_back(std::move(payload));
  spec.pin = request.pin;
  spec.launch = Launch{call.arguments, call.environment, call.folder};
  BeginLoad(std::move(waiter), std::move(spec), now, out);
}

}  // namespace modelcache
