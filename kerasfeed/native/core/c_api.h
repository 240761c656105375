// The window for Python (ctypes): kerasfeed/native/window.py is its only user.
//
// Every function returns a KfStatus, and what else it has to say is in the
// KfReply: numbers and text, which are the caller's until kf_reply_free. What
// the numbers are is said at each function; where it is not, there are none. A
// position is two of them (epoch, step), a segment five (first epoch, origin
// pass, origin element, steps per epoch, first step). Where steps per epoch are
// a number, 0 means: none. No exception gets out: it becomes kKfBroken. Waits
// end by themselves after some seconds, so that Python can look at its signals,
// and nothing calls back into Python.
#ifndef KERASFEED_NATIVE_CORE_C_API_H_
#define KERASFEED_NATIVE_CORE_C_API_H_

#include <stdint.h>

#define KF_API extern "C" __attribute__((visibility("default")))

struct KfWindow;
struct KfElement;

enum KfStatus : int32_t {
  kKfNothing = 0,  // there is none, or not now
  kKfDone = 1,
  kKfBindError = 2,  // text: the BindError
  kKfBroken = -1,    // text: what is wrong; a bug, or no memory
};

struct KfReply {
  int64_t* numbers;
  int64_t count;
  char* text;  // UTF-8, `bytes` long, and a zero byte that is not counted
  int64_t bytes;
};

// What Window takes from WindowOptions.
struct KfOptions {
  int64_t size;
  int64_t prefetch;
  int64_t ready_bytes;
  int64_t max_bytes;
  int64_t steps_per_epoch;
  int64_t cardinality;
  double start_timeout;
  double rank_timeout;
  double cut_grace;
  double poll_seconds;
  // The clock stands still where kf_window_set_clock has put it.
  int32_t own_clock;
  // No rank gets the end of an epoch before kf_window_reported_epoch_end.
  int32_t holds_ends;
};

enum KfWork : int64_t {
  kKfSeek = 0,
  kKfProduce = 1,
  kKfPause = 2,
  kKfStop = 3
};
enum KfItem : int64_t { kKfDelivery = 0, kKfEpochEnd = 1, kKfFailure = 2 };

KF_API void kf_reply_free(KfReply* reply);

// ---- Elements ----

// `components` describes each of `count` components: its offset, its length,
// the number of its dimensions, and those. The bytes are copied.
KF_API KfStatus kf_element_new(int64_t size, const int64_t* components,
                               const char* const* buffers, int64_t count,
                               KfElement** element, KfReply* reply);
// Numbers: size, then `components` as above.
KF_API KfStatus kf_element_describe(const KfElement* element, KfReply* reply);
// The bytes of a component, as long as the element is held.
KF_API const char* kf_element_buffer(const KfElement* element,
                                     int64_t component);
KF_API void kf_element_free(KfElement* element);

// ---- The window ----

// `segment`: null for none. `counts`: for each of `counts_count` epochs its
// number, elements, steps, dropped and complete. `pass_lengths`: for each pass
// its number and its elements. `left`: for each rank its number, how many
// epochs follow, and for each of those its number and the steps trained.
KF_API KfStatus kf_window_new(const KfOptions* options, const int64_t* segment,
                              const int64_t* counts, int64_t counts_count,
                              const int64_t* pass_lengths,
                              int64_t pass_lengths_count, const int64_t* left,
                              int64_t left_count, KfWindow** window,
                              KfReply* reply);
// Nobody may use the window any more.
KF_API void kf_window_free(KfWindow* window);
KF_API void kf_window_set_clock(KfWindow* window, double seconds);

// ---- The pump's side ----

// See Window::TryWork; `wakes` is -1 for none. Numbers: the KfWork and, for
// kKfSeek and kKfProduce, the generation; for kKfSeek also pass, element and
// whether the passes are joined.
KF_API KfStatus kf_window_work(KfWindow* window, int32_t interrupted,
                               double seconds, int64_t wakes, KfReply* reply);
KF_API KfStatus kf_window_wake_pump(KfWindow* window, KfReply* reply);
// Numbers: how often the pump was woken.
KF_API KfStatus kf_window_pump_wakes(KfWindow* window, KfReply* reply);
// Numbers: KfElement*, each to be freed.
KF_API KfStatus kf_window_untrained(KfWindow* window, int64_t epoch,
                                    int64_t step, KfReply* reply);
KF_API KfStatus kf_window_put(KfWindow* window, int64_t generation,
                              const KfElement* element, KfReply* reply);
KF_API KfStatus kf_window_end_pass(KfWindow* window, int64_t generation,
                                   int64_t pass, int64_t elements,
                                   KfReply* reply);
KF_API KfStatus kf_window_note_pass_length(KfWindow* window, int64_t pass,
                                           int64_t elements, KfReply* reply);
