#include "wire.h"

#include <algorithm>
#include <limits>
#include <type_traits>

namespace kerasfeed {
namespace {

constexpr int64_t kLengthBytes = 8;  // of an ELEMENT's payload head
constexpr int64_t kMinComponentBytes = 4 + 8 + 8;
constexpr int64_t kMinHeadBytes = 8 + 8 + 8 + 8 + 4;
constexpr int64_t kMaxReleasesInFrame = (kMaxControlPayload - 4) / 8;
constexpr int64_t kProgressBytes = 8 + 4 * 8 + 1 + 4;  // without `trained`
constexpr int64_t kMaxTrained = (kMaxControlPayload - kProgressBytes) / 16;
constexpr size_t kMaxMessageBytes = kMaxControlPayload - 256;

// Bytes of `head` in a frame, ELEMENT's own length not included.
int64_t HeadBytes(const ElementHead& head) {
  int64_t bytes = kMinHeadBytes;
  for (const Component& component : head.components)
    bytes +=
        kMinComponentBytes + 8 * static_cast<int64_t>(component.shape.size());
  return bytes;
}

// ---- Writing ----

template <typename Integer>
void Put(std::string* out, Integer value) {
  const auto bits = static_cast<std::make_unsigned_t<Integer>>(value);
  char bytes[sizeof(bits)];
  for (size_t i = 0; i < sizeof(bits); ++i)
    bytes[i] = static_cast<char>((bits >> (8 * i)) & 0xff);
  out->append(bytes, sizeof(bytes));
}

void PutFlag(std::string* out, bool value) { Put<uint8_t>(out, value ? 1 : 0); }

void PutProof(std::string* out, const Proof& proof) {
  out->append(reinterpret_cast<const char*>(proof.data()), proof.size());
}

void PutPosition(std::string* out, const Position& position) {
  Put(out, position.epoch);
  Put(out, position.step);
}

void PutElementHead(std::string* out, const ElementHead& head) {
  Put(out, head.reader);
  PutPosition(out, head.position);
  Put(out, head.size);
  Put(out, static_cast<uint32_t>(head.components.size()));
  for (const Component& component : head.components) {
    Put(out, static_cast<uint32_t>(component.shape.size()));
    for (int64_t dim : component.shape) Put(out, dim);
    Put(out, component.offset);
    Put(out, component.length);
  }
}

void PutHead(std::string* out, FrameType type, int64_t payload) {
  Put(out, static_cast<uint32_t>(type));
  Put<uint32_t>(out, 0);
  Put(out, payload);
}

// Writes a frame whose payload's length is known when it is complete.
class FrameWriter {
 public:
  FrameWriter(std::string* out, FrameType type)
      : out_(out), start_(out->size()) {
    PutHead(out, type, 0);
  }
  ~FrameWriter() {
    const uint64_t payload = out_->size() - start_ - kFrameHeadBytes;
    for (size_t i = 0; i < 8; ++i)
      (*out_)[start_ + 8 + i] = static_cast<char>((payload >> (8 * i)) & 0xff);
  }
  FrameWriter(const FrameWriter&) = delete;
  FrameWriter& operator=(const FrameWriter&) = delete;

 private:
  std::string* const out_;
  const size_t start_;
};

// At most kMaxMessageBytes, and no UTF-8 character cut in two.
std::string_view Cut(std::string_view message) {
  if (message.size() <= kMaxMessageBytes) return message;
  size_t size = kMaxMessageBytes;
  while (size && (static_cast<uint8_t>(message[size]) & 0xc0) == 0x80) --size;
  return message.substr(0, size);
}

// ---- Reading ----

std::string Expected(const std::string& frame, const std::string& expected,
                     const std::string& received) {
  return frame + ": expected " + expected + ". Received: " + received;
}

// Reads a payload from front to back. What is wrong first is kept; from then on
// all reads return zeros, so that a parser looks at `Finish` only, and at
// `failed` before it trusts a count.
class Cursor {
 public:
  Cursor(FrameType type, std::string_view bytes)
      : type_(type), bytes_(bytes), size_(bytes.size()) {}

