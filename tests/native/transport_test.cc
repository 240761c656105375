// Server and reader with everything between them: streams of elements whose
// bytes are known, over both kinds of sockets, with connections that break, and
// peers that misbehave.
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "core/pool.h"
#include "core/reader.h"
#include "core/server.h"
#include "core/socket.h"
#include "core/window.h"
#include "core/wire.h"

namespace kerasfeed {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kPlenty = int64_t{1} << 30;
constexpr int64_t kPass = 1'000'000;
constexpr bool kBothKinds[] = {true, false};

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

size_t Entries(const char* path) {
  DIR* directory = opendir(path);
  CHECK(directory);
  size_t count = 0;
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

int64_t MappingsNamed(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(name + " ") != std::string::npos;
  }
  return count;
}

// Waits for what other threads or processes have yet to do.
void Eventually(const std::function<bool()>& holds,
                int line = __builtin_LINE()) {
  const auto start = Clock::now();
  while (!holds()) {
    if (SecondsSince(start) > 20) {
      kerasfeed_test::Fail(__FILE__, line, "this has not come within 20 s");
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
}

// Descriptors and threads are what they were when this was made.
class NothingLeft {
 public:
  NothingLeft() {
    // A sanitizer starts a thread of its own with the first one.
    std::thread([] {}).join();
    descriptors_ = Entries("/proc/self/fd");
    threads_ = Entries("/proc/self/task");
  }
  ~NothingLeft() {
    Eventually([this] { return Entries("/proc/self/fd") == descriptors_; });
    Eventually([this] { return Entries("/proc/self/task") == threads_; });
  }

 private:
  size_t descriptors_, threads_;
};

Proof NewProof() {
  static std::mt19937_64 random(7);
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  Proof proof;
  for (uint8_t& byte : proof) byte = static_cast<uint8_t>(random());
  return proof;
}

// ---- Elements that are a function of their number ----

using Sizes = std::function<int64_t(int64_t number, std::mt19937_64* random)>;

int64_t AnySize(int64_t, std::mt19937_64* random) {
  const uint64_t kind = (*random)() % 64;
  const int64_t bound = kind == 0   ? 3'000'000
                        : kind < 8  ? 200'000
                        : kind < 16 ? 1
                                    : 4'000;
  return (*random)() % bound;
}

Sizes Always(int64_t size) {
  return [size](int64_t, std::mt19937_64*) { return size; };
}

uint64_t WordOf(int64_t number, size_t component, int64_t index) {
  return (number + 1) * 0x9e3779b97f4a7c15 + component * 0xbf58476d1ce4e5b9 +
         index;
}

void Fill(char* data, int64_t size, int64_t number, size_t component) {
  for (int64_t i = 0; i < size; i += 8) {
    const uint64_t word = WordOf(number, component, i);
    std::memcpy(data + i, &word, std::min<int64_t>(8, size - i));
  }
}

bool Holds(const char* data, int64_t size, int64_t number, size_t component) {
  for (int64_t i = 0; i < size; i += 8) {
    const uint64_t word = WordOf(number, component, i);
    if (std::memcmp(data + i, &word, std::min<int64_t>(8, size - i))) {
      return false;
    }
  }
  return true;
}

std::vector<Component> Layout(int64_t number, const Sizes& sizes) {
  std::mt19937_64 random(number * 977 + 5);
  int64_t left = sizes(number, &random);
  const size_t count = 1 + random() % 4;
  std::vector<Component> components;
  int64_t offset = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t length = i + 1 < count ? random() % (left + 1) : left;
    components.push_back({{length, 1}, offset, length});
    offset += Aligned(length);
    left -= length;
  }
  return components;
}

int64_t SizeOf(const std::vector<Component>& components) {
  return components.back().offset + components.back().length;
}

void CheckElement(const ReceivedElement& element, int64_t number,
                  const Sizes& sizes) {
  const auto expected = Layout(number, sizes);
  CHECK_EQ(element.size, SizeOf(expected));
  CHECK_EQ(element.components.size(), expected.size());
  CHECK(element.block);
  CHECK_EQ(reinterpret_cast<uintptr_t>(element.block.get()) % kAlignment, 0u);
  for (size_t i = 0; i < expected.size(); ++i) {
    const Component& component = element.components[i];
    CHECK_EQ(component.offset, expected[i].offset);
    CHECK_EQ(component.length, expected[i].length);
    CHECK(component.shape == expected[i].shape);
    CHECK(Holds(element.block.get() + component.offset, component.length,
                number, i));
  }
}

// ---- The producer's side ----

struct FeedOptions {
  int64_t ranks = 1;
  int64_t length = 100;  // of a pass
  Sizes sizes = AnySize;
  double hello_timeout = 10;
  int64_t pool_bytes = int64_t{256} << 20;
  int64_t piece_bytes = int64_t{1} << 20;
  int64_t prefetch = 8;
  double poll_seconds = 0.5;
};

// A producer in this process: a window, a pump and a server.
class Feed {
 public:
  explicit Feed(FeedOptions options)
      : options_(std::move(options)), window_([this] {
          WindowOptions window;
          window.size = options_.ranks;
          window.prefetch = options_.prefetch;
          window.max_bytes = kPlenty;
          window.poll_seconds = options_.poll_seconds;
          return window;
        }()) {
    static std::atomic<int> feeds{0};
    name_ = "kerasfeed-test-" + std::to_string(getpid()) + "-" +
            std::to_string(++feeds);
    PoolOptions pool;
    pool.name = name_;
    pool.max_bytes = options_.pool_bytes;
    pool.piece_bytes = options_.piece_bytes;
    pool_ = Pool::Create(pool);
    ServerOptions server;
    server.unix_name = name_;
    server.tcp_host = "127.0.0.1";
    server.hello_timeout = options_.hello_timeout;
    auto started = Server::Start(server, &window_, pool_);
    if (auto* error = std::get_if<std::string>(&started)) {
      std::cerr << *error << std::endl;
      CHECK(false);
    }
    server_ = std::move(std::get<std::unique_ptr<Server>>(started));
    pump_ = std::thread([this] { Pump(); });
  }

  ~Feed() { StopPump(); }

  Window* window() { return &window_; }
  Server* server() { return server_.get(); }
  Pool* pool() { return pool_.get(); }
  const std::string& name() const { return name_; }
  void StopPump() {
    window_.StopPump();
    if (pump_.joinable()) pump_.join();
  }
  // In a child of fork(), which has no pump.
  void ForgetPumpAndStopServer() {
    new std::thread(std::move(pump_));
    server_.reset();
    pool_.reset();
  }
  void StopServer() {
    StopPump();  // which asks the server
    server_.reset();
  }
  // Elements in shared memory from now on, or not.
  void Share(bool share) { share_ = share; }

  std::string Address(bool local) const {
    return local ? "unix:" + name_
                 : "tcp:127.0.0.1:" + std::to_string(server_->tcp_port());
  }

  // What the control plane does when a rank has come, or come back.
  std::optional<std::string> Attach(Reader* reader, int64_t rank, bool local) {
    const Proof proof = NewProof(), answer = NewProof();
    server_->Admit(rank, proof, answer);
    return reader->Attach(Address(local), rank, proof, answer, 5);
  }

  void Attend(int64_t rank) { CHECK(!window_.Attend(rank, {}, {})); }

  int64_t NumberOf(int64_t rank, Position position) const {
    return position.epoch * kPass + position.step * options_.ranks + rank;
  }

  void Check(const ReceivedElement& element, int64_t rank) const {
    CheckElement(element, NumberOf(rank, element.position), options_.sizes);
  }

 private:
  ElementPtr Make(int64_t number, int64_t rank) {
    auto element = std::make_shared<Element>();
    element->components = Layout(number, options_.sizes);
    element->size = SizeOf(element->components);
    char* data = nullptr;
    if (share_ && server_->Shares(rank)) {
      element->block = pool_->Allocate(element->size);
      if (element->block) data = element->block->data;
    }
    if (!data) {
      const std::shared_ptr<char> memory(new char[element->size + 1],
                                         std::default_delete<char[]>());
      data = memory.get();
      element->owner = memory;
    }
    for (size_t i = 0; i < element->components.size(); ++i) {
      const Component& component = element->components[i];
      Fill(data + component.offset, component.length, number, i);
      element->buffers.push_back({data + component.offset, component.length});
    }
    return element;
  }

  void Pump() {
    int64_t pass = 0, index = 0;
    while (true) {
      const Work work = window_.WaitForWork();
      if (std::holds_alternative<Stop>(work)) return;
      if (const auto* seek = std::get_if<Seek>(&work)) {
        pass = seek->pass;
        index = seek->element;
      } else if (const auto* produce = std::get_if<Produce>(&work)) {
        if (index >= options_.length) {
          window_.EndPass(produce->generation, pass++, options_.length);
          index = 0;
        } else {
          const ElementPtr element =
              Make(pass * kPass + index, index % options_.ranks);
          ++index;
          window_.Put(produce->generation, element);
        }
      }
    }
  }

  const FeedOptions options_;
  Window window_;
  std::shared_ptr<Pool> pool_;
  std::string name_;
  std::unique_ptr<Server> server_;
  std::atomic<bool> share_{true};
  std::thread pump_;
};

ReadRequest Asking(Position position, int64_t credit_steps = 8,
                   bool through_epochs = true,
                   int64_t credit_bytes = int64_t{8} << 20) {
  ReadRequest request;
  request.position = position;
  request.credit_steps = credit_steps;
  request.credit_bytes = credit_bytes;
  request.through_epochs = through_epochs;
  return request;
}

Received Next(Reader* reader, int64_t read) {
  const auto start = Clock::now();
  return reader->Next(read, [&]() -> std::optional<std::string> {
    CHECK(SecondsSince(start) < 30);
    return std::nullopt;
  });
}

// The next step, which must be at `position`.
ReceivedElement NextElement(Reader* reader, int64_t read, Position position) {
  Received received = Next(reader, read);
  if (auto* failure = std::get_if<Failure>(&received)) {
    std::cerr << failure->message << std::endl;
  }
  CHECK(std::holds_alternative<ReceivedElement>(received));
  auto element = std::move(std::get<ReceivedElement>(received));
  CHECK_EQ(element.position.ToString(), position.ToString());
  return element;
}

void CheckEnd(const Received& received, int64_t epoch, int64_t steps) {
  CHECK(std::holds_alternative<EpochEnd>(received));
  CHECK_EQ(std::get<EpochEnd>(received).epoch, epoch);
  CHECK_EQ(std::get<EpochEnd>(received).steps, steps);
}

// Reads whole epochs from `from` on, and checks all of it.
void ReadEpochs(Feed* feed, Reader* reader, int64_t rank, Position from,
                int64_t epochs, int64_t steps, ReadRequest request) {
  request.position = from;
  int64_t read = reader->Read(request);
  Position position = from;
  for (int64_t epoch = from.epoch; epoch < epochs; ++epoch) {
    for (; position.step < steps; position = position.Next()) {
      CHECK_EQ(reader->pulled().ToString(), position.ToString());
      feed->Check(NextElement(reader, read, position), rank);
      reader->Acknowledge(position.Next(), {{epoch, position.step + 1}});
    }
    CheckEnd(Next(reader, read), epoch, steps);
    position = {epoch + 1, 0};
    if (!request.through_epochs) {
      request.position = position;
      read = reader->Read(request);
    }
  }
}

// ---- Whole streams ----

TEST(EveryByteArrivesOnceInOrder) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      FeedOptions options;
      options.ranks = ranks;
      options.length = 61 * ranks;
      if (ranks == 2) {
        options.sizes = [](int64_t number, std::mt19937_64* random) {
          return number == kPass + 21 ? 50'000'000 : AnySize(number, random);
        };
      }
      Feed feed(options);
      std::vector<std::thread> threads;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          Reader reader({});
          feed.Attend(rank);
          const auto wrong = feed.Attach(&reader, rank, local);
          CHECK_EQ(wrong.value_or(""), "");
          ReadEpochs(&feed, &reader, rank, {}, 2, 61,
                     Asking({}, 1 + 5 * rank, rank % 2 == 0,
                            rank == 1 ? 1 : int64_t{8} << 20));
          CHECK(reader.Sync(5));
          const auto counts = reader.GetCounts();
          CHECK_EQ(counts.shared + counts.received, 2 * 61);
          CHECK(local ? counts.shared > 0 : counts.shared == 0);
          CHECK_EQ(counts.kept_bytes, 0);
        });
      }
      for (std::thread& thread : threads) thread.join();
      const auto statistics = feed.window()->GetStatistics();
      for (int64_t rank = 0; rank < ranks; ++rank) {
        CHECK_EQ(statistics[1].trained.at(rank), 61);
      }
      CHECK_EQ(feed.server()->TakeLog().size(), 0u);
    }
  }
}

