// How the command line prints: tables for people, one-line errors, JSON of messages. Results go to
// stdout, everything else to stderr. Called on the main thread.
#pragma once

#include <google/protobuf/message.h>
#include <google/protobuf/timestamp.pb.h>

#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace everstep::cli {

// Exit codes of all commands but `run` and `wait job` (docs/cli.md).
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitUnmet = 3;

// Columns as wide as their widest cell, two spaces apart, the last one free. Empty cells print as
// <none>.
class Table {
 public:
  explicit Table(std::vector<std::string> titles) : titles_(std::move(titles)) {}
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string Text() const;

 private:
  std::vector<std::string> titles_;
  std::vector<std::vector<std::string>> rows_;
};

// "everstep: message" on stderr; returns the exit code that belongs to the status: usage for
// INVALID_ARGUMENT, otherwise failure.
int Fail(const Status& status);
void Note(std::string_view message);  // a line of progress on stderr: "everstep: message"
void Print(std::string_view text);    // stdout, flushed at the end of a line

std::string Json(const google::protobuf::Message& message);

// "SERVER_STATE_SPARE" of an enum with prefix "SERVER_STATE_" as people read it: "Spare".
std::string CamelCase(std::string_view enum_value, std::string_view prefix);
std::string Age(const google::protobuf::Timestamp& since);       // "5h", "<unknown>" when unset
std::string Bytes(uint64_t bytes);                               // "16.4MiB"
std::string ClockTime(const google::protobuf::Timestamp& time);  // "12:03:04.123", local time

}  // namespace everstep::cli
