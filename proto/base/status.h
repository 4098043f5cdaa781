// Status and Result: how everything below the gRPC shells reports what the world did. Codes are the canonical
// gRPC ones, with the meanings of the house rules:
//   kUnavailable retry · kAborted stale generation: refresh, rejoin · kFailedPrecondition wait for a state change ·
//   kInvalidArgument never retry · kResourceExhausted no spare, or a limit · kDataLoss corrupt checkpoint.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "proto/base/check.h"

namespace everstep {

enum class StatusCode {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

const char* StatusCodeName(StatusCode code);  // "UNAVAILABLE"

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  std::string ToString() const;  // "UNAVAILABLE: message", "OK"
  bool operator==(const Status&) const = default;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return Status(); }
inline Status InvalidArgument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status AlreadyExists(std::string m) { return {StatusCode::kAlreadyExists, std::move(m)}; }
inline Status FailedPrecondition(std::string m) { return {StatusCode::kFailedPrecondition, std::move(m)}; }
inline Status Aborted(std::string m) { return {StatusCode::kAborted, std::move(m)}; }
inline Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
inline Status ResourceExhausted(std::string m) { return {StatusCode::kResourceExhausted, std::move(m)}; }
inline Status DataLoss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status DeadlineExceeded(std::string m) { return {StatusCode::kDeadlineExceeded, std::move(m)}; }
inline Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : data_(std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Status status) : data_(std::move(status)) {  // NOLINT
    EVERSTEP_CHECK(!std::get<Status>(data_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(data_); }
  Status status() const { return ok() ? OkStatus() : std::get<Status>(data_); }
  // REQUIRES: ok()
  T& value() & { EVERSTEP_CHECK(ok()); return std::get<T>(data_); }
  const T& value() const& { EVERSTEP_CHECK(ok()); return std::get<T>(data_); }
  T&& value() && { EVERSTEP_CHECK(ok()); return std::get<T>(std::move(data_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> data_;
};

}  // namespace everstep

#define EVERSTEP_RETURN_IF_ERROR(expression)           \
  do {                                                 \
    if (::everstep::Status everstep_status_ = (expression); !everstep_status_.ok()) return everstep_status_; \
  } while (false)
#define EVERSTEP_CONCAT_INNER(a, b) a##b
#define EVERSTEP_CONCAT(a, b) EVERSTEP_CONCAT_INNER(a, b)
#define EVERSTEP_ASSIGN_OR_RETURN(target, expression) \
  EVERSTEP_ASSIGN_OR_RETURN_INNER(EVERSTEP_CONCAT(everstep_result_, __LINE__), target, expression)
#define EVERSTEP_ASSIGN_OR_RETURN_INNER(result, target, expression) \
  auto result = (expression);                                       \
  if (!result.ok()) return result.status();                         \
  target = std::move(result).value()