  bool failed() const { return error_.has_value(); }
  int64_t left() const { return static_cast<int64_t>(bytes_.size()); }

  void Fail(const std::string& expected, const std::string& received) {
    if (!error_)
      error_ = WireError{Expected(FrameName(type_), expected, received)};
  }

  std::string_view Bytes(size_t count, const char* what) {
    if (failed()) return {};
    if (count > bytes_.size()) {
      Fail(std::to_string(count) + " bytes for the " + what + " at byte " +
               std::to_string(size_ - bytes_.size()),
           "a payload of " + std::to_string(size_) + " bytes");
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  template <typename Integer>
  Integer Read(const char* what) {
    std::make_unsigned_t<Integer> bits = 0;
    const std::string_view bytes = Bytes(sizeof(bits), what);
    for (size_t i = 0; i < bytes.size(); ++i)
      bits = static_cast<decltype(bits)>(
          bits | (static_cast<decltype(bits)>(static_cast<uint8_t>(bytes[i]))
                  << (8 * i)));
    return static_cast<Integer>(bits);
  }

  // An integer in [least, most].
  int64_t ReadWithin(const char* what, int64_t least, int64_t most) {
    const int64_t value = Read<int64_t>(what);
    if (failed()) return 0;
    if (value < least || value > most) {
      const bool open = most == std::numeric_limits<int64_t>::max();
      Fail("a " + std::string(what) + " of at least " + std::to_string(least) +
               (open ? "" : " and at most " + std::to_string(most)),
           std::to_string(value));
      return 0;
    }
    return value;
  }

  int64_t ReadNatural(const char* what) {
    return ReadWithin(what, 0, std::numeric_limits<int64_t>::max());
  }

  int64_t ReadEpochOrStep(const char* what) {
    return ReadWithin(what, 0, kMaxEpochOrStep);
  }

  // How many parts of `bytes_each` bytes or more follow: never more than are
  // there, so that memory may be reserved for them.
  int64_t ReadCount(const char* what, int64_t most, int64_t bytes_each) {
    const int64_t count = Read<uint32_t>(what);
    if (failed()) return 0;
    if (count > most) {
      Fail("at most " + std::to_string(most) + " " + what,
           std::to_string(count));
      return 0;
    }
    if (count * bytes_each > left()) {
      Fail(std::to_string(count) + " " + what + " in at least " +
               std::to_string(count * bytes_each) + " bytes",
           std::to_string(left()) + " bytes");
      return 0;
    }
    return count;
  }

  bool ReadFlag(const char* what) {
    const uint8_t value = Read<uint8_t>(what);
    if (value > 1)
      Fail("0 or 1 for the " + std::string(what), std::to_string(value));
    return value == 1;
  }

  Position ReadPosition(const char* epoch, const char* step) {
    Position position;
    position.epoch = ReadEpochOrStep(epoch);
    position.step = ReadEpochOrStep(step);
    return position;
  }

  Proof ReadProof() {
    Proof proof{};
    const std::string_view bytes = Bytes(proof.size(), "proof");
    std::copy(bytes.begin(), bytes.end(), proof.begin());
    return proof;
  }

  ElementHead ReadElementHead() {
    ElementHead head;
    head.reader = ReadNatural("reader");
    head.position = ReadPosition("epoch", "step");
    head.size = ReadWithin("size", 0, kMaxPayload);
    const int64_t count =
        ReadCount("components", kMaxComponents, kMinComponentBytes);
    head.components.reserve(count);
    for (int64_t i = 0; i < count && !failed(); ++i) {
      Component component;
      const int64_t dims = ReadCount("dimensions", kMaxDims, 8);
      component.shape.reserve(dims);
      for (int64_t dim = 0; dim < dims; ++dim)
        component.shape.push_back(Read<int64_t>("dimension"));
      component.offset = Read<int64_t>("component's offset");
      component.length = Read<int64_t>("component's length");
      head.components.push_back(std::move(component));
    }
    if (!failed()) {
      if (auto error = CheckHead(head))
        error_ = WireError{FrameName(type_) + ": " + error->message};
    }
    return head;
  }

  // The value, if all was right and nothing is left.
  template <typename Value>
  std::variant<Value, WireError> Finish(Value value) {
    if (!bytes_.empty())
      Fail("a payload of " + std::to_string(size_ - bytes_.size()) + " bytes",
           std::to_string(size_));
    if (error_) return *std::move(error_);
    return value;
  }

 private:
  const FrameType type_;
  std::string_view bytes_;  // not yet read
  const size_t size_;
  std::optional<WireError> error_;
};

WireError HeadError(const std::string& expected, const std::string& received) {
  return {Expected("element", expected, received)};
}

// TensorFlow multiplies in this order, too, and refuses a shape that overflows.
bool CountFits(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(count, dim, &count)) return false;
  }
  return true;
}

}  // namespace

std::string FrameName(FrameType type) {
  switch (type) {
    case FrameType::kHello:
      return "HELLO";
    case FrameType::kWelcome:
      return "WELCOME";
    case FrameType::kRead:
      return "READ";
    case FrameType::kProgress:
      return "PROGRESS";
    case FrameType::kRelease:
      return "RELEASE";
    case FrameType::kSync:
      return "SYNC";
    case FrameType::kElement:
      return "ELEMENT";
    case FrameType::kShared:
      return "SHARED";
    case FrameType::kPiece:
      return "PIECE";
    case FrameType::kForget:
      return "FORGET";
    case FrameType::kEnd:
      return "END";
    case FrameType::kFailure:
      return "FAILURE";
    case FrameType::kSynced:
      return "SYNCED";
  }
  return "type " + std::to_string(static_cast<uint32_t>(type));
}

std::optional<WireError> CheckHead(const ElementHead& head) {
  const auto count = static_cast<int64_t>(head.components.size());
  if (count > kMaxComponents)
    return HeadError(
        "at most " + std::to_string(kMaxComponents) + " component tensors",
        std::to_string(count));
  const int64_t bytes = HeadBytes(head);
  if (bytes > kMaxHeadBytes - kLengthBytes)
    return HeadError("shapes of all component tensors in at most " +
                         std::to_string(kMaxHeadBytes - kLengthBytes) +
                         " bytes",
                     std::to_string(bytes));
  if (head.size < 0 || head.size > kMaxPayload - kMaxHeadBytes)
    return HeadError("a size of at least 0 and at most " +
                         std::to_string(kMaxPayload - kMaxHeadBytes),
                     std::to_string(head.size));
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Component& component = head.components[i];
    const std::string which = "component " + std::to_string(i);
    if (static_cast<int64_t>(component.shape.size()) > kMaxDims)
      return HeadError(
          which + " of at most " + std::to_string(kMaxDims) + " dimensions",
          std::to_string(component.shape.size()));
    for (int64_t dim : component.shape) {
      if (dim < 0)
        return HeadError(which + " with dimensions of at least 0",
                         std::to_string(dim));
    }
    if (!CountFits(component.shape))
      return HeadError(which + " with a number of values below 2**63",
                       "dimensions whose product is larger");
    if (component.offset < end || component.offset % kAlignment != 0)
      return HeadError(which + " at a multiple of " +
                           std::to_string(kAlignment) + " that is at least " +
                           std::to_string(end),
                       std::to_string(component.offset));
    if (component.offset > head.size || component.length < 0 ||
        component.length > head.size - component.offset)
      return HeadError(
          which + " inside a block of " + std::to_string(head.size) + " bytes",
          "offset " + std::to_string(component.offset) + ", length " +
              std::to_string(component.length));
    end = component.offset + component.length;
  }
  return std::nullopt;
}

