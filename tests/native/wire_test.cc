#include "core/wire.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>

#include "check.h"

namespace {
// The largest single allocation of this thread since it was set to zero: other
// tests of this program have more threads.
thread_local size_t largest_allocation = 0;
}  // namespace

// Where these are inlined, g++ takes them for a mismatch.
__attribute__((noinline)) void* operator new(size_t size) {
  largest_allocation = std::max(largest_allocation, size);
  void* memory = std::malloc(size ? size : 1);
  if (!memory) std::abort();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace kerasfeed {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr uint64_t kMaxUint64 = std::numeric_limits<uint64_t>::max();
constexpr uint32_t kMaxUint32 = std::numeric_limits<uint32_t>::max();

Proof MakeProof(int first) {
  Proof proof;
  for (size_t i = 0; i < proof.size(); ++i)
    proof[i] = static_cast<uint8_t>(first + 7 * i);
  return proof;
}

template <typename Frame>
std::string Frames(const Frame& frame) {
  std::string out;
  Append(&out, frame);
  return out;
}

ElementHead MakeHead() {
  ElementHead head;
  head.reader = 3;
  head.position = {kMaxEpochOrStep, 7};
  head.size = 64 * 5 + 9;
  head.components = {{{2, 3}, 0, 24},
                     {{0, 5}, 64, 0},
                     {{}, 64, 8},
                     {{1, 190, 1}, 128, 190},
                     {{9}, 320, 9}};
  return head;
}

// One of each frame, and some with values at the edges.
std::vector<std::string> Samples() {
  std::vector<std::string> samples;
  samples.push_back(Frames(HelloFrame{0, MakeProof(1)}));
  samples.push_back(Frames(HelloFrame{kMaxInt64, MakeProof(200)}));
  samples.push_back(Frames(WelcomeFrame{MakeProof(9)}));
  samples.push_back(Frames(ReadRequest{}));
  ReadRequest request;
  request.reader = kMaxInt64;
  request.position = {kMaxEpochOrStep, kMaxEpochOrStep};
  request.through_epochs = true;
  request.credit_steps = kMaxInt64;
  request.credit_bytes = kMaxInt64;
  request.last_epoch = kMaxInt64;
  request.left = Position{4, 5};
  request.direct = true;
  samples.push_back(Frames(request));
  samples.push_back(Frames(ProgressFrame{}));
  samples.push_back(Frames(
      ProgressFrame{2, {1, 9}, {1, 3}, true, {{0, 4}, {1, 0}, {7, 1 << 20}}}));
  samples.push_back(Frames(ReleaseFrame{}));
  samples.push_back(Frames(ReleaseFrame{{0, kMaxUint64, 17}}));
  samples.push_back(Frames(SyncFrame{kMaxUint64}));
  std::string synced;
  AppendSynced(&synced, SyncFrame{5});
  samples.push_back(synced);
  samples.push_back(Frames(SharedFrame{MakeHead(), 8, 2, 64 * 11}));
  samples.push_back(Frames(SharedFrame{{}, kMaxUint64, kMaxUint32, 0}));
  samples.push_back(Frames(PieceFrame{kMaxUint32, kMaxPayload}));
  samples.push_back(Frames(ForgetFrame{6}));
  samples.push_back(Frames(EndFrame{1, 2, kMaxEpochOrStep}));
  samples.push_back(Frames(Failure{}));
  samples.push_back(Frames(
      Failure{FailureKind::kRanks, std::string("a\0b", 3), Position{3, 0}}));
  std::string element;
  AppendElementHead(&element, MakeHead());
  samples.push_back(element);
  return samples;
}

FrameHead HeadOf(const std::string& frame) {
  const auto head = ParseHead(frame.substr(0, kFrameHeadBytes));
  CHECK(std::holds_alternative<FrameHead>(head));
  return std::get<FrameHead>(head);
}

template <typename Frame>
std::string SaidAgain(const std::variant<Frame, WireError>& parsed) {
  if (const auto* error = std::get_if<WireError>(&parsed)) {
    CHECK(error->message.find("expected") != std::string::npos);
    CHECK(error->message.find("Received: ") != std::string::npos);
    return "";
  }
  std::string out;
  if constexpr (std::is_same_v<Frame, ElementHead>)
    AppendElementHead(&out, std::get<Frame>(parsed));
  else
    Append(&out, std::get<Frame>(parsed));
  return out;
}

// Parses a frame (of an ELEMENT the head) and returns what writing its value
// gives, or "" if there was an error. Checks that memory for no more than the
// payload is asked for.
std::string ParseAndWrite(FrameType type, std::string_view payload,
                          int64_t length) {
  largest_allocation = 0;
  std::string said;
  switch (type) {
    case FrameType::kHello:
      said = SaidAgain(ParseHello(payload));
      break;
    case FrameType::kWelcome:
      said = SaidAgain(ParseWelcome(payload));
      break;
    case FrameType::kRead:
      said = SaidAgain(ParseRead(payload));
      break;
    case FrameType::kProgress:
      said = SaidAgain(ParseProgress(payload));
      break;
    case FrameType::kRelease:
      said = SaidAgain(ParseRelease(payload));
      break;
    case FrameType::kSync:
      said = SaidAgain(ParseSync(payload));
      break;
    case FrameType::kSynced: {
      said = SaidAgain(ParseSync(payload));
      if (!said.empty()) {
        const auto frame = ParseSync(payload);
        said.clear();
        AppendSynced(&said, std::get<SyncFrame>(frame));
      }
      break;
    }
    case FrameType::kShared:
      said = SaidAgain(ParseShared(payload));
      break;
    case FrameType::kPiece:
      said = SaidAgain(ParsePiece(payload));
      break;
    case FrameType::kForget:
      said = SaidAgain(ParseForget(payload));
      break;
    case FrameType::kEnd:
      said = SaidAgain(ParseEnd(payload));
      break;
    case FrameType::kFailure:
      said = SaidAgain(ParseFailure(payload));
      break;
    case FrameType::kElement:
      said = SaidAgain(ParseElementHead(payload, length));
      break;
  }
  CHECK(largest_allocation <= 4 * payload.size() + 1024);
  return said;
}

std::string ParseAndWrite(const std::string& frame) {
  const FrameHead head = HeadOf(frame);
  return ParseAndWrite(
      head.type, std::string_view(frame).substr(kFrameHeadBytes), head.payload);
}

template <typename Value>
Value Parsed(const std::variant<Value, WireError>& parsed) {
  if (const auto* error = std::get_if<WireError>(&parsed))
    kerasfeed_test::Fail(__FILE__, __LINE__, error->message);
  return std::get<Value>(parsed);
}

template <typename Value>
std::string Message(const std::variant<Value, WireError>& parsed) {
  CHECK(std::holds_alternative<WireError>(parsed));
  return std::get<WireError>(parsed).message;
}

std::string Payload(const std::string& frame) {
  return frame.substr(kFrameHeadBytes);
}

TEST(EveryFrameComesBackAsItWasSaid) {
  for (const std::string& frame : Samples()) {
    const FrameHead head = HeadOf(frame);
    if (head.type != FrameType::kElement)
      CHECK_EQ(head.payload,
               static_cast<int64_t>(frame.size() - kFrameHeadBytes));
    CHECK(ParseAndWrite(frame) == frame);
  }
}

TEST(TheValuesAreThoseThatWereSaid) {
  const auto hello =
      Parsed(ParseHello(Payload(Frames(HelloFrame{7, MakeProof(3)}))));
  CHECK_EQ(hello.rank, 7);
  CHECK(SameProof(hello.proof, MakeProof(3)));

  ReadRequest request;
  request.reader = 2;
  request.position = {3, 4};
  request.through_epochs = true;
  request.credit_steps = 5;
  request.credit_bytes = 6;
  request.last_epoch = 8;
  request.left = Position{9, 10};
  const auto read = Parsed(ParseRead(Payload(Frames(request))));
  CHECK_EQ(read.reader, 2);
  CHECK(read.position == (Position{3, 4}));
  CHECK(read.through_epochs);
  CHECK_EQ(read.credit_steps, 5);
  CHECK_EQ(read.credit_bytes, 6);
  CHECK_EQ(read.last_epoch, 8);
  CHECK(read.left == (Position{9, 10}));
  CHECK(!read.direct);

  const auto progress = Parsed(ParseProgress(
      Payload(Frames(ProgressFrame{1, {2, 3}, {4, 5}, true, {{6, 7}}}))));
  CHECK_EQ(progress.reader, 1);
  CHECK(progress.pulled == (Position{2, 3}));
  CHECK(progress.acknowledged == (Position{4, 5}));
  CHECK(progress.waiting);
  CHECK_EQ(progress.trained.at(6), 7);

  const auto shared = Parsed(ParseShared(
      Payload(Frames(SharedFrame{MakeHead(), kMaxUint64 - 1, 12, 64}))));
  CHECK_EQ(shared.delivery, kMaxUint64 - 1);
  CHECK_EQ(shared.piece, 12u);
  CHECK_EQ(shared.offset, 64);
  CHECK_EQ(shared.head.size, MakeHead().size);
  CHECK_EQ(shared.head.components.size(), size_t{5});
  CHECK(shared.head.components[3].shape == (std::vector<int64_t>{1, 190, 1}));
  CHECK_EQ(shared.head.components[3].offset, 128);
  CHECK_EQ(shared.head.components[3].length, 190);

  const auto failure = Parsed(ParseFailure(Payload(Frames(
      Failure{FailureKind::kMismatch, "not the same", Position{1, 2}}))));
  CHECK(failure.kind == FailureKind::kMismatch);
  CHECK_EQ(failure.message, "not the same");
  CHECK(failure.position == (Position{1, 2}));

  const auto end = Parsed(ParseEnd(Payload(Frames(EndFrame{1, 2, 3}))));
  CHECK_EQ(end.reader, 1);
  CHECK_EQ(end.epoch, 2);
  CHECK_EQ(end.steps, 3);

  const auto piece = Parsed(ParsePiece(Payload(Frames(PieceFrame{4, 4096}))));
  CHECK_EQ(piece.piece, 4u);
  CHECK_EQ(piece.bytes, 4096);
}

TEST(BytesAreLittleEndian) {
  const std::string frame = Frames(SyncFrame{0x0102030405060708});
  CHECK(frame == std::string("\x0d\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0"
                             "\x08\x07\x06\x05\x04\x03\x02\x01",
                             24));
}

TEST(TruncatedFramesAreErrors) {
  for (const std::string& frame : Samples()) {
    const FrameHead head = HeadOf(frame);
    const std::string payload = Payload(frame);
    for (size_t size = 0; size < payload.size(); ++size) {
      // A copy of its own, so that a sanitizer sees a read beyond it.
      const std::vector<char> part(payload.begin(), payload.begin() + size);
      CHECK_EQ(
          ParseAndWrite(head.type, {part.data(), part.size()}, head.payload),
          "");
    }
    CHECK_EQ(ParseAndWrite(head.type, payload + '\0', head.payload + 1), "");
    for (size_t size = 0; size < kFrameHeadBytes; ++size)
      Message(ParseHead(std::string_view(frame).substr(0, size)));
  }
}

TEST(ChangedBytesAreErrorsOrOtherValues) {
  for (const std::string& frame : Samples()) {
    const FrameHead head = HeadOf(frame);
    const std::string payload = Payload(frame);
    for (size_t at = 0; at < payload.size(); ++at) {
      for (int change = 1; change < 256; ++change) {
        std::string other = payload;
        other[at] = static_cast<char>(other[at] ^ change);
        const std::string said = ParseAndWrite(head.type, other, head.payload);
        if (!said.empty()) CHECK(said.substr(kFrameHeadBytes) == other);
      }
    }
    for (size_t at = 0; at < kFrameHeadBytes; ++at) {
      for (int change = 1; change < 256; ++change) {
        std::string other = frame.substr(0, kFrameHeadBytes);
        other[at] = static_cast<char>(other[at] ^ change);
        const auto parsed = ParseHead(other);
        if (at >= 4 && at < 8) Message(parsed);
        if (const auto* value = std::get_if<FrameHead>(&parsed))
          CHECK(value->payload >= 0 && value->payload <= kMaxPayload);
      }
    }
  }
}

TEST(RandomBytesAreErrorsOrValues) {
  std::mt19937_64 random(1);
  const std::vector<std::string> samples = Samples();
  for (int round = 0; round < 200000; ++round) {
    const std::string& sample = samples[random() % samples.size()];
    const FrameHead head = HeadOf(sample);
    std::string payload;
    if (random() % 2) {
      payload.resize(random() % 200);
      const bool sparse = random() % 2;
      for (char& byte : payload)
        byte = sparse && random() % 8 ? '\0' : static_cast<char>(random());
    } else {
      payload = Payload(sample);
      for (int change = random() % 6; change >= 0; --change) {
        if (!payload.empty())
          payload[random() % payload.size()] =
              static_cast<char>(random() % 3 ? random() % 5 : random());
      }
    }
    const int64_t length =
        random() % 2 ? head.payload : static_cast<int64_t>(random() % 600);
    const std::string said = ParseAndWrite(head.type, payload, length);
    if (!said.empty()) CHECK(said.substr(kFrameHeadBytes) == payload);
    ElementHeadBytes(payload, length);
    ParseHead(payload);
  }
}

TEST(HeadsThatAreNoneAreErrors) {
  const auto head = [](uint32_t type, uint32_t zero, uint64_t payload) {
    std::string bytes;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(type >> (8 * i));
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(zero >> (8 * i));
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(payload >> (8 * i));
    return ParseHead(bytes);
  };
  CHECK_EQ(Message(head(3, 0, 0)), "frame: expected a known type. Received: 3");
  CHECK_EQ(Message(head(1, 9, 0)),
           "frame: expected zero after the type HELLO. Received: 9");
  CHECK_EQ(Message(head(10, 0, kMaxControlPayload + 1)),
           "frame: expected at most 1048576 bytes in a payload of READ. "
           "Received: 1048577");
  Message(head(20, 0, kMaxPayload + 1));
  Message(head(20, 0, kMaxUint64));
  Message(head(21, 0, kMaxHeadBytes + 1));
  CHECK_EQ(Parsed(head(20, 0, kMaxPayload)).payload, kMaxPayload);
  CHECK_EQ(Parsed(head(10, 0, kMaxControlPayload)).payload, kMaxControlPayload);
  Message(ParseHead(std::string(17, '\0')));
}

TEST(CountsBeyondThePayloadAreErrors) {
  std::string release = Payload(Frames(ReleaseFrame{{1, 2}}));
  release[0] = 3;
  CHECK_EQ(Message(ParseRelease(release)),
           "RELEASE: expected 3 deliveries in at least 24 bytes. "
           "Received: 16 bytes");
  for (int i = 0; i < 4; ++i) release[i] = '\xff';
  CHECK_EQ(Message(ParseRelease(release)),
           "RELEASE: expected at most 131071 deliveries. "
           "Received: 4294967295");
}

TEST(ComponentsMustLieInTheirBlock) {
  const auto error = [](ElementHead head) {
    const auto found = CheckHead(head);
    CHECK(found.has_value());
    std::string out;
    Append(&out, SharedFrame{head, 0, 0, 0});
    const std::string message = Message(ParseShared(Payload(out)));
    CHECK_EQ(message.substr(0, 7), "SHARED:");
    return found->message;
  };
  ElementHead head = MakeHead();
  CHECK(!CheckHead(head));

  head.components[1].offset = 0;  // over the one before
  CHECK_EQ(error(head),
           "element: expected component 1 at a multiple of 64 that is at "
           "least 24. Received: 0");
  head = MakeHead();
  head.components[1].offset = 32;
  error(head);
  head.components[1].offset = -64;
  error(head);
  head = MakeHead();
  head.components[4].length = 10;
  CHECK_EQ(error(head),
           "element: expected component 4 inside a block of 329 bytes. "
           "Received: offset 320, length 10");
  head.components[4].length = kMaxInt64;
  error(head);
  head.components[4].length = -1;
  error(head);
  head = MakeHead();
  head.components[4].offset = kMaxInt64 - 63;
  error(head);
  head = MakeHead();
  head.components[0].shape = {2, -3};
  error(head);
  head.components[0].shape = {int64_t{1} << 32, int64_t{1} << 31};
  error(head);
  head.components[0].shape = std::vector<int64_t>(kMaxDims + 1, 1);
  error(head);
  head.components[0].shape = std::vector<int64_t>(kMaxDims, 1);
  CHECK(!CheckHead(head));
  head = MakeHead();
  head.size = -1;
  error(head);
  head.size = kMaxInt64;
  error(head);
}

TEST(ManyComponentsTravelUpToTheLimit) {
  ElementHead head;
  head.components.assign(kMaxComponents, {{1, 2, 3, 4, 5, 6}, 0, 0});
  CHECK(!CheckHead(head));
  const std::string shared = Frames(SharedFrame{head, 1, 2, 0});
  CHECK(ParseAndWrite(shared) == shared);
  std::string element;
  AppendElementHead(&element, head);
  CHECK(ParseAndWrite(element) == element);

  head.components.push_back({});
  CHECK(CheckHead(head).has_value());
  head.components.assign(kMaxComponents, {std::vector<int64_t>(100, 1), 0, 0});
  CHECK(CheckHead(head).has_value());
}

TEST(TheElementsBytesMustFollowItsHead) {
  std::string frame;
  AppendElementHead(&frame, MakeHead());
  const FrameHead head = HeadOf(frame);
  const std::string payload = Payload(frame);
  const auto size = static_cast<int64_t>(payload.size());
  CHECK_EQ(head.payload, size + MakeHead().size);
  CHECK_EQ(Parsed(ElementHeadBytes(payload.substr(0, 8), head.payload)), size);
  Message(ElementHeadBytes(payload.substr(0, 8), size - 1));
  Message(ElementHeadBytes(payload.substr(0, 7), head.payload));
  Message(ElementHeadBytes(std::string(8, '\0'), head.payload));
  Message(ElementHeadBytes(std::string(8, '\xff'), head.payload));
  Message(ElementHeadBytes(std::string(8, '\xff'), -1));
  CHECK_EQ(Message(ParseElementHead(payload, head.payload + 1)),
           "ELEMENT: expected an element of the 330 bytes that follow its "
           "head. Received: 329");
  Message(ParseElementHead(payload, -1));
}

TEST(WhatDoesNotFitIntoAFrameGoesIntoSeveral) {
  ReleaseFrame release;
  for (uint64_t i = 0; i < 300000; ++i) release.deliveries.push_back(i * i);
  ProgressFrame progress{1, {2, 3}, {4, 5}, false, {}};
  for (int64_t i = 0; i < 150000; ++i) progress.trained[i] = i + 1;
  std::string bytes = Frames(release) + Frames(progress);
  ReleaseFrame released;
  std::map<int64_t, int64_t> trained;
  int frames = 0;
  for (size_t at = 0; at < bytes.size(); ++frames) {
    const FrameHead head = HeadOf(bytes.substr(at));
    const auto payload =
        std::string_view(bytes).substr(at + kFrameHeadBytes, head.payload);
    if (head.type == FrameType::kRelease) {
      for (uint64_t delivery : Parsed(ParseRelease(payload)).deliveries)
        released.deliveries.push_back(delivery);
    } else {
      const auto part = Parsed(ParseProgress(payload));
      CHECK(part.acknowledged == progress.acknowledged);
      trained.insert(part.trained.begin(), part.trained.end());
    }
    at += kFrameHeadBytes + head.payload;
  }
  CHECK(released.deliveries == release.deliveries);
  CHECK(trained == progress.trained);
  CHECK_EQ(frames, 6);
}

TEST(LongMessagesAreCutBetweenCharacters) {
  Failure failure;
  for (int i = 0; i < 400000; ++i) failure.message += "\xe2\x82\xac";
  const std::string frame = Frames(failure);
  CHECK(HeadOf(frame).payload <= kMaxControlPayload);
  const std::string message = Parsed(ParseFailure(Payload(frame))).message;
  CHECK_EQ(message.size() % 3, size_t{0});
  CHECK(message.size() > kMaxControlPayload - 300);
  CHECK(message == failure.message.substr(0, message.size()));
}

TEST(ProofsAreTheSameInAllBytes) {
  const Proof proof = MakeProof(5);
  CHECK(SameProof(proof, MakeProof(5)));
  for (size_t at = 0; at < proof.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Proof other = proof;
      other[at] = static_cast<uint8_t>(other[at] ^ (1 << bit));
      CHECK(!SameProof(proof, other));
    }
  }
}

}  // namespace
}  // namespace kerasfeed