TEST(ElementsThatDoNotFitThePoolComeInline) {
  NothingLeft nothing_left;
  FeedOptions options;
  options.length = 50;
  options.pool_bytes = 1;
  Feed feed(options);
  Reader reader({});
  feed.Attend(0);
  CHECK(!feed.Attach(&reader, 0, true));
  ReadEpochs(&feed, &reader, 0, {}, 1, 50, Asking({}));
  CHECK_EQ(reader.GetCounts().received, 50);
}

// Elements of all sizes, so that pieces come and go.
TEST(PiecesThatAreGivenUpAreForgotten) {
  NothingLeft nothing_left;
  FeedOptions options;
  options.ranks = 2;
  options.length = 1200;
  options.pool_bytes = int64_t{24} << 20;
  options.sizes = [](int64_t number, std::mt19937_64* random) {
    const int64_t bound = int64_t{64} << (number / 40 % 13);
    return static_cast<int64_t>(bound + (*random)() % bound);
  };
  Feed feed(options);
  std::vector<std::thread> threads;
  std::atomic<int> done{0};
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Reader reader({});
      feed.Attend(rank);
      CHECK(!feed.Attach(&reader, rank, true));
      ReadEpochs(&feed, &reader, rank, {}, 1, 600, Asking({}, 4));
      CHECK(reader.GetCounts().shared > 100);
      ++done;
      Eventually([&] { return done >= 2; });
      // One mapping of the pool's, one of each rank's.
      Eventually([&] {
        CHECK(reader.Sync(5));
        const int64_t mappings = MappingsNamed("memfd:" + feed.name());
        const int64_t pieces = feed.pool()->GetHeld().pieces;
        return mappings >= pieces && mappings <= 3 * pieces;
      });
      ++done;
      Eventually([&] { return done == 4; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(feed.pool()->Allocate(1)->piece > 15);
}

TEST(ReadsAnewGetWhatTheyAskFor) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 2;
    options.length = 60;
    Feed feed(options);
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        std::mt19937_64 random(rank);
        Reader reader({});
        feed.Attend(rank);
        CHECK(!feed.Attach(&reader, rank, local));
        Position furthest;
        for (int i = 0; i < 40; ++i) {
          Position position = furthest;
          if (random() % 2) {
            position.step = random() % (furthest.step + 1);
          }
          const int64_t read = reader.Read(Asking(position, 1 + random() % 9));
          for (int64_t steps = random() % 12; steps > 0; --steps) {
            if (position.step == 30) {
              CheckEnd(Next(&reader, read), position.epoch, 30);
              position = {position.epoch + 1, 0};
            } else {
              feed.Check(NextElement(&reader, read, position), rank);
              position = position.Next();
            }
          }
          furthest = std::max(furthest, position);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(AFailureComesAfterTheLastStepAndStays) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 1000;
    options.sizes = Always(100);
    Feed feed(options);
    Reader reader({});
    feed.Attend(0);
    CHECK(!feed.Attach(&reader, 0, local));
    int64_t read = reader.Read(Asking({0, 3}));
    feed.Check(NextElement(&reader, read, {0, 3}), 0);
    feed.window()->Abandon(std::string(3'000'000, 'x'));
    for (int i = 0; i < 2; ++i) {
      Received received;
      do {
        received = Next(&reader, read);
      } while (std::holds_alternative<ReceivedElement>(received));
      CHECK(std::holds_alternative<Failure>(received));
      CHECK(std::get<Failure>(received).message.size() < 1'100'000);
    }
    read = reader.Read(Asking({0, 0}));
    CHECK(std::holds_alternative<Failure>(Next(&reader, read)));
    // Another connection is told, too.
    CHECK(!feed.Attach(&reader, 0, local));
    CHECK(std::holds_alternative<Failure>(Next(&reader, read)));
  }
}

// ---- What a reader is asked besides ----

TEST(PeekLeavesWhatItSees) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 3;
    Feed feed(options);
    Reader reader({});
    feed.Attend(0);
    const int64_t early = reader.Read(Asking({}));
    auto start = Clock::now();
    CHECK(!reader.Peek(early, 0.05));
    CHECK(SecondsSince(start) >= 0.05 && SecondsSince(start) < 1);
    CHECK(!feed.Attach(&reader, 0, local));
    const int64_t read = reader.Read(Asking({}, 8, /*through_epochs=*/false));
    CHECK(std::holds_alternative<Interrupted>(*reader.Peek(early, 5)));
    for (int64_t step = 0; step < 3; ++step) {
      for (int i = 0; i < 2; ++i) {
        const auto peeked = reader.Peek(read, 5);
        CHECK_EQ(std::get<Position>(*peeked).step, step);
        CHECK_EQ(reader.GetPulls(read)->steps, step);
        CHECK_EQ(reader.GetPulls(read)->next.step, step);
      }
      feed.Check(NextElement(&reader, read, {0, step}), 0);
    }
    for (int i = 0; i < 2; ++i) {
      CHECK_EQ(std::get<EpochEnd>(*reader.Peek(read, 5)).steps, 3);
    }
    CheckEnd(Next(&reader, read), 0, 3);
    CHECK_EQ(reader.GetPulls(read)->next.epoch, 1);
    CHECK(!reader.GetPulls(early));
    feed.window()->Abandon("broken");
    const int64_t later = reader.Read(Asking({1, 0}));
    Eventually([&] {
      const auto peeked = reader.Peek(later, 5);
      if (std::holds_alternative<Failure>(*peeked)) return true;
      Next(&reader, later);
      return false;
    });
  }
}

