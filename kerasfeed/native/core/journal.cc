#include "journal.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

namespace kerasfeed {
namespace {

// The file: a few numbers, the first digests of all, then the runs, then the
// digests in a ring, in the order in which they were noted.
constexpr int64_t kFirstAt = (4 << 10) / 8;
constexpr int64_t kFirstKept = 100;
constexpr int64_t kRunsAt = (64 << 10) / 8;
constexpr int64_t kDigestsAt = (4 << 20) / 8;
constexpr int64_t kRunWords = 5;
constexpr int64_t kMostRuns = (kDigestsAt - kRunsAt) / kRunWords;

enum Word { kFirstRun, kEndRun, kTail, kFloor, kLost };
enum RunWord { kPass, kFirst, kPosition, kCount, kEnd };

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

}  // namespace

std::variant<std::unique_ptr<Journal>, std::string> Journal::Open(
    int fd, int64_t max_runs) {
  struct stat status;
  if (fstat(fd, &status) != 0)
    return std::string("the journal's file can't be read: ") +
           std::strerror(errno);
  const auto size = static_cast<int64_t>(status.st_size);
  if (size < 8 * (kDigestsAt + 1) || size % 8 != 0)
    return "the journal's file is none. Expected a multiple of 8 from " +
           std::to_string(8 * (kDigestsAt + 1)) +
           " bytes on. Received: " + std::to_string(size);
  if (max_runs < 1 || max_runs > kMostRuns)
    return "a journal has 1 to " + std::to_string(kMostRuns) +
           " runs. Received: " + std::to_string(max_runs);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED)
    return std::string("the journal's file can't be mapped: ") +
           std::strerror(errno);
  std::unique_ptr<Journal> journal(
      new Journal(static_cast<int64_t*>(memory), size, max_runs));
  if (!journal->Load())
    return std::string(
        "the journal's file is none: its table of runs says what no journal "
        "writes");
  return journal;
}

Journal::Journal(int64_t* words, size_t bytes, int64_t max_runs)
    : words_(words),
      bytes_(bytes),
      max_runs_(max_runs),
      capacity_(static_cast<int64_t>(bytes / 8) - kDigestsAt) {}

Journal::~Journal() { munmap(words_, bytes_); }

bool Journal::Load() {
  tail_ = Load(kTail);
  floor_ = Load(kFloor);
  // An untouched file says 0: nothing was lost.
  lost_ = Load(kLost) - 1;
  const int64_t first = Load(kFirstRun), end = Load(kEndRun);
  if (tail_ < 0 || first < 0 || end < first || end - first > max_runs_)
    return false;
  for (int64_t number = first; number < end; ++number) {
    const int64_t at = WordOfRun(number);
    const Run run{at,
                  Load(at + kPass),
                  Load(at + kFirst),
                  Load(at + kPosition),
                  Load(at + kCount),
                  Load(at + kEnd)};
    if (run.first < 0 || run.position < 0 || run.count < 0 ||
        run.count > kNone - std::max(run.first, run.position))
      return false;
    Keep(run);
  }
  head_ = runs_.empty() ? tail_ : runs_.back().position + runs_.back().count;
  if (head_ < tail_ || head_ - tail_ > capacity_) return false;
  DropForgotten();
  FindClearUntil();
  return true;
}

