#include "worker/collective/host/first_message.h"

#include <algorithm>

#include "proto/base/check.h"

namespace everstep::collective {
namespace {

template <typename T>
std::byte* Put(std::byte* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i)
    at[i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
  return at + sizeof(T);
}

template <typename T>
const std::byte* Get(const std::byte* at, T& value) {
  uint64_t bits = 0;
  for (size_t i = 0; i < sizeof(T); ++i) bits |= static_cast<uint64_t>(at[i]) << (8 * i);
  value = static_cast<T>(bits);
  return at + sizeof(T);
}

}  // namespace

HelloBytes EncodeHello(const MeshHello& hello) {
  EVERSTEP_CHECK(hello.job_uid.value.size() <= kJobUidBytesMax);
  HelloBytes bytes{};
  std::memcpy(bytes.data(), kHelloMagic.data(), kHelloMagic.size());
  std::byte* at = bytes.data() + kHelloMagic.size();
  at = Put(at, kMeshVersion);
  at = Put(at, static_cast<uint32_t>(hello.job_uid.value.size()));
  at = Put(at, hello.generation.value);
  at = Put(at, hello.group.value);
  at = Put(at, hello.from);
  at = Put(at, hello.to);
  std::memcpy(at, hello.token.data(), hello.token.size());
  std::memcpy(at + hello.token.size(), hello.job_uid.value.data(), hello.job_uid.value.size());
  return bytes;
}

std::optional<MeshHello> DecodeHello(const HelloBytes& bytes) {
  if (std::memcmp(bytes.data(), kHelloMagic.data(), kHelloMagic.size()) != 0) return std::nullopt;
  const std::byte* at = bytes.data() + kHelloMagic.size();
  MeshHello hello;
  uint32_t version = 0;
  uint32_t uid_bytes = 0;
  at = Get(at, version);
  at = Get(at, uid_bytes);
  at = Get(at, hello.generation.value);
  at = Get(at, hello.group.value);
  at = Get(at, hello.from);
  at = Get(at, hello.to);
  if (version != kMeshVersion || uid_bytes > kJobUidBytesMax) return std::nullopt;
  std::memcpy(hello.token.data(), at, hello.token.size());
  hello.job_uid.value.assign(reinterpret_cast<const char*>(at + hello.token.size()), uid_bytes);
  return hello;
}

AnswerBytes EncodeAnswer(Generation generation, GroupId group, int32_t rank) {
  AnswerBytes bytes{};
  std::memcpy(bytes.data(), kAnswerMagic.data(), kAnswerMagic.size());
  std::byte* at = bytes.data() + kAnswerMagic.size();
  at = Put(at, generation.value);
  at = Put(at, group.value);
  Put(at, rank);
  return bytes;
}

}  // namespace everstep::collective
