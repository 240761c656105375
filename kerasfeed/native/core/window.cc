#include "window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <set>
#include <tuple>

namespace kerasfeed {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kFreeStepsAhead = 2;
constexpr int64_t kMinRoomSteps = 2;
constexpr double kForever = 1e9;
constexpr double kLongestWait = 3600;  // a wait that is longer is several
// Waking a thread for each light element costs more than all else that is done
// for it: who just had something to do leaves them to gather for so long.
constexpr double kGatherSeconds = 400e-6;
// What is light: of one in shared memory only its place is sent.
constexpr int64_t kLightBytes = int64_t{32} << 10;
constexpr int64_t kLightSharedBytes = int64_t{256} << 10;
constexpr int kSpins = 100;  // before a lock puts its thread to sleep

double Now() {
  return std::chrono::duration<double>(SteadyClock::now().time_since_epoch())
      .count();
}

// How long a call may still block.
class WaitDeadline {
 public:
  explicit WaitDeadline(double seconds)
      : end_(seconds > 0 ? Now() + seconds : 0), blocks_(seconds > 0) {}
  double Left() const { return blocks_ ? end_ - Now() : 0; }

 private:
  double end_;
  bool blocks_;
};

std::string Counted(int64_t number, const std::string& what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

std::string RankNames(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string Formatted(const char* format, double number) {
  char text[64];
  std::snprintf(text, sizeof(text), format, number);
  return text;
}

std::string StepsText(const std::optional<int64_t>& steps) {
  return steps ? std::to_string(*steps) : "None";
}

std::string SegmentText(const Segment& s) {
  return "Segment(first_epoch=" + std::to_string(s.first_epoch) +
         ", origin_pass=" + std::to_string(s.origin_pass) +
         ", origin_element=" + std::to_string(s.origin_element) +
         ", steps_per_epoch=" + StepsText(s.steps_per_epoch) +
         ", first_step=" + std::to_string(s.first_step) + ")";
}

// Where somebody sleeps until there is something for him.
struct Bed {
  enum Sleep {
    kNone,
    kShallow,  // for a moment: woken early if there is much to do
    kDeep,     // until there is anything to do
  };
  std::condition_variable woken;
  int sleepers = 0;
  Sleep sleep = kNone;  // of who sleeps and was not woken yet
};

struct Step {
  Position position;
  std::vector<ElementPtr> elements;
  int64_t size = 0;
  bool light = false;  // all elements are
};

bool IsLight(const ElementPtr& element) {
  return element->size <= (element->block ? kLightSharedBytes : kLightBytes);
}

// A rank left an epoch before its end, and the producer did so too.
struct Cut {
  int64_t rank = 0;
  Position left_at;
  Position went_to;
};

// What was settled when the first rank began a fit.
struct Binding {
  Position position;
  std::optional<int64_t> steps_per_epoch;
  Segment segment;
  Position start;
};

// How far a rank has come, and what it has asked for.
struct Rank {
  int64_t number = 0;
  Bed bed;
  int64_t wakes = 0;
  bool came = false;
  bool connected = true;
  double since = 0;
  bool left = false;
  std::optional<int64_t> reader;
  Position next;
  bool through_epochs = false;
  bool at_end = false;
  bool waiting = false;
  bool told_failure = false;
  bool direct = false;
  int64_t began = 0;
  int64_t finished = -1;
  std::set<int64_t> left_epochs;
  int64_t credit_steps = 1;
  int64_t credit_bytes = 1;
  int64_t free_bytes = 0;
  std::deque<std::pair<Position, int64_t>> inflight;
  int64_t inflight_bytes = 0;
  Position pulled;
  Position acknowledged;
  std::map<int64_t, int64_t> trained;
  int64_t last_epoch = kNoLastEpoch;
  std::optional<double> stuck_since;

  bool HasCredit(int64_t size) const {
    if (inflight.empty()) return true;
    const int64_t sent = static_cast<int64_t>(inflight.size());
    const int64_t bytes = inflight_bytes + size;
    return bytes <= credit_bytes &&
           (sent < credit_steps ||
            (bytes <= free_bytes && sent < kMaxSmallSteps));
  }
};

template <typename Value>
std::optional<int64_t> Find(const std::map<int64_t, Value>& values,
                            int64_t key) {
  const auto found = values.find(key);
  if (found == values.end()) return std::nullopt;
  return found->second;
}

}  // namespace

// Everything but the locking: its functions are called with the mutex held.
class Window::State {
 public:
  explicit State(WindowOptions options)
      : size(std::max<int64_t>(options.size, 1)),
        prefetch(options.prefetch),
        ready_bytes(options.ready_bytes),
        max_bytes(options.max_bytes),
        own_steps(options.steps_per_epoch),
        start_timeout(options.start_timeout),
        rank_timeout(options.rank_timeout),
        cut_grace(options.cut_grace),
        cardinality(options.cardinality),
        poll_seconds(options.poll_seconds),
        holds_ends(options.holds_ends),
        clock(options.clock ? std::move(options.clock) : Now),
        counts(std::move(options.counts)),
        pass_lengths(std::move(options.pass_lengths)) {
    if (options.segment) {
      segment = *options.segment;
    } else {
      segment.steps_per_epoch = own_steps;
    }
    for (int64_t number = 0; number < size; ++number) {
      ranks.push_back(std::make_unique<Rank>());
      ranks.back()->number = number;
    }
    for (auto& [number, trained] : options.left) {
      Rank* rank = RankOf(number);
      if (rank == nullptr) continue;
      rank->left = true;
      rank->trained = std::move(trained);
      Come(rank);
    }
  }

  // ---- Fixed ----

  const int64_t size;
  const int64_t prefetch;
  const int64_t ready_bytes;
  const int64_t max_bytes;
  const std::optional<int64_t> own_steps;
  const double start_timeout;
  const double rank_timeout;
  const double cut_grace;
  const int64_t cardinality;
  const double poll_seconds;
  const bool holds_ends;
  const std::function<double()> clock;
  std::vector<std::unique_ptr<Rank>> ranks;  // by number, also who has not come

  // ---- Guarded by the mutex ----

  std::mutex mutex;
  Bed pump_bed;
  Bed news_bed;
  mutable Bed drained_bed;
  std::atomic<int64_t> pump_wakes{0};
  std::vector<Rank*> came;  // in the order in which they came
  int64_t away = 0;  // at most so many are not connected, those that left too
  std::optional<double> first_came;
  Segment segment;
  std::deque<Step> steps;  // in order of their positions
  int64_t bytes = 0;
  std::optional<Position> head;
  std::vector<ElementPtr> partial;
  std::map<int64_t, int64_t> ends;
  std::multiset<int64_t> held_ends;  // that are not reported yet
  // What an epoch dropped, until all have trained it: with another number of
  // ranks it is not dropped.
  std::map<int64_t, std::vector<ElementPtr>> remainders;
  std::map<int64_t, Cut> cuts;
  std::map<int64_t, Cut> lefts;
  std::map<int64_t, EpochCount> counts;
  std::map<int64_t, int64_t> pass_lengths;
  std::optional<Failure> failure;
  int64_t generation = 0;
  bool seek_pending = false;
  std::optional<double> working_since;
  std::map<int64_t, Binding> bindings;
  bool stopped = false;
  bool warned_room = false;
  bool said_dropped = false;
  std::vector<News> news;

  // ---- What is to be done when the mutex is free again ----

  struct Chores {
    std::vector<Bed*> wake;
    std::vector<std::vector<ElementPtr>> garbage;

    bool Any() const { return !wake.empty() || !garbage.empty(); }
  };
  Chores chores;

  // Holds the mutex. Does the chores when it lets go of it.
  class Locked {
   public:
    explicit Locked(State* state) : state_(state), lock_(Lock(state)) {}
    ~Locked() { LetGo(); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

    // Waits for a notification; for `seconds` at most, and no longer than until
    // the next look at the timeouts is due. May return early, so what is waited
    // for has to be looked at again. Whether it has waited at all.
    bool Wait(Bed* bed, double seconds, bool gathers = false) {
      if (state_->chores.Any()) {
        LetGo();
        lock_ = Lock(state_);
        return false;
      }
      seconds = std::min({seconds, state_->poll_seconds, kLongestWait});
      if (gathers) seconds = std::min(seconds, kGatherSeconds);
      bed->sleep = std::max(bed->sleep, gathers ? Bed::kShallow : Bed::kDeep);
      ++bed->sleepers;
      bed->woken.wait_for(lock_, std::chrono::duration<double>(seconds));
      --bed->sleepers;
      // If there are others they count as sleeping deeply: at worst they are
      // woken for nothing.
      bed->sleep = bed->sleepers > 0 ? Bed::kDeep : Bed::kNone;
      return true;
    }

   private:
    static std::unique_lock<std::mutex> Lock(State* state) {
      // It is held for less time than it takes to go to sleep.
      for (int i = 0; i < kSpins; ++i) {
        std::unique_lock<std::mutex> lock(state->mutex, std::try_to_lock);
        if (lock) return lock;
        Pause();
      }
      return std::unique_lock<std::mutex>(state->mutex);
    }
    static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    void LetGo() {
      Chores chores;
      std::swap(chores, state_->chores);
      lock_.unlock();
      for (Bed* bed : chores.wake) bed->woken.notify_all();
    }

    State* state_;
    std::unique_lock<std::mutex> lock_;
  };

  void Wake(Bed* bed) {
    if (bed->sleep == Bed::kNone) return;
    bed->sleep = Bed::kNone;
    chores.wake.push_back(bed);
  }
  void WakePump() {
    Wake(&pump_bed);
    Wake(&drained_bed);
  }
  void WakeRanks() {
    for (const auto& rank : ranks) Wake(&rank->bed);
  }
  void WakeRank(Rank* rank) { Wake(&rank->bed); }

  // Wakes the pump if there is something for it to produce now, and if it
  // sleeps for a moment only: if there is room for much.
  void WakePumpForRoom() {
    if (pump_bed.sleep == Bed::kNone || !MayProduce()) return;
    if (pump_bed.sleep == Bed::kDeep ||
        2 * StepsFrom(Furthest()) <= StepsToKeepReady())
      Wake(&pump_bed);
  }
  // Wakes a rank if there is something for it now, and if it sleeps for a
  // moment only: if there is `much`.
  void WakeRankForItem(Rank* rank, bool any) {
    if (rank->bed.sleep == Bed::kNone || !HasItem(*rank)) return;
    if (any || rank->bed.sleep == Bed::kDeep || HasMuch(*rank))
      Wake(&rank->bed);
  }
  void WakeRanksForItems(bool any = false) {
    for (Rank* rank : came) WakeRankForItem(rank, any);
  }

  void Tell(News item) {
    news.push_back(std::move(item));
    Wake(&news_bed);
  }
  void Log(std::string text) {
    News item;
    item.kind = News::Kind::kLog;
    item.text = std::move(text);
    Tell(std::move(item));
  }
  void TellEpochEnded(int64_t epoch, const EpochCount& count) {
    News item;
    item.kind = News::Kind::kEpochEnded;
    item.number = epoch;
    item.count = count;
    if (holds_ends) held_ends.insert(epoch);
    Tell(std::move(item));
  }

  // ---- Who is there ----

  Rank* RankOf(int64_t number) const {
    if (number < 0 || number >= size) return nullptr;
    return ranks[static_cast<size_t>(number)].get();
  }
  // One that has come; null if it has not.
  Rank* Present(int64_t number) const {
    Rank* rank = RankOf(number);
    return rank != nullptr && rank->came ? rank : nullptr;
  }
  void Come(Rank* rank) {
    rank->came = true;
    came.push_back(rank);
  }
  bool AllCame() const { return static_cast<int64_t>(came.size()) == size; }
  bool Drained() const {
    return AllCame() && std::all_of(came.begin(), came.end(),
                                    [](const Rank* r) { return r->left; });
  }
  std::vector<int64_t> Missing() const {
    std::vector<int64_t> missing;
    for (const auto& rank : ranks)
      if (!rank->came) missing.push_back(rank->number);
    return missing;
  }
  // The smallest of what `get` returns for the ranks that have not left.
  template <typename Get>
  std::optional<Position> Least(Get get) const {
    std::optional<Position> least;
    for (const Rank* rank : came)
      if (!rank->left && (!least || get(*rank) < *least)) least = get(*rank);
    return least;
  }
  std::optional<Position> LeastAcknowledged() const {
    return Least(
        [](const Rank& r) -> const Position& { return r.acknowledged; });
  }

  void CheckRanks() {
    if (failure || (AllCame() && away == 0)) return;
    const double now = clock();
    if (first_came && now - *first_came >= start_timeout && !AllCame()) {
      std::vector<int64_t> present;
      for (const auto& rank : ranks)
        if (rank->came) present.push_back(rank->number);
      Fail(FailureKind::kRanks,
           RankNames(Missing()) + " of " + std::to_string(size) +
               " did not come within " + Formatted("%g", start_timeout) +
               " s (present: " + RankNames(present) +
               "). All ranks must use it, and build the same feeders");
    }
    for (const Rank* rank : came) {
      if (rank->connected || rank->left || now - rank->since < rank_timeout)
        continue;
      Fail(FailureKind::kRanks, "rank " + std::to_string(rank->number) +
                                    " is gone: its connection broke " +
                                    Formatted("%g", rank_timeout) +
                                    " s ago at " + rank->pulled.ToString());
    }
  }

  // ---- Steps ----

  // The steps from a position on.
  std::deque<Step>::const_iterator From(const Position& position) const {
    if (steps.empty() || position > steps.back().position) return steps.end();
    // As a rule they follow each other without a gap.
    const Position& first = steps.front().position;
    const int64_t index = position.step - first.step;
    if (position.epoch == first.epoch && index >= 0 &&
        index < static_cast<int64_t>(steps.size()) &&
        steps[static_cast<size_t>(index)].position == position)
      return steps.begin() + index;
    return std::lower_bound(
        steps.begin(), steps.end(), position,
        [](const Step& step, const Position& p) { return step.position < p; });
  }
  int64_t StepsFrom(const Position& position) const {
    return steps.end() - From(position);
  }
  const Step* StepAt(const Position& position) const {
    const auto found = From(position);
    return found != steps.end() && found->position == position ? &*found
                                                               : nullptr;
  }
  void DropStep(Step* step) {
    bytes -= step->size;
    chores.garbage.push_back(std::move(step->elements));
  }
  void DropFirst() {
    DropStep(&steps.front());
    steps.pop_front();
  }
  void DropRemainder(std::map<int64_t, std::vector<ElementPtr>>::iterator at) {
    if (!at->second.empty()) chores.garbage.push_back(std::move(at->second));
    remainders.erase(at);
  }
  void DropPartial() {
    if (!partial.empty()) chores.garbage.push_back(std::move(partial));
    partial.clear();
  }

  // Forgets what every rank has trained.
  void Trim() {
    if (!AllCame()) return;
    const std::optional<Position> trained = LeastAcknowledged();
    while (!steps.empty() && (!trained || steps.front().position < *trained))
      DropFirst();
    while (!remainders.empty() &&
           (!trained || remainders.begin()->first < trained->epoch))
      DropRemainder(remainders.begin());
  }

  // The first step for who reads from `position` on, behind ends that are
  // known; nothing if an end is all that he gets.
  std::optional<Position> FirstStepFor(Position position,
                                       bool through_epochs) const {
    for (auto end = Find(ends, position.epoch); end && position.step >= *end;
         end = Find(ends, position.epoch)) {
      if (!through_epochs) return std::nullopt;
      position = {position.epoch + 1, 0};
    }
    return position;
  }

  // ---- What the pump is to do ----

  std::optional<Work> NextWork(const std::function<bool()>& interrupted) {
    if (stopped || Drained()) return Work(Stop{});
    CheckRanks();
    if (!head) StartWhereRanksAre();
    if (seek_pending && *head < segment.Start()) {
      Fail(FailureKind::kProducer,
           "the producer is broken: it is to go to " + head->ToString() +
               ", which lies before " + SegmentText(segment));
    } else if (seek_pending) {
      seek_pending = false;
      const Place place = segment.Locate(*head, size);
      working_since = clock();
      return Work(Seek{generation, place.first, place.second,
                       segment.steps_per_epoch.has_value()});
    }
    if (interrupted && interrupted()) return Work(Pause{});
    if (MayProduce()) {
      working_since = clock();
      return Work(Produce{generation, static_cast<int64_t>(partial.size())});
    }
    working_since.reset();
    return std::nullopt;
  }

  void StartWhereRanksAre() {
    if (!AllCame() || failure) return;
    std::optional<Position> start;
    for (const Rank* rank : came)
      if (rank->reader && !rank->left && (!start || rank->next < *start))
        start = rank->next;
    if (!start) return;
    if (*start < segment.Start()) {
      Fail(FailureKind::kRanks,
           "the producer died while ranks began a fit: one asks for " +
               start->ToString() +
               ", which lies before it and can't be produced again");
    } else {
      GoTo(*start);
    }
  }

  // Lets the pump produce from `position` on. Steps before it stay, for ranks
  // that have yet to get them.
  void GoTo(const Position& position) {
    while (!steps.empty() && steps.back().position >= position) {
      DropStep(&steps.back());
      steps.pop_back();
    }
    head = position;
    DropPartial();
    ++generation;
    seek_pending = true;
    WakePump();
  }

  bool MayProduce() {
    if (!head || failure) return false;
    if (!partial.empty()) return true;
    bool readers = false;
    int64_t last_epoch = kNoLastEpoch;
    int64_t current = 0;
    Position furthest;
    for (const Rank* rank : came) {
      if (rank->left) continue;
      last_epoch = std::max(last_epoch, rank->last_epoch);
      if (!rank->reader) continue;
      const int64_t epoch = rank->next.epoch - (rank->at_end ? 1 : 0);
      current = readers ? std::max(current, epoch) : epoch;
      furthest = readers ? std::max(furthest, rank->next) : rank->next;
      readers = true;
    }
    if (!readers) return false;
    const bool beyond_fit =
        last_epoch > kNoLastEpoch && last_epoch <= head->epoch;
    for (const Rank* rank : came) {
      if (!rank->left && rank->reader && !rank->at_end && rank->next >= *head &&
          (rank->waiting || !beyond_fit))
        return HasRoom();
    }
    if (beyond_fit) return false;
    if (head->epoch > current) {
      if (head->epoch > current + 1) return false;
      if (last_epoch == kNoLastEpoch && head->step >= kFreeStepsAhead)
        return false;
    }
    return StepsFrom(furthest) < StepsToKeepReady() && HasRoom();
  }

  int64_t StepsToKeepReady() const {
    if (steps.empty()) return prefetch;
    const int64_t small = ready_bytes / std::max<int64_t>(steps.back().size, 1);
    return std::max(prefetch, std::min(small, kMaxSmallSteps));
  }

  // What the rank that is furthest wants next.
  Position Furthest() const {
    Position furthest;
    for (const Rank* rank : came)
      if (!rank->left && rank->reader)
        furthest = std::max(furthest, rank->next);
    return furthest;
  }

  // Makes room where that is possible: steps that all ranks were sent may go.
  bool HasRoom() {
    const int64_t expected = steps.empty() ? 0 : steps.back().size;
    const Position delivered = Least([](const Rank& r) -> const Position& {
                                 return r.next;
                               }).value_or(Position{});
    while (!steps.empty() && bytes + expected > max_bytes &&
           steps.front().position < delivered)
      DropFirst();
    if (bytes + expected <= max_bytes) return true;
    if (StepsFrom(delivered) >= kMinRoomSteps) return false;
    if (!warned_room) {
      warned_room = true;
      Log("max_buffer_bytes=" + std::to_string(max_bytes) +
          " holds less than two steps of " + std::to_string(expected) +
          " bytes each; room for two steps is kept all the same");
    }
    return true;
  }

  // ---- Epochs ----

  void NotePassLength(int64_t pass, int64_t elements) {
    pass_lengths[pass] = elements;
    News item;
    item.kind = News::Kind::kPassEnded;
    item.number = pass;
    item.count.elements = elements;
    Tell(std::move(item));
  }

  int64_t FirstStep(int64_t epoch) const {
    return epoch == segment.first_epoch ? segment.first_step : 0;
  }

  void EndEpoch() {
    const int64_t epoch = head->epoch;
    const int64_t dropped = static_cast<int64_t>(partial.size());
    EpochCount& count = counts[epoch];
    count.steps = head->step - FirstStep(epoch);
    count.dropped = dropped;
    // This producer need not have made them all, nor any of them.
    count.elements = count.steps * size + dropped;
    count.complete = true;
    if (dropped && !said_dropped) {
      said_dropped = true;
      Log("epoch " + std::to_string(epoch) + " drops " +
          Counted(dropped, "element") + " of " +
          std::to_string(count.elements) +
          (count.steps ? "" : ", all that there are") +
          ": no complete step for " + std::to_string(size) +
          " ranks (statistics() counts what is dropped; this is said once)");
    }
    const auto earlier = remainders.find(epoch);
    if (earlier != remainders.end()) DropRemainder(earlier);
    remainders[epoch] = std::move(partial);
    partial.clear();
    ends[epoch] = head->step;
    cuts.erase(epoch);
    TellEpochEnded(epoch, count);
    head = Position{epoch + 1, 0};
  }

  // Ends an epoch where a `fit` broke off and the next one starts an epoch of
  // its own.
  void CloseEpoch(const Position& position) {
    EpochCount& count = counts[position.epoch];
    count.steps = position.step - FirstStep(position.epoch);
    count.dropped = 0;
    count.elements = count.steps * size;
    count.complete = true;
    ends[position.epoch] = position.step;
    const auto remainder = remainders.find(position.epoch);
    if (remainder != remainders.end()) DropRemainder(remainder);
    TellEpochEnded(position.epoch, count);
  }

  // Forgets what was known of epochs from `first` on: they get other elements
  // now.
  void ForgetEpochs(int64_t first) {
    counts.erase(counts.lower_bound(first), counts.end());
    ends.erase(ends.lower_bound(first), ends.end());
    cuts.erase(cuts.lower_bound(first), cuts.end());
    for (auto at = remainders.lower_bound(first); at != remainders.end();
         at = remainders.lower_bound(first))
      DropRemainder(at);
  }

  std::pair<Segment, Position> Resolve(
      const Position& position, const std::optional<int64_t>& fit_steps) const {
    if (position < segment.Start()) return {segment, segment.Start()};
    const std::optional<int64_t> steps_per_epoch =
        fit_steps ? fit_steps : own_steps;
    // A fit that was restored inside an epoch ends that epoch; one that follows
    // another begins one of its own.
    const bool realign =
        fit_steps && position.step > 0 && position != segment.Start();
    if (steps_per_epoch == segment.steps_per_epoch && !realign)
      return {segment, position};
    const Position start =
        position.step == 0 ? position : Position{position.epoch + 1, 0};
    const Place place = *Locate(position);
    return {Segment{start.epoch, place.first, place.second, steps_per_epoch, 0},
            start};
  }

  std::optional<Place> Locate(const Position& position) const {
    if (position < segment.Start()) return std::nullopt;
    auto [pass, element] = segment.Locate(position, size);
    const int64_t claimed = cardinality > 0 ? cardinality : element + 1;
    const int64_t last_known =
        pass_lengths.empty() ? -1 : pass_lengths.rbegin()->first;
    while (element > 0) {
      if (pass > last_known) {
        pass += element / claimed;
        element %= claimed;
        break;
      }
      const int64_t length = Find(pass_lengths, pass).value_or(claimed);
      if (element < length) break;
      element -= length;
      ++pass;
    }
    return Place{pass, element};
  }

  // ---- Failures ----

  void Fail(FailureKind kind, std::string message,
            std::optional<Position> position = std::nullopt) {
    if (failure) return;
    failure = Failure{kind, std::move(message), position};
    WakeRanks();
  }

  // Fails if another rank has trained all of the epoch that this one left: they
  // are no longer in step.
  void CheckLeft(const Rank& rank, const Position& left,
                 const Position& went_to) {
    const Cut& cut = lefts.emplace(left.epoch, Cut{rank.number, left, went_to})
                         .first->second;
    for (const Rank* other : came)
      if (other->finished >= left.epoch &&
          !other->left_epochs.count(left.epoch))
        Compare(cut, other->number);
  }

  // A rank has pulled all of an epoch; what was sent to it does not count, as
  // it may not have been wanted.
  void NoteFinished(Rank* rank, int64_t epoch) {
    rank->finished = std::max(rank->finished, epoch);
    const auto left = lefts.find(epoch);
    if (left != lefts.end() && !rank->left_epochs.count(epoch))
      Compare(left->second, rank->number);
  }

  void Compare(const Cut& cut, int64_t finished) {
    const int64_t epoch = cut.left_at.epoch;
    const auto end = Find(ends, epoch);
    if (finished != cut.rank && end && cut.left_at.step < *end)
      FailApart(cut, finished,
                "finished epoch " + std::to_string(epoch) + ", of " +
                    Counted(*end, "step"));
  }

  void FailApart(const Cut& cut, int64_t rank, const std::string& what) {
    Fail(FailureKind::kRanks,
         "the ranks iterate over different epochs: rank " +
             std::to_string(cut.rank) + " left epoch " +
             std::to_string(cut.left_at.epoch) + " at step " +
             std::to_string(cut.left_at.step) + " and went on to " +
             cut.went_to.ToString() + ", but rank " + std::to_string(rank) +
             " " + what +
             ". All ranks must leave an epoch at the same step, and pull the "
             "same number of iterators");
  }

  void CheckCut(Rank* rank) {
    if (!rank->waiting || (head && *head <= rank->next)) return;
    const auto cut = cuts.find(rank->next.epoch);
    if (cut == cuts.end()) return;
    const double now = clock();
    if (!rank->stuck_since) rank->stuck_since = now;
    if (now - *rank->stuck_since >= cut_grace)
      FailApart(cut->second, rank->number,
                "still asks for " + rank->next.ToString());
  }

  // ---- What a rank gets ----

  std::optional<Item> Take(Rank* rank) {
    // A failure is told once for each read: a rank that knows of it gets
    // nothing more until it asks again.
    if (rank->told_failure) return std::nullopt;
    if (failure) {
      const std::optional<Position>& position = failure->position;
      if (!position ||
          (rank->reader && !rank->at_end && rank->next >= *position)) {
        rank->told_failure = true;
        return Item(*failure);
      }
    }
    if (!rank->reader || rank->at_end || !head || !AllCame())
      return std::nullopt;
    const Position position = rank->next;
    const auto end = Find(ends, position.epoch);
    if (end && position.step >= *end) {
      if (held_ends.count(position.epoch)) return std::nullopt;
      rank->next = Position{position.epoch + 1, 0};
      rank->at_end = !rank->through_epochs;
      return Item(EpochEnd{*rank->reader, position.epoch, *end});
    }
    const Step* step = StepAt(position);
    if (step == nullptr) {
      CheckCut(rank);
      return std::nullopt;
    }
    const ElementPtr& element =
        step->elements[static_cast<size_t>(rank->number)];
    if (!rank->HasCredit(element->size)) return std::nullopt;
    rank->inflight.emplace_back(position, element->size);
    rank->inflight_bytes += element->size;
    rank->next = position.Next();
    rank->stuck_since.reset();
    rank->waiting = false;
    return Item(Delivery{*rank->reader, position, element});
  }

  // Whether Take would return something, but for what only timeouts bring.
  bool HasItem(const Rank& rank) const {
    if (rank.told_failure) return false;
    if (failure) return true;
    if (!rank.reader || rank.at_end || !head || !AllCame()) return false;
    const auto end = Find(ends, rank.next.epoch);
    if (end && rank.next.step >= *end) return !held_ends.count(rank.next.epoch);
    const Step* step = StepAt(rank.next);
    return step != nullptr &&
           rank.HasCredit(
               step->elements[static_cast<size_t>(rank.number)]->size);
  }

  // Of one that has an item: whether it is worth to be woken early for.
  bool HasMuch(const Rank& rank) const {
    if (!AreLight()) return true;
    const int64_t here = StepsFrom(rank.next);
    return 2 * here >= StepsToKeepReady() || head->epoch != rank.next.epoch;
  }

  // Whether it is worth to let elements gather, as far as the last step says.
  bool AreLight() const { return !steps.empty() && steps.back().light; }

  std::optional<Item> NextItem(Rank* rank) {
    CheckRanks();
    std::optional<Item> item = Take(rank);
    if (item) WakePumpForRoom();
    return item;
  }
};

Window::Window(WindowOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

Window::~Window() = default;

// ---- The pump's side ----

Work Window::WaitForWork(const std::function<bool()>& interrupted) {
  while (true) {
    std::optional<Work> work = TryWork(interrupted, kForever);
    if (work) return *work;
  }
}

std::optional<Work> Window::TryWork(const std::function<bool()>& interrupted,
                                    double seconds,
                                    std::optional<int64_t> wakes) {
  const WaitDeadline deadline(seconds);
  State& s = *state_;
  State::Locked locked(&s);
  bool gathers = s.AreLight();
  while (true) {
    std::optional<Work> work = s.NextWork(interrupted);
    if (work) return work;
    const double left = deadline.Left();
    if (left <= 0 || (wakes && s.pump_wakes != *wakes)) return std::nullopt;
    // Nothing more comes for now.
    s.WakeRanksForItems(/*any=*/true);
    if (locked.Wait(&s.pump_bed, left, gathers)) gathers = false;
  }
}

void Window::WakePump() {
  State::Locked locked(state_.get());
  ++state_->pump_wakes;
  state_->WakePump();
}

int64_t Window::PumpWakes() const { return state_->pump_wakes; }

std::optional<std::vector<ElementPtr>> Window::Untrained(
    Position position) const {
  State& s = *state_;
  State::Locked locked(&s);
  if (!s.head || s.seek_pending || position > *s.head) return std::nullopt;
  std::vector<ElementPtr> elements;
  auto step = s.From(position);
  while (position < *s.head) {
    const std::vector<ElementPtr>* more = nullptr;
    if (position.step == Find(s.ends, position.epoch)) {
      const auto remainder = s.remainders.find(position.epoch);
      if (remainder == s.remainders.end()) return std::nullopt;
      more = &remainder->second;
      position = Position{position.epoch + 1, 0};
      step = s.From(position);
    } else if (step != s.steps.end() && step->position == position) {
      more = &step->elements;
      position = position.Next();
      ++step;
    } else {
      return std::nullopt;
    }
    elements.insert(elements.end(), more->begin(), more->end());
  }
  elements.insert(elements.end(), s.partial.begin(), s.partial.end());
  return elements;
}

void Window::Put(int64_t generation, ElementPtr element) {
  State& s = *state_;
  State::Locked locked(&s);
  if (generation != s.generation || !s.head || !element) return;
  const int64_t epoch = s.head->epoch;
  EpochCount& count = s.counts[epoch];
  if (s.partial.empty()) s.partial.reserve(static_cast<size_t>(s.size));
  s.partial.push_back(std::move(element));
  const int64_t produced = s.head->step - s.FirstStep(epoch);
  const int64_t in_step = static_cast<int64_t>(s.partial.size());
  count.elements = std::max(count.elements, produced * s.size + in_step);
  if (in_step < s.size) return;
  Step step{*s.head, std::move(s.partial), 0, false};
  s.partial.clear();
  step.light = std::all_of(step.elements.begin(), step.elements.end(), IsLight);
  for (const ElementPtr& e : step.elements) step.size += e->size;
  s.bytes += step.size;
  s.steps.push_back(std::move(step));
  s.head = s.head->Next();
  count.steps = std::max(count.steps, produced + 1);
  if (s.head->step == s.segment.steps_per_epoch) s.EndEpoch();
  s.Trim();
  s.WakeRanksForItems();
}

void Window::EndPass(int64_t generation, int64_t pass, int64_t elements) {
  State& s = *state_;
  State::Locked locked(&s);
  s.NotePassLength(pass, elements);
  if (generation != s.generation || !s.head) return;
  if (!s.segment.steps_per_epoch) {
    s.EndEpoch();
  } else if (elements == 0) {
    s.Fail(FailureKind::kProducer,
           "the dataset is empty: it can't fill an epoch of " +
               std::to_string(*s.segment.steps_per_epoch) + " steps");
  }
  s.WakeRanks();
}

void Window::NotePassLength(int64_t pass, int64_t elements) {
  State::Locked locked(state_.get());
  state_->NotePassLength(pass, elements);
}

std::optional<int64_t> Window::PassLength(int64_t pass) const {
  State::Locked locked(state_.get());
  return Find(state_->pass_lengths, pass);
}

void Window::Fail(int64_t generation, const std::string& message,
                  FailureKind kind) {
  State::Locked locked(state_.get());
  if (generation == state_->generation)
    state_->Fail(kind, message, state_->head);
}

int64_t Window::FirstPass() const {
  State& s = *state_;
  State::Locked locked(&s);
  if (!s.AllCame()) return 0;
  const Position start = s.segment.Start();
  return s.Locate(std::max(s.LeastAcknowledged().value_or(start), start))
      ->first;
}

// ---- The ranks' side ----

std::optional<BindError> Window::Attend(int64_t rank, Position acknowledged,
                                        const std::optional<Segment>& segment) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* known = s.RankOf(rank);
  if (known == nullptr)
    return BindError{"rank " + std::to_string(rank) + " is none of " +
                     std::to_string(s.size) + " ranks"};
  if (segment && *segment != s.segment) {
    if (!s.came.empty() && segment->first_epoch == s.segment.first_epoch)
      return BindError{"rank " + std::to_string(rank) + " goes on from " +
                       SegmentText(*segment) + ", but another rank from " +
                       SegmentText(s.segment)};
    if (segment->first_epoch >= s.segment.first_epoch) s.segment = *segment;
  }
  if (!known->came) {
    s.Come(known);
    if (s.AllCame()) {
      News item;
      item.kind = News::Kind::kComplete;
      s.Tell(std::move(item));
    }
  }
  if (!known->connected) --s.away;
  known->connected = true;
  known->left = false;
  known->since = s.clock();
  known->reader.reset();
  known->told_failure = false;
  known->acknowledged = std::max(known->acknowledged, acknowledged);
  known->pulled = std::max(known->pulled, acknowledged);
  known->next = std::max(known->next, acknowledged);
  if (!s.first_came) s.first_came = s.clock();
  s.WakePump();
  return std::nullopt;
}

void Window::Read(int64_t rank, const ReadRequest& request) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.Present(rank);
  if (r == nullptr) return;
  const Position& position = request.position;
  // It needs not have pulled the end of an epoch whose length it knows.
  if (!request.left && r->direct && position.epoch > r->began)
    s.NoteFinished(r, r->began);
  r->last_epoch = request.last_epoch;
  r->direct = request.direct;
  r->began = position.epoch;
  if (request.left && request.direct) {
    r->left_epochs.insert(request.left->epoch);
    s.CheckLeft(*r, *request.left, position);
  }
  r->reader = request.reader;
  r->next = r->pulled = position;
  r->told_failure = false;
  r->through_epochs = request.through_epochs;
  r->at_end = r->waiting = false;
  r->credit_steps = request.credit_steps;
  r->credit_bytes = request.credit_bytes;
  r->free_bytes = request.free_bytes;
  r->inflight.clear();
  r->inflight_bytes = 0;
  r->stuck_since.reset();
  if (s.head) {
    if (request.left && position.epoch > s.head->epoch) {
      for (int64_t epoch = s.head->epoch; epoch < position.epoch; ++epoch)
        s.cuts[epoch] = Cut{rank, *request.left, position};
      s.GoTo(position);
    }
    const auto first = s.FirstStepFor(position, request.through_epochs);
    if (first && *first < *s.head && s.StepAt(*first) == nullptr) {
      if (*first >= s.segment.Start()) {
        s.GoTo(*first);
      } else {
        s.Fail(FailureKind::kRanks,
               "rank " + std::to_string(rank) + " asks again for " +
                   position.ToString() +
                   ", which lies before the present fit and is no longer in "
                   "memory");
      }
    }
  }
  s.WakePump();
  s.WakeRank(r);
}

void Window::Progress(int64_t rank, int64_t reader, Position pulled,
                      Position acknowledged,
                      const std::map<int64_t, int64_t>& trained, bool waiting) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.Present(rank);
  if (r == nullptr) return;
  if (r->reader == reader) {
    r->pulled = std::max(r->pulled, pulled);
    while (!r->inflight.empty() && r->inflight.front().first < pulled) {
      r->inflight_bytes -= r->inflight.front().second;
      r->inflight.pop_front();
    }
    r->waiting = waiting && r->inflight.empty();
    if (r->direct) {
      const auto end = Find(s.ends, r->began);
      if (end && r->pulled >= Position{r->began, *end})
        s.NoteFinished(r, r->began);
    }
  }
  r->acknowledged = std::max(r->acknowledged, acknowledged);
  for (const auto& [epoch, steps] : trained) r->trained[epoch] = steps;
  s.Trim();
  s.WakePumpForRoom();
  s.WakeRankForItem(r, /*any=*/r->waiting);
}

std::variant<std::pair<Segment, Position>, BindError> Window::Bind(
    int64_t rank, int64_t binding, Position position,
    std::optional<int64_t> steps_per_epoch) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.Present(rank);
  if (r == nullptr || (steps_per_epoch && *steps_per_epoch < 1))
    return BindError{"rank " + std::to_string(rank) +
                     " can't begin a fit with steps_per_epoch=" +
                     StepsText(steps_per_epoch) +
                     (r == nullptr ? ": it has not come" : "")};
  r->reader.reset();
  auto settled = s.bindings.find(binding);
  if (settled == s.bindings.end()) {
    const auto [segment, start] = s.Resolve(position, steps_per_epoch);
    if (segment != s.segment) {
      if (start.epoch > position.epoch) s.CloseEpoch(position);
      s.segment = segment;
      s.ForgetEpochs(start.epoch);
      s.WakeRanks();
      if (s.head) s.GoTo(start);
    }
    settled = s.bindings
                  .emplace(binding,
                           Binding{position, steps_per_epoch, segment, start})
                  .first;
  }
  const Binding& bound = settled->second;
  if (position != bound.position || steps_per_epoch != bound.steps_per_epoch)
    return BindError{"rank " + std::to_string(rank) + " begins its fit at " +
                     position.ToString() + " with steps_per_epoch=" +
                     StepsText(steps_per_epoch) + ", but another rank at " +
                     bound.position.ToString() + " with steps_per_epoch=" +
                     StepsText(bound.steps_per_epoch)};
  r->acknowledged = std::max(r->acknowledged, bound.start);
  s.WakePump();
  return std::make_pair(bound.segment, bound.start);
}

