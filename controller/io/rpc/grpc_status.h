// Our Status as gRPC's. Only for controller/io/rpc.
#pragma once

#include <grpcpp/support/status.h>

#include "proto/base/status.h"
#include "proto/convert/reader.h"

namespace everstep {

inline grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), ToUtf8(status.message()));
}

}  // namespace everstep