TEST(AVoidReadGetsNothingAndStillSaysHowFarItCame) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 2;  // the other one never comes, so that nothing does
    Feed feed(options);
    feed.Attend(0);
    Reader reader({});
    CHECK(!feed.Attach(&reader, 0, local));
    int64_t read = reader.Read(Asking({}));
    std::atomic<bool> looks{false};
    std::thread waits([&] {
      const Received received =
          reader.Next(read, [&]() -> std::optional<std::string> {
            looks = true;
            return std::nullopt;
          });
      CHECK(std::holds_alternative<Interrupted>(received));
    });
    Eventually([&] { return looks.load(); });
    const auto start = Clock::now();
    reader.Void();
    waits.join();
    CHECK(SecondsSince(start) < 0.25);
    feed.Attend(1);
    read = reader.Read(Asking({}));
    feed.Check(NextElement(&reader, read, {0, 0}), 0);
    reader.Void();
    CHECK(std::holds_alternative<Interrupted>(Next(&reader, read)));
    CHECK(std::holds_alternative<Interrupted>(*reader.Peek(read, 5)));
    CHECK_EQ(reader.GetPulls(read)->next.step, 1);
    // Nor is it asked for again over another connection.
    CHECK(!feed.Attach(&reader, 0, local));
    CHECK(std::holds_alternative<Interrupted>(Next(&reader, read)));
    CHECK(reader.Sync(5));
    CHECK_EQ(reader.GetCounts().kept_bytes, 0);
  }
}

