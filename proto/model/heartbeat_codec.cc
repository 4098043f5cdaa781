#include "proto/model/heartbeat_codec.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

namespace everstep {
namespace {

constexpr uint32_t kMagic = 0x42485645;  // "EVHB"
constexpr uint8_t kVersion = 1;
constexpr size_t kFixedBytes = 8 + 5 * 8;
constexpr size_t kVoteBytesMax = 3 * 10 + 1;
constexpr uint8_t kPhaseLast = static_cast<uint8_t>(RankPhase::kFinished);

void PutU64(std::string& out, uint64_t value) {
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t GetU64(std::string_view bytes, size_t at) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) {
    value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
  }
  return value;
}

void PutVarint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

bool GetVarint(std::string_view bytes, size_t& at, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (at >= bytes.size()) return false;
    const auto byte = static_cast<uint8_t>(bytes[at++]);
    if (shift == 63 && byte > 1) return false;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

std::array<uint8_t, EVP_MAX_MD_SIZE> Mac(std::string_view bytes, const HeartbeatKey& key) {
  std::array<uint8_t, EVP_MAX_MD_SIZE> mac{};
  unsigned int length = 0;
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  EVERSTEP_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, bytes.size(),
                      mac.data(), &length) != nullptr);
  return mac;
}

}  // namespace

std::string EncodeHeartbeat(const Heartbeat& heartbeat, uint64_t key_id, const HeartbeatKey& key) {
  std::string out;
  out.reserve(kHeartbeatBytesMax);
  const size_t name_bytes = std::min(heartbeat.server.value.size(), kHeartbeatNameBytesMax);
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(kMagic >> (8 * i)));
  out.push_back(static_cast<char>(kVersion));
  out.push_back(static_cast<char>(name_bytes));
  const size_t vote_count_at = out.size();
  out.push_back(0);
  out.push_back(0);
  PutU64(out, key_id);
  PutU64(out, heartbeat.incarnation.value);
  PutU64(out, heartbeat.sequence);
  PutU64(out, heartbeat.loop_counter);
  PutU64(out, heartbeat.acted.value);
  out.append(heartbeat.server.value, 0, name_bytes);
  uint8_t vote_count = 0;
  for (const Heartbeat::Vote& vote : heartbeat.votes) {
    if (vote_count == kHeartbeatVotesMax) break;
    if (vote.step.value < 0) continue;
    std::string one;
    one.reserve(kVoteBytesMax);
    PutVarint(one, vote.process.value);
    PutVarint(one, vote.generation.value);
    PutVarint(one, static_cast<uint64_t>(vote.step.value));
    one.push_back(static_cast<char>(vote.phase));
    if (out.size() + one.size() + kHeartbeatMacBytes > kHeartbeatBytesMax) break;
    out += one;
    ++vote_count;
  }
  out[vote_count_at] = static_cast<char>(vote_count);
  const auto mac = Mac(out, key);
  out.append(reinterpret_cast<const char*>(mac.data()), kHeartbeatMacBytes);
  return out;
}

Result<DecodedHeartbeat> DecodeHeartbeat(std::string_view bytes, const HeartbeatKeyLookup& lookup) {
  if (bytes.size() < kFixedBytes + kHeartbeatMacBytes || bytes.size() > kHeartbeatBytesMax) {
    return InvalidArgument("not a heartbeat: wrong size");
  }
  uint32_t magic = 0;
  for (int i = 0; i < 4; ++i) {
    magic |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  }
  if (magic != kMagic) return InvalidArgument("not a heartbeat: wrong magic");
  if (static_cast<uint8_t>(bytes[4]) != kVersion) return InvalidArgument("heartbeat of another version");

  DecodedHeartbeat decoded;
  decoded.key_id = GetU64(bytes, 8);
  const HeartbeatKey* key = lookup(decoded.key_id);
  if (key == nullptr) return NotFound("heartbeat with an unknown key");
  const std::string_view body = bytes.substr(0, bytes.size() - kHeartbeatMacBytes);
  const auto mac = Mac(body, *key);
  if (CRYPTO_memcmp(mac.data(), bytes.data() + body.size(), kHeartbeatMacBytes) != 0) {
    return Status(StatusCode::kPermissionDenied, "heartbeat with a wrong code");
  }

  // Authentic from here on; still parsed with full checks, because the sender may be of another build.
  Heartbeat& heartbeat = decoded.heartbeat;
  const size_t name_bytes = static_cast<uint8_t>(bytes[5]);
  const size_t vote_count = static_cast<uint8_t>(bytes[6]);
  if (name_bytes > kHeartbeatNameBytesMax || kFixedBytes + name_bytes > body.size() ||
      vote_count > kHeartbeatVotesMax) {
    return InvalidArgument("malformed heartbeat");
  }
  heartbeat.incarnation = Incarnation(GetU64(bytes, 16));
  heartbeat.sequence = GetU64(bytes, 24);
  heartbeat.loop_counter = GetU64(bytes, 32);
  heartbeat.acted = CommandSequence(GetU64(bytes, 40));
  heartbeat.server = ServerId(std::string(body.substr(kFixedBytes, name_bytes)));
  size_t at = kFixedBytes + name_bytes;
  heartbeat.votes.reserve(vote_count);
  for (size_t i = 0; i < vote_count; ++i) {
    uint64_t process = 0, generation = 0, step = 0;
    if (!GetVarint(body, at, process) || !GetVarint(body, at, generation) ||
        !GetVarint(body, at, step) || at >= body.size() || step > INT64_MAX) {
      return InvalidArgument("malformed heartbeat");
    }
    const auto phase = static_cast<uint8_t>(body[at++]);
    if (phase > kPhaseLast) return InvalidArgument("malformed heartbeat");
    heartbeat.votes.push_back({ProcessId(process), Generation(generation),
                               Step(static_cast<int64_t>(step)), static_cast<RankPhase>(phase)});
  }
  if (at != body.size()) return InvalidArgument("malformed heartbeat");
  return decoded;
}

}  // namespace everstep
