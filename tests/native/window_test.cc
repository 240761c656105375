// The window where Python can't look: threads, and what becomes of the memory.
// What it answers is tested by tests/unit/test_window.py.
#include "core/window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"

namespace kerasfeed {
namespace {

constexpr int64_t kPlenty = int64_t{1} << 30;
constexpr int64_t kPass = 1'000'000;

// An element of eight bytes that says which one it is.
ElementPtr Made(int64_t number) {
  const auto memory = std::make_shared<int64_t>(number);
  auto element = std::make_shared<Element>();
  element->components = {{{}, 0, sizeof(number)}};
  element->buffers = {
      {reinterpret_cast<const char*>(memory.get()), sizeof(number)}};
  element->size = sizeof(number);
  element->owner = memory;
  return element;
}

int64_t NumberOf(const ElementPtr& element) {
  return *static_cast<const int64_t*>(element->owner.get());
}

ReadRequest Asking(int64_t reader, Position position, int64_t credit = 16) {
  ReadRequest request;
  request.reader = reader;
  request.position = position;
  request.credit_steps = credit;
  request.credit_bytes = kPlenty;
  return request;
}

WindowOptions Options(int64_t size, int64_t prefetch = 4,
                      int64_t max_bytes = kPlenty) {
  WindowOptions options;
  options.size = size;
  options.prefetch = prefetch;
  options.max_bytes = max_bytes;
  return options;
}

// Does what the pump does for one piece of work, with passes of one length.
class Pump {
 public:
  Pump(Window* window, int64_t length) : window_(window), length_(length) {}

  void Do(const Work& work) {
    if (const auto* seek = std::get_if<Seek>(&work)) {
      pass_ = seek->pass;
      element_ = seek->element;
    } else if (const auto* produce = std::get_if<Produce>(&work)) {
      if (element_ >= length_) {
        window_->EndPass(produce->generation, pass_++, length_);
        element_ = 0;
      } else {
        const ElementPtr element = Made(pass_ * kPass + element_++);
        made.push_back(element);
        window_->Put(produce->generation, element);
      }
    }
  }
  void DoAll() {
    for (auto work = window_->TryWork(); work; work = window_->TryWork())
      Do(*work);
  }

  std::vector<std::weak_ptr<const Element>> made;

