// The cluster's view as messages of the admin service. Used by the admin service's reads. Thread-safe: pure functions.
#pragma once

#include "controller/core/view/view.h"
#include "everstep/v1/admin.pb.h"

namespace everstep {

void WriteServer(const ServerView& in, v1::Server* out);
void WriteJob(const JobView& in, v1::Job* out);
void WriteOutcome(const JobEnded& in, v1::JobOutcome* out);
void WriteRecovery(const RecoveryRecord& in, v1::Recovery* out);
void WriteCheckpoint(const JobView& job, const Manifest& in, v1::Checkpoint* out);
void WriteEvent(const EventView& in, v1::Event* out);

// The job of that uid, or the newest of that name; null when there is none.
const JobView* FindJob(const ClusterView& view, const std::string& name_or_uid);

// The bodies of read calls. The request's filters apply; nothing is found: an empty list.
void WriteServers(const ClusterView& view, v1::ListServersResponse* out);
void WriteJobs(const ClusterView& view, v1::ListJobsResponse* out);
void WriteRecoveries(const ClusterView& view, const JobUid* job, v1::ListRecoveriesResponse* out);
void WriteCheckpoints(const ClusterView& view, const JobUid* job, v1::ListCheckpointsResponse* out);
void WriteEvents(const ClusterView& view, const v1::ListEventsRequest& request, const JobUid* job,
                 v1::ListEventsResponse* out);
void WriteLogs(const ClusterView& view, const JobView& job, const v1::GetLogsRequest& request,
               v1::GetLogsResponse* out);

}  // namespace everstep
