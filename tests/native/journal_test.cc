// The journal knows what was produced, wherever its writer goes back to or
// dies.
#include "core/journal.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"

namespace {

using kerasfeed::Journal;

constexpr int64_t kFirstAt = 512, kRunsAt = 8192, kDigestsAt = 524288;  // words
constexpr int64_t kFirstKept = 100;

// A file as the supervisor makes it.
class File {
 public:
  explicit File(int64_t capacity = 4096)
      : bytes_(8 * (kDigestsAt + capacity)),
        fd_(memfd_create("journal_test", MFD_CLOEXEC)) {
    CHECK(fd_ >= 0);
    CHECK_EQ(ftruncate(fd_, bytes_), 0);
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    CHECK(memory != MAP_FAILED);
    words_ = static_cast<int64_t*>(memory);
  }
  ~File() {
    munmap(words_, bytes_);
    close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::unique_ptr<Journal> Open(int64_t max_runs = Journal::kMaxRuns) const {
    auto opened = Journal::Open(fd_, max_runs);
    if (auto* error = std::get_if<std::string>(&opened))
      kerasfeed_test::Fail(__FILE__, __LINE__, *error);
    return std::move(std::get<0>(opened));
  }
  int fd() const { return fd_; }
  int64_t* words() const { return words_; }
  int64_t capacity() const { return bytes_ / 8 - kDigestsAt; }
  int64_t AllocatedBytes() const {
    struct stat status;
    CHECK_EQ(fstat(fd_, &status), 0);
    return status.st_blocks * 512;
  }
  // The words that journals of a few runs write, one region behind the other.
  std::vector<int64_t> Used(int64_t max_runs) const {
    std::vector<int64_t> used;
    for (auto [at, count] : Regions(max_runs))
      used.insert(used.end(), words_ + at, words_ + at + count);
    return used;
  }
  void SetUsed(const std::vector<int64_t>& used, int64_t max_runs) {
    auto from = used.begin();
    for (auto [at, count] : Regions(max_runs)) {
      std::copy(from, from + count, words_ + at);
      from += count;
    }
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> Regions(int64_t max_runs) const {
    return {{0, 5},
            {kFirstAt, kFirstKept},
            {kRunsAt, 5 * max_runs},
            {kDigestsAt, capacity()}};
  }

  int64_t bytes_;
  int fd_;
  int64_t* words_;
};

uint64_t Value(int64_t pass, int64_t element) {
  return (static_cast<uint64_t>(pass + 1) << 40 | (element + 1)) *
         0x9E3779B97F4A7C15;
}

// What the journal answers, as text: the digest's element if it is the right
// one.
std::string Noted(Journal* journal, int64_t pass, int64_t first, int64_t stop,
                  uint64_t mark = 0) {
  std::string text;
  for (int64_t element = first; element < stop; ++element) {
    const auto found =
        journal->Note(pass, element, Value(pass, element) ^ mark);
    text += !found ? "." : *found == Value(pass, element) ? "k" : "?";
  }
  return text;
}

// By value: CHECK_EQ would keep a reference into the optional, which is gone.
uint64_t Known(const std::optional<uint64_t>& digest) {
  CHECK(digest.has_value());
  return *digest;
}

int64_t OrMinusOne(const std::optional<int64_t>& value) {
  return value.value_or(-1);
}

}  // namespace

TEST(UntouchedFileIsAnEmptyJournal) {
  File file;
  const auto journal = file.Open();
  CHECK_EQ(OrMinusOne(journal->Elements(0)), -1);
  CHECK(!journal->Find(0, 0));
  CHECK(file.Used(10) == std::vector<int64_t>(5 + 100 + 50 + 4096));
}

TEST(TheFileIsWhatThePythonJournalWrites) {
  File file(1000);
  const auto journal = file.Open();
  CHECK_EQ(Noted(journal.get(), 0, 0, 3), "...");
  CHECK_EQ(OrMinusOne(journal->NoteEnd(0, 3)), -1);
  CHECK_EQ(Noted(journal.get(), 1, 7, 9), "..");
  std::vector<int64_t> expected = {0, 2, 0, 0, 0};
  for (int64_t element = 0; element < 3; ++element)
    expected.push_back(static_cast<int64_t>(Value(0, element)));
  expected.resize(5 + 100);
  for (int64_t word : {0, 0, 0, 3, 3, 1, 7, 3, 2, -1}) expected.push_back(word);
  for (auto [pass, element] : {std::pair(0, 0), {0, 1}, {0, 2}, {1, 7}, {1, 8}})
    expected.push_back(static_cast<int64_t>(Value(pass, element)));
  expected.resize(5 + 100 + 10 + 1000);
  CHECK(file.Used(2) == expected);
}

TEST(WhatIsNoJournalIsRefused) {
  const auto error = [](int fd) {
    auto opened = Journal::Open(fd);
    auto* found = std::get_if<std::string>(&opened);
    return found != nullptr ? *found : "none";
  };
  CHECK(error(-1).find("Bad file descriptor") != std::string::npos);
  const int empty = memfd_create("journal_test", MFD_CLOEXEC);
  CHECK(error(empty).find("Received: 0") != std::string::npos);
  close(empty);
  File file(10);
  CHECK_EQ(error(file.fd()), "none");
  for (const auto& [at, value] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {0, -1}, {1, -1}, {1, 70000}, {2, -5}}) {
    file.words()[at] = value;
    CHECK(error(file.fd()).find("table of runs") != std::string::npos);
    file.words()[at] = 0;
  }
  file.words()[1] = 1;
  for (int64_t word = 1; word < 4; ++word) {
    file.words()[kRunsAt + word] = -7;
    CHECK(error(file.fd()).find("table of runs") != std::string::npos);
    file.words()[kRunsAt + word] = INT64_MAX;
    file.words()[kRunsAt + 3] = std::max<int64_t>(1, file.words()[kRunsAt + 3]);
    CHECK(error(file.fd()).find("table of runs") != std::string::npos);
    std::fill_n(file.words() + kRunsAt, 5, 0);
  }
  // More digests than there is room for.
  file.words()[kRunsAt + 3] = 11;
  CHECK(error(file.fd()).find("table of runs") != std::string::npos);
}

TEST(GoingBackKeepsWhatIsKnownOfLaterElements) {
  File file;
  const auto journal = file.Open();
  for (int64_t pass = 0; pass < 3; ++pass) {
    CHECK_EQ(Noted(journal.get(), pass, 0, 10), "..........");
    CHECK_EQ(OrMinusOne(journal->NoteEnd(pass, 10)), -1);
  }
  for (int round = 0; round < 2; ++round) {
    CHECK_EQ(Noted(journal.get(), 1, 4, 10, 1), "kkkkkk");
    CHECK_EQ(OrMinusOne(journal->NoteEnd(1, 11)), 10);
  }
  CHECK_EQ(Noted(file.Open().get(), 2, 0, 11), "kkkkkkkkkk.");
}

TEST(DigestsOfZeroAndOfAllOnesAreDigests) {
  File file;
  const auto journal = file.Open();
  CHECK(!journal->Note(0, 0, 0));
  CHECK(!journal->Note(0, 1, UINT64_MAX));
  CHECK_EQ(Known(journal->Note(0, 0, 5)), 0u);
  CHECK_EQ(Known(file.Open()->Note(0, 1, 5)), UINT64_MAX);
  CHECK_EQ(OrMinusOne(journal->NoteEnd(1, 0)), -1);
  CHECK_EQ(OrMinusOne(journal->NoteEnd(1, 3)), 0);
}

TEST(FirstDigestsAreNeverForgotten) {
  File file;
  const auto journal = file.Open();
  Noted(journal.get(), 0, 3, 6);
  Noted(journal.get(), 1, 0, 5);
  CHECK_EQ(file.words()[kFirstAt], 0);
  Noted(journal.get(), 0, 0, 3);
  journal->Note(0, 2, 5);
  Noted(journal.get(), 0, 6, 2 * kFirstKept);
  journal->ForgetBefore(7);
  file.Open()->Note(0, 2, 5);
  for (int64_t element = 0; element < kFirstKept; ++element)
    CHECK_EQ(static_cast<uint64_t>(file.words()[kFirstAt + element]),
             Value(0, element));
  CHECK_EQ(file.words()[kFirstAt + kFirstKept], 0);
}

TEST(FullJournalForgetsTheOldestOnly) {
  File file(100);
  const auto journal = file.Open();
  const std::string lost(150, '.'), kept(100, 'k');
  Noted(journal.get(), 0, 0, 250);
  CHECK_EQ(Noted(journal.get(), 0, 0, 250, 1), lost + kept);
  CHECK_EQ(Noted(file.Open().get(), 0, 0, 250, 1), lost + kept);
  // What was forgotten is not noted again: that would push out what comes next.
  CHECK_EQ(Noted(journal.get(), 0, 250, 260), "..........");
  CHECK_EQ(Noted(journal.get(), 0, 0, 260), lost + ".........." + kept);
}

TEST(FullJournalDoesNotFillAGapBeforeWhatItHas) {
  File file(12);
  const auto journal = file.Open();
  CHECK_EQ(Noted(journal.get(), 0, 50, 60), "..........");
  // The third one pushes out the first of those; the next ones would push out
  // all of them, though they come again soon.
  CHECK_EQ(Noted(journal.get(), 0, 0, 10), "..........");
  CHECK_EQ(Noted(journal.get(), 0, 0, 10), "kkk.......");
  CHECK_EQ(Noted(journal.get(), 0, 50, 62), ".kkkkkkkkk..");
}

TEST(TableOfRunsForgetsTheOldest) {
  File file;
  const auto journal = file.Open(8);
  for (int64_t pass = 0; pass < 30; ++pass) {
    Noted(journal.get(), pass, 0, pass % 3);
    CHECK_EQ(OrMinusOne(journal->NoteEnd(pass, pass % 3)), -1);
  }
  const auto reopened = file.Open(8);
  for (Journal* reader : {journal.get(), reopened.get()}) {
    for (int64_t pass = 0; pass < 30; ++pass) {
      CHECK_EQ(OrMinusOne(reader->Elements(pass)), pass < 22 ? -1 : pass % 3);
      CHECK_EQ(Noted(reader, pass, 0, pass % 3, 1),
               std::string(pass % 3, pass < 22 ? '.' : 'k'));
    }
  }
}

TEST(ForgettingMakesRoomAndGivesMemoryBack) {
  File file(1 << 16);
  const auto journal = file.Open();
  for (int64_t pass = 0; pass < 20; ++pass) {
    Noted(journal.get(), pass, 0, 20000);
    journal->ForgetBefore(pass);
    CHECK(file.AllocatedBytes() <= 2 * 8 * 20000 + 20 * 4096);
    CHECK_EQ(Noted(journal.get(), pass, 0, 20000), std::string(20000, 'k'));
  }
  journal->ForgetBefore(20);
  CHECK(file.AllocatedBytes() <= 10 * 4096);
  CHECK_EQ(Noted(journal.get(), 19, 0, 5), ".....");
  CHECK_EQ(OrMinusOne(journal->NoteEnd(19, 5)), -1);
  CHECK_EQ(OrMinusOne(journal->Elements(19)), -1);
}

// What a journal with room for all should know.
TEST(JournalKnowsWhatAMapKnows) {
  std::mt19937_64 generator(3);
  for (int round = 0; round < 300; ++round) {
    // With little room it may be silent, but is never wrong.
    const bool roomy = round % 2;
    File file(roomy ? 4096 : 1 + generator() % 50);
    const int64_t max_runs = roomy ? Journal::kMaxRuns : 1 + generator() % 8;
    auto journal = file.Open(max_runs);
    std::map<std::pair<int64_t, int64_t>, uint64_t> digests;
    int64_t floor = 0, pass = 0, element = 0;
    for (int step = 0; step < 60; ++step) {
      switch (generator() % 8) {
        case 0:
          journal = file.Open(max_runs);
          break;
        case 1:
          pass = generator() % 4;
          element = generator() % 30;
          break;
        case 2:
          floor = std::max<int64_t>(floor, generator() % 6 == 0 ? pass : 0);
          journal->ForgetBefore(floor);
          break;
        case 3:
          ++pass;
          element = 0;
          break;
        default:
          for (size_t count = generator() % 20; count > 0; --count) {
            const uint64_t digest = generator();
            const auto known = digests.find({pass, element});
            const bool is_known = pass >= floor && known != digests.end();
            const auto sought = journal->Find(pass, element);
            const auto found = journal->Note(pass, element, digest);
            CHECK(found == sought);
            if (found) CHECK_EQ(*found, known->second);
            CHECK(is_known || !found);
            if (roomy) CHECK_EQ(found.has_value(), is_known);
            // What was forgotten may have another one now.
            if (!found && pass >= floor) digests[{pass, element}] = digest;
            ++element;
          }
      }
      const int64_t first = generator() % 30;
      const int64_t stop = first + generator() % 10;
      std::vector<uint64_t> taken(stop - first);
      const bool all = journal->Digests(pass, first, stop, taken.data());
      bool is_known = true;
      for (int64_t at = first; at < stop; ++at) {
        const auto known = digests.find({pass, at});
        is_known = is_known && pass >= floor && known != digests.end();
        if (all) CHECK(is_known && taken[at - first] == known->second);
      }
      if (roomy) CHECK_EQ(all, is_known);
    }
  }
}

TEST(NoteTakesTheSameTimeHoweverManyRunsThereAre) {
  const auto seconds = [](int64_t runs) {
    File file(1 << 20);
    const auto journal = file.Open();
    for (int64_t run = 0; run < runs; ++run)
      journal->Note(0, 2 * run, 1);  // in runs of one element
    const auto began = std::chrono::steady_clock::now();
    for (int64_t element = 2 * runs - 1; element < 2 * runs + 200000; ++element)
      journal->Note(0, element, 1);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         began)
        .count();
  };
  const double few = seconds(1);
  CHECK(seconds(4000) < 50 * few);
}