 private:
  Window* window_;
  const int64_t length_;
  int64_t pass_ = 0;
  int64_t element_ = 0;
};

TEST(EveryRankGetsItsElementsInOrder) {
  Window window(Options(2));
  Pump pump(&window, 7);
  for (int64_t rank = 0; rank < 2; ++rank) {
    CHECK(!window.Attend(rank, {}, {}));
    window.Read(rank, Asking(1, {}));
  }
  pump.DoAll();
  for (int64_t rank = 0; rank < 2; ++rank) {
    for (int64_t step = 0; step < 3; ++step) {
      const auto item = window.TryItem(rank);
      CHECK(item && std::holds_alternative<Delivery>(*item));
      CHECK_EQ(NumberOf(std::get<Delivery>(*item).element), 2 * step + rank);
      pump.DoAll();
    }
    const auto item = window.TryItem(rank);
    CHECK(item && std::holds_alternative<EpochEnd>(*item));
    CHECK_EQ(std::get<EpochEnd>(*item).steps, 3);
  }
}

// All elements of `pump` that somebody still holds.
int64_t Held(const Pump& pump) {
  return std::count_if(pump.made.begin(), pump.made.end(),
                       [](const auto& element) { return !element.expired(); });
}

TEST(WhatAllRanksHaveTrainedIsGivenBack) {
  Window window(Options(2, 4));
  Pump pump(&window, 7);
  for (int64_t rank = 0; rank < 2; ++rank) {
    window.Attend(rank, {}, {});
    window.Read(rank, Asking(1, {}));
  }
  pump.DoAll();
  const int64_t made = static_cast<int64_t>(pump.made.size());
  CHECK_EQ(Held(pump), made);
  window.Progress(0, 1, {}, {0, 3}, {}, false);
  CHECK_EQ(Held(pump), made);
  window.Progress(1, 1, {}, {0, 2}, {}, false);
  CHECK_EQ(Held(pump), made - 4);
  // The seventh element, which epoch 0 drops, is kept until all have trained
  // that.
  window.Progress(1, 1, {}, {0, 3}, {}, false);
  CHECK_EQ(Held(pump), made - 6);
  for (int64_t rank = 0; rank < 2; ++rank)
    window.Progress(rank, 1, {}, {1, 0}, {}, false);
  CHECK_EQ(Held(pump), made - 7);
}

TEST(WhatIsProducedAgainIsGivenBackFirst) {
  Window window(Options(2, 4, 1));
  Pump pump(&window, 100);
  for (int64_t rank = 0; rank < 2; ++rank) {
    window.Attend(rank, {}, {});
    window.Read(rank, Asking(1, {}));
  }
  for (int64_t step = 0; step < 10; ++step) {
    pump.DoAll();
    for (int64_t rank = 0; rank < 2; ++rank) CHECK(window.TryItem(rank));
  }
  // Half a step, too.
  auto work = window.TryWork();
  CHECK(work);
  pump.Do(*work);
  CHECK(Held(pump) > 0);
  window.Read(0, Asking(2, {}));
  CHECK_EQ(Held(pump), 0);
}

TEST(ARankThatWasSentAnElementKeepsIt) {
  std::optional<Item> item;
  {
    Window window(Options(1));
    Pump pump(&window, 3);
    window.Attend(0, {}, {});
    window.Read(0, Asking(1, {}));
    pump.DoAll();
    item = window.TryItem(0);
    window.Progress(0, 1, {0, 3}, {9, 0}, {}, false);
    CHECK_EQ(window.GetHeld().bytes, 0);
  }
  CHECK_EQ(NumberOf(std::get<Delivery>(*item).element), 0);
}

TEST(TheEndOfAnEpochIsHeldUntilItIsReported) {
  WindowOptions options = Options(1);
  options.holds_ends = true;
  Window window(options);
  Pump pump(&window, 1);
  CHECK(!window.Attend(0, {}, std::nullopt));
  ReadRequest asking = Asking(1, {});
  asking.through_epochs = true;
  window.Read(0, asking);
  while (const auto work = window.TryWork()) pump.Do(*work);
  CHECK(std::holds_alternative<Delivery>(*window.TryItem(0)));
  CHECK(!window.TryItem(0));
  CHECK(window.WaitingFor(0).find("the end of epoch 0") != std::string::npos);
  // Of another epoch, or of one that is not held, is no news.
  window.ReportedEpochEnd(7);
  CHECK(!window.TryItem(0));

  std::thread reporter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    window.ReportedEpochEnd(0);
  });
  const auto item = window.WaitForItem(0, {});
  reporter.join();
  const auto* end = std::get_if<EpochEnd>(&*item);
  CHECK(end != nullptr);
  CHECK_EQ(end->epoch, 0);
  CHECK_EQ(end->steps, 1);
  CHECK(std::holds_alternative<Delivery>(*window.TryItem(0)));
}

TEST(ARankThatDoesNotExistIsIgnored) {
  Window window(Options(2));
  for (const int64_t rank : {int64_t{-1}, int64_t{2}, INT64_MAX, INT64_MIN}) {
    CHECK(window.Attend(rank, {}, {}));
    window.Read(rank, Asking(1, {}));
    window.Progress(rank, 1, {}, {}, {{0, 1}}, true);
    CHECK(std::holds_alternative<BindError>(window.Bind(rank, 1, {}, {})));
    window.Leave(rank, "");
    window.Disconnected(rank);
    window.Wake(rank);
    CHECK_EQ(window.Wakes(rank), 0);
    CHECK(!window.TryItem(rank, 10));
    CHECK(!window.WaitForItem(rank, [] { return false; }));
    window.WaitingFor(rank);
  }
  CHECK(window.GetStatistics().empty());
}

TEST(ARankThatWasRefusedIsToldWhy) {
  Window window(Options(2));
  Segment one;
  one.steps_per_epoch = 4;
  Segment other;
  other.steps_per_epoch = 5;
  CHECK(!window.Attend(0, {}, one));
  const auto error = window.Attend(1, {}, other);
  CHECK(error);
  window.Refuse(error->message);
  const auto item = window.TryItem(1);
  CHECK(item && std::get<Failure>(*item).message == error->message);
  CHECK(!window.TryItem(1));
}

