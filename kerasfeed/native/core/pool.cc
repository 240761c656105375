#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <limits>
#include <list>
#include <map>
#include <sstream>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "element.h"

// Newer than the headers that this may be compiled with.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kerasfeed {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t kFirstPieceBytes = int64_t{256} << 10;
constexpr int64_t kMaxMargin = int64_t{1} << 30;
// Memory is reserved and populated in strides of so much, so that a signal
// costs little and a destructor waits little.
constexpr int64_t kStride = int64_t{4} << 20;
constexpr int kMaxInterruptions = 1000;  // of a stride, by signals

int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t WholePages(int64_t size) {
  return (size + PageBytes() - 1) / PageBytes() * PageBytes();
}

// ---- What the machine has free ----

// Less a margin of a 16th, so that we are not what takes the last of it.
int64_t WithMargin(int64_t total, int64_t available) {
  return available - std::min(kMaxMargin, total / 16);
}

// The value after `key` in a file of lines "key value"; nothing if it has none.
std::optional<int64_t> ReadKey(const std::string& path,
                               const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// The number in a file; nothing if it holds none ("max").
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// What the names are in the two versions of control groups.
struct GroupFiles {
  const char* root;
  const char* limit;
  const char* usage;
  const char* statistics_prefix;
};
constexpr GroupFiles kGroups1 = {"/sys/fs/cgroup/memory",
                                 "memory.limit_in_bytes",
                                 "memory.usage_in_bytes", "total_"};
constexpr GroupFiles kGroups2 = {"/sys/fs/cgroup", "memory.max",
                                 "memory.current", ""};

// What is free in the group `path` and all above it. In a container the path
// may be the host's and lead nowhere, but its own group is then the root.
int64_t SpareInGroups(const GroupFiles& files, std::string path) {
  int64_t spare = kUnlimited;
  while (true) {
    const std::string directory = files.root + path + "/";
    const auto limit = ReadNumber(directory + files.limit);
    const auto usage = ReadNumber(directory + files.usage);
    if (limit && usage && *limit < kUnlimited / 2) {
      // Usage counts cached files, which give way.
      int64_t cached = 0;
      for (const char* key : {"inactive_file", "active_file"})
        cached += ReadKey(directory + "memory.stat",
                          std::string(files.statistics_prefix) + key)
                      .value_or(0);
      spare = std::min(spare, WithMargin(*limit, *limit - *usage + cached));
    }
    if (path.empty()) return spare;
    path.resize(path.rfind('/'));
  }
}

int64_t SpareInGroups() {
  int64_t spare = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  // Lines "number:controllers:path"; version 2 is number 0.
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/') continue;
    if (path == "/") path.clear();
    if (line.compare(0, first, "0") == 0)
      spare = std::min(spare, SpareInGroups(kGroups2, path));
    else if (controllers.find(",memory,") != std::string::npos)
      spare = std::min(spare, SpareInGroups(kGroups1, path));
  }
  return spare;
}

// ---- Memory ----

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

class Mapped {
 public:
  // `data` is null if it could not be mapped.
  Mapped(int fd, int64_t size, int protection)
      : memory_(mmap(nullptr, size, protection, MAP_SHARED, fd, 0)),
        size_(size) {
    if (memory_ == MAP_FAILED) memory_ = nullptr;
  }
  Mapped(Mapped&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), size_(other.size_) {}
  Mapped& operator=(Mapped&&) = delete;
  ~Mapped() {
    if (memory_) munmap(memory_, size_);
  }
  char* data() const { return static_cast<char*>(memory_); }
  int64_t size() const { return size_; }

 private:
  void* memory_;
  const int64_t size_;
};

// What a piece consists of.
struct Memory {
  FileDescriptor descriptor;  // read-only
  Mapped mapped;
};

int OpenMemory(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

bool Reserve(int fd, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kStride) {
    int error = EINTR;
    for (int i = 0; error == EINTR && i < kMaxInterruptions; ++i)
      error = posix_fallocate(fd, at, std::min(kStride, bytes - at));
    if (error) return false;
  }
  return true;
}

// Fresh memory that has its pages and keeps its size; nothing if there is none.
std::optional<Memory> MakeMemory(const std::string& name, int64_t bytes) {
  const FileDescriptor writable(OpenMemory(name.c_str()));
  if (writable.get() < 0 || !Reserve(writable.get(), bytes))
    return std::nullopt;
  Mapped mapped(writable.get(), bytes, PROT_READ | PROT_WRITE);
  if (!mapped.data()) return std::nullopt;
  // From here on only this mapping can write (on Linux 5.1 or newer; before it,
  // others can if they are the same user and try to).
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(writable.get(), F_ADD_SEALS, kSize | F_SEAL_FUTURE_WRITE) &&
      fcntl(writable.get(), F_ADD_SEALS, kSize))
    return std::nullopt;
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  FileDescriptor descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (descriptor.get() < 0) return std::nullopt;
  return Memory{std::move(descriptor), std::move(mapped)};
}

