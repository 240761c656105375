// Which elements were produced, by (pass, element), with their digests, in
// memory that outlives the producer. The same file, word by word, and the same
// guarantees as class Journal in kerasfeed/producer/digest.py, which is the
// reference: a feed's next producer may be of the other engine.
//
// The supervisor makes the file and reads the first digests of pass 0 in it
// while a producer writes. Numbers are 8 bytes at multiples of 8. Each write
// first stores what is new, then, by one store of 8 bytes, that it counts: a
// kill at any moment leaves what was noted before it.
#ifndef KERASFEED_NATIVE_CORE_JOURNAL_H_
#define KERASFEED_NATIVE_CORE_JOURNAL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kerasfeed {

// Thread-safe. The pump alone writes, and nobody else opens the file meanwhile;
// others ask what was noted.
class Journal {
 public:
  // So many runs of consecutive elements fit into the file's table.
  static constexpr int64_t kMaxRuns = 1 << 16;

  // Opens the file of a `Journal.create`, of whichever engine wrote in it; an
  // error in words if it is none. The descriptor stays the caller's, who may
  // close it at once. `max_runs` is for tests.
  static std::variant<std::unique_ptr<Journal>, std::string> Open(
      int fd, int64_t max_runs = kMaxRuns);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // This element was produced. Returns the digest that it had when it was
  // produced before, if that is known. For the next element of those that were
  // noted last it takes the same time however many there are.
  std::optional<uint64_t> Note(int64_t pass, int64_t element, uint64_t digest);
  // The digest of this element, if that is known.
  std::optional<uint64_t> Find(int64_t pass, int64_t element) const;
  // This pass ended after so many elements. Returns how many it had before, if
  // that is known.
  std::optional<int64_t> NoteEnd(int64_t pass, int64_t elements);
  // How many elements this pass had when it ended, if that is known.
  std::optional<int64_t> Elements(int64_t pass) const;
  // The digests of a pass's elements from `first` up to `stop`, in their order.
  // Whether all are known.
  bool Digests(int64_t pass, int64_t first, int64_t stop,
               uint64_t* digests) const;
  // Passes before this one will not be produced again: their room is free, and
  // they are not noted any more.
  void ForgetBefore(int64_t pass);

 private:
  // Consecutive elements of a pass whose digests lie one behind the other: what
  // the file says, at hand.
  struct Run {
    int64_t at;  // the word in the file with which it begins
    int64_t pass;
    int64_t first;     // the first element of it
    int64_t position;  // how many digests had ever been noted before that one
    int64_t count;     // elements
    int64_t end;  // elements of the whole pass, if its end was met in this run;
                  // else -1

    int64_t stop() const { return first + count; }
  };
  using Runs = std::vector<Run*>;

  Journal(int64_t* words, size_t bytes, int64_t max_runs);

  // With the mutex held, all of them.

  // Reads the table of runs; whether it can be one.
  bool Load();

  int64_t Load(int64_t at) const;
  void Store(int64_t at, int64_t value);
  int64_t WordOfDigest(int64_t position) const;
  int64_t WordOfRun(int64_t number) const;

  const Runs* RunsOf(int64_t pass) const;
  const Run* RunWith(int64_t pass, int64_t element) const;
  std::optional<uint64_t> DigestIn(const Run& run, int64_t element) const;
  bool IsNext(int64_t pass, int64_t element) const;
  bool IsForgotten(int64_t pass) const;
  void Keep(const Run& run);
  Run* BeginRun(int64_t pass, int64_t first);
  void FindClearUntil();
  void NoteLost(int64_t pass);
  void ForgetOldestDigest();
  void DropForgotten();
  void DropOldestRun();
  void GiveMemoryBack();

  std::optional<int64_t> EndOf(int64_t pass) const;

  mutable std::mutex mutex_;
  int64_t* words_;
  size_t bytes_;
  int64_t max_runs_;
  int64_t capacity_;  // digests
  int64_t tail_ = 0, head_ = 0;
  int64_t floor_ = 0;
  // The newest pass of which something was forgotten for want of room; -1:
  // none.
  int64_t lost_ = -1;
  std::deque<Run> runs_;
  std::map<int64_t, Runs> passes_;
  // No run but the last one has an element of its pass from where it stops up
  // to this one: they need no search.
  int64_t clear_until_ = 0;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_JOURNAL_H_