TEST(BrokenIsWhatNobodyCanReadAround) {
  double now = 0;
  WindowOptions options = Options(2);
  options.clock = [&] { return now; };
  options.rank_timeout = 60;
  {
    Window window(options);
    Pump pump(&window, 3);
    for (int64_t rank : {0, 1}) {
      CHECK(!window.Attend(rank, {}, std::nullopt));
      window.Read(rank, Asking(1, {}));
    }
    CHECK(!window.Broken());
    // What ranks get up to a position, they get.
    const Work seek = *window.TryWork();
    window.Fail(std::get<Seek>(seek).generation, "the pipeline raised");
    CHECK(window.TryItem(0));
    CHECK(!window.Broken());
  }
  {
    Window window(options);
    for (int64_t rank : {0, 1}) CHECK(!window.Attend(rank, {}, std::nullopt));
    window.Leave(0, "it raised");
    const auto failure = window.Broken();
    CHECK(failure && failure->kind == FailureKind::kRanks);
    CHECK(failure->message.find("rank 0 left with an error: it raised") !=
          std::string::npos);
  }
  {
    Window window(options);
    for (int64_t rank : {0, 1}) CHECK(!window.Attend(rank, {}, std::nullopt));
    window.Disconnected(1);
    now = 59;
    CHECK(!window.Broken());
    now = 60;  // nobody but Broken looks at the time
    CHECK(window.Broken()->message.find("rank 1 is gone") != std::string::npos);
  }
}

// ---- With threads ----

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since)
      .count();
}

// Polls come too late to help: only a notification can end a wait in time.
WindowOptions OnlyNotified(WindowOptions options) {
  options.poll_seconds = 1000;
  return options;
}

// Calls `wait` in a thread, then `wake` some time later, and fails if that does
// not end the wait.
void CheckWoken(const std::function<void()>& wait,
                const std::function<void()>& wake) {
  const auto began = std::chrono::steady_clock::now();
  std::thread waiting(wait);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  wake();
  waiting.join();
  CHECK(Seconds(began) < 10);
}

TEST(EachWaitIsEndedByWhatItWaitsFor) {
  Window window(OnlyNotified(Options(1)));
  std::atomic<bool> over{false};
  const auto interrupted = [&] { return over.load(); };
  CheckWoken([&] { CHECK(!window.WaitForItem(0, interrupted)); },
             [&] {
               over = true;
               window.Wake(0);
             });
  const int64_t wakes = window.Wakes(0);
  CheckWoken([&] { CHECK(!window.TryItem(0, 100, wakes)); },
             [&] { window.Wake(0); });
  // One that came before the wait counts as well.
  CheckWoken([&] { CHECK(!window.TryItem(0, 100, wakes)); }, [] {});
  CheckWoken([&] { CHECK_EQ(window.TakeNews(100).size(), size_t{1}); },
             [&] { window.Attend(0, {}, {}); });
  over = false;
  CheckWoken(
      [&] {
        CHECK(std::holds_alternative<Pause>(window.WaitForWork(interrupted)));
      },
      [&] {
        over = true;
        window.WakePump();
      });
  const int64_t pump_wakes = window.PumpWakes();
  CheckWoken([&] { CHECK(!window.TryWork({}, 100, pump_wakes)); },
             [&] { window.WakePump(); });
  CheckWoken([&] { CHECK(std::holds_alternative<Seek>(window.WaitForWork())); },
             [&] { window.Read(0, Asking(1, {})); });
  CheckWoken([&] { CHECK(window.WaitUntilDrained(100)); },
             [&] { window.Leave(0, ""); });
  CheckWoken([&] { CHECK(std::holds_alternative<Stop>(window.WaitForWork())); },
             [] {});
}

TEST(AWaitOfSomeSecondsEndsAfterThem) {
  Window window(Options(1));
  window.Attend(0, {}, {});
  window.TakeNews(0);
  const auto began = std::chrono::steady_clock::now();
  CHECK(!window.TryItem(0, 0.02));
  CHECK(!window.TryWork({}, 0.02));
  CHECK(window.TakeNews(0.02).empty());
  CHECK(!window.WaitUntilDrained(0.02));
  CHECK(Seconds(began) >= 0.08);
  CHECK(Seconds(began) < 10);
}