std::optional<Place> Window::Locate(Position position) const {
  State::Locked locked(state_.get());
  return state_->Locate(position);
}

void Window::Leave(int64_t rank, const std::string& error) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.Present(rank);
  if (r == nullptr) return;
  r->left = true;
  if (!error.empty()) {
    s.Fail(FailureKind::kRanks,
           "rank " + std::to_string(rank) + " left with an error: " + error);
  } else {
    News item;
    item.kind = News::Kind::kRankLeft;
    item.number = rank;
    item.trained = r->trained;
    s.Tell(std::move(item));
  }
  s.Trim();
  s.WakePump();
}

void Window::Disconnected(int64_t rank) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.Present(rank);
  if (r == nullptr) return;
  if (r->connected) ++s.away;
  r->connected = false;
  r->reader.reset();
  r->since = s.clock();
  s.WakePump();
}

std::optional<Item> Window::WaitForItem(
    int64_t rank, const std::function<bool()>& interrupted) {
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.RankOf(rank);
  bool gathers = s.AreLight();
  while (r != nullptr && !(interrupted && interrupted())) {
    std::optional<Item> item = s.NextItem(r);
    if (item) return item;
    if (locked.Wait(&r->bed, kForever, gathers)) gathers = false;
  }
  return std::nullopt;
}