TEST(StepsOfAFreeReadAreTrainedWhenTheNextOneIsPulled) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 40;
    Feed feed(options);
    feed.Attend(0);
    Reader reader({});
    CHECK(!feed.Attach(&reader, 0, local));
    const auto trained = [&](int64_t epoch) -> int64_t {
      CHECK(reader.Sync(5));
      for (const auto& of_epoch : feed.window()->GetStatistics()) {
        if (of_epoch.epoch == epoch) return of_epoch.trained.at(0);
      }
      return 0;
    };
    // Ten were trained before, as somebody else counted.
    reader.Acknowledge({0, 10}, {{0, 10}});
    const int64_t read = reader.Read(Asking({0, 10}), /*free=*/true);
    for (int64_t step = 10; step < 40; ++step) {
      feed.Check(NextElement(&reader, read, {0, step}), 0);
      CHECK_EQ(trained(0), step);
      if (step % 7 == 0) {
        // A connection that is replaced counts nothing twice.
        CHECK(!feed.Attach(&reader, 0, local));
      }
    }
    CheckEnd(Next(&reader, read), 0, 40);
    CHECK_EQ(trained(0), 40);
    feed.Check(NextElement(&reader, read, {1, 0}), 0);
    CHECK_EQ(trained(1), 0);
    feed.Check(NextElement(&reader, read, {1, 1}), 0);
    CHECK_EQ(trained(1), 1);
    // What the window has trained, it does not keep.
    CHECK_EQ(feed.window()->FirstPass(), 1);
  }
}

// A producer that makes one small element now and then: none is kept back for
// others to come.
TEST(ASmallElementThatIsWaitedForComesAtOnce) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 10'000;
    options.sizes = [](int64_t, std::mt19937_64*) {
      std::this_thread::sleep_for(milliseconds(5));
      return int64_t{100};
    };
    options.poll_seconds = 10;
    options.prefetch = 1000;  // so that the pump never sleeps
    Feed feed(options);
    feed.Attend(0);
    Reader reader({});
    CHECK(!feed.Attach(&reader, 0, local));
    const int64_t read = reader.Read(Asking({}));
    const auto start = Clock::now();
    for (int64_t step = 0; step < 50; ++step)
      NextElement(&reader, read, {0, step});
    CHECK(SecondsSince(start) < 5);
  }
}

// ---- Connections that break ----

TEST(KilledConnectionsLoseNothing) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 2;
    options.length = 240;
    Feed feed(options);
    std::vector<std::thread> threads;
    std::atomic<int64_t> kills{0};
    for (int64_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        Reader reader({});
        feed.Attend(rank);
        CHECK(!feed.Attach(&reader, rank, local));
        std::atomic<bool> done{false};
        std::thread killer([&] {
          std::mt19937_64 random(100 + rank);
          while (!done) {
            std::this_thread::sleep_for(
                std::chrono::microseconds(random() % 8000));
            switch (random() % 4) {
              case 0:
                feed.server()->Dismiss(rank);
                Eventually([&] { return !reader.attached(); });
                break;
              case 1:
                reader.Detach();
                break;
              case 2:  // nobody there
                CHECK(reader.Attach("unix:nobody", rank, {}, {}, 1));
                break;
              case 3:  // in the place of a connection that works
                break;
            }
            const auto wrong =
                feed.Attach(&reader, rank, random() % 4 ? local : !local);
            CHECK_EQ(wrong.value_or(""), "");
            ++kills;
          }
        });
        // Some elements are kept, and looked at again later.
        std::deque<ReceivedElement> kept;
        std::mt19937_64 random(rank);
        Position position;
        const int64_t read = reader.Read(Asking({}, 6));
        for (int epoch = 0; epoch < 3; ++epoch) {
          for (; position.step < 120; position = position.Next()) {
            ReceivedElement element = NextElement(&reader, read, position);
            feed.Check(element, rank);
            kept.push_back(std::move(element));
            while (kept.size() > random() % 20) {
              feed.Check(kept.front(), rank);
              kept.pop_front();
            }
          }
          CheckEnd(Next(&reader, read), epoch, 120);
          position = {epoch + 1, 0};
        }
        done = true;
        killer.join();
        for (const ReceivedElement& element : kept) feed.Check(element, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(kills > 20);
    CHECK_EQ(feed.server()->TakeLog().size(), 0u);
  }
}

