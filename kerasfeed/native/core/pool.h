// Shared memory for elements of any size: the producer's side hands out blocks,
// ranks map them and give them back.
//
// Memory comes in pieces (one memfd each), reserved with posix_fallocate and
// populated ahead of use by a thread of its own. A piece is cut into slots of
// one size class; one that is empty is given up when another class needs the
// room, so that sizes which change from element to element can't fragment the
// pool to a halt. When there is no room, Allocate says so and the element
// travels another way: it never waits.
//
// Only the producer can write. Pieces can't change their size, what ranks get
// of them is read-only, and no file has a name: when the last process that has
// a piece is gone, so is its memory, however it ended.
#ifndef KERASFEED_NATIVE_CORE_POOL_H_
#define KERASFEED_NATIVE_CORE_POOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "socket.h"

namespace kerasfeed {

struct PoolOptions {
  std::string name = "kerasfeed";  // of the memfds, as /proc shows it
  int64_t max_bytes = int64_t{1}
                      << 30;  // of all pieces together, reserved or not
  // A piece is at most as large as this, or one slot that is larger. It is
  // raised if the process may not have descriptors enough for `max_bytes` then.
  int64_t piece_bytes = int64_t{32} << 20;
  double idle_seconds = 60;  // after which an empty piece is given up
  std::function<int64_t()> spare_bytes;  // what the machine has left for us;
                                         // empty: SpareBytes
};

// Bytes that the machine, and the control groups that this process is in, have
// free now, less a margin for others.
int64_t SpareBytes();

class Pool;

// A slot that is in use. Given back when the last owner lets go.
struct Block {
  uint32_t piece = 0;  // number of the piece; never used again for another one
  int64_t offset = 0;  // in the piece
  int64_t capacity = 0;  // bytes of the slot
  char* data = nullptr;  // mapped here
};

// Who reserves and populates when.
//
// A piece belongs to one size class, and no class owns memory that it doesn't
// use. The first piece of a class is small (256 KB, or one slot), and each
// later one is as large as all that the class has, up to `piece_bytes`: so a
// class that is met once takes little, and one that is used much has few
// pieces.
//
// Allocate takes a free slot of the class, in the oldest piece that has one, so
// that younger pieces run empty. If there is none, it makes a piece itself:
// posix_fallocate, whose failing is an answer while touching a page without
// memory behind it would kill the process. If there is room only for one more
// slot, the piece has only that; and if there is none, empty pieces of other
// classes are given up for it, those first that were used least recently.
//
// A thread, which the first piece starts and the destructor ends, makes pieces
// ahead of need: whenever less than a quarter of the slots of a class are free
// after an Allocate, and Prepare's number before the first. It populates them
// before anybody can get a slot of them, gives up nothing for them, and stays
// below `max_bytes` and SpareBytes as Allocate does. It also gives up pieces
// that were empty for `idle_seconds`, unless a class in use would be left with
// less than half of its slots free.
//
// So Allocate fails only if the pieces that hold a block at all, those that are
// being made at this moment, and one more for a slot of `SlotBytes(size)`
// (256 KB at least) are larger than `max_bytes`, or if the machine has no
// memory or descriptors left. A block holds no more than its own piece: at most
// `piece_bytes`, or its slot if that is larger. As elements are given back in
// about the order in which they came, the pieces of a size that is no longer
// used soon hold none.
//
// In a child of fork() blocks may be destroyed, and the pool, which does
// nothing there.
//
// A piece that is given up is unmapped and closed here. Ranks have it until
// they are told to forget it: its memory is the machine's again after that.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static std::shared_ptr<Pool> Create(PoolOptions options);
  ~Pool();

  // A block of at least `size` bytes, at a multiple of 64; null if there is no
  // room now, or the machine has no memory. The pool lives as long as its
  // blocks.
  std::shared_ptr<Block> Allocate(int64_t size);

  // Elements of `size` bytes are to come: populates room for `count` of them,
  // without waiting for it.
  void Prepare(int64_t size, int64_t count);

  // A read-only descriptor of a piece to be passed to a rank: a duplicate,
  // which the caller closes; -1 if the piece is gone, or no descriptor is free.
  // A piece that holds a block is never gone.
  int Descriptor(uint32_t piece) const;
  // -1 if the piece is gone.
  int64_t PieceBytes(uint32_t piece) const;
  // How many pieces were given up so far: if it has not changed, ranks need
  // forget none. Takes no lock.
  int64_t given_up() const;

  struct Held {
    int64_t reserved_bytes = 0;  // of all pieces
    int64_t used_bytes = 0;      // of the slots in use
    int64_t pieces = 0;
    int64_t blocks = 0;
  };
  Held GetHeld() const;

 private:
  class State;
  explicit Pool(std::unique_ptr<State> state);
  const Origin origin_;
  std::unique_ptr<State> state_;
};

// The smallest slot size that holds `size` bytes: four classes between each
// power of two and the next, so that at most a quarter of a slot is wasted (at
// most 64 bytes below 256).
int64_t SlotBytes(int64_t size);

// ---- A rank's side ----

// Pieces that a rank has mapped, by number: it reads there and can't write.
// Thread-safe. What it hands out
// stays mapped until the last user lets go, also when the piece is forgotten.
class Mappings {
 public:
  // Maps a piece and closes the descriptor, also if it fails. An error message,
  // or nothing. What could be truncated while it is read is refused.
  std::optional<std::string> Add(uint32_t piece, int fd);
  void Forget(uint32_t piece);
  // The mapped memory [offset, offset + size) of a piece; null if the piece is
  // not known or does not reach that far. The pointer keeps the mapping.
  std::shared_ptr<char> Find(uint32_t piece, int64_t offset,
                             int64_t size) const;

 private:
  struct Mapping;
  mutable std::mutex mutex_;
  std::vector<std::pair<uint32_t, std::shared_ptr<Mapping>>> mappings_;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_POOL_H_
