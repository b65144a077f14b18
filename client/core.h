// Client: what a program asks the daemon for, with reconnection, autostart and fork handled.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/connection.h"
#include "client/model.h"
#include "client/model_files.h"
#include "common/clock.h"
#include "common/result.h"
#include "proto/codec.h"
#include "proto/messages.h"

namespace modelcache {

enum class Autostart {
  kDefault,  // unless MODELCACHE_AUTOSTART=0
  kNever,
  kAlways,
};

// A call returns at most this long after its timeout: what the daemon says of the passed deadline
// tells more than our own giving up.
inline constexpr auto kReplyGrace = std::chrono::milliseconds(200);

inline constexpr auto kConnectTimeout = std::chrono::seconds(10);

struct ClientOptions {
  std::string socket_path;  // empty: DefaultSocketPath()
  Autostart autostart = Autostart::kDefault;
  std::string daemon_path;             // empty: FindDaemonProgram
  Duration timeout = kConnectTimeout;  // of the first connection; later ones: see Client
};

struct OpenOptions {
  std::string name;
  std::string format = "auto";
  std::string device = "cpu";
  bool pin = false;
  bool count_hit = true;  // false: only looks at a resident model
  // Of the whole call, connecting included; 0: MODELCACHE_LOAD_TIMEOUT, else no limit.
  std::uint64_t timeout_ms = 0;
  std::function<bool(const ProgressEvent&)> progress;  // false gives up waiting
  bool trusted_only = false;  // what comes will be run: the daemon must be of this user, or root's
};

// Thread-safe. A forked child may go on using it: it gets a connection of its own. A call that has
// to connect again does so within its own deadline, and within kConnectTimeout or the timeout of
// the options, whichever is longer.
class Client {
 public:
  // Errors: those of mc_client_connect.
  static Result<std::unique_ptr<Client>> Connect(ClientOptions options);

  // Errors: those of mc_model_open.
  Result<std::unique_ptr<Model>> Open(const std::vector<std::string>& paths,
                                      const OpenOptions& options);

  // The same with files that are open already.
  Result<std::unique_ptr<Model>> Open(const ModelFiles& files, const OpenOptions& options);

  // A model that is resident already, by name, id or path. Errors: also kNotFound.
  Result<std::unique_ptr<Model>> OpenResident(const std::string& model,
                                              const OpenOptions& options = {});

  // The entry of a Python call. Errors: as OpenResident; kUnsupported when the daemon remembers
  // that the call cannot be cached, kPermission when it belongs to another user.
  Result<std::unique_ptr<Model>> FindCall(const CallKey& key);

  // The same, made by a loader that the daemon starts as `call` says when it is not resident or is
  // the one `call` names stale. Errors: also kLoaderFailed and whatever the loader gives, with its
  // detail; kUnsupported (the daemon does not see this process's files), kLimit (`call` is too
  // large).
  Result<std::unique_ptr<Model>> MakeCall(CallRequest call, std::span<const std::byte> payload,
                                          const OpenOptions& options);

  // One control request. A connection that turns out to be dead is replaced once, except for
  // kShutdown. Errors: kUnavailable, kTimeout, kProtocol, whatever the daemon replies.
  template <typename Reply, typename Body>
  Result<Reply> Control(MessageType type, const Body& body, Duration timeout) {
    Result<Answer> answer = Call({type, Encode(body), {}, DeadlineAfter(timeout)}, nullptr);
    return answer.ok() ? Decode<Reply>(answer->frame.body)
                       : Result<Reply>(std::move(answer).error());
  }

  [[nodiscard]] const std::string& socket_path() const { return options_.socket_path; }
  [[nodiscard]] bool started_daemon() const { return started_; }

  // The daemon's greeting; reconnects when the connection is gone.
  Result<HelloReply> Hello();

 private:
  // A reply and the connection it came over, which holds the lease in it.
  struct Answer {
    Frame frame;
    std::shared_ptr<Connection> connection;
  };

  Client(ClientOptions options, bool path_was_told)
      : options_(std::move(options)), path_was_told_(path_was_told) {}

  [[nodiscard]] Result<Answer> Call(const Request& request, const EventHandler& on_event);
  [[nodiscard]] Result<void> CheckTrust(const Connection& peer, const OpenOptions& options) const;
  [[nodiscard]] Result<std::unique_ptr<Model>> MapAnswer(Answer answer, const OpenOptions& options,
                                                         TimePoint deadline);
  [[nodiscard]] Result<std::unique_ptr<Model>> OpenWith(OpenRequest request,
                                                        const ModelFiles& files,
                                                        const OpenOptions& options);
  [[nodiscard]] Result<std::shared_ptr<Connection>> Connected(TimePoint deadline);
  [[nodiscard]] TimePoint ConnectDeadline(TimePoint deadline) const;
  [[nodiscard]] Result<std::shared_ptr<Connection>> Dial(TimePoint deadline) const;
  [[nodiscard]] Result<std::shared_ptr<Connection>> DialOrStart(TimePoint deadline);
  [[nodiscard]] bool MayStart() const;
  std::shared_ptr<Connection> Exchange(std::shared_ptr<Connection> connection);

  ClientOptions options_;
  bool path_was_told_;
  std::atomic<bool> started_{false};
  std::shared_ptr<Connection> connection_;  // guarded by ProcessState::mutex
};

}  // namespace modelcache