// Enters pages into the page tables, unless `stopped`. The caller is the only
// one who uses the memory.
void Populate(const Mapped& mapped, const std::atomic<bool>& stopped) {
  for (int64_t at = 0; at < mapped.size() && !stopped; at += kStride) {
    const int64_t size = std::min(kStride, mapped.size() - at);
    char* const start = mapped.data() + at;
    if (!madvise(start, size, MADV_POPULATE_WRITE)) continue;
    if (errno != EINVAL) return;  // nothing that pages need not be touched for
    for (int64_t page = 0; page < size; page += PageBytes())
      *const_cast<volatile char*>(start + page) = 0;
  }
}

}  // namespace

int64_t SpareBytes() {
  const int64_t total = ReadKey("/proc/meminfo", "MemTotal:").value_or(0);
  const auto available = ReadKey("/proc/meminfo", "MemAvailable:");
  const int64_t machine =
      available ? WithMargin(total * 1024, *available * 1024) : kUnlimited;
  return std::min(machine, SpareInGroups());
}

int64_t SlotBytes(int64_t size) {
  if (size <= 4 * kAlignment) return std::max(Aligned(size), kAlignment);
  const int power = 63 - __builtin_clzll(static_cast<uint64_t>(size - 1));
  const int64_t step = int64_t{1} << (power - 2);
  return (size + step - 1) / step * step;
}

// ---- Pool ----

class Pool::State {
 public:
  explicit State(PoolOptions options)
      : options_(std::move(options)),
        max_pieces_(MaxPieces()),
        piece_bytes_(std::max(options_.piece_bytes,
                              options_.max_bytes / (max_pieces_ / 2 + 1))) {}

