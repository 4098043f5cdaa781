// Converters of the shapes that several message packages contain with the same field names: everstep.v1 (RPC) and
// everstep.storage.v1 (disk) are separate on purpose, but one rule reads and writes both. Internal to converters.
#pragma once

#include <cstdint>
#include <string>

#include "proto/convert/reader.h"
#include "proto/model/assignment.h"
#include "proto/model/job.h"
#include "proto/model/rank_messages.h"

namespace everstep::shapes {

// The message enum of a model enum, for the field whose getter returns `Pb`.
template <typename Pb, typename E>
Pb EnumTo(E value) {
  return static_cast<Pb>(static_cast<int>(value) + 1);
}

template <typename Pb>
void WriteStateId(const StateId& in, Pb* out) {
  out->set_step(in.step.value);
  out->set_generation(in.generation.value);
}

template <typename Pb>
StateId ReadStateId(Reader& r, const Pb& in, const char* field) {
  StateId out;
  r.In(field, [&] {
    out.step = r.ReadStep(in.step(), "step");
    out.generation = Generation(in.generation());
  });
  return out;
}

template <typename Pb>
void WriteDigest(const Digest128& in, Pb* out) {
  out->set_low(in[0]);
  out->set_high(in[1]);
}

template <typename Pb>
Digest128 ReadDigest(const Pb& in) {
  return {in.low(), in.high()};
}

template <typename Pb>
void WriteSnapshot(const SnapshotInfo& in, Pb* out) {
  WriteStateId(in.state, out->mutable_state());
  out->set_shard(in.shard.value);
  out->set_tier(EnumTo<decltype(out->tier())>(in.tier));
  out->set_server(in.server.value);
  out->set_bytes(in.bytes);
  WriteDigest(in.digest, out->mutable_digest());
}

template <typename Pb>
SnapshotInfo ReadSnapshot(Reader& r, const Pb& in) {
  SnapshotInfo out;
  out.state = ReadStateId(r, in.state(), "state");
  out.shard = ShardIndex(r.Number32(in.shard(), 0, kRanksMax, "shard"));
  out.tier = r.Enum(in.tier(), SnapshotTier::kStored, "tier");
  out.server = ServerId(r.NameOrEmpty(in.server(), "server"));
  out.bytes = in.bytes();
  out.digest = ReadDigest(in.digest());
  return out;
}

template <typename Pb>
void WriteSource(const SnapshotSource& in, Pb* out) {
  out->set_server(in.server.value);
  out->set_tier(EnumTo<decltype(out->tier())>(in.tier));
  out->set_transfer_address(in.transfer_address);
  WriteStateId(in.state, out->mutable_state());
  out->set_shard(in.shard.value);
}

template <typename Pb>
SnapshotSource ReadSource(Reader& r, const Pb& in) {
  SnapshotSource out;
  out.server = ServerId(r.Name(in.server(), "server"));
  out.tier = r.Enum(in.tier(), SnapshotTier::kStored, "tier");
  out.transfer_address = r.Address(in.transfer_address(), "transfer_address");
  out.state = ReadStateId(r, in.state(), "state");
  out.shard = ShardIndex(r.Number32(in.shard(), 0, kRanksMax, "shard"));
  return out;
}

template <typename Pb>
void WriteAssignment(const Assignment& in, Pb* out) {
  out->set_job(in.job.value);
  out->set_job_name(in.job_name);
  out->set_generation(in.generation.value);
  WriteStateId(in.recovery_point, out->mutable_recovery_point());
  out->set_token(std::string(in.token.begin(), in.token.end()));
  out->set_dp_size(in.dp_size);
  out->set_tp_size(in.tp_size);
  out->set_pp_size(in.pp_size);
  out->set_micro_batch_count(in.micro_batch_count);
  out->mutable_ranks()->Reserve(static_cast<int>(in.ranks.size()));
  for (const RankAssignment& rank : in.ranks) {
    auto* to = out->add_ranks();
    to->set_rank(rank.rank.value);
    to->set_server(rank.server.value);
    to->set_device(rank.device.value);
    to->set_process(rank.process.value);
    to->set_dp(rank.dp);
    to->set_tp(rank.tp);
    to->set_pp(rank.pp);
    to->set_local_rank(rank.local_rank);
    to->set_micro_batch_first(rank.micro_batch_first);
    to->set_micro_batch_count(rank.micro_batch_count);
    to->set_mesh_address(rank.mesh_address);
    to->set_action(EnumTo<decltype(to->action())>(rank.action));
    to->set_source_rank(rank.source_rank.value);
    for (const SnapshotSource& source : rank.sources) WriteSource(source, to->add_sources());
  }
}

template <typename Pb>
RankAssignment ReadRankAssignment(Reader& r, const Pb& in) {
  RankAssignment out;
  out.rank = Rank(r.Number32(in.rank(), 0, kRanksMax, "rank"));
  out.server = ServerId(r.Name(in.server(), "server"));
  out.device = DeviceIndex(r.Number32(in.device(), 0, INT32_MAX, "device"));
  out.process = ProcessId(in.process());
  out.dp = r.Number32(in.dp(), 0, kRanksMax, "dp");
  out.tp = r.Number32(in.tp(), 0, kRanksMax, "tp");
  out.pp = r.Number32(in.pp(), 0, kRanksMax, "pp");
  out.local_rank = r.Number32(in.local_rank(), 0, kRanksMax, "local_rank");
  out.micro_batch_first = r.Number32(in.micro_batch_first(), 0, INT32_MAX, "micro_batch_first");
  out.micro_batch_count = r.Number32(in.micro_batch_count(), 0, INT32_MAX, "micro_batch_count");
  out.mesh_address = r.Address(in.mesh_address(), "mesh_address");
  out.action = r.Enum(in.action(), RestoreAction::kFetchFromSnapshot, "action");
  out.source_rank = Rank(r.Number32(in.source_rank(), -1, kRanksMax, "source_rank"));
  if (r.ListFits(in.sources_size(), kSourcesMax, "sources")) {
    for (int i = 0; i < in.sources_size(); ++i) {
      r.In("sources", i, [&] { out.sources.push_back(ReadSource(r, in.sources(i))); });
    }
  }
  return out;
}

template <typename Pb>
Assignment ReadAssignment(Reader& r, const Pb& in) {
  Assignment out;
  out.job = JobUid(r.Name(in.job(), "job"));
  out.job_name = r.NameOrEmpty(in.job_name(), "job_name");
  out.generation = Generation(r.AboveZero(in.generation(), "generation"));
  out.recovery_point = ReadStateId(r, in.recovery_point(), "recovery_point");
  if (in.token().size() == out.token.size()) {
    for (size_t i = 0; i < out.token.size(); ++i) out.token[i] = static_cast<uint8_t>(in.token()[i]);
  } else {
    r.Fail("token", "needs 16 bytes");
  }
  out.dp_size = r.Number32(in.dp_size(), 1, kRanksMax, "dp_size");
  out.tp_size = r.Number32(in.tp_size(), 1, kRanksMax, "tp_size");
  out.pp_size = r.Number32(in.pp_size(), 1, kRanksMax, "pp_size");
  out.micro_batch_count = r.Number32(in.micro_batch_count(), 0, INT32_MAX, "micro_batch_count");
  if (!r.ListFits(in.ranks_size(), kRanksMax, "ranks")) return out;
  out.ranks.reserve(in.ranks_size());
  for (int i = 0; i < in.ranks_size(); ++i) {
    r.In("ranks", i, [&] { out.ranks.push_back(ReadRankAssignment(r, in.ranks(i))); });
    if (r.ok() && out.ranks.back().rank.value != i) r.Fail("ranks", "are not in the order of their rank");
    if (!r.ok()) break;
  }
  return out;
}

template <typename Pb>
void WriteJobSpec(const JobSpec& in, Pb* out) {
  out->set_name(in.name);
  out->set_program(in.program);
  for (const std::string& argument : in.arguments) out->add_arguments(argument);
  out->set_working_directory(in.working_directory);
  for (const auto& [key, value] : in.environment) (*out->mutable_environment())[key] = value;
  for (const auto& [key, value] : in.secret_files) (*out->mutable_secret_files())[key] = value;
  out->set_servers_min(in.servers_min);
  out->set_servers_wanted(in.servers_wanted);
  out->set_servers_max(in.servers_max);
  out->set_ranks_per_server(in.ranks_per_server);
  out->set_pipeline_stages(in.pipeline_stages);
  out->set_micro_batch_count(in.micro_batch_count);
  out->set_priority(in.priority);
  out->set_spares_reserved(in.spares_reserved);
  out->set_standbys_wanted(in.standbys_wanted);
  out->set_restarts_max(in.restarts_max);
  out->set_opaque(in.opaque);
  WriteDuration(in.termination_grace, out->mutable_termination_grace());
  out->set_snapshot_interval_steps(in.snapshot_interval_steps);
  out->set_persist_interval_steps(in.persist_interval_steps);
  out->set_checkpoints_kept(in.checkpoints_kept);
}

// Bounds and forms only; what makes sense together is ValidateJobSpec's.
template <typename Pb>
JobSpec ReadJobSpec(Reader& r, const Pb& in) {
  JobSpec out;
  out.name = r.Name(in.name(), "name");
  out.program = r.Text(in.program(), "program", kPathBytesMax);
  if (r.ListFits(in.arguments_size(), kArgumentsMax, "arguments")) {
    for (int i = 0; i < in.arguments_size(); ++i) {
      out.arguments.push_back(r.Text(in.arguments(i), "arguments", kArgumentBytesMax));
    }
  }
  out.working_directory = r.Text(in.working_directory(), "working_directory", kPathBytesMax);
  if (r.ListFits(static_cast<int64_t>(in.environment().size()), kArgumentsMax, "environment")) {
    for (const auto& [key, value] : in.environment()) {
      if (key.empty() || key.find('=') != std::string::npos) {
        r.Fail("environment", "has a variable whose name is empty or contains '='");
      }
      out.environment[r.Text(key, "environment", kNameBytesMax)] =
          r.Text(value, "environment", kArgumentBytesMax);
    }
  }
  if (r.ListFits(static_cast<int64_t>(in.secret_files().size()), kArgumentsMax, "secret_files")) {
    for (const auto& [key, value] : in.secret_files()) {
      if (key.empty() || key.find('=') != std::string::npos) {
        r.Fail("secret_files", "has a variable whose name is empty or contains '='");
      }
      out.secret_files[r.Text(key, "secret_files", kNameBytesMax)] =
          r.Text(value, "secret_files", kPathBytesMax);
    }
  }
  const auto number = [&](bool present, int64_t value, int32_t otherwise, const char* field) {
    return present ? r.Number32(value, 0, INT32_MAX, field) : otherwise;
  };
  const JobSpec defaults;
  out.servers_min = number(in.has_servers_min(), in.servers_min(), defaults.servers_min, "servers_min");
  out.servers_wanted = number(in.has_servers_wanted(), in.servers_wanted(), defaults.servers_wanted,
                              "servers_wanted");
  out.servers_max = number(true, in.servers_max(), 0, "servers_max");
  out.ranks_per_server = number(in.has_ranks_per_server(), in.ranks_per_server(),
                                defaults.ranks_per_server, "ranks_per_server");
  out.pipeline_stages = number(in.has_pipeline_stages(), in.pipeline_stages(),
                               defaults.pipeline_stages, "pipeline_stages");
  out.micro_batch_count = number(true, in.micro_batch_count(), 0, "micro_batch_count");
  out.priority = in.priority();
  out.spares_reserved = number(true, in.spares_reserved(), 0, "spares_reserved");
  out.standbys_wanted = number(in.has_standbys_wanted(), in.standbys_wanted(),
                               defaults.standbys_wanted, "standbys_wanted");
  out.restarts_max = number(in.has_restarts_max(), in.restarts_max(), defaults.restarts_max,
                            "restarts_max");
  out.opaque = in.opaque();
  if (in.has_termination_grace()) {
    out.termination_grace = r.ReadDuration(in.termination_grace(), Duration(0), Seconds(24 * 3600),
                                           "termination_grace");
  }
  out.snapshot_interval_steps =
      r.Number(in.snapshot_interval_steps(), 0, INT64_MAX, "snapshot_interval_steps");
  out.persist_interval_steps =
      r.Number(in.persist_interval_steps(), 0, INT64_MAX, "persist_interval_steps");
  out.checkpoints_kept = number(in.has_checkpoints_kept(), in.checkpoints_kept(),
                                defaults.checkpoints_kept, "checkpoints_kept");
  return out;
}

}  // namespace everstep::shapes