void Append(std::string* out, const HelloFrame& frame) {
  FrameWriter writer(out, FrameType::kHello);
  Put(out, frame.rank);
  PutProof(out, frame.proof);
}

void Append(std::string* out, const WelcomeFrame& frame) {
  FrameWriter writer(out, FrameType::kWelcome);
  PutProof(out, frame.proof);
}

void Append(std::string* out, const ReadRequest& request) {
  FrameWriter writer(out, FrameType::kRead);
  Put(out, request.reader);
  PutPosition(out, request.position);
  PutFlag(out, request.through_epochs);
  Put(out, request.credit_steps);
  Put(out, request.credit_bytes);
  Put(out, request.free_bytes);
  Put(out, request.last_epoch);
  PutFlag(out, request.left.has_value());
  if (request.left) PutPosition(out, *request.left);
  PutFlag(out, request.direct);
}

void Append(std::string* out, const ProgressFrame& frame) {
  auto next = frame.trained.begin();
  auto left = static_cast<int64_t>(frame.trained.size());
  do {
    FrameWriter writer(out, FrameType::kProgress);
    Put(out, frame.reader);
    PutPosition(out, frame.pulled);
    PutPosition(out, frame.acknowledged);
    PutFlag(out, frame.waiting);
    const int64_t count = std::min(left, kMaxTrained);
    Put(out, static_cast<uint32_t>(count));
    for (int64_t i = 0; i < count; ++i, ++next) {
      Put(out, next->first);
      Put(out, next->second);
    }
    left -= count;
  } while (left);
}