std::optional<uint64_t> Journal::Note(int64_t pass, int64_t element,
                                      uint64_t digest) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pass == 0 && element >= 0 && element < kFirstKept &&
      Load(kFirstAt + element) == 0)
    Store(kFirstAt + element, static_cast<int64_t>(digest));
  const bool next = IsNext(pass, element);
  if (!next) {
    if (const Run* run = RunWith(pass, element)) return DigestIn(*run, element);
    if (IsForgotten(pass)) return std::nullopt;
    // To note again what was forgotten would push out what comes next: nothing
    // would ever be checked.
    if (pass <= lost_) {
      const Runs& runs = *RunsOf(pass);
      if (std::any_of(runs.begin(), runs.end(), [element](const Run* run) {
            return element < run->stop();
          }))
        return std::nullopt;
    }
  }
  if (head_ - tail_ == capacity_) ForgetOldestDigest();
  Run* current = runs_.empty() ? nullptr : &runs_.back();
  if (current == nullptr || current->pass != pass || element != current->stop())
    current = BeginRun(pass, element);
  else if (!next)
    FindClearUntil();
  Store(WordOfDigest(head_), static_cast<int64_t>(digest));
  Store(current->at + kCount, ++current->count);
  ++head_;
  return std::nullopt;
}

std::optional<uint64_t> Journal::Find(int64_t pass, int64_t element) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Run* run = RunWith(pass, element);
  return run != nullptr ? DigestIn(*run, element) : std::nullopt;
}

std::optional<int64_t> Journal::NoteEnd(int64_t pass, int64_t elements) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::optional<int64_t> known = EndOf(pass);
  if (known || IsForgotten(pass)) return known;
  const Runs* runs = RunsOf(pass);
  Run* run = runs != nullptr ? runs->back() : BeginRun(pass, elements);
  run->end = elements;
  Store(run->at + kEnd, elements);
  return std::nullopt;
}

std::optional<int64_t> Journal::Elements(int64_t pass) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return EndOf(pass);
}

bool Journal::Digests(int64_t pass, int64_t first, int64_t stop,
                      uint64_t* digests) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Runs* found = RunsOf(pass);
  Runs runs = found != nullptr ? *found : Runs();
  std::sort(runs.begin(), runs.end(),
            [](const Run* a, const Run* b) { return a->first < b->first; });
  int64_t at = first;
  for (const Run* run : runs) {
    if (run->first > at) break;
    for (; at < std::min(run->stop(), stop); ++at) {
      const std::optional<uint64_t> digest = DigestIn(*run, at);
      if (!digest) return false;
      *digests++ = *digest;
    }
  }
  return at >= stop;
}

std::optional<int64_t> Journal::EndOf(int64_t pass) const {
  if (const Runs* runs = RunsOf(pass)) {
    for (const Run* run : *runs)
      if (run->end >= 0) return run->end;
  }
  return std::nullopt;
}

void Journal::ForgetBefore(int64_t pass) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pass <= floor_) return;
  floor_ = pass;
  Store(kFloor, pass);
  passes_.erase(passes_.begin(), passes_.lower_bound(pass));
  DropForgotten();
  GiveMemoryBack();
}

// A release store, so that the compiler keeps the order of stores: what a
// killed process leaves are the stores up to some one. Others, too, then see
// each word whole.
void Journal::Store(int64_t at, int64_t value) {
  __atomic_store_n(words_ + at, value, __ATOMIC_RELEASE);
}

int64_t Journal::Load(int64_t at) const {
  return __atomic_load_n(words_ + at, __ATOMIC_RELAXED);
}

int64_t Journal::WordOfDigest(int64_t position) const {
  return kDigestsAt + position % capacity_;
}

int64_t Journal::WordOfRun(int64_t number) const {
  return kRunsAt + number % max_runs_ * kRunWords;
}

const Journal::Runs* Journal::RunsOf(int64_t pass) const {
  const auto found = passes_.find(pass);
  return found != passes_.end() ? &found->second : nullptr;
}

const Journal::Run* Journal::RunWith(int64_t pass, int64_t element) const {
  if (const Runs* runs = RunsOf(pass)) {
    for (const Run* run : *runs)
      if (element >= run->first && element < run->stop()) return run;
  }
  return nullptr;
}

std::optional<uint64_t> Journal::DigestIn(const Run& run,
                                          int64_t element) const {
  const int64_t position = run.position + element - run.first;
  if (position < tail_) return std::nullopt;
  return static_cast<uint64_t>(Load(WordOfDigest(position)));
}

