// The ops' other side for Python (ctypes), in the manners of core/c_api.h: what
// pumps, and what a rank's dataset reads from. Ops find both by a number, since
// a graph can hold one.
#ifndef KERASFEED_NATIVE_OPS_C_API_H_
#define KERASFEED_NATIVE_OPS_C_API_H_

#include <stdint.h>

#include "core/c_api.h"
#include "core/digest_c_api.h"
#include "core/reader_c_api.h"
#include "core/server_c_api.h"

// ---- The producer: what KerasfeedPump works with ----

// `server`: null if no rank can share memory. `progress`: four numbers, the
// first two of which are (pass, elements) of what was produced furthest. All
// must outlive the pump. Numbers: the pump's number.
KF_API KfStatus kf_pump_new(KfWindow* window, KfServer* server,
                            KerasfeedDigester* digester,
                            KerasfeedJournal* journal, int64_t* progress,
                            int64_t ahead, KfReply* reply);
// What the op with this pump came to, which it can't say when it fails.
// Numbers: the PumpOutcome's kind, produced, generation, the seek's generation,
// pass, element and whether passes are joined, and both digests.
KF_API KfStatus kf_pump_outcome(int64_t pump, KfReply* reply);
KF_API KfStatus kf_pump_free(int64_t pump, KfReply* reply);

// ---- A rank: what KerasfeedDataset reads from ----

// What Python is asked, in whatever thread pulls; all are called with the
// feed's number, and may leave a message of up to kKfMessageBytes, its zero
// byte included, when they return -1. Nobody is asked once the feed is closed.
constexpr int64_t kKfMessageBytes = 16384;
struct KfFeedCallbacks {
  // An iterator pulls for the first time. Returns the number of its read.
  int64_t (*open)(int64_t feed, int32_t direct, char* message);
  // The read has come to the end of an epoch. Returns whether it goes on.
  int64_t (*ended)(int64_t feed, int64_t reader, int64_t epoch, int64_t steps,
                   char* message);
  // The read waits for its next step, for so long by now, or since Ctrl-C. 0:
  // it waits on.
  int64_t (*waiting)(int64_t feed, int64_t reader, double seconds,
                     int32_t interrupted, char* message);
  // There is no next step, for a reason of this kind (as FailureKind counts;
  // -1: the read is void). Returns -1.
  int64_t (*failed)(int64_t feed, int64_t reader, int64_t kind,
                    const char* text, char* message);
};
// For the whole process, and for ever.
KF_API void kf_feed_set_callbacks(const KfFeedCallbacks* callbacks);

// A feed, with the name that messages give it. Numbers: its number.
KF_API KfStatus kf_feed_new(const char* name, int64_t bytes, KfReply* reply);
KF_API KfStatus kf_feed_free(int64_t feed, KfReply* reply);
// The feed starts: iterators that are opened from now on read from this reader.
KF_API KfStatus kf_feed_begin(int64_t feed, KfReader* reader, KfReply* reply);
// Whoever waits asks `waiting` now.
KF_API KfStatus kf_feed_alert(int64_t feed, KfReply* reply);
// Whoever waits asks `waiting` now, and says that he was interrupted.
KF_API KfStatus kf_feed_interrupt(int64_t feed, KfReply* reply);
// Whoever reads from the present reader gets an error, now and later, and
// Python is not asked any more.
KF_API KfStatus kf_feed_close(int64_t feed, KfReply* reply);

#endif  // KERASFEED_NATIVE_OPS_C_API_H_
