// Daemon: owns the event loop, performs the dispatcher's actions, shuts down in order.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/actions.h"
#include "server/arena_store.h"
#include "server/client_requests.h"
#include "server/config.h"
#include "server/dispatcher.h"
#include "server/listener.h"
#include "server/notify.h"
#include "server/process_loader.h"
#include "server/reaper.h"
#include "server/session.h"
#include "server/socket_place.h"
#include "server/socket_watch.h"

namespace modelcache {

// One thread, one loop. Everything it owns is used on that thread alone, but for the reaper.
class Daemon final : private Session::Owner, private LoaderProcess::Owner {
 public:
  Daemon(Config config, SocketPlace place, Notifier notifier);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Serves until SIGTERM, SIGINT or a shutdown request.
  void Run();

 private:
  void RunLoop();
  void OnRequest(SessionId session, Frame frame) override;
  void OnSessionClosed(SessionId session, const std::string& why) override;
  void OnLoaderFrame(JobId job, Frame frame) override;
  void OnLoaderBroken(JobId job, const Error& why) override;
  void OnLoaderExit(JobId job, const std::optional<Error>& error) override;

  Result<void> OnConnection(UniqueFd& socket, const PeerCredentials& peer);
  void OnSignal();
  void WatchSocket();
  void OnSocketChange();

  // Queues the actions and performs what is queued, unless that is going on already.
  void Perform(Actions actions);
  void Do(SendToClient& action);
  void Do(SendToLoader& action);
  void Do(StartJob& action);
  void Do(CancelJob& action);
  void Do(CreateArenas& action);
  void Do(SealArenas& action);
  void Do(CloseArenas& action);
  void Do(MeasureArenas& action);
  void Do(Note& action);
  void Do(StopDaemon& action);

  [[nodiscard]] std::vector<int> ArenaFds(const std::vector<ArenaId>& arenas) const;
  void ArmDeadline();
  void ArmMetrics();
  void WriteMetrics();
  void Stop();
  void BeginStop();
  void EndWhenIdle();

  Config config_;
  boost::asio::io_context loop_{1};
  SocketPlace place_;
  Notifier notifier_;
  LruPlanner planner_;
  Dispatcher dispatcher_;
  Reaper reaper_;
  ArenaStore store_;
  Listener listener_;
  SocketWatch watch_;
  boost::asio::signal_set signals_;
  boost::asio::steady_timer deadline_timer_;
  boost::asio::steady_timer metrics_timer_;
  boost::asio::steady_timer stop_timer_;
  TimePoint armed_for_ = kNoDeadline;
  bool metrics_armed_ = false;
  bool performing_ = false;
  bool stopping_ = false;
  std::deque<Action> actions_;
  std::unordered_map<SessionId, std::shared_ptr<Session>> sessions_;
  std::map<JobId, std::shared_ptr<LoaderProcess>> loaders_;
  std::uint64_t last_session_ = 0;
  std::size_t max_clients_;
  std::uint64_t pid_namespace_;
};

}  // namespace modelcache