// Whether it is clear without a search that this element goes on the last run.
bool Journal::IsNext(int64_t pass, int64_t element) const {
  if (runs_.empty() || pass < floor_) return false;
  const Run& current = runs_.back();
  return pass == current.pass && element == current.stop() &&
         element < clear_until_ && (pass > lost_ || clear_until_ == kNone);
}

bool Journal::IsForgotten(int64_t pass) const {
  return pass < floor_ || (pass <= lost_ && RunsOf(pass) == nullptr);
}

void Journal::Keep(const Run& run) {
  runs_.push_back(run);
  if (run.pass >= floor_) passes_[run.pass].push_back(&runs_.back());
}

Journal::Run* Journal::BeginRun(int64_t pass, int64_t first) {
  const int64_t number = Load(kEndRun);
  if (number - Load(kFirstRun) == max_runs_) {
    NoteLost(runs_.front().pass);
    DropOldestRun();
  }
  const int64_t at = WordOfRun(number);
  Store(at + kPass, pass);
  Store(at + kFirst, first);
  Store(at + kPosition, head_);
  Store(at + kCount, 0);
  Store(at + kEnd, -1);
  Store(kEndRun, number + 1);
  Keep(Run{at, pass, first, head_, 0, -1});
  FindClearUntil();
  return &runs_.back();
}

// A run that begins before the last one stops, and has not the element there,
// stops before it, too: only those that begin later count.
void Journal::FindClearUntil() {
  clear_until_ = kNone;
  const Runs* runs = runs_.empty() ? nullptr : RunsOf(runs_.back().pass);
  if (runs == nullptr) return;
  const int64_t from = runs_.back().stop();
  for (const Run* run : *runs) {
    if (run->stop() > from)
      clear_until_ = std::min(clear_until_, std::max(run->first, from));
  }
}

void Journal::NoteLost(int64_t pass) {
  if (pass <= lost_) return;
  lost_ = pass;
  Store(kLost, pass + 1);
}

void Journal::ForgetOldestDigest() {
  for (const Run& run : runs_) {
    if (run.position > tail_) break;
    NoteLost(run.pass);
  }
  Store(kTail, ++tail_);
  DropForgotten();
}

void Journal::DropForgotten() {
  // A run of no elements stands for the place of its pass's end: that is
  // forgotten with the digest behind it.
  while (!runs_.empty() &&
         (runs_.front().pass < floor_ ||
          runs_.front().position + std::max<int64_t>(runs_.front().count, 1) <=
              tail_))
    DropOldestRun();
}

void Journal::DropOldestRun() {
  const Run& run = runs_.front();
  tail_ = std::max(tail_, run.position + run.count);
  Store(kTail, tail_);
  Store(kFirstRun, Load(kFirstRun) + 1);
  const auto found = passes_.find(run.pass);
  if (found != passes_.end()) {
    Runs& runs = found->second;
    runs.erase(std::find(runs.begin(), runs.end(), &run));
    if (runs.empty()) passes_.erase(found);
  }
  runs_.pop_front();
}

// Frees the pages of the ring that hold no digest.
void Journal::GiveMemoryBack() {
  const int64_t start = tail_ % capacity_, stop = head_ % capacity_;
  std::vector<std::pair<int64_t, int64_t>> free;
  if (start < stop)
    free = {{0, start}, {stop, capacity_}};
  else if (head_ > tail_)
    free = {{stop, start}};
  else
    free = {{0, capacity_}};
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (const auto& [low, high] : free) {
    const int64_t low_byte = (8 * (kDigestsAt + low) + page - 1) / page * page;
    const int64_t high_byte = 8 * (kDigestsAt + high) / page * page;
    // Where the kernel can't, the pages stay: the ring will use them again.
    if (low_byte < high_byte)
      madvise(words_ + low_byte / 8, high_byte - low_byte, MADV_REMOVE);
  }
}

}  // namespace kerasfeed