std::optional<Item> Window::TryItem(int64_t rank, double seconds,
                                    std::optional<int64_t> wakes) {
  const WaitDeadline deadline(seconds);
  State& s = *state_;
  State::Locked locked(&s);
  Rank* r = s.RankOf(rank);
  if (r == nullptr) return std::nullopt;
  while (true) {
    std::optional<Item> item = s.NextItem(r);
    if (item) return item;
    const double left = deadline.Left();
    if (left <= 0 || (wakes && r->wakes != *wakes)) return std::nullopt;
    locked.Wait(&r->bed, left);
  }
}

void Window::Wake(int64_t rank) {
  State::Locked locked(state_.get());
  Rank* r = state_->RankOf(rank);
  if (r == nullptr) return;
  ++r->wakes;
  state_->WakeRank(r);
}

int64_t Window::Wakes(int64_t rank) const {
  State::Locked locked(state_.get());
  const Rank* r = state_->RankOf(rank);
  return r == nullptr ? 0 : r->wakes;
}

std::optional<Failure> Window::Broken() {
  State::Locked locked(state_.get());
  state_->CheckRanks();
  const auto& failure = state_->failure;
  return failure && !failure->position ? failure : std::nullopt;
}

// ---- Life and news ----

void Window::Refuse(const std::string& message) {
  State::Locked locked(state_.get());
  state_->Fail(FailureKind::kRanks, message);
}