// ---- Killed writers ----

namespace {

// (pass, element, digest), and (pass, -1, elements) for ends.
using Snapshot = std::set<std::tuple<int64_t, int64_t, uint64_t>>;

Snapshot SnapshotOf(const Journal& journal) {
  Snapshot found;
  for (int64_t pass = 0; pass < 9; ++pass) {
    for (int64_t element = 0; element < 9; ++element)
      if (const auto digest = journal.Find(pass, element))
        found.emplace(pass, element, *digest);
    if (const auto end = journal.Elements(pass)) found.emplace(pass, -1, *end);
  }
  return found;
}

struct Case {
  const char* name;
  int64_t capacity;
  int64_t max_runs;
  bool prepared;  // whether three passes of three elements were noted before
  std::function<void(Journal*)> work;
};

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {"first note", 100, 8, false, [](Journal* j) { Noted(j, 0, 0, 1); }},
      {"next note", 100, 8, true, [](Journal* j) { Noted(j, 2, 3, 4); }},
      {"next pass", 100, 8, true, [](Journal* j) { Noted(j, 3, 0, 1); }},
      {"end", 100, 8, true, [](Journal* j) { j->NoteEnd(3, 0); }},
      {"full ring", 9, 8, true, [](Journal* j) { Noted(j, 3, 0, 1); }},
      {"full table", 100, 3, true, [](Journal* j) { Noted(j, 3, 0, 1); }},
      {"full of both", 9, 3, true, [](Journal* j) { Noted(j, 3, 0, 1); }},
      {"ring of one", 1, 3, true, [](Journal* j) { Noted(j, 3, 0, 1); }},
      {"forget", 100, 8, true, [](Journal* j) { j->ForgetBefore(2); }},
      {"forget all", 100, 8, true, [](Journal* j) { j->ForgetBefore(7); }},
  };
  return *cases;
}

