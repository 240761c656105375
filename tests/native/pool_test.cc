#include "core/pool.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "check.h"

namespace kerasfeed {
namespace {

constexpr int64_t kKilo = int64_t{1} << 10;
constexpr int64_t kMega = int64_t{1} << 20;

PoolOptions Options(int64_t max_bytes, int64_t piece_bytes = 4 * kMega) {
  PoolOptions options;
  options.name = "kerasfeed-test";
  options.max_bytes = max_bytes;
  options.piece_bytes = piece_bytes;
  return options;
}

bool Eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

// What the process has of the pools: descriptors of any kind, and bytes mapped.
int CountDescriptors() {
  DIR* directory = opendir("/proc/self/fd");
  CHECK(directory != nullptr);
  int count = 0;
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

int64_t MappedBytes() {
  std::ifstream file("/proc/self/maps");
  int64_t bytes = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.find("/memfd:kerasfeed-test") == std::string::npos) continue;
    size_t dash = 0;
    const auto start = std::stoull(line, &dash, 16);
    bytes += std::stoull(line.substr(dash + 1), nullptr, 16) - start;
  }
  return bytes;
}

// Marks a block at its ends and in each page; a mark that isn't there any more
// was somebody else's.
template <typename Visit>
void ForEachMark(const Block& block, int64_t size, const Visit& visit) {
  for (int64_t at = 0; at + 8 <= size; at += 4096) visit(block.data + at);
  if (size >= 8) visit(block.data + size / 8 * 8 - 8);
}

void Mark(const Block& block, int64_t size, uint64_t mark) {
  ForEachMark(block, size,
              [&](char* place) { memcpy(place, &mark, sizeof(mark)); });
}

void CheckMark(const Block& block, int64_t size, uint64_t mark) {
  ForEachMark(block, size, [&](char* place) {
    uint64_t found = 0;
    memcpy(&found, place, sizeof(found));
    CHECK_EQ(found, mark);
  });
}

// A block that the thread's pieces don't stand in the way of: they only do
// while they are being made.
std::shared_ptr<Block> AllocateSoon(Pool* pool, int64_t size) {
  std::shared_ptr<Block> block;
  CHECK(Eventually([&] { return (block = pool->Allocate(size)) != nullptr; }));
  return block;
}

TEST(SlotsWasteAtMostAQuarter) {
  int64_t last = 0;
  const auto check = [&](int64_t size) {
    const int64_t slot = SlotBytes(size);
    CHECK(slot >= size && slot >= last && slot % 64 == 0);
    CHECK(slot - size <= std::max<int64_t>(64, slot / 4));
    CHECK_EQ(SlotBytes(slot), slot);
    last = slot;
  };
  for (int64_t size = 0; size < 100000; ++size) check(size);
  for (int64_t power = 17; power < 50; ++power) {
    for (int64_t part = 8; part < 16; ++part) {
      const int64_t size = part << (power - 3);
      check(size - 1);
      check(size);
      check(size + 1);
    }
  }
  CHECK_EQ(SlotBytes(0), 64);
  CHECK_EQ(SlotBytes(257), 320);
  CHECK_EQ(SlotBytes(1025), 1280);
}

TEST(BlocksHoldWhatWasAskedFor) {
  const auto pool = Pool::Create(Options(512 * kMega));
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{2000},
                       200 * kKilo, 9600 * kKilo, 300 * kMega}) {
    const auto block = AllocateSoon(pool.get(), size);
    CHECK(block->capacity >= size);
    CHECK_EQ(block->offset % 64, 0);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block->data) % 64, uintptr_t{0});
    CHECK(block->offset + block->capacity <= pool->PieceBytes(block->piece));
    memset(block->data, 7, size);
  }
  CHECK(!pool->Allocate(-1));
  CHECK(!pool->Allocate(std::numeric_limits<int64_t>::max()));
  CHECK(!pool->Allocate(512 * kMega + 1));
  CHECK_EQ(pool->GetHeld().used_bytes, 0);
  CHECK_EQ(pool->GetHeld().blocks, 0);
}