  ~State() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  std::shared_ptr<Block> Allocate(std::shared_ptr<Pool> pool, int64_t size) {
    if (size < 0 || size > options_.max_bytes) return nullptr;
    const int64_t slot_bytes = SlotBytes(size);
    // Made first, so that nothing is lost should there be no memory for it.
    auto handle = std::make_shared<Handle>();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      SizeClass& size_class = GetClass(slot_bytes);
      if (size_class.available.empty() && !AddPiece(&lock, &size_class))
        return nullptr;
      Take(&size_class, handle.get());
      if (size_class.WantsMore()) AskForMore(&size_class);
    }
    handle->pool = std::move(pool);
    Block* const block = &handle->block;
    return std::shared_ptr<Block>(std::move(handle), block);
  }

  void Prepare(int64_t size, int64_t count) {
    if (size < 0 || size > options_.max_bytes) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    SizeClass& size_class = GetClass(SlotBytes(size));
    size_class.wanted = std::max(size_class.wanted, count);
    if (size_class.WantsMore()) AskForMore(&size_class);
  }

  int GetDescriptor(uint32_t piece) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pieces_.find(piece);
    if (found == pieces_.end()) return -1;
    return fcntl(found->second->memory.descriptor.get(), F_DUPFD_CLOEXEC, 0);
  }

  int64_t PieceBytes(uint32_t piece) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pieces_.find(piece);
    return found == pieces_.end() ? -1 : found->second->memory.mapped.size();
  }

  int64_t given_up() const { return given_up_; }

  Held GetHeld() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Held held;
    held.reserved_bytes = reserved_bytes_;
    held.used_bytes = used_bytes_;
    held.pieces = static_cast<int64_t>(pieces_.size());
    held.blocks = blocks_;
    return held;
  }

 private:
  struct Piece;

  // The slots of one size. Never removed: there are few hundred at most.
  struct SizeClass {
    int64_t slot_bytes = 0;
    int64_t slots = 0;   // in all pieces, those included that are being made
    int64_t used = 0;    // slots
    int64_t wanted = 0;  // slots that Prepare asked for
    bool asked = false;  // in asked_
    Clock::time_point last_used;           // when a piece last ran empty
    std::map<uint32_t, Piece*> available;  // pieces with a free slot

    bool WantsMore() const {
      return slots < wanted || (used && 4 * (slots - used) < slots);
    }
    bool CanLose(int64_t count) const {
      return 2 * (slots - count - used) >= slots - count &&
             slots - count >= wanted;
    }
  };

  struct Piece {
    Piece(Memory memory, SizeClass* size_class, uint32_t number, int64_t slots)
        : memory(std::move(memory)),
          size_class(size_class),
          number(number),
          slots(slots) {}

    Memory memory;
    SizeClass* const size_class;
    const uint32_t number;
    const int64_t slots;
    int64_t used = 0;
    int64_t untouched = 0;       // the first slot that was never in use
    std::vector<uint32_t> free;  // slots that were in use and are not
    Clock::time_point last_used;
    typename std::list<Piece>::iterator self;  // in busy_ or idle_
  };
  using Pieces = std::list<Piece>;

  // A block, and what it takes to give it back.
  struct Handle {
    Block block;
    Piece* piece = nullptr;
    uint32_t slot = 0;
    std::shared_ptr<Pool> pool;  // null: nothing to give back

    ~Handle() {
      if (pool && !pool->origin_.Forked()) {
        pool->state_->GiveBack(piece, slot);
      }
    }
  };

  static int64_t MaxPieces() {
    // Each has a descriptor, and the user's code needs some, too.
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur == RLIM_INFINITY)
      return int64_t{1} << 16;
    return std::max<int64_t>(1, static_cast<int64_t>(limit.rlim_cur) / 4);
  }

  int64_t Spare() const {
    return options_.spare_bytes ? options_.spare_bytes() : SpareBytes();
  }

  SizeClass& GetClass(int64_t slot_bytes) {
    SizeClass& size_class = classes_[slot_bytes];
    size_class.slot_bytes = slot_bytes;
    return size_class;
  }

  void Take(SizeClass* size_class, Handle* handle) {
    Piece& piece = *size_class->available.begin()->second;
    if (!piece.used) busy_.splice(busy_.end(), idle_, piece.self);
    if (piece.free.empty()) {
      handle->slot = static_cast<uint32_t>(piece.untouched++);
    } else {
      handle->slot = piece.free.back();
      piece.free.pop_back();
    }
    if (++piece.used == piece.slots)
      size_class->available.erase(size_class->available.begin());
    handle->piece = &piece;
    handle->block.piece = piece.number;
    handle->block.offset = handle->slot * size_class->slot_bytes;
    handle->block.capacity = size_class->slot_bytes;
    handle->block.data = piece.memory.mapped.data() + handle->block.offset;
    ++size_class->used;
    ++blocks_;
    used_bytes_ += size_class->slot_bytes;
  }

  void GiveBack(Piece* piece, uint32_t slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    SizeClass& size_class = *piece->size_class;
    piece->free.push_back(slot);
    if (piece->used-- == piece->slots)
      size_class.available.emplace(piece->number, piece);
    if (!piece->used) {
      piece->last_used = size_class.last_used = Clock::now();
      idle_.splice(idle_.end(), busy_, piece->self);
    }
    --size_class.used;
    --blocks_;
    used_bytes_ -= size_class.slot_bytes;
  }

  // ---- Making pieces ----

  // What a piece of `bytes` lacks: nothing if it is at most 0.
  int64_t Lacking(int64_t bytes, int64_t spare) const {
    return std::max(reserved_bytes_ - options_.max_bytes, -spare) + bytes;
  }

  struct Plan {
    int64_t slots = 0;
    int64_t bytes = 0;
  };

  // The next piece of a class: less than it would have if there is no room.
  Plan PlanPiece(const SizeClass& size_class, int64_t spare) const {
    const auto plan = [&](int64_t bytes) {
      const int64_t slots = std::max<int64_t>(1, bytes / size_class.slot_bytes);
      return Plan{slots, WholePages(slots * size_class.slot_bytes)};
    };
    const Plan next = plan(std::min(
        piece_bytes_,
        std::max(kFirstPieceBytes, size_class.slots * size_class.slot_bytes)));
    if (Lacking(next.bytes, spare) <= 0) return next;
    return plan(std::min(piece_bytes_, kFirstPieceBytes));
  }

  bool CanHaveAnother() const {
    return static_cast<int64_t>(pieces_.size()) + making_ < max_pieces_;
  }

  // Makes a piece now, and gives up empty ones for it if need be. Whether there
  // is a free slot then.
  bool AddPiece(std::unique_lock<std::mutex>* lock, SizeClass* size_class) {
    lock->unlock();
    const int64_t spare = Spare();  // asks the kernel: not under the lock
    lock->lock();
    if (!size_class->available.empty()) return true;

    const auto [slots, bytes] = PlanPiece(*size_class, spare);
    int64_t freed = 0;
    int64_t count = 0;
    const int64_t lacking = Lacking(bytes, spare);
    auto end = idle_.begin();
    while (end != idle_.end() &&
           (freed < lacking || (!count && !CanHaveAnother()))) {
      freed += end->memory.mapped.size();
      ++end;
      ++count;
    }
    if (freed < lacking || (!count && !CanHaveAnother())) return false;
    Pieces victims = Remove(idle_.begin(), end);

    // The bytes of the victims count until they are unmapped.
    reserved_bytes_ += std::max<int64_t>(0, bytes - freed);
    const bool made = MakePiece(lock, size_class, slots, bytes, &victims);
    reserved_bytes_ -= std::max<int64_t>(0, freed - bytes);
    return made || !size_class->available.empty();
  }

  // Makes a piece whose bytes are counted, without the lock meanwhile, and
  // populates it if it is for later.
  bool MakePiece(std::unique_lock<std::mutex>* lock, SizeClass* size_class,
                 int64_t slots, int64_t bytes, Pieces* victims) {
    const bool ahead = victims == nullptr;
    size_class->slots += slots;
    ++making_;
    lock->unlock();
    if (victims) victims->clear();
    std::optional<Memory> memory = MakeMemory(options_.name, bytes);
    if (memory && ahead) Populate(memory->mapped, stopped_);
    lock->lock();
    --making_;
    if (!memory) {
      size_class->slots -= slots;
      reserved_bytes_ -= bytes;
      return false;
    }
    idle_.emplace_back(*std::move(memory), size_class, next_number_++, slots);
    Piece& piece = idle_.back();
    piece.self = std::prev(idle_.end());
    piece.free.reserve(slots);  // so that giving back takes no memory
    piece.last_used = Clock::now();
    pieces_.emplace(piece.number, &piece);
    size_class->available.emplace(piece.number, &piece);
    StartThread();
    return true;
  }

  // Takes empty pieces out of all lists. Their bytes still count: the caller
  // sees to that when it has unmapped them.
  Pieces Remove(Pieces::iterator begin, Pieces::iterator end) {
    Pieces removed;
    removed.splice(removed.end(), idle_, begin, end);
    for (Piece& piece : removed) {
      piece.size_class->slots -= piece.slots;
      piece.size_class->available.erase(piece.number);
      pieces_.erase(piece.number);
    }
    given_up_ += static_cast<int64_t>(removed.size());
    return removed;
  }

  // ---- The thread ----

  void AskForMore(SizeClass* size_class) {
    if (size_class->asked) return;
    size_class->asked = true;
    asked_.push_back(size_class);
    StartThread();
    wake_.notify_one();
  }

  void StartThread() {
    if (thread_.joinable() || stopped_) return;
    // The process's signals are for other threads.
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      thread_ = std::thread([this] {
        pthread_setname_np(pthread_self(), "kerasfeed-pool");
        Run();
      });
    } catch (const std::system_error&) {
      // No thread can be had: Allocate does all there is to do.
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  void Run() {
    const auto idle = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(
            std::clamp(options_.idle_seconds, 0.01, 1e9)));
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      if (asked_.empty()) wake_.wait_for(lock, idle / 2);
      while (!stopped_ && !asked_.empty()) {
        SizeClass* const size_class = asked_.front();
        if (!MakeAhead(&lock, size_class)) {
          asked_.pop_front();
          size_class->asked = false;
        } else if (asked_.size() > 1) {
          asked_.splice(asked_.end(), asked_, asked_.begin());
        }
      }
      if (!stopped_) GiveUpIdle(&lock, Clock::now() - idle);
    }
  }

  // Whether the class got a piece, and may want another.
  bool MakeAhead(std::unique_lock<std::mutex>* lock, SizeClass* size_class) {
    if (!size_class->WantsMore()) return false;
    lock->unlock();
    const int64_t spare = Spare();
    lock->lock();
    const auto [slots, bytes] = PlanPiece(*size_class, spare);
    if (Lacking(bytes, spare) > 0 || !CanHaveAnother()) return false;
    reserved_bytes_ += bytes;
    return MakePiece(lock, size_class, slots, bytes, nullptr);
  }

  // Gives up pieces that were empty since `since`.
  void GiveUpIdle(std::unique_lock<std::mutex>* lock, Clock::time_point since) {
    Pieces removed;
    int64_t bytes = 0;
    for (auto next = idle_.begin(); next != idle_.end();) {
      const auto piece = next++;
      SizeClass& size_class = *piece->size_class;
      if (piece->last_used > since) continue;
      const bool unused = !size_class.used && size_class.last_used <= since;
      const bool met = size_class.last_used != Clock::time_point();
      if (unused && met) size_class.wanted = 0;
      if (!(unused && met) && !size_class.CanLose(piece->slots)) continue;
      bytes += piece->memory.mapped.size();
      removed.splice(removed.end(), Remove(piece, next));
    }
    if (removed.empty()) return;
    lock->unlock();
    removed.clear();
    lock->lock();
    reserved_bytes_ -= bytes;
  }

  const PoolOptions options_;
  const int64_t max_pieces_;
  const int64_t piece_bytes_;  // so many that the pieces suffice for max_bytes
  mutable std::mutex mutex_;
  std::condition_variable wake_;  // of the thread
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> given_up_{0};
  std::unordered_map<int64_t, SizeClass> classes_;  // by the slots' bytes
  Pieces busy_;
  Pieces idle_;  // empty pieces, the least recently used one first
  std::unordered_map<uint32_t, Piece*> pieces_;
  std::list<SizeClass*> asked_;  // the thread is to look at these
  int64_t reserved_bytes_ = 0;   // also of pieces being made or unmapped
  int64_t used_bytes_ = 0;
  int64_t blocks_ = 0;
  int64_t making_ = 0;  // pieces
  uint32_t next_number_ = 0;
  std::thread thread_;
};

