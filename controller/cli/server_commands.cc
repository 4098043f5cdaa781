// `everstep drain|undrain server`: empty a server at a step boundary, and give it back.
#include <fmt/format.h>

#include <memory>

#include "controller/cli/command_line.h"
#include "controller/cli/output.h"

namespace everstep::cli {
namespace {

struct DrainFlags {
  std::string server;
  bool dry_run = false;
};

template <typename Request>
int Change(const CommandLine& line, const DrainFlags& flags) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  Request request;
  request.set_request_id(NewRequestId());
  request.set_server(flags.server);
  request.set_dry_run(flags.dry_run);
  const auto response = client.value().Call(request);
  if (!response.ok()) return Fail(response.status());
  Print(response.value().message() + (flags.dry_run ? " (dry run)\n" : "\n"));
  return kExitDone;
}

}  // namespace

void AddServerCommands(CommandLine& line) {
  CLI::App* drain = line.AddGroup(&line.app, "drain", "Empty something before taking it away");
  auto flags = std::make_shared<DrainFlags>();
  CLI::App* server = line.Add(
      drain, "server", "Move a server's ranks elsewhere at a step boundary; no step is aborted",
      "  everstep drain server s2\n  everstep drain server s2 --dry-run",
      [&line, flags] { return Change<v1::DrainServerRequest>(line, *flags); });
  server->add_option("name", flags->server, "The server")->required()->type_name("NAME");
  server->add_flag("--dry-run", flags->dry_run, "Only say what would happen");
  line.AddControllerFlags(server);

  CLI::App* undrain = line.AddGroup(&line.app, "undrain", "Give something back");
  auto back = std::make_shared<DrainFlags>();
  CLI::App* returned = line.Add(
      undrain, "server", "Let jobs use a drained server again", "  everstep undrain server s2",
      [&line, back] { return Change<v1::UndrainServerRequest>(line, *back); });
  returned->add_option("name", back->server, "The server")->required()->type_name("NAME");
  returned->add_flag("--dry-run", back->dry_run, "Only say what would happen");
  line.AddControllerFlags(returned);
}

}  // namespace everstep::cli