TEST(ThreadsGetBlocksThatDoNotOverlap) {
  constexpr int64_t kMax = 400 * kMega;
  PoolOptions options = Options(kMax);
  options.idle_seconds = 0.05;
  const auto pool = Pool::Create(options);
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> got{0}, refused{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number);
      struct Kept {
        std::shared_ptr<Block> block;
        int64_t size;
        uint64_t mark;
      };
      std::deque<Kept> kept;
      for (uint64_t round = 0; !stopped; ++round) {
        const double power = std::uniform_real_distribution<>(0, 22)(random);
        int64_t size = static_cast<int64_t>(std::pow(2, power)) - 1;
        if (random() % 200 == 0) size = 300 * kMega - random() % 100000;
        if (auto block = pool->Allocate(size)) {
          const uint64_t mark = round << 8 | number;
          Mark(*block, size, mark);
          kept.push_back({std::move(block), size, mark});
          ++got;
        } else {
          ++refused;
        }
        while (kept.size() > random() % 40) {
          const size_t which = random() % 4 ? 0 : random() % kept.size();
          CheckMark(*kept[which].block, kept[which].size, kept[which].mark);
          kept.erase(kept.begin() + which);
        }
      }
    });
  }
  for (int i = 0; i < 300; ++i) {
    CHECK(pool->GetHeld().reserved_bytes <= kMax);
    // Read in several parts, so that a piece may be seen where it went and
    // where a new one came.
    int64_t mapped = MappedBytes();
    for (int again = 0; mapped > kMax && again < 10; ++again)
      mapped = std::min(mapped, MappedBytes());
    CHECK(mapped <= kMax);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  stopped = true;
  for (auto& thread : threads) thread.join();
  std::cout << "  " << got << " blocks, " << refused << " refused, "
            << pool->given_up() << " pieces given up" << std::endl;
  CHECK(got > 1000);
  CHECK_EQ(pool->GetHeld().used_bytes, 0);
  CHECK_EQ(pool->GetHeld().blocks, 0);
}

TEST(BlocksThatHoldPiecesRefuseOnlyWhatDoesNotFitBesideThem) {
  // Fill the pool with small blocks, and keep one of each piece: the worst that
  // can be done to it.
  constexpr int64_t kMax = 64 * kMega;
  const auto pool = Pool::Create(Options(kMax, 4 * kMega));
  std::vector<std::shared_ptr<Block>> all;
  while (auto block = pool->Allocate(50 * kKilo)) all.push_back(block);
  CHECK(Eventually([&] {
    while (auto block = pool->Allocate(50 * kKilo)) all.push_back(block);
    // No piece that is made ahead at this moment is large enough, either.
    return pool->GetHeld().used_bytes > kMax - kMega;
  }));
  std::map<uint32_t, std::shared_ptr<Block>> kept;
  for (auto& block : all) kept.emplace(block->piece, block);
  all.clear();
  CHECK(!pool->Allocate(4 * kMega));
  CHECK(pool->GetHeld().used_bytes < 3 * kMega);

  // Their own size has all the room that there is.
  for (int i = 0; i < 1000; ++i) {
    all.push_back(pool->Allocate(50 * kKilo));
    CHECK(all.back() != nullptr);
  }
  all.clear();

  // As they go, so comes the room: each piece at once.
  int64_t held = pool->GetHeld().reserved_bytes;
  while (!kept.empty()) {
    held -= pool->PieceBytes(kept.begin()->first);
    kept.erase(kept.begin());
    if (held + 4 * kMega <= kMax) {
      const auto block = AllocateSoon(pool.get(), 4 * kMega);
      Mark(*block, 4 * kMega, 5);
    }
  }
  AllocateSoon(pool.get(), 50 * kMega);
}

TEST(SizesThatChangeAllTheTimeFindRoom) {
  // A window of eight elements, as a producer has it, in a pool that the eight
  // largest pieces fill.
  constexpr int64_t kLargest = 8 * kMega;
  const auto pool = Pool::Create(Options(8 * kLargest, kMega));
  std::mt19937_64 random(3);
  std::deque<std::pair<std::shared_ptr<Block>, int64_t>> window;
  int64_t again = 0;
  for (int round = 0; round < 3000; ++round) {
    if (window.size() == 8) {
      CheckMark(*window.front().first, window.front().second, round - 8);
      window.pop_front();
    }
    // Now all are small, now large, now mixed.
    const double least = round / 300 % 3 == 1 ? 20 : 0;
    const double most = round / 300 % 3 == 0 ? 16 : 23;
    const int64_t size = static_cast<int64_t>(
        std::pow(2, std::uniform_real_distribution<>(least, most)(random)));
    auto block = pool->Allocate(size);
    if (!block) {
      ++again;
      block = AllocateSoon(pool.get(), size);
    }
    Mark(*block, size, round);
    window.emplace_back(std::move(block), size);
  }
  std::cout << "  " << again << " of 3000 had to ask again" << std::endl;
}

