// The pump's loop: what it puts into the window, and what it comes back for.
#include "core/pump.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"

namespace kerasfeed {
namespace {

using Kind = PumpOutcome::Kind;

std::ostream& operator<<(std::ostream& out, Kind kind) {
  return out << static_cast<int64_t>(kind);
}

constexpr int64_t kElementBytes = 256;
constexpr int64_t kPlenty = int64_t{1} << 30;

// A journal in a file of its own.
std::unique_ptr<Journal> NewJournal() {
  // Words before the digests: see kerasfeed/producer/digest.py.
  constexpr int64_t kDigestsAt = 524288;
  const int fd = memfd_create("pump_test", MFD_CLOEXEC);
  CHECK(fd >= 0);
  CHECK_EQ(ftruncate(fd, 8 * (kDigestsAt + 4096)), 0);
  auto opened = Journal::Open(fd);
  close(fd);
  CHECK(std::holds_alternative<std::unique_ptr<Journal>>(opened));
  return std::move(std::get<std::unique_ptr<Journal>>(opened));
}

// An element of two components, all bytes of which are `fill`.
Element Filled(char fill) {
  auto memory = std::make_shared<std::string>(kElementBytes, fill);
  Element element;
  const int64_t second = kElementBytes / 2;
  element.components = {{{10}, 0, 10}, {{second}, second, second}};
  element.buffers = {{memory->data(), 10}, {memory->data() + second, second}};
  element.size = kElementBytes;
  element.owner = std::move(memory);
  return element;
}

// A window with one rank that reads on and on, its pump's context, and a
// source.
class Fixture {
 public:
  explicit Fixture(int64_t prefetch = 4, int64_t credit = 1,
                   int64_t max_bytes = kPlenty)
      : window(MakeOptions(prefetch, max_bytes)),
        journal(NewJournal()),
        digester("spec", true) {
    CHECK(!window.Attend(0, {0, 0}, std::nullopt));
    Ask({0, 0}, credit);
    context.window = &window;
    context.digester = &digester;
    context.journal = journal.get();
    context.shares = [](int64_t) { return true; };
    context.progress = [this](int64_t pass, int64_t elements) {
      progress.push_back({pass, elements});
    };
  }

  void Ask(Position position, int64_t credit = 1) {
    ReadRequest request;
    request.reader = ++reads_;
    request.position = position;
    request.credit_steps = credit;
    request.credit_bytes = kPlenty;
    window.Read(0, request);
  }

  // Takes the work that says where to begin.
  Seek TakeSeek() {
    const Work work = window.WaitForWork();
    CHECK(std::holds_alternative<Seek>(work));
    return std::get<Seek>(work);
  }

  PumpOutcome Run(PumpRequest request = {}) {
    request.wakes += window.PumpWakes();
    return kerasfeed::Pump(&context, request, source);
  }

  // Elements of the first pass that are in the window.
  std::vector<ElementPtr> InWindow() {
    auto elements = window.Untrained({0, 0});
    CHECK(elements);
    return *elements;
  }

  Window window;
  std::unique_ptr<Journal> journal;
  Digester digester;
  PumpContext context;
  std::vector<Place> progress;
  int64_t pulled = 0;
  // The n-th element is filled with n.
  Source source = [this](Element* element) {
    *element = Filled(static_cast<char>(pulled++));
    return SourceResult::kElement;
  };

 private:
  static WindowOptions MakeOptions(int64_t prefetch, int64_t max_bytes) {
    WindowOptions options;
    options.prefetch = prefetch;
    options.max_bytes = max_bytes;
    return options;
  }