TEST(MemoryInUseOutlivesItsConnectionAndItsReader) {
  NothingLeft nothing_left;
  FeedOptions options;
  options.length = 1000;
  options.sizes = Always(10'000);
  Feed feed(options);
  feed.Attend(0);
  std::vector<ReceivedElement> kept;
  {
    Reader reader({});
    Position position;
    const int64_t read = reader.Read(Asking({}));
    const auto pull = [&](int64_t steps) {
      for (; steps > 0; --steps, position = position.Next()) {
        kept.push_back(NextElement(&reader, read, position));
        reader.Acknowledge(position.Next(), {});
      }
    };
    CHECK(!feed.Attach(&reader, 0, true));
    pull(50);
    feed.server()->Dismiss(0);
    Eventually([&] { return !reader.attached(); });
    CHECK(!feed.Attach(&reader, 0, true));
    pull(50);
    reader.Detach();
    CHECK(!feed.Attach(&reader, 0, true));
    pull(50);
    CHECK(!feed.Attach(&reader, 0, true));
    pull(50);
    // What was produced while there was no connection came inline.
    CHECK(reader.GetCounts().shared > 100);
    int64_t bytes = 0;
    for (const auto& element : kept) {
      feed.Check(element, 0);
      if (element.shared) bytes += element.size;
    }
    CHECK_EQ(reader.GetCounts().kept_bytes, bytes);
  }
  CHECK(feed.pool()->GetHeld().blocks > 100);
  for (const auto& element : kept) feed.Check(element, 0);
  // What is let go of comes back to the producer, over whatever connection.
  feed.StopPump();
  feed.window()->Leave(0, "");
  kept.erase(std::remove_if(kept.begin(), kept.end(),
                            [](const ReceivedElement& element) {
                              return !element.shared;
                            }),
             kept.end());
  kept.erase(kept.begin() + 25, kept.end());
  Eventually([&] { return feed.pool()->GetHeld().blocks == 25; });
  for (const auto& element : kept) feed.Check(element, 0);
  kept.clear();
  Eventually([&] { return feed.pool()->GetHeld().blocks == 0; });
  CHECK_EQ(feed.server()->TakeLog().size(), 0u);
}

TEST(KeptElementsAreCopiedBeforeMemoryRunsOut) {
  NothingLeft nothing_left;
  FeedOptions options;
  options.length = 4000;
  options.sizes = Always(2'000);
  Feed feed(options);
  feed.Attend(0);
  ReaderOptions reader_options;
  reader_options.max_kept_bytes = 1'000'000;
  Reader reader(reader_options);
  CHECK(!feed.Attach(&reader, 0, true));
  const int64_t read = reader.Read(Asking({}));
  std::vector<ReceivedElement> kept;
  for (int64_t step = 0; step < 4000; ++step) {
    kept.push_back(NextElement(&reader, read, {0, step}));
    reader.Acknowledge({0, step + 1}, {});
    CHECK_EQ(kept.back().shared, step < reader.GetCounts().shared);
  }
  const auto counts = reader.GetCounts();
  CHECK(counts.kept_bytes > 900'000 && counts.kept_bytes <= 1'000'000);
  CHECK_EQ(counts.shared + counts.copied, 4000);
  CHECK(counts.shared < 500);
  CHECK(reader.Sync(5));
  Eventually([&] { return feed.pool()->GetHeld().blocks < 600; });
  for (const auto& element : kept) feed.Check(element, 0);
  kept.clear();
  CHECK_EQ(reader.GetCounts().kept_bytes, 0);
}

// ---- Waiting ----

TEST(AWaitEndsWhenItIsToldTo) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 2;  // the other one never comes, so that nothing does
    options.sizes = Always(100);
    Feed feed(options);
    feed.Attend(0);
    Reader reader({});
    const int64_t first = reader.Read(Asking({}));
    std::atomic<bool> stop{false};
    std::atomic<int> looks{0};
    std::optional<Received> received;
    const auto wait = [&](int64_t read) {
      return std::thread([&, read] {
        received = reader.Next(read, [&]() -> std::optional<std::string> {
          ++looks;
          if (stop) return "stopped";
          return std::nullopt;
        });
      });
    };
    for (const bool attached : {false, true}) {
      if (attached) CHECK(!feed.Attach(&reader, 0, local));
      looks = 0;
      stop = false;
      std::thread waits = wait(first);
      Eventually([&] { return looks > 0; });
      stop = true;
      const auto start = Clock::now();
      reader.Wake();
      waits.join();
      CHECK(SecondsSince(start) < 0.25);
      CHECK_EQ(std::get<Interrupted>(*received).message, "stopped");
    }
    stop = false;
    looks = 0;
    std::thread waits = wait(first);
    Eventually([&] { return looks > 0; });
    auto start = Clock::now();
    const int64_t second = reader.Read(Asking({0, 1}));
    waits.join();
    CHECK(SecondsSince(start) < 0.25);
    CHECK(std::holds_alternative<Interrupted>(*received));
    // A connection that is replaced wakes it, too, and then the step comes.
    waits = wait(second);
    reader.Detach();
    CHECK(!feed.Attach(&reader, 0, local));
    feed.Attend(1);
    waits.join();
    feed.Check(std::get<ReceivedElement>(*received), 0);
    CHECK_EQ(std::get<ReceivedElement>(*received).position.step, 1);
  }
}

TEST(SyncIsAnsweredWhenAllWasHeard) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 100;
    Feed feed(options);
    feed.Attend(0);
    Reader reader({});
    CHECK(!reader.Sync(0.02));
    CHECK(!feed.Attach(&reader, 0, local));
    CHECK(reader.Sync(5));
    const int64_t read = reader.Read(Asking({}, 100, true, kPlenty));
    for (int64_t step = 0; step < 100; ++step) {
      if (step % 10 == 0) {
        reader.Acknowledge({0, step}, {{0, step}});
        CHECK(reader.Sync(5));
        const auto statistics = feed.window()->GetStatistics();
        CHECK_EQ(statistics[0].trained.at(0), step);
      }
      feed.Check(NextElement(&reader, read, {0, step}), 0);
    }
    reader.Detach();
    reader.Acknowledge({0, 100}, {{0, 100}});
    CHECK(!reader.Sync(0.02));
    std::thread attaches([&] {
      std::this_thread::sleep_for(milliseconds(20));
      CHECK(!feed.Attach(&reader, 0, local));
    });
    CHECK(reader.Sync(5));
    attaches.join();
    const auto statistics = feed.window()->GetStatistics();
    CHECK_EQ(statistics[0].trained.at(0), 100);
  }
}

