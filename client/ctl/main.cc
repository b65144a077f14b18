// modelcachectl: reads the command line and runs one command.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "client/ctl/commands.h"
#include "proto/version.h"

namespace {

using modelcache::CommandLine;

void AddLoad(CLI::App& app, CommandLine& line) {
  CLI::App* load =
      app.add_subcommand("load", "Load a model, starting the daemon when none answers");
  load->add_option("PATH", line.paths, "A file, a folder, an index file, or the files of a model")
      ->required();
  load->add_option("--name", line.name, "Name to show instead of the path");
  load->add_option("--format", line.format, "auto, safetensors, torch, torchscript or npz")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "safetensors", "torch", "torchscript", "npz"}));
  load->add_option("--device", line.device, "cpu or cuda[:N], for formats built on a device")
      ->capture_default_str();
  load->add_flag("--pin", line.pin, "Keep it resident until it is unpinned");
  load->add_option("--timeout", line.timeout_seconds, "Seconds to wait for a cold load")
      ->check(CLI::Range(0.001, 1e9));
}

void AddModelCommand(CLI::App& app, CommandLine& line, const std::string& name,
                     const std::string& help) {
  app.add_subcommand(name, help)
      ->add_option("MODEL", line.model, "Name, id (6 digits or more of it) or path")
      ->required();
}

void AddCommands(CLI::App& app, CommandLine& line) {
  AddLoad(app, line);
  app.add_subcommand("list", "The models the daemon holds")
      ->add_flag("--wide", line.wide, "Every column, whole names");
  AddModelCommand(app, line, "show", "The tensors of a model");
  app.add_subcommand("status", "Memory, counters, clients");
  AddModelCommand(app, line, "evict", "Drop a model nobody uses");
  AddModelCommand(app, line, "pin", "Keep a model resident");
  AddModelCommand(app, line, "unpin", "Let a model be evicted again");
  AddModelCommand(app, line, "why", "Hits, misses and evictions of a model, with reasons");
  AddModelCommand(app, line, "verify", "Hash a model's memory and compare it with its files");
  app.add_subcommand("metrics", "Counters in Prometheus' text format");
  app.add_subcommand("shutdown", "Stop the daemon");
}

// The library's own words when a command was recognised; else what is wrong with the command.
std::string UsageError(const CLI::App& app, const CLI::ParseError& error) {
  if (!app.get_subcommands().empty()) {
    return error.what();
  }
  const std::vector<std::string> rest = app.remaining();
  return rest.empty() ? "no command was given" : "unknown command '" + rest.front() + "'";
}

int Run(int argc, char** argv) {
  CLI::App app("modelcachectl: look at and steer modelcached");
  CommandLine line;
  app.add_option("--socket", line.socket_path, "Socket of the daemon");
  app.add_flag("--json", line.json, "One JSON object on standard output");
  app.set_version_flag("--version", modelcache::kProductVersion);
  app.require_subcommand(1);
  app.fallthrough();  // --json may stand behind the command too
  app.footer("Exit: 0 done, 1 the daemon said no, 2 usage, 3 no daemon.");
  AddCommands(app, line);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {  // --help, --version
      return app.exit(e);
    }
    std::cerr << "modelcachectl: " << UsageError(app, e) << "; see 'modelcachectl --help'\n";
    return modelcache::kExitUsage;
  }
  line.command = app.get_subcommands().front()->get_name();
  return modelcache::RunCommand(line);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "modelcachectl: " << e.what() << '\n';
    return modelcache::kExitRefused;
  }
}