std::shared_ptr<Pool> Pool::Create(PoolOptions options) {
  return std::shared_ptr<Pool>(
      new Pool(std::make_unique<State>(std::move(options))));
}

Pool::Pool(std::unique_ptr<State> state) : state_(std::move(state)) {}

Pool::~Pool() {
  if (origin_.Forked()) static_cast<void>(state_.release());
}

std::shared_ptr<Block> Pool::Allocate(int64_t size) {
  return state_->Allocate(shared_from_this(), size);
}

void Pool::Prepare(int64_t size, int64_t count) {
  state_->Prepare(size, count);
}

int Pool::Descriptor(uint32_t piece) const {
  return state_->GetDescriptor(piece);
}

int64_t Pool::PieceBytes(uint32_t piece) const {
  return state_->PieceBytes(piece);
}

int64_t Pool::given_up() const { return state_->given_up(); }

Pool::Held Pool::GetHeld() const { return state_->GetHeld(); }

// ---- Mappings ----

struct Mappings::Mapping {
  explicit Mapping(Mapped mapped) : mapped(std::move(mapped)) {}
  const Mapped mapped;
};

std::optional<std::string> Mappings::Add(uint32_t piece, int fd) {
  const FileDescriptor descriptor(fd);
  const std::string which = "piece " + std::to_string(piece);
  struct stat status{};
  if (fstat(fd, &status))
    return which + " has no descriptor: " + strerror(errno);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK))
    return which +
           ": expected a memfd that can't shrink. Received: a descriptor " +
           (seals < 0 ? "that is none" : "of one that can");
  if (status.st_size <= 0)
    return which +
           ": expected memory. Received: " + std::to_string(status.st_size) +
           " bytes";
  Mapped mapped(fd, status.st_size, PROT_READ);
  if (!mapped.data())
    return which + ": " + std::to_string(status.st_size) +
           " bytes can't be mapped: " + strerror(errno);
  const auto mapping = std::make_shared<Mapping>(std::move(mapped));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, known] : mappings_) {
    if (number == piece)
      return which + ": expected a new number. Received: that of a piece of " +
             std::to_string(known->mapped.size()) + " bytes that is known";
  }
  mappings_.emplace_back(piece, mapping);
  return std::nullopt;
}

void Mappings::Forget(uint32_t piece) {
  std::shared_ptr<Mapping> forgotten;  // unmapped without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : mappings_) {
    if (entry.first != piece) continue;
    forgotten = std::move(entry.second);
    std::swap(entry, mappings_.back());
    mappings_.pop_back();
    return;
  }
}

std::shared_ptr<char> Mappings::Find(uint32_t piece, int64_t offset,
                                     int64_t size) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, mapping] : mappings_) {
    if (number != piece) continue;
    const Mapped& mapped = mapping->mapped;
    if (offset < 0 || size < 0 || offset > mapped.size() ||
        size > mapped.size() - offset)
      return nullptr;
    return std::shared_ptr<char>(mapping, mapped.data() + offset);
  }
  return nullptr;
}

}  // namespace kerasfeed