// ---- Ranks that misbehave ----

// A rank by hand.
class RawRank {
 public:
  RawRank(const Feed& feed, bool local) {
    const Event never;
    auto connected =
        Connect(feed.Address(local), After(5), never, [] { return false; });
    CHECK(std::holds_alternative<Connected>(connected));
    socket_ = std::move(std::get<Connected>(connected).socket);
  }

  template <typename Frame>
  RawRank& Say(const Frame& frame) {
    std::string bytes;
    Append(&bytes, frame);
    return SayBytes(bytes);
  }

  RawRank& SayBytes(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t more =
          SendSome(socket_.fd(), &bytes[sent], bytes.size() - sent);
      if (more < 0 && errno != EAGAIN) break;
      if (more > 0) sent += more;
    }
    return *this;
  }

  // So many bytes, or fewer if the other side has closed.
  std::string Hear(size_t size) {
    std::string bytes;
    const Deadline deadline = After(10);
    while (bytes.size() < size) {
      char buffer[4096];
      const ssize_t received = ReceiveSome(
          socket_.fd(), buffer, std::min(sizeof(buffer), size - bytes.size()));
      if (received > 0) {
        bytes.append(buffer, received);
        continue;
      }
      if (received == 0 || errno != EAGAIN) break;
      pollfd polled{socket_.fd(), POLLIN, 0};
      CHECK(poll(&polled, 1, MillisecondsUntil(deadline, 20'000)) > 0);
    }
    return bytes;
  }

  // Waits until the other side has closed.
  void HearEnd() { Hear(size_t{1} << 40); }

  int fd() const { return socket_.fd(); }
  void Close() { socket_.Close(); }

 private:
  Descriptor socket_;
};

std::unique_ptr<RawRank> LetIn(Feed* feed, int64_t rank, bool local) {
  const Proof proof = NewProof(), answer = NewProof();
  feed->server()->Admit(rank, proof, answer);
  auto raw = std::make_unique<RawRank>(*feed, local);
  raw->Say(HelloFrame{rank, proof});
  std::string welcome;
  Append(&welcome, WelcomeFrame{answer});
  CHECK(raw->Hear(welcome.size()) == welcome);
  return raw;
}

template <typename Frame>
std::string Said(const Frame& frame) {
  std::string bytes;
  Append(&bytes, frame);
  return bytes;
}

TEST(SmallStepsComeBeyondTheCreditOfSteps) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    for (const int64_t size : {1'000, 100'000}) {
      FeedOptions options;
      options.length = 1000;
      options.sizes = Always(size);
      options.prefetch = 200;
      Feed feed(options);
      feed.Attend(0);
      auto raw = LetIn(&feed, 0, local);
      ReadRequest request = Asking({}, 4, true, kPlenty);
      request.free_bytes = 50'000;
      raw->Say(request);
      // As many are ready beyond those that it was sent.
      const auto sent = [&] { return feed.window()->Furthest().step - 200; };
      const bool small = size == 1'000;
      Eventually([&] { return sent() >= (small ? 40 : 4); });
      std::this_thread::sleep_for(milliseconds(20));
      CHECK(sent() <= (small ? 50 : 4));
    }
  }
}

TEST(AReaderAsksForSmallStepsBeyondTheCreditOfSteps) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 1000;
    options.sizes = Always(1'000);
    options.prefetch = 200;
    Feed feed(options);
    feed.Attend(0);
    ReaderOptions with;
    with.free_bytes = 50'000;
    Reader reader(with);
    CHECK(!feed.Attach(&reader, 0, local));
    const int64_t read = reader.Read(Asking({}, 4, true, kPlenty));
    const auto sent = [&] { return feed.window()->Furthest().step - 200; };
    Eventually([&] { return sent() >= 40; });
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(sent() <= 50);
    for (int64_t step = 0; step < 100; ++step)
      feed.Check(NextElement(&reader, read, {0, step}), 0);
  }
}

TEST(MalformedFramesEndOneConnectionOnly) {
  NothingLeft nothing_left;
  std::string read = Said(Asking({}));
  std::vector<std::string> nonsense = {
      std::string(100, '\xff'),
      std::string(100, '\0'),
      Said(HelloFrame{}),
      Said(EndFrame{}),
      Said(ReleaseFrame{{1}}),
      read.substr(0, 8) + std::string(8, '\x7f') + read.substr(16),
      read.substr(0, 8) + std::string(1, read[8] - 1) + read.substr(9),
  };
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 2;
    options.length = 200;
    Feed feed(options);
    feed.Attend(0);
    feed.Attend(1);
    std::thread good([&] {
      Reader reader({});
      CHECK(!feed.Attach(&reader, 1, local));
      ReadEpochs(&feed, &reader, 1, {}, 2, 100, Asking({}));
    });
    for (const std::string& bytes : nonsense) {
      auto raw = LetIn(&feed, 0, local);
      raw->SayBytes(bytes).HearEnd();
      const auto log = feed.server()->TakeLog();
      CHECK_EQ(log.size(), 1u);
      CHECK(log[0].find("rank 0") != std::string::npos);
    }
    // What was sent must not be let go of twice.
    if (local) {
      auto raw = LetIn(&feed, 0, local);
      raw->Say(Asking({}));
      raw->Hear(300);
      raw->Say(ReleaseFrame{{1}}).Say(ReleaseFrame{{1}}).HearEnd();
      CHECK_EQ(feed.server()->TakeLog().size(), 1u);
    }
    good.join();
  }
}