// Runs the case's work in a child, instruction by instruction. Returns each
// state that its file was in; nothing where the kernel does not let us.
std::optional<std::vector<std::vector<int64_t>>> StatesOf(const Case& each,
                                                          File* file) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const auto journal = file->Open(each.max_runs);
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    raise(SIGSTOP);
    each.work(journal.get());
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (!WIFSTOPPED(status)) return std::nullopt;
  std::vector<std::vector<int64_t>> states = {file->Used(each.max_runs)};
  while (true) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) break;
    CHECK_EQ(waitpid(child, &status, 0), child);
    if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) break;
    auto state = file->Used(each.max_runs);
    if (state != states.back()) states.push_back(std::move(state));
  }
  CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
  kill(child, SIGKILL);
  CHECK_EQ(waitpid(child, &status, 0), child);
  return states;
}

}  // namespace

TEST(DeathBetweenAnyTwoInstructionsLeavesWhatWasNoted) {
  for (const Case& each : Cases()) {
    File file(each.capacity);
    if (each.prepared) {
      const auto journal = file.Open(each.max_runs);
      for (int64_t pass = 0; pass < 3; ++pass) {
        Noted(journal.get(), pass, 0, 3);
        journal->NoteEnd(pass, 3);
      }
    }
    const auto states = StatesOf(each, &file);
    if (!states) {
      std::cout << "  not run: ptrace is forbidden here" << std::endl;
      return;
    }
    const Snapshot after = SnapshotOf(*file.Open(each.max_runs));
    File copy(each.capacity);
    const auto reopened = [&](const std::vector<int64_t>& state) {
      copy.SetUsed(state, each.max_runs);
      return copy.Open(each.max_runs);
    };
    const Snapshot before = SnapshotOf(*reopened(states->front()));
    CHECK(before != after);
    // One word at a time.
    for (size_t i = 1; i < states->size(); ++i) {
      const auto &was = (*states)[i - 1], &is = (*states)[i];
      int changed = 0;
      for (size_t word = 0; word < is.size(); ++word)
        changed += is[word] != was[word];
      // The kernel frees pages as it likes.
      CHECK(changed == 1 || std::string(each.name).find("forget") == 0);
    }
    for (const auto& state : *states) {
      const auto journal = reopened(state);
      const Snapshot found = SnapshotOf(*journal);
      // Nothing that is neither before nor after, and nothing is gone but what
      // was to be forgotten.
      for (const auto& entry : found)
        CHECK(before.count(entry) || after.count(entry));
      for (const auto& entry : before)
        CHECK(found.count(entry) || !after.count(entry));
      // The next producer does it again, and goes on.
      each.work(journal.get());
      CHECK(SnapshotOf(*copy.Open(each.max_runs)) == after);
      Noted(journal.get(), 8, 0, 5);
      CHECK_EQ(Known(copy.Open(each.max_runs)->Find(8, 4)), Value(8, 4));
    }
    CHECK(states->size() >= 2);
  }
}

