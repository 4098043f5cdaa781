// What the controller's core asks the world to do. Effects are performed in order, and none before the ledger is
// durable up to the sequence its decision saw (`after`): persist, then tell. Plain data.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "controller/core/ledger/record.h"
#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/status.h"
#include "proto/base/time.h"
#include "proto/model/commands.h"

namespace everstep {

struct AppendRecord { LedgerSequence sequence; Record record; };
struct SendCommand { SessionId session; CommandHeader header; Command command; };
struct CloseSession { SessionId session; };
struct StartProbe { ServerId server; Incarnation incarnation; std::string address; Duration timeout{}; };
// Performed like any effect, when the fence is durable: the shell then feeds FenceBecameDurable.
struct ConfirmFence { JobUid job; Generation generation; };
struct ReplyToOperator { CallId call; Status status; JobUid job; std::string message; };  // "server/s17 drained"

enum class NoticeLevel : uint8_t { kDebug, kInfo, kError };
// A log line, an entry of `get events` and a watcher's line: one fact for all three.
struct Notice {
  NoticeLevel level = NoticeLevel::kInfo;
  Reason reason = Reason::kNone;
  std::string what;                  // constant text: "Server declared dead"
  ServerId server;                   // empty when not about one
  JobUid job;
  std::string job_name;
  std::vector<std::pair<std::string, std::string>> keys;
};
struct ForwardLines { JobUid job; Rank rank; ProcessId process; std::vector<std::string> lines; };
struct ForwardMetric { JobUid job; Rank rank; Step step; std::string name; double value = 0; };

// A measurement for the metrics registry; names and labels are fixed in controller/io/ops.
struct Measured {
  enum class What : uint8_t { kHeartbeat, kHeartbeatDelay, kVerdict, kPlan, kPlanDuration, kRecovery, kRecoveryPhase,
                              kSparePromoted, kStaleMessage, kCheckpointCommit };
  What what = What::kHeartbeat;
  Reason reason = Reason::kNone;
  RecoveryPhase phase = RecoveryPhase::kNone;
  std::string label;                 // verdict, outcome or kind, from a closed set
  double seconds = 0;
};

using EffectBody = std::variant<AppendRecord, SendCommand, CloseSession, StartProbe, ConfirmFence, ReplyToOperator, Notice,
                                ForwardLines, ForwardMetric, Measured>;
struct Effect {
  LedgerSequence after;              // 0: at once
  EffectBody body;
};
using Effects = std::vector<Effect>;

}  // namespace everstep
