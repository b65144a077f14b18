// Actions: what the dispatcher wants done. The daemon performs them, in order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/ids.h"
#include "common/unique_fd.h"
#include "proto/frame.h"
#include "proto/messages.h"

namespace modelcache {

using ClientBody = std::variant<EmptyReply, ErrorReply, OpenReply, ProgressEvent, ListReply,
                                StatusReply, WhyReply, VerifyReply, MetricsReply>;
using LoaderBody = std::variant<EmptyReply, ErrorReply, CandidatesReply, ReserveReply>;

// A frame for a client. Dropped when the session is gone.
struct SendToClient {
  SessionId session;
  MessageType type = MessageType::kHello;
  std::uint8_t flags = 0;
  std::uint32_t request_id = 0;
  ClientBody body;
  std::vector<ArenaId> descriptors;  // of these arenas
};

// A frame for the loader of a job. Dropped when it is gone.
struct SendToLoader {
  JobId job;
  MessageType type = MessageType::kJob;
  std::uint8_t flags = 0;
  std::uint32_t request_id = 0;
  LoaderBody body;
  std::vector<ArenaId> descriptors;
};

// How to start a program. The first argument is its absolute path.
struct Launch {
  std::vector<std::string> arguments;
  std::vector<std::string> environment;  // "NAME=value", the whole of it
  std::string folder;                    // to start in; empty: the daemon's
};

// Spawn a loader and send it the job with the files' and the arenas' descriptors. Answered by
// Dispatcher::OnLoaderExit, whatever happens.
struct StartJob {
  JobId job;
  JobRequest request;
  std::vector<UniqueFd> files;
  std::optional<Launch> launch{};  // nothing: the daemon's own loader
};

// Kill the loader and everything it started. OnLoaderExit still follows.
struct CancelJob {
  JobId job;
};

// Create the arenas of a granted reservation. Answered by Dispatcher::OnArenasCreated.
struct CreateArenas {
  JobId job;
  std::vector<ReserveArena> arenas;
};

// Seal and validate what a loader committed. Answered by Dispatcher::OnSealed.
struct SealArenas {
  JobId job;
  ModelId model;
  std::vector<ArenaId> borrowed;
  std::vector<ArenaId> own;
};

// Close the descriptors. Each is answered by Dispatcher::OnArenaClosed once its memory is back.
struct CloseArenas {
  std::vector<ArenaId> arenas;
};

// Look again at what these arenas hold. Answered by Dispatcher::OnArenaMeasured.
struct MeasureArenas {
  std::vector<ArenaId> arenas;
};

// A line for the log.
struct Note {
  enum class Level : std::uint8_t { kInfo, kWarning };
  Level level = Level::kInfo;
  std::string text;
};

struct StopDaemon {};

using Action = std::variant<SendToClient, SendToLoader, StartJob, CancelJob, CreateArenas,
                            SealArenas, CloseArenas, MeasureArenas, Note, StopDaemon>;
using Actions = std::vector<Action>;

}  // namespace modelcache
