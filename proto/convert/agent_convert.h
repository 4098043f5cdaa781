// Facts and commands ↔ the messages of the agent's stream. Both shells use it: the controller's (controller/io/rpc)
// and the agent's (worker/io). What arrives is untrusted and bounded here. Thread-safe: pure functions.
#pragma once

#include <variant>

#include "everstep/v1/agent.pb.h"
#include "proto/base/status.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"

namespace everstep {

v1::AgentMessage ToMessage(const AgentHello& hello);
v1::AgentMessage ToMessage(FactSequence sequence, const Fact& fact);
v1::AgentMessage ToMessage(const Heartbeat& heartbeat);  // where datagrams don't arrive

struct SequencedFact {
  FactSequence sequence;
  Fact fact;
};
using FromAgent = std::variant<AgentHello, SequencedFact, Heartbeat>;
// kInvalidArgument: a field is missing or out of its bounds; the message names it.
Result<FromAgent> FromMessage(const v1::AgentMessage& message);

v1::ControllerMessage ToMessage(const CommandHeader& header, const Command& command);

struct ReceivedCommand {
  CommandHeader header;
  Command command;
};
// kInvalidArgument: as above.
Result<ReceivedCommand> FromMessage(const v1::ControllerMessage& message);

}  // namespace everstep