  int64_t reads_ = 0;
};

PumpRequest Limited(int64_t limit, Tolerance tolerance = Tolerance::kNone) {
  PumpRequest request;
  request.limit = limit;
  request.tolerance = tolerance;
  return request;
}

std::string BytesOf(const ElementPtr& element) {
  std::string bytes;
  for (const Span& buffer : element->buffers)
    bytes.append(buffer.data, buffer.size);
  return bytes;
}

// Runs the pump in a thread, which waits for work that does not come, until
// `disturb` has been called. Returns what it came back for.
PumpOutcome WhileWaiting(Fixture* f, const std::function<void()>& disturb) {
  PumpOutcome outcome;
  std::atomic<bool> over{false};
  PumpRequest request;
  const int64_t wakes = f->window.PumpWakes();
  request.wakes = wakes;
  std::thread pump([&] {
    outcome = kerasfeed::Pump(&f->context, request, f->source);
    over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!over);
  const auto began = std::chrono::steady_clock::now();
  disturb();
  pump.join();
  // It was woken: it did not find out by looking now and then.
  CHECK(std::chrono::steady_clock::now() - began <
        std::chrono::milliseconds(400));
  return outcome;
}

TEST(PumpPutsElementsIntoTheWindowInOrderAndNotesThem) {
  Fixture f;
  f.TakeSeek();
  PumpRequest request = Limited(3);
  request.place = {0, 0};
  CHECK_EQ(f.Run(request).kind, Kind::kLimit);
  request = Limited(1);
  request.place = {0, 3};
  CHECK_EQ(f.Run(request).kind, Kind::kLimit);
  CHECK((f.progress == std::vector<Place>{{0, 1}, {0, 2}, {0, 3}, {0, 4}}));
  const auto elements = f.InWindow();
  CHECK_EQ(elements.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const Element made = Filled(static_cast<char>(i));
    CHECK_EQ(BytesOf(elements[i]), BytesOf(std::make_shared<Element>(made)));
    CHECK(f.journal->Find(0, i) == f.digester.Digest(made));
  }
}

TEST(PumpComesBackAfterTheLimitAndNotBefore) {
  for (const int64_t limit : {0, 1, 4}) {
    Fixture f;
    f.TakeSeek();
    const PumpOutcome outcome = f.Run(Limited(limit));
    CHECK_EQ(outcome.kind, Kind::kLimit);
    CHECK_EQ(outcome.produced, limit);
    CHECK_EQ(f.pulled, limit);
  }
}

TEST(PumpPullsNothingThatIsNotWantedAndWaits) {
  Fixture f(/*prefetch=*/4);
  f.TakeSeek();
  const PumpOutcome outcome = WhileWaiting(&f, [&f] { f.window.WakePump(); });
  CHECK_EQ(outcome.kind, Kind::kInterrupted);
  CHECK_EQ(outcome.produced, 4);
  CHECK_EQ(f.pulled, 4);
}

TEST(PumpThatWasWokenBeforeItBeganPullsNothing) {
  Fixture f;
  f.TakeSeek();
  PumpRequest request;
  request.wakes = f.window.PumpWakes();
  f.window.WakePump();
  const PumpOutcome outcome = kerasfeed::Pump(&f.context, request, f.source);
  CHECK_EQ(outcome.kind, Kind::kInterrupted);
  CHECK_EQ(f.pulled, 0);
  // Nor is what the window wants lost.
  CHECK_EQ(f.Run(Limited(1)).produced, 1);
}

TEST(PumpHandsOutASeekAlsoIfItWasWoken) {
  // The window says it once.
  for (const bool woken : {false, true}) {
    Fixture f;
    PumpRequest request;
    request.wakes = f.window.PumpWakes();
    if (woken) f.window.WakePump();
    const PumpOutcome outcome = kerasfeed::Pump(&f.context, request, f.source);
    CHECK_EQ(outcome.kind, Kind::kSeek);
    CHECK_EQ(outcome.seek.pass, 0);
    CHECK_EQ(outcome.seek.element, 0);
    CHECK_EQ(f.pulled, 0);
    CHECK_EQ(f.Run(Limited(1)).kind, Kind::kLimit);
  }
}

TEST(PumpThatWaitsHearsOfASeek) {
  Fixture f(/*prefetch=*/2);
  f.TakeSeek();
  f.window.Progress(0, 1, {0, 0}, {0, 0}, {}, false);
  const PumpOutcome outcome = WhileWaiting(&f, [&f] {
    ReadRequest request;
    request.reader = 2;
    request.position = {3, 0};
    request.left = Position{0, 0};
    f.window.Read(0, request);
  });
  CHECK_EQ(outcome.kind, Kind::kSeek);
  CHECK_EQ(outcome.seek.pass, 3);
  CHECK_EQ(outcome.produced, 2);
}

TEST(PumpThatWaitsHearsThatItIsToStop) {
  Fixture f(/*prefetch=*/2);
  f.TakeSeek();
  CHECK_EQ(WhileWaiting(&f, [&f] { f.window.StopPump(); }).kind, Kind::kStop);
}

TEST(PumpWaitsForRoom) {
  Fixture f(/*prefetch=*/100, /*credit=*/1, /*max_bytes=*/1);
  f.TakeSeek();
  CHECK_EQ(WhileWaiting(&f, [&f] { f.window.WakePump(); }).produced, 2);
}

TEST(PumpComesBackAtTheEndAndWhenTheSourceFails) {
  for (const auto& [result, kind] :
       {std::pair{SourceResult::kEnd, Kind::kEnd},
        std::pair{SourceResult::kError, Kind::kError}}) {
    Fixture f;
    const Seek seek = f.TakeSeek();
    const Source elements = f.source;
    f.source = [&f, &elements, result = result](Element* element) {
      return f.pulled < 2 ? elements(element) : result;
    };
    const PumpOutcome outcome = f.Run();
    CHECK_EQ(outcome.kind, kind);
    CHECK_EQ(outcome.produced, 2);
    CHECK_EQ(outcome.generation, seek.generation);
    CHECK_EQ(f.InWindow().size(), 2u);
  }
}

TEST(PumpDoesNotLetAnElementThatIsAnotherOneThroughUnlessItMay) {
  struct Case {
    Tolerance tolerance;
    Kind kind;
    int64_t produced;
    size_t in_window;
  };
  for (const Case& expected : {Case{Tolerance::kNone, Kind::kMismatch, 2, 1},
                               Case{Tolerance::kTell, Kind::kMismatch, 2, 2},
                               Case{Tolerance::kAll, Kind::kLimit, 3, 3}}) {
    Fixture f;
    f.TakeSeek();
    const uint64_t was = 12345;
    f.journal->Note(0, 0, f.digester.Digest(Filled(0)));
    f.journal->Note(0, 1, was);
    const PumpOutcome outcome = f.Run(Limited(3, expected.tolerance));
    CHECK_EQ(outcome.kind, expected.kind);
    CHECK_EQ(outcome.produced, expected.produced);
    CHECK_EQ(f.InWindow().size(), expected.in_window);
    CHECK_EQ(f.progress.size(), expected.in_window);
    if (expected.kind != Kind::kMismatch) continue;
    CHECK_EQ(outcome.was, was);
    CHECK_EQ(outcome.now, f.digester.Digest(Filled(1)));
  }
}

TEST(PumpDoesNotLetElementsBehindAPassesEndThroughUnlessItMay) {
  for (const auto& [tolerance, kind, in_window] :
       {std::tuple{Tolerance::kNone, Kind::kPastEnd, 2},
        std::tuple{Tolerance::kTell, Kind::kPastEnd, 3},
        std::tuple{Tolerance::kAll, Kind::kLimit, 4}}) {
    Fixture f;
    f.TakeSeek();
    for (const char i : {0, 1})
      f.journal->Note(0, i, f.digester.Digest(Filled(i)));
    f.journal->NoteEnd(0, 2);
    const PumpOutcome outcome = f.Run(Limited(4, tolerance));
    CHECK_EQ(outcome.kind, kind);
    CHECK_EQ(f.InWindow().size(), static_cast<size_t>(in_window));
  }
}

TEST(PumpPutsElementsOfRanksThatShareMemoryThere) {
  for (const bool shares : {true, false}) {
    Fixture f;
    f.TakeSeek();
    PoolOptions options;
    options.spare_bytes = [] { return kPlenty; };
    f.context.pool = Pool::Create(std::move(options));
    f.context.shares = [shares](int64_t rank) { return shares && rank == 0; };
    f.context.ahead = 4;
    f.Run(Limited(2));
    CHECK_EQ(f.context.pool->GetHeld().blocks, shares ? 2 : 0);
    for (const ElementPtr& element : f.InWindow())
      CHECK_EQ(element->block != nullptr, shares);
  }
}

TEST(PumpDoesWithoutSharedMemoryThatThereIsNot) {
  Fixture f;
  f.TakeSeek();
  PoolOptions options;
  options.max_bytes = 0;
  f.context.pool = Pool::Create(std::move(options));
  const PumpOutcome outcome = f.Run(Limited(2));
  CHECK_EQ(outcome.kind, Kind::kLimit);
  const auto elements = f.InWindow();
  CHECK_EQ(elements.size(), 2u);
  CHECK(elements[1]->block == nullptr);
  CHECK_EQ(BytesOf(elements[1]), BytesOf(std::make_shared<Element>(Filled(1))));
}

TEST(PlacedElementsHaveTheSameBytesAndNothingOfEarlierOnes) {
  PoolOptions options;
  options.spare_bytes = [] { return kPlenty; };
  const auto pool = Pool::Create(std::move(options));
  // The slot is used twice.
  CHECK(Placed(pool.get(), Filled('x'))->block);
  const ElementPtr placed = Placed(pool.get(), Filled('y'));
  CHECK(placed->block);
  CHECK_EQ(BytesOf(placed), BytesOf(std::make_shared<Element>(Filled('y'))));
  std::string whole(kElementBytes, '\0');
  for (size_t i = 0; i < placed->components.size(); ++i) {
    const Component& component = placed->components[i];
    CHECK(placed->buffers[i].data == placed->block->data + component.offset);
    std::memcpy(&whole[component.offset], placed->buffers[i].data,
                component.length);
  }
  CHECK_EQ(std::string(placed->block->data, kElementBytes), whole);
}

TEST(ElementsWithoutBytesNeedNoMemory) {
  PoolOptions options;
  options.spare_bytes = [] { return kPlenty; };
  const auto pool = Pool::Create(std::move(options));
  Element empty;
  empty.components = {{{0, 3}, 0, 0}};
  empty.buffers = {{nullptr, 0}};
  const ElementPtr placed = Placed(pool.get(), std::move(empty));
  CHECK_EQ(placed->size, 0);
  CHECK_EQ(placed->components[0].shape.size(), 2u);
}

}  // namespace
}  // namespace kerasfeed