TEST(Kill9LeavesAPrefixThatIsRight) {
  std::mt19937_64 generator(7);
  constexpr int64_t kElements = 700;
  int64_t deepest = 0;
  for (int trial = 0; trial < 40; ++trial) {
    File file(5000);
    auto* counted = static_cast<volatile int64_t*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
             -1, 0));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      const auto journal = file.Open();
      for (int64_t index = 0;; ++index) {
        const int64_t pass = index / kElements, element = index % kElements;
        journal->Note(pass, element, Value(pass, element));
        if (element == kElements - 1) {
          journal->NoteEnd(pass, kElements);
          if (trial % 2) journal->ForgetBefore(pass - 4);
        }
        *counted = index + 1;
      }
    }
    while (*counted == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(generator() % 20000));
    kill(child, SIGKILL);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
    const int64_t done = *counted;
    munmap(const_cast<int64_t*>(counted), 4096);
    deepest = std::max(deepest, done);
    const auto journal = file.Open();
    const int64_t newest = (done - 1) / kElements;
    const int64_t first = std::max<int64_t>(
        {0, done - 4999, trial % 2 ? (newest - 4) * kElements : 0});
    for (int64_t index = first; index < done; ++index) {
      const int64_t pass = index / kElements, element = index % kElements;
      const auto found = journal->Find(pass, element);
      CHECK(found.has_value());
      CHECK_EQ(*found, Value(pass, element));
    }
    for (int64_t pass = first / kElements + 1; pass < newest; ++pass)
      CHECK_EQ(OrMinusOne(journal->Elements(pass)), kElements);
    CHECK_EQ(OrMinusOne(journal->Elements(newest + 1)), -1);
    // At most the element that was being noted is there besides.
    CHECK(!journal->Find((done + 1) / kElements, (done + 1) % kElements));
  }
  CHECK(deepest > 5000);
}
