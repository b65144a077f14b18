// Requests wait for exactly the reply with their id: the daemon sends a loader nothing else.
#include "server/loader/loader_channel.h"

#include <chrono>
#include <string>

#include "common/utf8.h"
#include "proto/codec.h"

namespace modelcache {
namespace {

// The daemon enforces the deadline of a load by killing its loader; this bound only keeps a loader
// from waiting on a daemon that hangs. Making room may take the daemon a while.
constexpr std::chrono::minutes kReplyTimeout{10};

Error UnexpectedFrame(const FrameHeader& header) {
  return Error{ErrorCode::kProtocol,
               "unexpected message of type " + std::to_string(static_cast<int>(header.type)) +
                   " on the loader channel",
               0};
}

Error AsError(const Frame& frame) {
  auto reply = Decode<ErrorReply>(frame.body);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return ToError(std::move(*reply));
}

Error DescriptorCountError(std::size_t expected, std::size_t found) {
  return Error{ErrorCode::kProtocol,
               "a reply names " + std::to_string(expected) + " arenas but carries " +
                   std::to_string(found) + " descriptors",
               0};
}

}  // namespace

template <typename Reply, typename Request>
Result<std::pair<Reply, std::vector<UniqueFd>>> LoaderChannel::Call(MessageType type,
                                                                    const Request& request) {
  FrameHeader header;
  header.type = type;
  header.request_id = next_request_id_++;
  const TimePoint deadline = DeadlineAfter(kReplyTimeout);
  if (auto sent = channel_.Send(header, Encode(request), {}, deadline); !sent.ok()) {
    return std::move(sent).error();
  }
  auto frame = channel_.Receive(deadline);
  if (!frame.ok()) {
    return std::move(frame).error();
  }
  if (!frame->header.IsReply() || frame->header.request_id != header.request_id) {
    return UnexpectedFrame(frame->header);
  }
  if (frame->header.IsError()) {
    return AsError(*frame);
  }
  if (frame->DescriptorsMissing()) {
    return frame->MissingDescriptorsError();
  }
  auto reply = Decode<Reply>(frame->body);
  if (!reply.ok()) {
    return std::move(reply).error();
  }
  return std::pair(std::move(*reply), std::move(frame->descriptors));
}

template <typename Event>
Result<void> LoaderChannel::SendEvent(MessageType type, const Event& event) {
  FrameHeader header;
  header.type = type;
  header.flags = kFlagEvent;
  header.request_id = job_request_id_;
  return channel_.Send(header, Encode(event), {}, DeadlineAfter(kReplyTimeout));
}

Result<Job> LoaderChannel::ReceiveJob() {
  auto frame = channel_.Receive(DeadlineAfter(kReplyTimeout));
  if (!frame.ok()) {
    return std::move(frame).error();
  }
  if (frame->header.type != MessageType::kJob) {
    return UnexpectedFrame(frame->header);
  }
  job_request_id_ = frame->header.request_id;
  if (frame->DescriptorsMissing()) {
    return frame->MissingDescriptorsError();
  }
  auto request = Decode<JobRequest>(frame->body);
  if (!request.ok()) {
    return std::move(request).error();
  }
  return Job{std::move(*request), std::move(frame->descriptors)};
}

Result<Candidates> LoaderChannel::AskCandidates(const CandidatesRequest& request) {
  auto called = Call<CandidatesReply>(MessageType::kCandidates, request);
  if (!called.ok()) {
    return std::move(called).error();
  }
  Candidates candidates{std::move(called->first), std::move(called->second)};
  if (candidates.reply.arenas.size() != candidates.arenas.size()) {
    return DescriptorCountError(candidates.reply.arenas.size(), candidates.arenas.size());
  }
  return candidates;
}

Result<Reservation> LoaderChannel::Reserve(const ReserveRequest& request) {
  auto called = Call<ReserveReply>(MessageType::kReserve, request);
  if (!called.ok()) {
    return std::move(called).error();
  }
  Reservation reservation{std::move(called->first.arenas), std::move(called->second)};
  if (reservation.arenas.size() != request.arenas.size() ||
      reservation.ids.size() != request.arenas.size()) {
    return DescriptorCountError(request.arenas.size(), reservation.arenas.size());
  }
  return reservation;
}

Result<void> LoaderChannel::Commit(const CommitRequest& request) {
  auto called = Call<EmptyReply>(MessageType::kCommit, request);
  return called.ok() ? Result<void>() : Result<void>(std::move(called).error());
}

Result<void> LoaderChannel::SendProgress(const LoaderProgressEvent& event) {
  const TimePoint now = std::chrono::steady_clock::now();
  if (now < next_progress_) {
    return {};
  }
  next_progress_ = now + std::chrono::milliseconds(100);
  return SendEvent(MessageType::kLoaderProgress, event);
}

Result<void> LoaderChannel::SendVerified(VerifiedEvent event) {
  for (std::string& difference : event.differences) {
    difference = Printable(difference);
  }
  return SendEvent(MessageType::kVerified, event);
}

Result<void> LoaderChannel::SendFailed(const Error& error) {
  ErrorReply reply = ToReply(error);
  reply.message = Printable(reply.message);
  return SendEvent(MessageType::kJobFailed, reply);
}

}  // namespace modelcache
