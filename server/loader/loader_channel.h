// The loader's side of its private channel to the daemon.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/frame_channel.h"
#include "proto/messages.h"

namespace modelcache {

// A job with its descriptors: those of the files that came, then those of the arenas.
struct Job {
  JobRequest request;
  std::vector<UniqueFd> descriptors;
};

struct Candidates {
  CandidatesReply reply;
  std::vector<UniqueFd> arenas;  // as many as reply.arenas
};

struct Reservation {
  std::vector<ArenaId> ids;
  std::vector<UniqueFd> arenas;  // as many as ids
};

// Typed calls. One thread. Errors of every call: what the daemon answered, or kUnavailable,
// kProtocol, kTimeout, kLimit, kSystem of the channel itself.
class LoaderChannel {
 public:
  explicit LoaderChannel(UniqueFd socket) : channel_(std::move(socket)) {}

  Result<Job> ReceiveJob();
  Result<Candidates> AskCandidates(const CandidatesRequest& request);
  // Errors: also kNoRoom.
  Result<Reservation> Reserve(const ReserveRequest& request);
  Result<void> Commit(const CommitRequest& request);

  // Progress is sent at most ten times a second; calls in between do nothing.
  Result<void> SendProgress(const LoaderProgressEvent& event);
  Result<void> SendVerified(VerifiedEvent event);
  Result<void> SendFailed(const Error& error);

  [[nodiscard]] int fd() const { return channel_.fd(); }

 private:
  template <typename Reply, typename Request>
  Result<std::pair<Reply, std::vector<UniqueFd>>> Call(MessageType type, const Request& request);
  template <typename Event>
  Result<void> SendEvent(MessageType type, const Event& event);

  FrameChannel channel_;
  std::uint32_t next_request_id_ = 1;
  std::uint32_t job_request_id_ = 0;
  TimePoint next_progress_{};
};

}  // namespace modelcache
