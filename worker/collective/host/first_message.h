// The first bytes on each connection between ranks, both ways. Fixed size, little-endian. Pure
// functions.
//
//   connector sends  magic "ESMESH1\n" | version u32 | uid bytes u32 | generation u64 | group u64 |
//   from i32 | to i32 |
//                    token 16 | uid 256, zero-padded
//   acceptor answers magic "ESMESHA\n" | generation u64 | group u64 | rank i32 | 0 u32, once a mesh
//   has taken it
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>

#include "worker/collective/host/mesh_listener.h"

namespace everstep::collective {

inline constexpr std::array<char, 8> kHelloMagic = {'E', 'S', 'M', 'E', 'S', 'H', '1', '\n'};
inline constexpr std::array<char, 8> kAnswerMagic = {'E', 'S', 'M', 'E', 'S', 'H', 'A', '\n'};
inline constexpr uint32_t kMeshVersion = 1;

struct MeshHello {
  JobUid job_uid;
  Generation generation;
  GroupId group;
  int32_t from = 0;
  int32_t to = 0;
  MeshToken token{};
};

inline constexpr size_t kHelloBytes = 8 + 4 + 4 + 8 + 8 + 4 + 4 + 16 + kJobUidBytesMax;
inline constexpr size_t kAnswerBytes = 8 + 8 + 8 + 4 + 4;
using HelloBytes = std::array<std::byte, kHelloBytes>;
using AnswerBytes = std::array<std::byte, kAnswerBytes>;

// REQUIRES: the uid is at most kJobUidBytesMax bytes
HelloBytes EncodeHello(const MeshHello& hello);
// Nothing when the bytes are not a first message of this version.
std::optional<MeshHello> DecodeHello(const HelloBytes& bytes);
AnswerBytes EncodeAnswer(Generation generation, GroupId group, int32_t rank);

}  // namespace everstep::collective
