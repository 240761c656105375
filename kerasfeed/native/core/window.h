// The window: steps that were produced and may have to be served (again), and
// how far each rank has come. The same behaviour as
// kerasfeed/producer/window.py, which is the reference: the tests of that one
// run against both.
//
// The pump puts elements in, senders take steps out, and ranks report progress;
// nothing here starts a thread or knows a socket.
//
// Room is governed by what was delivered, never by what was acknowledged: a
// rank may pull as far ahead of its training as it likes. Acknowledgement only
// says what will never be asked for again.
#ifndef KERASFEED_NATIVE_CORE_WINDOW_H_
#define KERASFEED_NATIVE_CORE_WINDOW_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "element.h"
#include "position.h"

namespace kerasfeed {

constexpr int64_t kNoLastEpoch = -1;
// However small they are, no more steps than this are ready, or sent ahead of
// what was pulled, because they are small.
constexpr int64_t kMaxSmallSteps = 1024;

enum class FailureKind { kProducer, kMismatch, kRanks };

// Why nothing is delivered from `position` on (from anywhere, if there is
// none).
struct Failure {
  FailureKind kind = FailureKind::kProducer;
  std::string message;
  std::optional<Position> position;
};

// The element that a rank gets in a step.
struct Delivery {
  int64_t reader = 0;
  Position position;
  ElementPtr element;
};

// The answer to a read past the last step of an epoch.
struct EpochEnd {
  int64_t reader = 0;
  int64_t epoch = 0;
  int64_t steps = 0;
};

using Item = std::variant<Delivery, EpochEnd, Failure>;

// Work for the pump: stand at this element of this pass, counting on through
// later passes in a joined stream.
struct Seek {
  int64_t generation = 0;
  int64_t pass = 0;
  int64_t element = 0;
  bool joined = false;
};

// Work for the pump: the next element, which is for this rank.
struct Produce {
  int64_t generation = 0;
  int64_t rank = 0;
};

// Work for the pump: none, but somebody waits for it to stand still.
struct Pause {};

// Work for the pump: none any more.
struct Stop {};

using Work = std::variant<Seek, Produce, Pause, Stop>;

// What was produced of an epoch.
struct EpochCount {
  int64_t elements = 0;
  int64_t steps = 0;
  int64_t dropped = 0;
  bool complete = false;
};

// What happened that others want to know, in order: taken by Window::TakeNews,
// so that no lock is held while they hear.
struct News {
  enum class Kind { kLog, kComplete, kPassEnded, kEpochEnded, kRankLeft };
  Kind kind = Kind::kLog;
  std::string text;    // kLog
  int64_t number = 0;  // the pass, the epoch or the rank
  EpochCount count;    // kEpochEnded; of kPassEnded the elements
  std::map<int64_t, int64_t> trained;  // kRankLeft: steps by epoch
};

// The ranks do not agree on where a `fit` begins.
struct BindError {
  std::string message;
};

struct WindowOptions {
  int64_t size = 1;  // number of ranks
  int64_t prefetch =
      8;  // steps to keep ready ahead of the rank that is furthest
  // More steps are kept ready if they have no more bytes than this together.
  int64_t ready_bytes = 0;
  int64_t max_bytes = int64_t{1}
                      << 30;  // room for two steps is made all the same
  std::optional<int64_t> steps_per_epoch;  // none: an epoch is a pass
  // Where the stream begins; none: with the first element of all.
  std::optional<Segment> segment;
  double start_timeout =
      600;  // seconds for all ranks to come, from the first one on
  double rank_timeout =
      60;  // seconds after which a rank whose connection broke counts as gone
  double cut_grace = 10;  // seconds that a rank may want a step of an epoch
                          // which another has left for a later one
  std::map<int64_t, EpochCount>
      counts;  // of epochs under producers before this one
  std::map<int64_t, int64_t>
      pass_lengths;  // of passes that ended under producers before this one
  int64_t cardinality =
      -2;  // elements in a pass; negative if the dataset does not say
  std::map<int64_t, std::map<int64_t, int64_t>>
      left;  // ranks that left before, with the steps they trained, by epoch
  std::function<double()> clock;  // monotonic seconds; empty: the system's
  double poll_seconds = 0.5;  // how often a wait looks at the timeouts above
  // No rank gets the end of an epoch before ReportedEpochEnd: what is known of
  // the epoch then outlives this process.
  bool holds_ends = false;
};

// All that a rank asks with a read; see Window::Read.
struct ReadRequest {
  int64_t reader = 0;           // the number of this read, counted by the rank
  Position position;            // the first step it wants
  bool through_epochs = false;  // whether it reads on after the epoch's end
  int64_t credit_steps =
      1;  // most steps to send it ahead of what it has pulled
  int64_t credit_bytes = 1;  // most bytes, too; one step is always sent
  int64_t free_bytes = 0;    // steps do not count if they have no more bytes
                             // than this together
  int64_t last_epoch =
      kNoLastEpoch;              // the first epoch that its `fit` will not run
  std::optional<Position> left;  // where it left an epoch before its end, for
                                 // the one that it asks for now
  bool direct = false;  // what it pulls is what its user gets: ranks must leave
                        // epochs at the same step
};

// Safe to be used by any number of threads. One mutex guards it all, and every
// call but Untrained holds it for a time that does not grow with the window:
// steps lie in order of their positions, leave at either end, and are found by
// bisection. What a call leaves behind for others is done when it has let go of
// the mutex: condition variables (one for the pump, one per rank, one for news)
// are notified, and elements that left the window are let go of, so that
// freeing their memory keeps nobody waiting. Nobody is called back, with two
// exceptions: `interrupted` and the clock are called with the mutex held, so
// they must be quick, take no lock, and not call the window (who can't promise
// that uses TryWork and TryItem, and looks himself). News are taken
// instead (TakeNews).
//
// Nothing here throws, but for want of memory. A rank that is none of 0 ..
// size - 1 does not exist: what it says is ignored, and it gets nothing.
class Window {
 public:
  explicit Window(WindowOptions options);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // ---- The pump's side ----

