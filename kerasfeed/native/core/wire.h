// What is said on a data socket: frames, each a head of 16 bytes and a payload,
// integers in little-endian order. All that comes from the other side is
// checked here; what does not fit is an error in words, never a crash.
//
// A rank says HELLO and proves, once, that it was let in over the control
// plane; the producer proves the same. Then the rank sends READ, PROGRESS,
// RELEASE and SYNC, the producer ELEMENT, SHARED, PIECE, FORGET, END, FAILURE
// and SYNCED.
#ifndef KERASFEED_NATIVE_CORE_WIRE_H_
#define KERASFEED_NATIVE_CORE_WIRE_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "element.h"
#include "position.h"
#include "window.h"

namespace kerasfeed {

constexpr size_t kProofBytes = 32;
constexpr int64_t kMaxPayload = int64_t{1} << 40;         // of an ELEMENT
constexpr int64_t kMaxControlPayload = int64_t{1} << 20;  // of all others
constexpr int64_t kMaxHeadBytes = int64_t{1}
                                  << 24;  // of a SHARED, and of the part of an
                                          // ELEMENT before its bytes
constexpr int64_t kMaxComponents = 1 << 16;
constexpr int64_t kMaxDims = 254;  // TensorFlow's own bound
// Of an epoch or a step, so that the arithmetic of positions can't overflow
// whatever a rank says.
constexpr int64_t kMaxEpochOrStep = int64_t{1} << 40;

using Proof = std::array<uint8_t, kProofBytes>;

inline Proof ProofOf(const char* bytes) {
  Proof proof;
  std::memcpy(proof.data(), bytes, proof.size());
  return proof;
}

enum class FrameType : uint32_t {
  kHello = 1,
  kWelcome = 2,
  kRead = 10,
  kProgress = 11,
  kRelease = 12,
  kSync = 13,
  kElement = 20,
  kShared = 21,
  kPiece = 22,
  kForget = 23,
  kEnd = 24,
  kFailure = 25,
  kSynced = 26,
};

constexpr size_t kFrameHeadBytes =
    16;  // type (u32), zero (u32), payload bytes (u64)

struct FrameHead {
  FrameType type = FrameType::kHello;
  int64_t payload = 0;
};

struct HelloFrame {
  int64_t rank = 0;
  Proof proof{};
};
struct WelcomeFrame {
  Proof proof{};
};
struct ProgressFrame {
  int64_t reader = 0;
  Position pulled, acknowledged;
  bool waiting = false;
  std::map<int64_t, int64_t> trained;  // steps by epoch, where they changed
};
struct ReleaseFrame {
  std::vector<uint64_t> deliveries;
};  // SHARED elements that nobody uses any more
struct SyncFrame {
  uint64_t number = 0;
};  // SYNCED answers it when all before it was heard
// Which step, and how its element lies in its block. The bytes of an ELEMENT
// follow the payload's head, all of them; of a SHARED one they lie in a piece
// of shared memory.
struct ElementHead {
  int64_t reader = 0;
  Position position;
  int64_t size = 0;
  std::vector<Component> components;
};
struct SharedFrame {
  ElementHead head;
  uint64_t delivery = 0;
  uint32_t piece = 0;
  int64_t offset = 0;
};
struct PieceFrame {
  uint32_t piece = 0;
  int64_t bytes = 0;
};  // its descriptor comes with its first byte
struct ForgetFrame {
  uint32_t piece = 0;
};
struct EndFrame {
  int64_t reader = 0, epoch = 0, steps = 0;
};

// As messages name it; "type 7" if there is none such.
std::string FrameName(FrameType type);

// Appends a whole frame to `out`; what doesn't fit into one (more than a
// hundred thousand releases, or epochs) goes into several, each of which counts
// by itself, and a message that doesn't is cut.
void Append(std::string* out, const HelloFrame&);
void Append(std::string* out, const WelcomeFrame&);
void Append(std::string* out, const ReadRequest&);
void Append(std::string* out, const ProgressFrame&);
void Append(std::string* out, const ReleaseFrame&);
void Append(std::string* out, const SyncFrame&);
void AppendSynced(std::string* out, const SyncFrame&);
void Append(std::string* out, const SharedFrame&);
void Append(std::string* out, const PieceFrame&);
void Append(std::string* out, const ForgetFrame&);
void Append(std::string* out, const EndFrame&);
void Append(std::string* out, const Failure&);
// The frame's head and the payload's head: `head.size` bytes of the element are
// to follow. `head` must be one that CheckHead lets through, as in a
// SharedFrame.
void AppendElementHead(std::string* out, const ElementHead& head);

// What is wrong with bytes that came, in words.
struct WireError {
  std::string message;
};

// Whether an element can be said at all, and its components lie in its block,
// one after the other, each at a multiple of 64 bytes. The producer asks before
// it sends one, and a rank never gets one of which this isn't true.
std::optional<WireError> CheckHead(const ElementHead& head);

// Takes the kFrameHeadBytes of a head.
std::variant<FrameHead, WireError> ParseHead(std::string_view bytes);

// Parse a payload (for an ELEMENT: the part before its bytes, whose length
// ElementHeadBytes says once 8 bytes are there).
std::variant<HelloFrame, WireError> ParseHello(std::string_view payload);
std::variant<WelcomeFrame, WireError> ParseWelcome(std::string_view payload);
std::variant<ReadRequest, WireError> ParseRead(std::string_view payload);
std::variant<ProgressFrame, WireError> ParseProgress(std::string_view payload);
std::variant<ReleaseFrame, WireError> ParseRelease(std::string_view payload);
std::variant<SyncFrame, WireError> ParseSync(std::string_view payload);
std::variant<SharedFrame, WireError> ParseShared(std::string_view payload);
std::variant<PieceFrame, WireError> ParsePiece(std::string_view payload);
std::variant<ForgetFrame, WireError> ParseForget(std::string_view payload);
std::variant<EndFrame, WireError> ParseEnd(std::string_view payload);
std::variant<Failure, WireError> ParseFailure(std::string_view payload);
// Bytes of the payload's head of an ELEMENT, its own 8 bytes of length
// included.
std::variant<int64_t, WireError> ElementHeadBytes(
    std::string_view first_8_bytes, int64_t payload);
std::variant<ElementHead, WireError> ParseElementHead(std::string_view head,
                                                      int64_t payload);

// Compares in constant time.
bool SameProof(const Proof& a, const Proof& b);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_WIRE_H_