TEST(AWaitNoticesARankThatIsGone) {
  WindowOptions options = Options(2);
  options.rank_timeout = 0.05;
  options.poll_seconds = 0.01;
  Window window(options);
  for (int64_t rank = 0; rank < 2; ++rank) window.Attend(rank, {}, {});
  window.Disconnected(1);
  const auto item = window.WaitForItem(0, {});
  CHECK(item && std::get<Failure>(*item).message ==
                    "rank 1 is gone: its connection broke 0.05 s ago at epoch "
                    "0, step 0");
}

// What one rank does in a thread of its own: it trains some epochs, and loses
// its connection, reads again what it has not acknowledged, and acknowledges,
// whenever that comes to its mind.
class RestlessRank {
 public:
  RestlessRank(Window* window, int64_t rank, int64_t size, int64_t length,
               unsigned seed)
      : window_(window),
        rank_(rank),
        size_(size),
        length_(length),
        random_(seed) {}

  void Train(int64_t epochs) {
    window_->Attend(rank_, acknowledged_, {});
    Ask({});
    while (pulled_.epoch < epochs) {
      Meddle();
      const auto item = window_->WaitForItem(rank_, [] { return false; });
      CHECK(item);
      if (const auto* delivery = std::get_if<Delivery>(&*item)) {
        CHECK_EQ(delivery->reader, reader_);
        CHECK_EQ(delivery->position.ToString(), pulled_.ToString());
        CHECK_EQ(NumberOf(delivery->element),
                 pulled_.epoch * kPass + pulled_.step * size_ + rank_);
        pulled_ = pulled_.Next();
        Report();
      } else {
        const auto* end = std::get_if<EpochEnd>(&*item);
        CHECK(end != nullptr);
        CHECK_EQ(end->epoch, pulled_.epoch);
        CHECK_EQ(end->steps, length_ / size_);
        CHECK_EQ(end->steps, pulled_.step);
        pulled_ = {pulled_.epoch + 1, 0};
        Ask(pulled_);
      }
    }
    acknowledged_ = pulled_;
    Report();
    window_->Leave(rank_, "");
  }

 private:
  void Ask(Position position) {
    pulled_ = position;
    window_->Read(rank_, Asking(++reader_, position, 1 + random_() % 4));
  }
  void Report() {
    window_->Progress(rank_, reader_, pulled_, acknowledged_,
                      {{pulled_.epoch, pulled_.step}}, random_() % 2 == 0);
  }
  void Meddle() {
    switch (random_() % 32) {
      case 0:
        window_->Disconnected(rank_);
        window_->Attend(rank_, acknowledged_, {});
        Ask(pulled_);
        break;
      case 1:
        Ask(acknowledged_);
        break;
      case 2:
      case 3:
        acknowledged_ = pulled_;
        Report();
        break;
      case 4:
        window_->WaitingFor(rank_);
        window_->GetStatistics();
        window_->Locate(pulled_);
        break;
      default:
        break;
    }
  }

  Window* window_;
  const int64_t rank_, size_, length_;
  std::mt19937 random_;
  int64_t reader_ = 0;
  Position pulled_, acknowledged_;
};

TEST(RestlessRanksGetAllAndNobodyHangs) {
  constexpr int64_t kEpochs = 4, kLength = 100;
  for (unsigned round = 0; round < 12; ++round) {
    const int64_t size = 1 + round % 4;
    const int64_t room = round % 3 ? kPlenty : 100;
    Window window(OnlyNotified(Options(size, 2 + round % 5, room)));
    Pump pump(&window, kLength);
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      while (true) {
        const Work work = window.WaitForWork([&] { return round % 2 == 1; });
        if (std::holds_alternative<Stop>(work)) return;
        if (std::holds_alternative<Pause>(work)) {
          window.Untrained({0, 0});
          const auto next = window.TryWork();
          if (next) pump.Do(*next);
          std::this_thread::yield();
        }
        pump.Do(work);
      }
    });
    threads.emplace_back([&] {
      while (!over) window.TakeNews(0.01);
    });
    for (int64_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&window, rank, size, round] {
        RestlessRank(&window, rank, size, kLength, 100 * round + rank)
            .Train(kEpochs);
      });
    }
    CHECK(window.WaitUntilDrained(60));
    over = true;
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(window.GetHeld().steps, 0);
    CHECK_EQ(window.GetHeld().bytes, 0);
    // But for those of a step that is not complete.
    CHECK(Held(pump) < size);
  }
}

}  // namespace
}  // namespace kerasfeed