TEST(PiecesAreGivenUpForOtherSizesAndTheirNumbersNeverComeAgain) {
  const auto pool = Pool::Create(Options(8 * kMega));
  std::set<uint32_t> seen;
  for (int round = 0; round < 50; ++round) {
    const int64_t size = (round % 4 + 3) * kMega;
    const auto block = AllocateSoon(pool.get(), size);
    const int fd = pool->Descriptor(block->piece);
    CHECK(fd >= 0);
    close(fd);
    seen.insert(block->piece);
  }
  CHECK(seen.size() > 10);
  CHECK(pool->given_up() > 10);
  int64_t alive = 0;
  for (uint32_t piece : seen) {
    const int fd = pool->Descriptor(piece);
    CHECK_EQ(pool->PieceBytes(piece) > 0, fd >= 0);
    if (fd >= 0) close(fd);
    alive += fd >= 0;
  }
  CHECK(alive <= pool->GetHeld().pieces);
  CHECK_EQ(pool->Descriptor(1 << 30), -1);
  CHECK_EQ(pool->PieceBytes(1 << 30), -1);
}

TEST(TheSameSizeStaysInTheSamePieces) {
  const auto pool = Pool::Create(Options(256 * kMega));
  std::deque<std::shared_ptr<Block>> window;
  std::set<uint32_t> late;
  for (int round = 0; round < 2000; ++round) {
    if (window.size() == 8) window.pop_front();
    window.push_back(pool->Allocate(600 * kKilo));
    CHECK(window.back() != nullptr);
    if (round > 1000) late.insert(window.back()->piece);
  }
  CHECK_EQ(pool->given_up(), 0);
  CHECK(late.size() <= 8);
  CHECK(pool->GetHeld().reserved_bytes <= 20 * 640 * kKilo);
}

TEST(RoomIsMadeAheadOfNeed) {
  const auto pool = Pool::Create(Options(256 * kMega));
  pool->Prepare(3 * kMega, 10);
  CHECK(Eventually([&] { return pool->GetHeld().pieces >= 10; }));
  const auto before = pool->GetHeld();
  CHECK_EQ(before.blocks, 0);
  CHECK_EQ(before.reserved_bytes, 10 * 3 * kMega);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < 7; ++i) {
    blocks.push_back(pool->Allocate(3 * kMega));
    // Its pages are there.
    unsigned char pages[3 * kMega / 4096] = {};
    CHECK(!mincore(blocks.back()->data, 3 * kMega, pages));
    for (unsigned char page : pages) CHECK(page & 1);
  }
  CHECK_EQ(pool->GetHeld().pieces, before.pieces);
  for (int i = 0; i < 3; ++i) blocks.push_back(pool->Allocate(3 * kMega));
  CHECK(Eventually([&] { return pool->GetHeld().pieces > before.pieces; }));
}

TEST(EmptyPiecesAreGivenUpAfterAWhile) {
  PoolOptions options = Options(256 * kMega);
  options.idle_seconds = 0.1;
  const auto pool = Pool::Create(options);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(pool->Allocate(2 * kMega));
  const auto other = pool->Allocate(100);
  blocks.resize(1);
  // What is in use keeps no more than room for as much again.
  CHECK(Eventually(
      [&] { return pool->GetHeld().reserved_bytes <= 5 * 2 * kMega; }));
  const auto held = pool->GetHeld();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK_EQ(pool->GetHeld().pieces, held.pieces);
  CHECK(held.reserved_bytes >= 2 * 2 * kMega);
  blocks.clear();
  CHECK(Eventually([&] { return pool->GetHeld().pieces == 1; }));
  CHECK(Eventually([&] { return MappedBytes() <= kMega; }));
}

TEST(AMachineWithoutMemoryIsAnAnswer) {
  std::atomic<int64_t> spare{0};
  PoolOptions options = Options(256 * kMega);
  // Whoever asks first gets it: what is made ahead finds nothing.
  options.spare_bytes = [&] { return spare.exchange(0); };
  const auto pool = Pool::Create(options);
  CHECK(!pool->Allocate(100));
  CHECK(!pool->Allocate(10 * kMega));
  CHECK_EQ(pool->GetHeld().reserved_bytes, 0);
  spare = 10 * kMega;
  CHECK(!pool->Allocate(11 * kMega));
  spare = 10 * kMega;
  auto block = pool->Allocate(10 * kMega);
  CHECK(block != nullptr);
  CHECK(!pool->Allocate(8 * kMega));
  // What is empty here is as good as what the machine has.
  block.reset();
  CHECK(AllocateSoon(pool.get(), 8 * kMega) != nullptr);
}