TEST(WhoDoesNotProveItselfIsNotLetInAndKeepsNobodyWaiting) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.hello_timeout = 0.5;
    options.length = 50;
    Feed feed(options);
    feed.Attend(0);
    const auto start = Clock::now();
    std::vector<std::unique_ptr<RawRank>> silent;
    const std::string hello = Said(HelloFrame{0, {}});
    for (int i = 0; i < 40; ++i) {
      silent.push_back(std::make_unique<RawRank>(feed, local));
      silent.back()->SayBytes(hello.substr(0, i));
    }
    CHECK_EQ(feed.server()->TakeLog().size(), 0u);
    // A wrong proof, also when a right one would be taken.
    const Proof proof = NewProof(), answer = NewProof();
    for (const int64_t rank : {0, 1, -1}) {
      feed.server()->Admit(rank, proof, answer);
      Proof wrong = proof;
      wrong.back() ^= 1;
      RawRank(feed, local).Say(HelloFrame{rank, wrong}).HearEnd();
      CHECK_EQ(feed.server()->TakeLog().size(), 1u);
    }
    // None that was used or replaced.
    Reader reader({});
    CHECK(!reader.Attach(feed.Address(local), 0, proof, answer, 5));
    CHECK(reader.Attach(feed.Address(local), 0, proof, answer, 5));
    feed.server()->Admit(0, proof, answer);
    feed.server()->Admit(0, NewProof(), answer);
    CHECK(reader.Attach(feed.Address(local), 0, proof, answer, 5));
    // A producer that does not prove itself is not believed.
    feed.server()->Admit(0, proof, answer);
    CHECK(reader.Attach(feed.Address(local), 0, proof, proof, 5));
    CHECK(!feed.Attach(&reader, 0, local));
    CHECK(SecondsSince(start) < 0.5);
    ReadEpochs(&feed, &reader, 0, {}, 1, 50, Asking({}));
    for (const auto& raw : silent) raw->HearEnd();
    CHECK(SecondsSince(start) > 0.45);
  }
}