void Append(std::string* out, const ReleaseFrame& frame) {
  auto next = frame.deliveries.begin();
  auto left = static_cast<int64_t>(frame.deliveries.size());
  do {
    FrameWriter writer(out, FrameType::kRelease);
    const int64_t count = std::min(left, kMaxReleasesInFrame);
    Put(out, static_cast<uint32_t>(count));
    for (int64_t i = 0; i < count; ++i, ++next) Put(out, *next);
    left -= count;
  } while (left);
}

void Append(std::string* out, const SyncFrame& frame) {
  FrameWriter writer(out, FrameType::kSync);
  Put(out, frame.number);
}

void AppendSynced(std::string* out, const SyncFrame& frame) {
  FrameWriter writer(out, FrameType::kSynced);
  Put(out, frame.number);
}

void Append(std::string* out, const SharedFrame& frame) {
  FrameWriter writer(out, FrameType::kShared);
  Put(out, frame.delivery);
  Put(out, frame.piece);
  Put(out, frame.offset);
  PutElementHead(out, frame.head);
}

void Append(std::string* out, const PieceFrame& frame) {
  FrameWriter writer(out, FrameType::kPiece);
  Put(out, frame.piece);
  Put(out, frame.bytes);
}

void Append(std::string* out, const ForgetFrame& frame) {
  FrameWriter writer(out, FrameType::kForget);
  Put(out, frame.piece);
}

void Append(std::string* out, const EndFrame& frame) {
  FrameWriter writer(out, FrameType::kEnd);
  Put(out, frame.reader);
  Put(out, frame.epoch);
  Put(out, frame.steps);
}

void Append(std::string* out, const Failure& failure) {
  FrameWriter writer(out, FrameType::kFailure);
  Put(out, static_cast<uint32_t>(failure.kind));
  PutFlag(out, failure.position.has_value());
  if (failure.position) PutPosition(out, *failure.position);
  const std::string_view message = Cut(failure.message);
  Put(out, static_cast<uint32_t>(message.size()));
  out->append(message);
}

void AppendElementHead(std::string* out, const ElementHead& head) {
  const int64_t bytes = kLengthBytes + HeadBytes(head);
  PutHead(out, FrameType::kElement, bytes + head.size);
  Put(out, bytes);
  PutElementHead(out, head);
}

std::variant<FrameHead, WireError> ParseHead(std::string_view bytes) {
  const auto error = [](const std::string& expected,
                        const std::string& received) {
    return WireError{Expected("frame", expected, received)};
  };
  if (bytes.size() != kFrameHeadBytes)
    return error("a head of " + std::to_string(kFrameHeadBytes) + " bytes",
                 std::to_string(bytes.size()));
  Cursor cursor(FrameType::kHello, bytes);
  const auto type = static_cast<FrameType>(cursor.Read<uint32_t>("type"));
  const auto zero = cursor.Read<uint32_t>("zero");
  const auto payload = cursor.Read<uint64_t>("length");
  int64_t most = kMaxControlPayload;
  switch (type) {
    case FrameType::kElement:
      most = kMaxPayload;
      break;
    case FrameType::kShared:
      most = kMaxHeadBytes;
      break;
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kRead:
    case FrameType::kProgress:
    case FrameType::kRelease:
    case FrameType::kSync:
    case FrameType::kPiece:
    case FrameType::kForget:
    case FrameType::kEnd:
    case FrameType::kFailure:
    case FrameType::kSynced:
      break;
    default:
      return error("a known type", std::to_string(static_cast<uint32_t>(type)));
  }
  if (zero != 0)
    return error("zero after the type " + FrameName(type),
                 std::to_string(zero));
  if (payload > static_cast<uint64_t>(most))
    return error("at most " + std::to_string(most) + " bytes in a payload of " +
                     FrameName(type),
                 std::to_string(payload));
  return FrameHead{type, static_cast<int64_t>(payload)};
}

