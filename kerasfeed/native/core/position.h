// Places in the stream of steps, and the segments that say where epochs lie in
// the passes over the user's dataset. The same arithmetic as
// kerasfeed/schedule.py, which is the reference.
#ifndef KERASFEED_NATIVE_CORE_POSITION_H_
#define KERASFEED_NATIVE_CORE_POSITION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace kerasfeed {

// The first step that is still to come. Compares by epoch first, then by step.
struct Position {
  int64_t epoch = 0;
  int64_t step = 0;

  Position Next() const { return {epoch, step + 1}; }
  std::string ToString() const {
    return "epoch " + std::to_string(epoch) + ", step " + std::to_string(step);
  }

  friend bool operator==(const Position& a, const Position& b) {
    return a.epoch == b.epoch && a.step == b.step;
  }
  friend bool operator!=(const Position& a, const Position& b) {
    return !(a == b);
  }
  friend bool operator<(const Position& a, const Position& b) {
    return std::tie(a.epoch, a.step) < std::tie(b.epoch, b.step);
  }
  friend bool operator>(const Position& a, const Position& b) { return b < a; }
  friend bool operator<=(const Position& a, const Position& b) {
    return !(b < a);
  }
  friend bool operator>=(const Position& a, const Position& b) {
    return !(a < b);
  }
};

// (pass, element): a place in the passes over the user's dataset.
using Place = std::pair<int64_t, int64_t>;

// From `first_epoch` on: where epochs lie in the passes. Without
// `steps_per_epoch` an epoch is a pass; with it the passes are joined to one
// stream that is cut every `steps_per_epoch` steps.
struct Segment {
  int64_t first_epoch = 0;
  int64_t origin_pass = 0;
  int64_t origin_element = 0;
  std::optional<int64_t> steps_per_epoch;
  int64_t first_step = 0;

  Position Start() const { return {first_epoch, first_step}; }

  // The element may lie beyond the end of its pass in a joined stream: it is
  // then counted on through those that follow. `position` must not lie before
  // `Start()`.
  Place Locate(const Position& position, int64_t size) const {
    const int64_t epochs = position.epoch - first_epoch;
    if (steps_per_epoch) {
      const int64_t steps =
          epochs * *steps_per_epoch + position.step - first_step;
      return {origin_pass, origin_element + steps * size};
    }
    if (epochs == 0)
      return {origin_pass,
              origin_element + (position.step - first_step) * size};
    return {origin_pass + epochs, position.step * size};
  }

  friend bool operator==(const Segment& a, const Segment& b) {
    return std::tie(a.first_epoch, a.origin_pass, a.origin_element,
                    a.steps_per_epoch, a.first_step) ==
           std::tie(b.first_epoch, b.origin_pass, b.origin_element,
                    b.steps_per_epoch, b.first_step);
  }
  friend bool operator!=(const Segment& a, const Segment& b) {
    return !(a == b);
  }
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_POSITION_H_