void Window::Abandon(const std::string& message) {
  State::Locked locked(state_.get());
  state_->Fail(FailureKind::kProducer, message);
}

void Window::StopPump() {
  State::Locked locked(state_.get());
  state_->stopped = true;
  state_->WakePump();
}

bool Window::Drained() const {
  State::Locked locked(state_.get());
  return state_->Drained();
}

bool Window::WaitUntilDrained(double seconds) const {
  const WaitDeadline deadline(seconds);
  State::Locked locked(state_.get());
  while (!state_->Drained()) {
    const double left = deadline.Left();
    if (left <= 0) return false;
    locked.Wait(&state_->drained_bed, left);
  }
  return true;
}

int64_t Window::size() const { return state_->size; }

Segment Window::segment() const {
  State::Locked locked(state_.get());
  return state_->segment;
}

Position Window::Furthest() const {
  State::Locked locked(state_.get());
  return state_->head.value_or(Position{});
}

std::string Window::WaitingFor(int64_t rank) const {
  State& s = *state_;
  State::Locked locked(&s);
  if (!s.AllCame()) return RankNames(s.Missing()) + " to use this feed";
  if (s.failure) return "nothing: " + s.failure->message;
  if (s.working_since) {
    return "the pipeline, at work on " + s.head->ToString() + ", element " +
           std::to_string(s.partial.size() + 1) + " of " +
           std::to_string(s.size) + " for " +
           Formatted("%.0f", s.clock() - *s.working_since) + " s";
  }
  const Rank* r = s.Present(rank);
  if (r != nullptr && r->reader && s.StepAt(r->next) != nullptr)
    return "this rank to pull what it was sent";
  if (r != nullptr && s.held_ends.count(r->next.epoch))
    return "the end of epoch " + std::to_string(r->next.epoch) +
           " to be reported to whoever started the producer";
  const Rank* slowest = nullptr;
  for (const Rank* other : s.came)
    if (!other->left && (slowest == nullptr || other->next < slowest->next))
      slowest = other;
  if (slowest == nullptr) slowest = r != nullptr ? r : s.came.front();
  return "rank " + std::to_string(slowest->number) +
         ", which was sent steps before " + slowest->next.ToString() +
         ", and pulled before " + slowest->pulled.ToString() +
         "; the window holds " + std::to_string(s.steps.size()) + " steps of " +
         std::to_string(s.bytes) +
         " bytes (max_buffer_bytes=" + std::to_string(s.max_bytes) + ")";
}