std::variant<HelloFrame, WireError> ParseHello(std::string_view payload) {
  Cursor cursor(FrameType::kHello, payload);
  HelloFrame frame;
  frame.rank = cursor.ReadNatural("rank");
  frame.proof = cursor.ReadProof();
  return cursor.Finish(frame);
}

std::variant<WelcomeFrame, WireError> ParseWelcome(std::string_view payload) {
  Cursor cursor(FrameType::kWelcome, payload);
  WelcomeFrame frame;
  frame.proof = cursor.ReadProof();
  return cursor.Finish(frame);
}

std::variant<ReadRequest, WireError> ParseRead(std::string_view payload) {
  Cursor cursor(FrameType::kRead, payload);
  ReadRequest request;
  request.reader = cursor.ReadNatural("reader");
  request.position = cursor.ReadPosition("epoch", "step");
  request.through_epochs = cursor.ReadFlag("through_epochs");
  request.credit_steps = cursor.ReadNatural("credit of steps");
  request.credit_bytes = cursor.ReadNatural("credit of bytes");
  request.free_bytes = cursor.ReadNatural("free bytes");
  request.last_epoch = cursor.ReadWithin("last epoch", kNoLastEpoch,
                                         std::numeric_limits<int64_t>::max());
  if (cursor.ReadFlag("left"))
    request.left = cursor.ReadPosition("epoch left", "step left");
  request.direct = cursor.ReadFlag("direct");
  return cursor.Finish(request);
}

std::variant<ProgressFrame, WireError> ParseProgress(std::string_view payload) {
  Cursor cursor(FrameType::kProgress, payload);
  ProgressFrame frame;
  frame.reader = cursor.ReadNatural("reader");
  frame.pulled = cursor.ReadPosition("epoch pulled", "step pulled");
  frame.acknowledged =
      cursor.ReadPosition("epoch acknowledged", "step acknowledged");
  frame.waiting = cursor.ReadFlag("waiting");
  const int64_t count = cursor.ReadCount("epochs trained", kMaxTrained, 16);
  for (int64_t i = 0; i < count && !cursor.failed(); ++i) {
    const int64_t epoch = cursor.ReadEpochOrStep("epoch trained");
    const int64_t steps = cursor.ReadEpochOrStep("steps trained");
    if (!frame.trained.empty() && epoch <= frame.trained.rbegin()->first)
      cursor.Fail("an epoch trained of more than " +
                      std::to_string(frame.trained.rbegin()->first),
                  std::to_string(epoch));
    frame.trained.emplace_hint(frame.trained.end(), epoch, steps);
  }
  return cursor.Finish(std::move(frame));
}

std::variant<ReleaseFrame, WireError> ParseRelease(std::string_view payload) {
  Cursor cursor(FrameType::kRelease, payload);
  ReleaseFrame frame;
  const int64_t count = cursor.ReadCount("deliveries", kMaxReleasesInFrame, 8);
  frame.deliveries.reserve(count);
  for (int64_t i = 0; i < count; ++i)
    frame.deliveries.push_back(cursor.Read<uint64_t>("delivery"));
  return cursor.Finish(std::move(frame));
}

std::variant<SyncFrame, WireError> ParseSync(std::string_view payload) {
  Cursor cursor(FrameType::kSync, payload);
  SyncFrame frame;
  frame.number = cursor.Read<uint64_t>("number");
  return cursor.Finish(frame);
}

