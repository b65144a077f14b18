// Decoding, fstat of descriptors, dispatch.
#include "server/client_requests.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "common/memfd.h"
#include "proto/codec.h"

namespace modelcache {
namespace {

Result<FileStat> StatFile(int fd, const std::string& path) {
  const int flags = ::fcntl(fd, F_GETFL);
  // O_PATH and write-only descriptors do not prove that the client may read the file.
  if (flags < 0 || (flags & O_PATH) != 0 || (flags & O_ACCMODE) == O_WRONLY) {
    return Error{ErrorCode::kPermission, "the descriptor of " + path + " is not open for reading",
                 0};
  }
  struct stat status = {};
  if (::fstat(fd, &status) != 0) {
    return SystemError("fstat of " + path, errno);
  }
  if (!S_ISREG(status.st_mode)) {
    return Error{ErrorCode::kInvalidArgument, path + " is not a regular file", 0};
  }
  return ToFileStat(status);
}

Actions RefuseFrame(SessionId session, const FrameHeader& header, const Error& error) {
  Actions out;
  if (!header.IsEvent()) {
    Waiter waiter;
    waiter.session = session;
    waiter.request_id = header.request_id;
    out.emplace_back(RefusedReply(waiter, header.type, error));
  }
  return out;
}

// The loader reads it while the client may do anything: neither bytes nor size may change.
Result<void> CheckPayloads(const std::vector<UniqueFd>& descriptors) {
  for (const UniqueFd& fd : descriptors) {
    Result<MemfdInfo> info = InspectMemfd(fd.get());
    if (!info.ok() || !IsSealed(*info)) {
      return Error{ErrorCode::kInvalidArgument, "a call did not come in a sealed memfd", 0};
    }
  }
  return {};
}

Actions DispatchOpen(Dispatcher& dispatcher, const Peer& peer, Frame& frame, TimePoint now) {
  const SessionId session = peer.session;
  Result<OpenRequest> request = Decode<OpenRequest>(frame.body);
  if (!request.ok()) {
    return RefuseFrame(session, frame.header, request.error());
  }
  if (request->call) {
    if (auto checked = CheckPayloads(frame.descriptors); !checked.ok()) {
      return RefuseFrame(session, frame.header, checked.error());
    }
  }
  std::vector<OpenedFile> files;
  files.reserve(frame.descriptors.size());
  for (UniqueFd& fd : frame.descriptors) {
    const std::size_t i = files.size();
    Result<FileStat> stat =
        StatFile(fd.get(), i < request->files.size() ? request->files[i].path : "a file");
    if (!stat.ok()) {
      return RefuseFrame(session, frame.header, stat.error());
    }
    files.push_back({std::move(fd), *stat});
  }
  return dispatcher.OnOpen({session, frame.header.request_id, peer.own_user}, *request,
                           std::move(files), now);
}

// Decodes a Request and calls `then` with it.
template <typename Request, typename Then>
Actions With(SessionId session, const Frame& frame, Then then) {
  Result<Request> request = Decode<Request>(frame.body);
  return request.ok() ? then(*request) : RefuseFrame(session, frame.header, request.error());
}

template <typename Event, typename Then>
Actions WithLoader(Dispatcher& dispatcher, JobId job, const Frame& frame, TimePoint now,
                   Then then) {
  Result<Event> event = Decode<Event>(frame.body);
  return event.ok() ? then(*event) : dispatcher.OnLoaderFailed(job, event.error(), now);
}

}  // namespace

Actions DispatchRequest(Dispatcher& dispatcher, const Peer& peer, Frame frame, TimePoint now) {
  const SessionId session = peer.session;
  if (frame.DescriptorsMissing()) {
    return RefuseFrame(session, frame.header, frame.MissingDescriptorsError());
  }
  const Caller from{session, frame.header.request_id};
  switch (frame.header.type) {
    case MessageType::kOpen:
      return DispatchOpen(dispatcher, peer, frame, now);
    case MessageType::kCancel:
      return dispatcher.OnCancel(from, now);
    case MessageType::kRelease:
      return With<ReleaseRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnRelease(session, request, now);
      });
    case MessageType::kArenaDescriptors:
      return With<ArenaDescriptorsRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnArenaDescriptors(from, request);
      });
    case MessageType::kList:
      return dispatcher.OnList(from, now);
    case MessageType::kStatus:
      return dispatcher.OnStatus(from, now);
    case MessageType::kWhy:
      return With<ModelRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnWhy(from, request, now);
      });
    case MessageType::kEvict:
      return With<ModelRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnEvict(from, request, now);
      });
    case MessageType::kPin:
      return With<PinRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnPin(from, request, now);
      });
    case MessageType::kVerify:
      return With<ModelRequest>(session, frame, [&](const auto& request) {
        return dispatcher.OnVerify(from, request, now);
      });
    case MessageType::kMetrics:
      return dispatcher.OnMetrics(from, now);
    case MessageType::kShutdown:
      return dispatcher.OnShutdown(from, now);
    default:
      return RefuseFrame(
          session, frame.header,
          Error{ErrorCode::kUnsupported,
                "unknown request type " + std::to_string(static_cast<unsigned>(frame.header.type)),
                0});
  }
}

Actions DispatchLoaderFrame(Dispatcher& dispatcher, JobId job, const Frame& frame, TimePoint now) {
  const std::uint32_t request_id = frame.header.request_id;
  switch (frame.header.type) {
    case MessageType::kCandidates:
      return WithLoader<CandidatesRequest>(dispatcher, job, frame, now, [&](const auto& event) {
        return dispatcher.OnCandidates(job, request_id, event);
      });
    case MessageType::kReserve:
      return WithLoader<ReserveRequest>(dispatcher, job, frame, now, [&](const auto& event) {
        return dispatcher.OnReserve(job, request_id, event, now);
      });
    case MessageType::kCommit:
      return WithLoader<CommitRequest>(dispatcher, job, frame, now, [&](const auto& event) {
        return dispatcher.OnCommit(job, request_id, event);
      });
    case MessageType::kLoaderProgress:
      return WithLoader<LoaderProgressEvent>(dispatcher, job, frame, now, [&](const auto& event) {
        return dispatcher.OnLoaderProgress(job, event);
      });
    case MessageType::kJobFailed:
      return WithLoader<JobFailedEvent>(dispatcher, job, frame, now,
                                        [&](const JobFailedEvent& event) {
                                          Error error = ToError(event);
                                          if (error.detail.size() > kMaxDetailBytes) {
                                            error.detail.clear();
                                          }
                                          return dispatcher.OnLoaderFailed(job, error, now);
                                        });
    case MessageType::kVerified:
      return WithLoader<VerifiedEvent>(dispatcher, job, frame, now, [&](const auto& event) {
        return dispatcher.OnVerified(job, event, now);
      });
    default:
      return dispatcher.OnLoaderFailed(
          job,
          Error{ErrorCode::kLoaderFailed,
                "the loader sent a message of type " +
                    std::to_string(static_cast<unsigned>(frame.header.type)),
                0},
          now);
  }
}

std::string EncodeBody(const ClientBody& body) {
  return std::visit([](const auto& message) { return Encode(message); }, body);
}

std::string EncodeBody(const LoaderBody& body) {
  return std::visit([](const auto& message) { return Encode(message); }, body);
}

}  // namespace modelcache
