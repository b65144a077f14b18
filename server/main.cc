// modelcached: reads the configuration, takes the socket, serves.
#include <fcntl.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <utility>

#include "common/socket_folder.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/notify.h"
#include "server/socket_place.h"

namespace {

constexpr int kRefused = 1;
constexpr int kUsage = 2;

// A missing standard descriptor would let a socket take its number.
void OpenStandardDescriptors() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);  // NOLINT(android-cloexec-open): it stands in for 0, 1 or 2
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO) {
    (void)::close(fd);
  }
}

modelcache::Result<modelcache::SocketPlace> TakeSocket(const std::string& wanted) {
  auto adopted = modelcache::SocketPlace::Adopt();
  if (!adopted.ok()) {
    return std::move(adopted).error();
  }
  if (adopted->has_value()) {
    return std::move(**adopted);
  }
  if (!wanted.empty()) {
    return modelcache::SocketPlace::Bind(wanted);
  }
  auto path = modelcache::DefaultSocketPath();
  if (!path.ok()) {
    return std::move(path).error();
  }
  return modelcache::SocketPlace::Bind(*path);
}

int Refuse(const modelcache::Error& error) {
  (void)std::fprintf(stderr, "modelcached: %s\n", error.message.c_str());
  return error.code == modelcache::ErrorCode::kInvalidArgument ? kUsage : kRefused;
}

int Main(int argc, char** argv) {
  OpenStandardDescriptors();
  (void)std::signal(SIGPIPE, SIG_IGN);
  auto parsed = modelcache::ParseConfig(argc, argv, modelcache::UsableMemoryBytes(""));
  if (!parsed.config) {
    (void)std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code;
  }
  if (auto loader = modelcache::CheckLoader(parsed.config->loader); !loader.ok()) {
    return Refuse(loader.error());
  }
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "modelcached", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::from_str(parsed.config->log_level));
  auto notifier = modelcache::Notifier::FromEnvironment();
  auto place = TakeSocket(parsed.config->socket);
  if (!place.ok()) {
    return Refuse(place.error());
  }
  modelcache::Daemon daemon(std::move(*parsed.config), std::move(*place), std::move(notifier));
  daemon.Run();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Main(argc, argv);
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "modelcached: %s\n", error.what());
    return kRefused;
  }
}
