// Frames of clients and loaders to calls of the dispatcher.
#pragma once

#include "common/clock.h"
#include "common/ids.h"
#include "proto/frame.h"
#include "server/actions.h"
#include "server/dispatcher.h"

namespace modelcache {

// Who sent a request.
struct Peer {
  SessionId session;
  bool own_user = false;  // its user is the daemon's
};

// Decodes a client's request, looks at the descriptors that came with it, and dispatches it. A body
// that cannot be decoded, an unknown type and missing descriptors are answered with an error.
Actions DispatchRequest(Dispatcher& dispatcher, const Peer& peer, Frame frame, TimePoint now);

// As above for what a loader says; whatever is outside the protocol fails its job.
Actions DispatchLoaderFrame(Dispatcher& dispatcher, JobId job, const Frame& frame, TimePoint now);

// The body of an action.
std::string EncodeBody(const ClientBody& body);
std::string EncodeBody(const LoaderBody& body);

}  // namespace modelcache