TEST(SpareBytesAreLessThanTheMachineHas) {
  const int64_t spare = SpareBytes();
  std::cout << "  " << spare / kMega << " MB to spare" << std::endl;
  CHECK(spare > 0);
  CHECK(spare < int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

TEST(ReservingThatFailsIsAnAnswer) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  CHECK(!getrlimit(RLIMIT_FSIZE, &before));
  const int descriptors = CountDescriptors();
  {
    const auto pool = Pool::Create(Options(256 * kMega));
    rlimit limit = before;
    limit.rlim_cur = 5 * kMega;  // fails in the second stride
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    CHECK(!pool->Allocate(10 * kMega));
    CHECK_EQ(pool->GetHeld().reserved_bytes, 0);
    CHECK_EQ(pool->GetHeld().pieces, 0);
    CHECK(pool->Allocate(kMega) != nullptr);
    CHECK(!setrlimit(RLIMIT_FSIZE, &before));
    CHECK(pool->Allocate(10 * kMega) != nullptr);
  }
  CHECK_EQ(CountDescriptors(), descriptors);
}

TEST(DescriptorsThatRunOutAreAnAnswer) {
  const auto pool = Pool::Create(Options(256 * kMega));
  rlimit before{};
  CHECK(!getrlimit(RLIMIT_NOFILE, &before));
  rlimit limit = before;
  limit.rlim_cur = 3;
  CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
  CHECK(!pool->Allocate(kMega));
  CHECK(!setrlimit(RLIMIT_NOFILE, &before));
  CHECK(pool->Allocate(kMega) != nullptr);

  limit.rlim_cur = 64;
  CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
  const auto frugal = Pool::Create(Options(256 * kMega, kMega));
  CHECK(!setrlimit(RLIMIT_NOFILE, &before));
  std::vector<std::shared_ptr<Block>> blocks;
  CHECK(Eventually([&] {
    while (auto block = frugal->Allocate(kMega)) blocks.push_back(block);
    return frugal->GetHeld().used_bytes > 200 * kMega;
  }));
  CHECK(frugal->GetHeld().pieces <= 16);
}

TEST(SignalsDoNotHinderReserving) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  struct sigaction before{};
  CHECK(!sigaction(SIGALRM, &action, &before));
  const itimerval often{{0, 500}, {0, 500}};
  CHECK(!setitimer(ITIMER_REAL, &often, nullptr));
  const auto pool = Pool::Create(Options(512 * kMega));
  for (int i = 0; i < 5; ++i) CHECK(pool->Allocate(64 * kMega) != nullptr);
  const itimerval never{};
  CHECK(!setitimer(ITIMER_REAL, &never, nullptr));
  CHECK(!sigaction(SIGALRM, &before, nullptr));
}

TEST(RanksReadWhatTheProducerWrites) {
  const auto pool = Pool::Create(Options(64 * kMega));
  const auto first = pool->Allocate(kMega);
  const auto second = pool->Allocate(kMega);
  Mappings mappings;
  std::set<uint32_t> pieces = {first->piece, second->piece};
  for (uint32_t piece : pieces)
    CHECK(!mappings.Add(piece, pool->Descriptor(piece)));
  for (const auto& block : {first, second}) {
    memset(block->data, 'x', kMega);
    const auto memory =
        mappings.Find(block->piece, block->offset, block->capacity);
    CHECK(memory != nullptr && memory.get() != block->data);
    CHECK(!memcmp(memory.get(), block->data, kMega));
    block->data[5] = 'y';  // also later
    CHECK_EQ(memory.get()[5], 'y');
  }
}

TEST(RanksCanNeitherWriteNorTruncate) {
  const auto pool = Pool::Create(Options(64 * kMega));
  const auto block = pool->Allocate(kMega);
  memset(block->data, 'x', kMega);
  Mappings mappings;
  const int fd = pool->Descriptor(block->piece);
  CHECK(!mappings.Add(block->piece, dup(fd)));
  const auto memory = mappings.Find(block->piece, 0, kMega);
  CHECK(mprotect(memory.get(), 4096, PROT_READ | PROT_WRITE) != 0);

  const auto try_to_harm = [&](int descriptor) {
    CHECK(mmap(nullptr, kMega, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
               0) == MAP_FAILED);
    CHECK(ftruncate(descriptor, 0) != 0);
    CHECK(ftruncate(descriptor, 100 * kMega) != 0);
    CHECK(pwrite(descriptor, "z", 1, 0) < 0);
    CHECK(fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                    4096) != 0);
    CHECK(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  };
  try_to_harm(fd);
  // Opened anew, as whoever is the same user can.
  const int other =
      open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR);
  if (other >= 0) {
    try_to_harm(other);
    close(other);
  }
  close(fd);
  for (int64_t at = 0; at < kMega; ++at) CHECK(block->data[at] == 'x');
}

