// docs/cli.md: the reference of all commands, made from the tree of commands, so that page and
// program cannot differ.
#include <fmt/format.h>

#include "controller/cli/command_line.h"

namespace everstep::cli {
namespace {

void AddCommand(std::string& page, const CLI::App& command, const std::string& path) {
  const auto children = command.get_subcommands([](const CLI::App*) { return true; });
  if (children.empty()) {
    page += fmt::format("## {}\n\n{}.\n\n", path, command.get_description());
    std::string usage = path;
    std::string rows;
    for (const CLI::Option* option : command.get_options()) {
      const std::string name = option->get_name(false, true);
      if (name.find("--help") != std::string::npos) continue;
      const std::string type = option->get_type_name();
      if (option->get_positional()) {
        usage += option->get_required() ? " " + type : " [" + type + "]";
        rows += fmt::format("| `{}` | {} |\n", type, option->get_description());
        continue;
      }
      const std::string cell = name;
      if (option->get_required()) usage += " " + cell.substr(0, cell.find(',')) + " " + type;
      std::string shown;
      for (const char c : cell) shown += c == ',' ? std::string("`, `") : std::string(1, c);
      std::string description = option->get_description();
      for (size_t bar = description.find('|'); bar != std::string::npos;
           bar = description.find('|', bar + 2)) {
        description.insert(bar, "\\");
      }
      std::string type_text;
      for (const char c : type) type_text += c == '|' ? std::string("\\|") : std::string(1, c);
      rows += fmt::format("| `{}{}` | {} |\n", shown, type_text.empty() ? "" : " " + type_text,
                          description);
    }
    page += fmt::format("```\n{}{}{}\n```\n\n", usage, rows.empty() ? "" : " [flags]",
                        command.get_prefix_command() ? " [--] [PROGRAM ARGUMENTS...]" : "");
    if (!rows.empty()) page += "| Flag | Meaning |\n| --- | --- |\n" + rows + "\n";
    const std::string footer = command.get_footer();
    const std::string title = "Examples:\n";
    if (footer.rfind(title, 0) == 0)
      page += fmt::format("```\n{}\n```\n\n", footer.substr(title.size()));
  }
  for (const CLI::App* child : children) AddCommand(page, *child, path + " " + child->get_name());
}

}  // namespace

std::string ReferencePage(const CLI::App& app) {
  std::string page =
      "# The `everstep` command\n\n"
      "For everyone who runs jobs or servers. This page is printed by `everstep reference`; a test "
      "keeps both equal.\n\n"
      "Results go to stdout, progress and errors to stderr, one line each. `-o json` is the proto "
      "JSON of the API and the\n"
      "only format meant for programs; tables are for people.\n\n"
      "**Which controller:** `--controller`, else `EVERSTEP_CONTROLLER`, else `controller: "
      "host:port` in\n"
      "`~/.everstep/config.yaml` (`$EVERSTEP_HOME/config.yaml` when that is set), else the local "
      "cluster.\n\n"
      "| Exit code | Meaning |\n| --- | --- |\n"
      "| 0 | success |\n| 1 | failure |\n| 2 | usage: an unknown flag, a bad value, an object that "
      "does not exist by that rule |\n"
      "| 3 | `wait`: the condition was not met |\n\n"
      "`run` and `wait job` (for the end of a job) exit with the job's code:\n\n"
      "| Exit code | Meaning |\n| --- | --- |\n"
      "| 0 | done |\n| 1-63 | the program's own exit code |\n| 64 | `run`: a usage error, nothing "
      "was started |\n"
      "| 70 | the program ended by a signal, or with a code above 63 |\n| 71 | no capacity |\n| 73 "
      "| cancelled |\n"
      "| 74 | data loss: no state of the job could be read |\n| 75 | infrastructure: worth another "
      "try |\n"
      "| 130 | `run` was interrupted twice |\n\n";
  for (const CLI::App* child : app.get_subcommands([](const CLI::App*) { return true; })) {
    AddCommand(page, *child, "everstep " + child->get_name());
  }
  while (page.size() > 1 && page[page.size() - 1] == '\n' && page[page.size() - 2] == '\n')
    page.pop_back();
  return page;
}

}  // namespace everstep::cli
