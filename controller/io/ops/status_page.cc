#include "controller/io/ops/status_page.h"

#include <fmt/format.h>

#include "proto/base/reason.h"
#include "proto/convert/reader.h"
#include "proto/model/names.h"

namespace everstep {
namespace {

constexpr size_t kRecoveriesShown = 20;
constexpr size_t kEventsShown = 50;

std::string Age(WallTime since, WallTime now) {
  const int64_t seconds = std::max<int64_t>(0, (now.unix_microseconds - since.unix_microseconds) / 1'000'000);
  if (seconds < 120) return fmt::format("{}s", seconds);
  if (seconds < 7200) return fmt::format("{}m", seconds / 60);
  if (seconds < 172800) return fmt::format("{}h", seconds / 3600);
  return fmt::format("{}d", seconds / 86400);
}

class Table {
 public:
  Table(std::string& out, std::initializer_list<std::string_view> titles) : out_(out) {
    out_ += "<table><tr>";
    for (std::string_view title : titles) out_ += fmt::format("<th>{}</th>", HtmlEscaped(title));
    out_ += "</tr>\n";
  }
  ~Table() { out_ += "</table>\n"; }
  void Row(std::initializer_list<std::string> cells) {
    out_ += "<tr>";
    for (const std::string& cell : cells) out_ += fmt::format("<td>{}</td>", HtmlEscaped(cell));
    out_ += "</tr>\n";
  }

 private:
  std::string& out_;
};

void WriteServers(const ClusterView& view, WallTime now, std::string& out) {
  out += "<h2>Servers</h2>\n";
  Table table(out, {"Name", "State", "Devices", "Free", "Ranks", "Incarnation", "Reason", "Heartbeat", "Age"});
  for (const ServerView& server : view.servers) {
    std::string ranks;
    for (const RankPlace& rank : server.ranks) {
      if (!ranks.empty()) ranks += ", ";
      ranks += rank.rank.value < 0 ? fmt::format("{} standby", rank.job_name)
                                   : fmt::format("{} {}", rank.job_name, rank.rank.value);
    }
    table.Row({server.server.value, std::string(ServerStateName(server.state)),
               std::to_string(server.inventory.devices.size()), std::to_string(server.devices_free), ranks,
               std::to_string(server.incarnation.value), std::string(ReasonName(server.reason)),
               fmt::format("{:.1f}s ago", ToSeconds(server.heartbeat_age)), Age(server.registered, now)});
  }
}

void WriteJobs(const ClusterView& view, WallTime now, std::string& out) {
  out += "<h2>Jobs</h2>\n";
  Table table(out, {"Name", "State", "Phase", "Generation", "Step", "Protected", "Ranks", "Failures", "Message", "Age"});
  for (const JobView& job : view.jobs) {
    table.Row({job.entry.spec.name, std::string(JobStateName(job.state)), std::string(RecoveryPhaseName(job.phase)),
               std::to_string(job.entry.resumed.value), std::to_string(job.step.value),
               std::to_string(job.protected_step.value), std::to_string(job.world_size),
               std::to_string(job.entry.failures), job.message, Age(job.entry.submitted, now)});
  }
}

void WriteRecoveries(const ClusterView& view, WallTime now, std::string& out) {
  out += "<h2>Recoveries</h2>\n";
  Table table(out, {"Id", "Job", "Reason", "Evidence", "Decision", "Outcome", "Steps lost", "Duration", "Age"});
  size_t shown = 0;
  for (auto it = view.recoveries.rbegin(); it != view.recoveries.rend() && shown < kRecoveriesShown; ++it, ++shown) {
    Duration end{};
    for (const PhaseRecord& phase : it->phases) end = std::max(end, phase.start + phase.duration);
    table.Row({std::to_string(it->id.value), it->job_name, std::string(ReasonName(it->reason)), it->evidence,
               it->decision_message, it->outcome.empty() ? "open" : it->outcome, std::to_string(it->steps_lost),
               fmt::format("{:.0f} ms", ToMilliseconds(end)), Age(it->started, now)});
  }
}

void WriteEvents(const ClusterView& view, WallTime now, std::string& out) {
  out += "<h2>Events</h2>\n";
  Table table(out, {"Age", "What", "Reason", "Server", "Job", "Details"});
  size_t shown = 0;
  for (auto it = view.events.rbegin(); it != view.events.rend() && shown < kEventsShown; ++it, ++shown) {
    std::string details;
    for (const auto& [key, value] : it->notice.keys) details += fmt::format("{}={} ", key, value);
    table.Row({Age(it->wall, now), it->notice.what, std::string(ReasonName(it->notice.reason)),
               it->notice.server.value, it->notice.job_name, details});
  }
}

}  // namespace

std::string HtmlEscaped(std::string_view text) {
  std::string out;
  for (char c : ToUtf8(text)) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string StatusPage(const ClusterView& view, WallTime now) {
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>everstep</title>\n"
      "<meta http-equiv=\"refresh\" content=\"5\">\n"
      "<style>body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
      "th,td{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid #ddd;vertical-align:top}"
      "th{font-weight:600}h2{margin-top:1.5em}.note{background:#fff3cd;padding:6px 10px}</style></head><body>\n";
  out += fmt::format("<h1>everstep</h1>\n<p>Controller term {}</p>\n", view.term.value);
  if (view.adopting) out += "<p class=\"note\">Waiting for agents to report after a restart.</p>\n";
  if (view.frozen) {
    out += "<p class=\"note\">Frozen: most servers fell silent at once, so the controller doubts its own network.</p>\n";
  }
  WriteServers(view, now, out);
  WriteJobs(view, now, out);
  WriteRecoveries(view, now, out);
  WriteEvents(view, now, out);
  out += "</body></html>\n";
  return out;
}

}  // namespace everstep
