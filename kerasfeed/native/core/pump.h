// The pump's loop: takes elements from a source, notes and compares their
// digests, and puts them into the window, as kerasfeed/producer/pump.py does.
// It comes back to its caller for all that is rare: to seek, at the end of a
// pass, when something fails, and where an iterator is to be saved.
#ifndef KERASFEED_NATIVE_CORE_PUMP_H_
#define KERASFEED_NATIVE_CORE_PUMP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "digest.h"
#include "element.h"
#include "journal.h"
#include "pool.h"
#include "position.h"
#include "window.h"

namespace kerasfeed {

// What a source has: the element, whose memory its owner keeps, or nothing more
// in this pass, or an error.
enum class SourceResult { kElement, kEnd, kError };
using Source = std::function<SourceResult(Element*)>;

// What becomes of an element that is another one than it was.
enum class Tolerance : int64_t {
  kNone,  // it does not go into the window
  kTell,  // it does, and the caller hears of it
  kAll,   // it does
};

struct PumpRequest {
  Place place;         // (pass, element) of what the source yields next
  int64_t limit = -1;  // most elements to produce before coming back;
                       // negative: as many as are wanted
  int64_t wakes = 0;  // Window::PumpWakes when the caller last looked what else
                      // there is to do
  Tolerance tolerance = Tolerance::kNone;
};

struct PumpOutcome {
  enum class Kind : int64_t {
    kInterrupted,  // Window::WakePump was called
    kSeek,         // the window wants another element
    kPause,        // the window has no work, and Window::TryWork says so
    kStop,
    kEnd,       // the source has nothing more in this pass
    kError,     // the source failed
    kLimit,     // so many were produced
    kMismatch,  // the last element is another one than it was
    kPastEnd,   // the pass had less elements when it was produced before
  };
  Kind kind = Kind::kStop;
  int64_t produced = 0;    // elements that the source yielded
  int64_t generation = 0;  // of the work that was under way: kEnd, kError,
                           // kMismatch, kPastEnd
  Seek seek;               // kSeek
  uint64_t was = 0;        // kMismatch: the digest that the element had
  uint64_t now = 0;
};

// What the loop needs beside its source. One thread pumps at a time.
struct PumpContext {
  Window* window = nullptr;
  const Digester* digester = nullptr;
  Journal* journal = nullptr;
  // Where elements of ranks that share memory go; null: nowhere.
  std::shared_ptr<Pool> pool;
  // Whether a rank shares memory with this process.
  std::function<bool(int64_t rank)> shares;
  // Called with (pass, elements that were produced of it) after each element.
  std::function<void(int64_t pass, int64_t elements)> progress;
  // How many elements are made ahead: room for them is made ahead, too.
  int64_t ahead = 0;
  // The largest element for which that was done.
  int64_t prepared_bytes = 0;
};

PumpOutcome Pump(PumpContext* context, const PumpRequest& request,
                 const Source& source);

// The element as it goes into the window: in a block of the pool if there is
// room, else as it is.
ElementPtr Placed(Pool* pool, Element element);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_PUMP_H_