std::vector<Window::Statistics> Window::GetStatistics() const {
  State& s = *state_;
  State::Locked locked(&s);
  std::set<int64_t> epochs;
  for (const auto& [epoch, count] : s.counts) epochs.insert(epoch);
  for (const Rank* rank : s.came)
    for (const auto& [epoch, steps] : rank->trained) epochs.insert(epoch);
  std::vector<Statistics> statistics;
  for (const int64_t epoch : epochs) {
    Statistics of_epoch;
    of_epoch.epoch = epoch;
    const auto count = s.counts.find(epoch);
    if (count != s.counts.end()) of_epoch.count = count->second;
    for (const Rank* rank : s.came)
      of_epoch.trained[rank->number] = Find(rank->trained, epoch).value_or(0);
    statistics.push_back(std::move(of_epoch));
  }
  return statistics;
}

std::vector<News> Window::TakeNews(double seconds) {
  WaitForNews(seconds);
  State::Locked locked(state_.get());
  std::vector<News> taken;
  taken.swap(state_->news);
  return taken;
}

void Window::ReportedEpochEnd(int64_t epoch) {
  State& s = *state_;
  State::Locked locked(&s);
  const auto held = s.held_ends.find(epoch);
  if (held == s.held_ends.end()) return;
  s.held_ends.erase(held);
  s.WakeRanksForItems(/*any=*/true);
}

bool Window::WaitForNews(double seconds) const {
  const WaitDeadline deadline(seconds);
  State::Locked locked(state_.get());
  while (state_->news.empty()) {
    const double left = deadline.Left();
    if (left <= 0) return false;
    locked.Wait(&state_->news_bed, left);
  }
  return true;
}

Window::Held Window::GetHeld() const {
  State& s = *state_;
  State::Locked locked(&s);
  Held held;
  held.bytes = s.bytes;
  held.steps = static_cast<int64_t>(s.steps.size());
  for (const auto& [epoch, elements] : s.remainders)
    held.remainders.push_back(epoch);
  return held;
}

}  // namespace kerasfeed
