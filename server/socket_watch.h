// SocketWatch: tells when the file of the daemon's socket may have gone.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <string>

#include "common/result.h"

namespace modelcache {

// Watches the folder of a path with inotify. Event loop thread only; must outlive the loop's last
// run.
class SocketWatch {
 public:
  // `on_change` is called some time after the folder's entry of this name, or the folder itself,
  // was removed, moved or replaced; once for changes that follow each other closely.
  SocketWatch(boost::asio::io_context& loop, const std::string& path,
              std::function<void()> on_change);

  // Starts, or after the folder was replaced goes on with the new one.
  // Errors: kNotFound (no folder), kLimit (inotify instances or watches), kSystem.
  Result<void> Start();
  void Stop();

 private:
  void Wait();
  // True when one of the events concerns the path.
  bool ReadEvents();
  void Settle();

  boost::asio::posix::stream_descriptor inotify_;
  boost::asio::steady_timer settle_;
  std::string folder_;
  std::string name_;
  std::function<void()> on_change_;
  int watch_ = -1;
  bool settling_ = false;
};

}  // namespace modelcache