TEST(ARankThatNeverReadsKeepsNobodyWaiting) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    for (const bool share : {true, false}) {
      FeedOptions options;
      options.ranks = 3;
      options.length = 300;
      options.sizes = Always(100'000);
      options.prefetch = 100;
      Feed feed(options);
      feed.Share(share);
      for (int64_t rank = 0; rank < 3; ++rank) feed.Attend(rank);
      auto reads_nothing = LetIn(&feed, 0, local);
      reads_nothing->Say(Asking({}, 1'000, true, kPlenty));
      auto asks_nothing = LetIn(&feed, 1, local);
      {
        Reader reader({});
        CHECK(!feed.Attach(&reader, 2, local));
        ReadEpochs(&feed, &reader, 2, {}, 1, 100, Asking({}));
      }
      feed.StopPump();
      const auto start = Clock::now();
      feed.StopServer();
      CHECK(SecondsSince(start) < 1);
    }
  }
}

TEST(ARankThatReadsNothingIsReplacedAtOnce) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    for (const bool share : {true, false}) {
      FeedOptions options;
      options.length = 300;
      options.sizes = Always(100'000);
      options.prefetch = 100;
      Feed feed(options);
      feed.Share(share);
      feed.Attend(0);
      auto reads_nothing = LetIn(&feed, 0, local);
      reads_nothing->Say(Asking({}, 1'000, true, kPlenty));
      // Its sender is in the middle of a write, or has sent all.
      std::this_thread::sleep_for(milliseconds(100));
      const auto start = Clock::now();
      Reader reader({});
      CHECK(!feed.Attach(&reader, 0, local));
      CHECK(SecondsSince(start) < 1);
      ReadEpochs(&feed, &reader, 0, {}, 1, 300, Asking({}));
    }
  }
}

// What a child has is the parent's: its end changes nothing there.
TEST(AChildOfForkLeavesItsParentAlone) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.length = 300;
    options.sizes = Always(10'000);
    auto feed = std::make_unique<Feed>(options);
    feed->Attend(0);
    auto reader = std::make_unique<Reader>(ReaderOptions{});
    CHECK(!feed->Attach(reader.get(), 0, local));
    const int64_t read = reader->Read(Asking({}));
    std::vector<ReceivedElement> kept;
    for (int64_t step = 0; step < 100; ++step) {
      kept.push_back(NextElement(reader.get(), read, {0, step}));
      reader->Acknowledge({0, step + 1}, {});
    }
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(20);
      kept.clear();
      reader.reset();
      feed->ForgetPumpAndStopServer();
      std::_Exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    for (const auto& element : kept) feed->Check(element, 0);
    for (int64_t step = 100; step < 300; ++step) {
      feed->Check(NextElement(reader.get(), read, {0, step}), 0);
      reader->Acknowledge({0, step + 1}, {});
    }
    CHECK(reader->Sync(5));
    for (const auto& element : kept) feed->Check(element, 0);
    kept.clear();
    CHECK(reader->Sync(5));
    CHECK_EQ(feed->server()->TakeLog().size(), 0u);
  }
}

TEST(ARankThatDiesHoldsNothing) {
  NothingLeft nothing_left;
  for (const bool talks : {false, true}) {
    FeedOptions options;
    options.sizes = Always(10'000);
    Feed feed(options);
    feed.Attend(0);
    auto raw = LetIn(&feed, 0, true);
    raw->Say(Asking({}, 20));
    raw->Hear(1000);
    // A connection that was ended holds what the rank may use.
    if (talks) {
      raw->SayBytes(std::string(1000, 'x'));
    } else {
      feed.server()->Dismiss(0);
    }
    raw->HearEnd();
    feed.StopPump();
    feed.window()->Leave(0, "");
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(feed.pool()->GetHeld().blocks > 0);
    raw->Close();
    Eventually([&] { return feed.pool()->GetHeld().blocks == 0; });
  }
}

TEST(TheServerEndsAtOnceWhateverItsRanksDo) {
  NothingLeft nothing_left;
  for (const bool local : kBothKinds) {
    FeedOptions options;
    options.ranks = 4;
    options.length = 4000;
    options.sizes = Always(30'000);
    Feed feed(options);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    std::atomic<int64_t> pulled{0}, attached{0};
    for (int64_t rank = 0; rank < 4; ++rank) {
      feed.Attend(rank);
      threads.emplace_back([&, rank] {
        Reader reader({});
        CHECK(!feed.Attach(&reader, rank, local));
        ++attached;  // it uses the server
        const int64_t read = reader.Read(Asking({}));
        std::vector<ReceivedElement> kept;
        while (true) {
          auto received =
              reader.Next(read, [&]() -> std::optional<std::string> {
                if (stop) return "stopped";
                return std::nullopt;
              });
          if (std::holds_alternative<Interrupted>(received)) break;
          feed.Check(std::get<ReceivedElement>(received), rank);
          kept.push_back(std::move(std::get<ReceivedElement>(received)));
          ++pulled;
        }
        CHECK(!reader.attached());
        CHECK(!reader.trouble().empty());
        for (const auto& element : kept) feed.Check(element, rank);
      });
    }
    Eventually([&] { return pulled > 100 && attached == 4; });
    feed.StopPump();
    const auto start = Clock::now();
    feed.StopServer();
    CHECK(SecondsSince(start) < 1);
    std::this_thread::sleep_for(milliseconds(20));
    stop = true;
    for (std::thread& thread : threads) thread.join();
  }
}

// ---- A producer that misbehaves ----

TEST(AReaderCutsOffAProducerThatTalksNonsense) {
  NothingLeft nothing_left;
  const std::string name =
      "kerasfeed-test-" + std::to_string(getpid()) + "-nonsense";
  auto listening = ListenUnix(name);
  CHECK(std::holds_alternative<Descriptor>(listening));
  const Descriptor listener = std::move(std::get<Descriptor>(listening));
  ElementHead head;
  head.reader = 1;
  head.position = {0, 7};
  head.size = 100;
  head.components = {{{100}, 0, 100}};
  ElementHead elsewhere = head;
  elsewhere.position.step = 8;
  std::string element, wrong_element;
  AppendElementHead(&element, head);
  element += std::string(100, 'x');
  AppendElementHead(&wrong_element, elsewhere);
  wrong_element += std::string(100, 'x');
  // More bytes than were asked for.
  const std::string too_much = element + wrong_element;
  const std::vector<std::string> nonsense = {
      std::string(50, '\xff'),
      std::string(50, '\0'),
      wrong_element,
      element.substr(0, 30),
      element + element,
      Said(EndFrame{1, 0, 9}),
      Said(EndFrame{1, 3, 2}),
      Said(SharedFrame{head, 1, 3, 0}),
      Said(PieceFrame{3, 4096}),
      Said(ProgressFrame{}),
      "",
      too_much,
  };
  for (const std::string& bytes : nonsense) {
    Reader reader({});
    const int64_t read = reader.Read(Asking({0, 7}, 8, true, 150));
    const Proof proof = NewProof();
    std::thread attaches(
        [&] { CHECK(!reader.Attach("unix:" + name, 0, proof, proof, 5)); });
    pollfd polled{listener.fd(), POLLIN, 0};
    CHECK_EQ(poll(&polled, 1, 5000), 1);
    Descriptor socket = Accept(listener.fd());
    const std::string welcome = Said(WelcomeFrame{proof});
    CHECK(SendSome(socket.fd(), welcome.data(), welcome.size()) > 0);
    attaches.join();
    // What is of an earlier read is no nonsense.
    ElementHead earlier = elsewhere;
    earlier.reader = 0;
    std::string said;
    AppendElementHead(&said, earlier);
    said += std::string(100, 'y') + Said(EndFrame{0, 5, 5}) + bytes;
    CHECK(SendSome(socket.fd(), said.data(), said.size()) > 0);
    socket.Close();
    auto received = reader.Next(read, [&]() -> std::optional<std::string> {
      if (!reader.trouble().empty()) return reader.trouble();
      return std::nullopt;
    });
    if (auto* first = std::get_if<ReceivedElement>(&received)) {
      CHECK(std::string(first->block.get(), 100) == std::string(100, 'x'));
      CHECK(bytes == element + element || bytes == too_much);
    }
    CHECK(!reader.attached());
    const bool first_is_right = bytes == element + element || bytes == too_much;
    CHECK_EQ(reader.pulled().step, first_is_right ? 8 : 7);
    if (bytes == too_much) {
      CHECK(reader.trouble().find("200 bytes") != std::string::npos);
    }
  }
}

TEST(AttachGivesUpInTimeAndWhenDetached) {
  NothingLeft nothing_left;
  const std::string name =
      "kerasfeed-test-" + std::to_string(getpid()) + "-silent";
  auto listening = ListenUnix(name);
  CHECK(std::holds_alternative<Descriptor>(listening));
  Reader reader({});
  auto start = Clock::now();
  CHECK(reader.Attach("unix:" + name, 0, {}, {}, 0.1));
  CHECK(SecondsSince(start) > 0.09 && SecondsSince(start) < 1);
  start = Clock::now();
  std::thread detaches([&] {
    std::this_thread::sleep_for(milliseconds(50));
    reader.Detach();
  });
  CHECK(reader.Attach("unix:" + name, 0, {}, {}, 10));
  CHECK(SecondsSince(start) < 1);
  detaches.join();
  for (const char* address : {"", "tcp:", "tcp:127.0.0.1", "tcp:127.0.0.1:1",
                              "tcp:127.0.0.1:x", "unix:", "http://x"}) {
    CHECK(reader.Attach(address, 0, {}, {}, 1));
  }
}

}  // namespace
}  // namespace kerasfeed