// Numbers: the elements.
KF_API KfStatus kf_window_pass_length(KfWindow* window, int64_t pass,
                                      KfReply* reply);
// `kind` counts as FailureKind does.
KF_API KfStatus kf_window_fail(KfWindow* window, int64_t generation,
                               const char* message, int64_t bytes, int64_t kind,
                               KfReply* reply);
// Numbers: the pass.
KF_API KfStatus kf_window_first_pass(KfWindow* window, KfReply* reply);

// ---- The ranks' side ----

// `segment`: null for none.
KF_API KfStatus kf_window_attend(KfWindow* window, int64_t rank, int64_t epoch,
                                 int64_t step, const int64_t* segment,
                                 KfReply* reply);
// `left`: null for none.
KF_API KfStatus kf_window_read(KfWindow* window, int64_t rank, int64_t reader,
                               int64_t epoch, int64_t step,
                               int32_t through_epochs, int64_t credit_steps,
                               int64_t credit_bytes, int64_t last_epoch,
                               const int64_t* left, int32_t direct,
                               KfReply* reply);
// `trained`: for each of `trained_count` epochs its number and the steps.
KF_API KfStatus kf_window_progress(
    KfWindow* window, int64_t rank, int64_t reader, int64_t pulled_epoch,
    int64_t pulled_step, int64_t acknowledged_epoch, int64_t acknowledged_step,
    const int64_t* trained, int64_t trained_count, int32_t waiting,
    KfReply* reply);
// Numbers: the segment and the position.
KF_API KfStatus kf_window_bind(KfWindow* window, int64_t rank, int64_t binding,
                               int64_t epoch, int64_t step,
                               int64_t steps_per_epoch, KfReply* reply);
// Numbers: pass and element.
KF_API KfStatus kf_window_locate(KfWindow* window, int64_t epoch, int64_t step,
                                 KfReply* reply);
KF_API KfStatus kf_window_leave(KfWindow* window, int64_t rank,
                                const char* error, int64_t bytes,
                                KfReply* reply);
KF_API KfStatus kf_window_disconnected(KfWindow* window, int64_t rank,
                                       KfReply* reply);
// See Window::TryItem; `wakes` is -1 for none. Numbers: the KfItem, and for
// kKfDelivery the reader, the position and the KfElement*, to be freed; for
// kKfEpochEnd reader, epoch and steps; for kKfFailure its kind, whether it has
// a position, and that. Text: the failure's message.
KF_API KfStatus kf_window_item(KfWindow* window, int64_t rank, double seconds,
                               int64_t wakes, KfReply* reply);
// Numbers: the failure's kind. Text: its message.
KF_API KfStatus kf_window_broken(KfWindow* window, KfReply* reply);
KF_API KfStatus kf_window_wake(KfWindow* window, int64_t rank, KfReply* reply);
// Numbers: how often the rank was woken.
KF_API KfStatus kf_window_wakes(KfWindow* window, int64_t rank, KfReply* reply);

// ---- Life and news ----

KF_API KfStatus kf_window_refuse(KfWindow* window, const char* message,
                                 int64_t bytes, KfReply* reply);
KF_API KfStatus kf_window_abandon(KfWindow* window, const char* message,
                                  int64_t bytes, KfReply* reply);
KF_API KfStatus kf_window_stop(KfWindow* window, KfReply* reply);
KF_API KfStatus kf_window_drained(KfWindow* window, double seconds,
                                  KfReply* reply);
// Numbers: the segment.
KF_API KfStatus kf_window_segment(KfWindow* window, KfReply* reply);
// Numbers: the position.
KF_API KfStatus kf_window_furthest(KfWindow* window, KfReply* reply);
// Text: what it waits for.
KF_API KfStatus kf_window_waiting_for(KfWindow* window, int64_t rank,
                                      KfReply* reply);
// Numbers: for each epoch its number, elements, steps, dropped, complete, how
// many ranks follow, and for each of those its number and the steps trained.
KF_API KfStatus kf_window_statistics(KfWindow* window, KfReply* reply);
// Numbers: for each piece of news its kind (as News::Kind counts), its number,
// elements, steps, dropped, complete, the bytes of its text, how many epochs
// follow, and for each of those its number and the steps trained. Text: all
// texts, joined.
KF_API KfStatus kf_window_news(KfWindow* window, KfReply* reply);
KF_API KfStatus kf_window_reported_epoch_end(KfWindow* window, int64_t epoch,
                                             KfReply* reply);
// See Window::WaitForNews.
KF_API KfStatus kf_window_wait_for_news(KfWindow* window, double seconds,
                                        KfReply* reply);
// Numbers: bytes, steps, and the epochs with remainders.
KF_API KfStatus kf_window_held(KfWindow* window, KfReply* reply);

namespace kerasfeed {

class Window;

// The window itself, for what serves it without Python.
Window* WindowOf(KfWindow* window);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_C_API_H_
