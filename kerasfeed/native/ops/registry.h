// Things that a graph names by a number: it can't hold them itself.
#ifndef KERASFEED_NATIVE_OPS_REGISTRY_H_
#define KERASFEED_NATIVE_OPS_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace kerasfeed {

// Thread-safe. A number is never used again.
template <typename Thing>
class Registry {
 public:
  int64_t Add(std::shared_ptr<Thing> thing) {
    std::lock_guard<std::mutex> lock(mutex_);
    things_.emplace(++last_, std::move(thing));
    return last_;
  }

  // Null if there is none of this number.
  std::shared_ptr<Thing> Find(int64_t number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(number);
    return found == things_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Thing> Remove(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = things_.find(number);
    if (found == things_.end()) return nullptr;
    std::shared_ptr<Thing> thing = std::move(found->second);
    things_.erase(found);
    return thing;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Thing>> things_;
  int64_t last_ = 0;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_OPS_REGISTRY_H_
