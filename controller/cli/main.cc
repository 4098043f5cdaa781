// everstep: the command of operators and training engineers. Wiring only.
#include <fmt/format.h>

#include <exception>

#include "controller/cli/command_line.h"
#include "controller/cli/output.h"

int main(int argc, char** argv) {
  using namespace everstep::cli;
  CommandLine line;
  AddJobCommands(line);
  AddLocalCommands(line);
  AddPlanCommands(line);
  AddReadCommands(line);
  AddServerCommands(line);
  AddToolCommands(line);
  if (const int code = line.Parse(argc, argv); code != kExitDone) return code;
  try {
    return line.action();
  } catch (const std::exception& error) {  // of a library
    fmt::print(stderr, "everstep: {}\n", error.what());
    return kExitFailure;
  }
}