TEST(MappingsStayWhileTheyAreUsed) {
  Mappings mappings;
  std::shared_ptr<char> memory;
  {
    const auto pool = Pool::Create(Options(64 * kMega));
    const auto block = pool->Allocate(kMega);
    memset(block->data, 'x', kMega);
    CHECK(!mappings.Add(block->piece, pool->Descriptor(block->piece)));
    memory = mappings.Find(block->piece, block->offset, kMega);
    mappings.Forget(block->piece);
    CHECK(!mappings.Find(block->piece, block->offset, kMega));
    mappings.Forget(block->piece);
  }
  for (int64_t at = 0; at < kMega; ++at) CHECK(memory.get()[at] == 'x');
  CHECK_EQ(MappedBytes(), kMega);
  memory.reset();
  CHECK_EQ(MappedBytes(), 0);
}

TEST(WhatIsNoPieceIsRefused) {
  const int descriptors = CountDescriptors();
  Mappings mappings;
  const auto expect = [&](int fd, const std::string& text) {
    const auto error = mappings.Add(7, fd);
    CHECK(error.has_value());
    if (error->find(text) == std::string::npos) CHECK_EQ(*error, text);
  };
  expect(-1, "piece 7 has no descriptor");
  expect(100000, "piece 7 has no descriptor");
  expect(open("/dev/null", O_RDONLY), "Received: a descriptor that is none");
  const int truncatable = memfd_create("other", MFD_CLOEXEC);
  CHECK(!ftruncate(truncatable, 4096));
  expect(truncatable, "Received: a descriptor of one that can");
  const int empty = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(!fcntl(empty, F_ADD_SEALS, F_SEAL_SHRINK));
  expect(empty, "expected memory. Received: 0 bytes");

  // Room for one piece, and no file to look into: the pool's thread has nothing
  // open while descriptors are counted.
  PoolOptions options = Options(kMega);
  options.spare_bytes = [] { return kMega; };
  const auto pool = Pool::Create(options);
  const auto block = pool->Allocate(kMega);
  CHECK(!mappings.Add(7, pool->Descriptor(block->piece)));
  expect(pool->Descriptor(block->piece), "expected a new number");
  CHECK_EQ(CountDescriptors(), descriptors + 1);
}

TEST(PlacesOutsideOfAPieceAreNotFound) {
  const auto pool = Pool::Create(Options(64 * kMega));
  const auto block = pool->Allocate(kMega);
  const int64_t bytes = pool->PieceBytes(block->piece);
  Mappings mappings;
  CHECK(!mappings.Add(3, pool->Descriptor(block->piece)));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  CHECK(mappings.Find(3, 0, bytes) != nullptr);
  CHECK(mappings.Find(3, bytes, 0) != nullptr);
  CHECK(!mappings.Find(2, 0, 1));
  CHECK(!mappings.Find(3, 0, bytes + 1));
  CHECK(!mappings.Find(3, 1, bytes));
  CHECK(!mappings.Find(3, bytes + 1, 0));
  CHECK(!mappings.Find(3, -1, 1));
  CHECK(!mappings.Find(3, 64, -1));
  CHECK(!mappings.Find(3, kMost, kMost));
  CHECK(!mappings.Find(3, 64, kMost));
}

TEST(ThePoolLivesAsLongAsItsBlocks) {
  auto pool = Pool::Create(Options(64 * kMega));
  auto block = pool->Allocate(kMega);
  const std::weak_ptr<Pool> weak = pool;
  pool.reset();
  CHECK(!weak.expired());
  memset(block->data, 1, kMega);
  // Any thread may be the last.
  std::thread([last = std::move(block)]() mutable { last.reset(); }).join();
  CHECK(weak.expired());
  CHECK_EQ(MappedBytes(), 0);
}

TEST(NothingIsLeft) {
  const int descriptors = CountDescriptors();
  for (int round = 0; round < 20; ++round) {
    const auto pool = Pool::Create(Options(64 * kMega));
    pool->Prepare(2 * kMega, 5);
    Mappings mappings;
    std::vector<std::shared_ptr<Block>> blocks;
    for (int i = 0; i < round; ++i) {
      if (auto block = pool->Allocate(i * 100 * kKilo)) blocks.push_back(block);
    }
    for (const auto& block : blocks)
      mappings.Add(block->piece, pool->Descriptor(block->piece));
  }
  CHECK_EQ(CountDescriptors(), descriptors);
  CHECK_EQ(MappedBytes(), 0);
}

}  // namespace
}  // namespace kerasfeed