  // Blocks until there is something for the pump to do. `interrupted` is looked
  // at after each WakePump.
  Work WaitForWork(const std::function<bool()>& interrupted = {});
  // As WaitForWork, but blocks for at most `seconds`, and only as long as
  // PumpWakes() is `wakes`, if that is given: for a caller who looks himself
  // whether he is interrupted, without the mutex. Nothing if there is nothing
  // to do now.
  std::optional<Work> TryWork(const std::function<bool()>& interrupted = {},
                              double seconds = 0,
                              std::optional<int64_t> wakes = std::nullopt);
  void WakePump();
  // How often WakePump was called.
  int64_t PumpWakes() const;
  // All elements from a step on up to the one that the pump comes to next;
  // nothing if some are not in memory. For the pump itself, between two
  // elements.
  std::optional<std::vector<ElementPtr>> Untrained(Position position) const;
  // Adds the next element. One that was produced before the window went
  // elsewhere is forgotten.
  void Put(int64_t generation, ElementPtr element);
  void EndPass(int64_t generation, int64_t pass, int64_t elements);
  void NotePassLength(int64_t pass, int64_t elements);
  std::optional<int64_t> PassLength(int64_t pass) const;
  void Fail(int64_t generation, const std::string& message,
            FailureKind kind = FailureKind::kProducer);
  int64_t FirstPass() const;

  // ---- The ranks' side ----

  std::optional<BindError> Attend(int64_t rank, Position acknowledged,
                                  const std::optional<Segment>& segment);
  void Read(int64_t rank, const ReadRequest& request);
  void Progress(int64_t rank, int64_t reader, Position pulled,
                Position acknowledged,
                const std::map<int64_t, int64_t>& trained, bool waiting);
  std::variant<std::pair<Segment, Position>, BindError> Bind(
      int64_t rank, int64_t binding, Position position,
      std::optional<int64_t> steps_per_epoch);
  // (pass, element) of what is trained first at `position`; nothing if that
  // lies before the present segment.
  std::optional<Place> Locate(Position position) const;
  void Leave(int64_t rank, const std::string& error);
  void Disconnected(int64_t rank);
  // Blocks for what `rank` gets next; nothing when `interrupted()`, which is
  // looked at after each Wake.
  std::optional<Item> WaitForItem(int64_t rank,
                                  const std::function<bool()>& interrupted);
  // As WaitForItem, but blocks for at most `seconds`, and only as long as
  // Wakes(rank) is `wakes`, if that is given. Without both: more of what can be
  // sent at once.
  std::optional<Item> TryItem(int64_t rank, double seconds = 0,
                              std::optional<int64_t> wakes = std::nullopt);
  void Wake(int64_t rank);
  // How often Wake was called for this rank.
  int64_t Wakes(int64_t rank) const;

  // The failure after which no rank gets anything any more, wherever it reads;
  // nothing if there is none. Ranks are told by WaitForItem all the same.
  std::optional<Failure> Broken();

  // ---- Life and news ----

  void Refuse(const std::string& message);
  void Abandon(const std::string& message);
  void StopPump();
  // Whether all ranks have come and left.
  bool Drained() const;
  // As Drained, but blocks up to `seconds` for it.
  bool WaitUntilDrained(double seconds) const;
  int64_t size() const;
  Segment segment() const;
  Position Furthest() const;
  std::string WaitingFor(int64_t rank) const;
  struct Statistics {
    int64_t epoch = 0;
    EpochCount count;
    std::map<int64_t, int64_t> trained;  // by rank
  };
  std::vector<Statistics> GetStatistics() const;
  // Takes what has happened since the last call; blocks up to `seconds` for
  // something.
  std::vector<News> TakeNews(double seconds);
  // Others know the counts of an epoch that News said has ended.
  void ReportedEpochEnd(int64_t epoch);
  // As TakeNews, but leaves the news to be taken. Whether there are some.
  bool WaitForNews(double seconds) const;
  // Bytes, steps and epochs with remainders that are held: for tests and
  // figures.
  struct Held {
    int64_t bytes = 0;
    int64_t steps = 0;
    std::vector<int64_t> remainders;
  };
  Held GetHeld() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_WINDOW_H_
