// A rank's side of its data socket: asks for steps, and hands them out in
// order, one by one.
//
// Over a Unix socket elements lie in shared memory and the one who calls Next
// reads the socket himself. Over TCP a thread receives ahead, straight into
// memory that becomes the tensors'. The connection may break and be replaced at
// any time (Attach): reading goes on at the next step that was not handed out.
#ifndef KERASFEED_NATIVE_CORE_READER_H_
#define KERASFEED_NATIVE_CORE_READER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "pool.h"
#include "socket.h"
#include "window.h"
#include "wire.h"

namespace kerasfeed {

// Memory of an element's block at a rank, aligned to 64 bytes. When the last
// owner lets go, it is given back.
struct ReceivedElement {
  int64_t reader = 0;
  Position position;
  int64_t size = 0;
  std::vector<Component> components;
  std::shared_ptr<char> block;
  bool shared = false;  // lies in shared memory
};

// Why Next returns without a step.
struct Interrupted {
  std::string message;
};

using Received = std::variant<ReceivedElement, EpochEnd, Failure, Interrupted>;

// What comes next: of a step its position only.
using Peeked = std::variant<Position, EpochEnd, Failure, Interrupted>;

// How far a read has come.
struct Pulls {
  int64_t steps = 0;  // that were handed out, over all epochs
  Position next;      // the first one that was not
};

struct ReaderOptions {
  // Fresh memory for a block of `size` bytes, aligned to 64 bytes: where TCP
  // receives into, and copies go. Pooled by whoever gives it, since fresh
  // memory costs as much as the transport. Never null; empty: an own pool.
  std::function<std::shared_ptr<char>(int64_t size)> allocate;
  // What a read asks for as `free_bytes`.
  int64_t free_bytes = int64_t{128} << 10;
  // From so many bytes of shared memory on that a user keeps, elements are
  // copied, so that the producer's slots come back.
  int64_t max_kept_bytes = int64_t{256} << 20;
};

// Threads: any may call anything, though two that call Next for one read share
// its steps in no order. Over a Unix socket there is no thread besides those
// that call: Next and Sync receive for each other. Over TCP each connection has
// one, which Attach starts, and Attach, Detach or the destructor joins. Nobody
// blocks in a send: what does not fit is sent by whoever waits next.
//
// Locks: one mutex guards the read and its queue, and is never held while
// somebody waits, connects or is joined. Each connection has another for what
// is to be sent, which may be taken with the first one held: elements are let
// go of in any thread, at any time, also when the reader is no more.
//
// A child of fork() must not use it, nor read elements for longer than its
// parent keeps them; it may destroy both, which does nothing there.
//
// Shared memory that the user still has keeps the connection over which it came
// open, also when another has taken its place, since its end would tell the
// producer that the memory is free.
class Reader {
 public:
  explicit Reader(ReaderOptions options);
  ~Reader();

  // Connects ("unix:<abstract name>" or "tcp:<host>:<port>"), proves itself,
  // and takes the place of the connection there was: reading goes on where it
  // was. Blocks for at most `timeout` seconds; an error in words, or nothing.
  std::optional<std::string> Attach(const std::string& address, int64_t rank,
                                    const Proof& proof, const Proof& expected,
                                    double timeout);
  void Detach();
  // Whether there is a connection, as far as this side can know.
  bool attached() const;
  // Why the last connection broke, in words; empty if none did since Attach.
  std::string trouble() const;

  // Asks for the steps from `request.position` on; what was asked for earlier
  // is void. The reader's own number takes the place of `request.reader`, and
  // is returned. In a `free` read a step counts as trained when the next one is
  // pulled, or the epoch's end, and the producer hears that without
  // Acknowledge: counts go on from what that said last.
  int64_t Read(ReadRequest request, bool free = false);
  // What was asked for is void, and nothing else is asked for.
  void Void();
  // The next step, the epoch's end, or a failure. Blocks; `interrupted` (a
  // message, or nothing) is looked at when Wake is called, and every half
  // second. What `reader` has not asked for is never returned to it: a later
  // Read interrupts it.
  Received Next(int64_t reader,
                const std::function<std::optional<std::string>()>& interrupted);
  // As Next, but leaves it to be handed out, and waits for at most `seconds`;
  // nothing if nothing has come.
  std::optional<Peeked> Peek(int64_t reader, double seconds);
  void Wake();
  // Tells the producer what is trained; what was pulled it hears by itself.
  void Acknowledge(Position acknowledged,
                   const std::map<int64_t, int64_t>& trained);
  // Waits until the producer has heard all that was said, at most `timeout`
  // seconds. Whether it has.
  bool Sync(double timeout);

  // The first step that was not handed out of the present read.
  Position pulled() const;
  // How far read `reader` has come, also if it is void; nothing if there is a
  // later one.
  std::optional<Pulls> GetPulls(int64_t reader) const;
  struct Counts {
    int64_t shared = 0, copied = 0, received = 0;  // elements
    int64_t kept_bytes = 0;  // shared memory that the user keeps now
    int64_t queued = 0;      // what has arrived and was not handed out
  };
  Counts GetCounts() const;

 private:
  class State;
  const Origin origin_;
  std::unique_ptr<State> state_;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_READER_H_