std::variant<SharedFrame, WireError> ParseShared(std::string_view payload) {
  Cursor cursor(FrameType::kShared, payload);
  SharedFrame frame;
  frame.delivery = cursor.Read<uint64_t>("delivery");
  frame.piece = cursor.Read<uint32_t>("piece");
  frame.offset = cursor.ReadWithin("offset in the piece", 0, kMaxPayload);
  if (frame.offset % kAlignment != 0)
    cursor.Fail(
        "an offset in the piece at a multiple of " + std::to_string(kAlignment),
        std::to_string(frame.offset));
  frame.head = cursor.ReadElementHead();
  return cursor.Finish(std::move(frame));
}

std::variant<PieceFrame, WireError> ParsePiece(std::string_view payload) {
  Cursor cursor(FrameType::kPiece, payload);
  PieceFrame frame;
  frame.piece = cursor.Read<uint32_t>("piece");
  frame.bytes = cursor.ReadWithin("size of a piece", 1, kMaxPayload);
  return cursor.Finish(frame);
}

std::variant<ForgetFrame, WireError> ParseForget(std::string_view payload) {
  Cursor cursor(FrameType::kForget, payload);
  ForgetFrame frame;
  frame.piece = cursor.Read<uint32_t>("piece");
  return cursor.Finish(frame);
}

std::variant<EndFrame, WireError> ParseEnd(std::string_view payload) {
  Cursor cursor(FrameType::kEnd, payload);
  EndFrame frame;
  frame.reader = cursor.ReadNatural("reader");
  frame.epoch = cursor.ReadEpochOrStep("epoch");
  frame.steps = cursor.ReadEpochOrStep("number of steps");
  return cursor.Finish(frame);
}

std::variant<Failure, WireError> ParseFailure(std::string_view payload) {
  Cursor cursor(FrameType::kFailure, payload);
  Failure failure;
  const uint32_t kind = cursor.Read<uint32_t>("kind");
  if (kind > static_cast<uint32_t>(FailureKind::kRanks))
    cursor.Fail("a kind of at most " +
                    std::to_string(static_cast<uint32_t>(FailureKind::kRanks)),
                std::to_string(kind));
  else
    failure.kind = static_cast<FailureKind>(kind);
  if (cursor.ReadFlag("position"))
    failure.position = cursor.ReadPosition("epoch", "step");
  const int64_t size =
      cursor.ReadCount("bytes of a message", kMaxMessageBytes, 1);
  failure.message = cursor.Bytes(size, "message");
  return cursor.Finish(std::move(failure));
}

std::variant<int64_t, WireError> ElementHeadBytes(
    std::string_view first_8_bytes, int64_t payload) {
  Cursor cursor(FrameType::kElement, first_8_bytes.substr(0, kLengthBytes));
  const int64_t most = std::min(payload, kMaxHeadBytes);
  if (most < kLengthBytes + kMinHeadBytes)
    cursor.Fail("a payload of at least " +
                    std::to_string(kLengthBytes + kMinHeadBytes) + " bytes",
                std::to_string(payload));
  return cursor.Finish(
      cursor.ReadWithin("head", kLengthBytes + kMinHeadBytes, most));
}

std::variant<ElementHead, WireError> ParseElementHead(std::string_view head,
                                                      int64_t payload) {
  const auto bytes = ElementHeadBytes(head, payload);
  if (const auto* error = std::get_if<WireError>(&bytes)) return *error;
  Cursor cursor(FrameType::kElement, head);
  cursor.Read<int64_t>("head");
  const auto size = static_cast<int64_t>(head.size());
  if (std::get<int64_t>(bytes) != size)
    cursor.Fail(
        "a head of " + std::to_string(std::get<int64_t>(bytes)) + " bytes",
        std::to_string(size));
  ElementHead parsed = cursor.ReadElementHead();
  if (parsed.size != payload - size)
    cursor.Fail("an element of the " + std::to_string(payload - size) +
                    " bytes that follow its head",
                std::to_string(parsed.size));
  return cursor.Finish(std::move(parsed));
}

bool SameProof(const Proof& a, const Proof& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace kerasfeed
