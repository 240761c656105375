// What was produced, in 8 bytes an element: the same digests as those of
// kerasfeed/producer/digest.py, which is the reference and says which bytes
// count and why. Backups and journals carry them from one engine to the other.
#ifndef KERASFEED_NATIVE_CORE_DIGEST_H_
#define KERASFEED_NATIVE_CORE_DIGEST_H_

#include <cstdint>
#include <string_view>

#include "element.h"

namespace kerasfeed {

// Makes the digests of a dataset's elements. Thread-safe; it allocates nothing.
class Digester {
 public:
  // `spec`: the dataset's element spec, as kerasfeed/spec.py wrote it. With
  // `full` every byte counts, however large the element.
  explicit Digester(std::string_view spec, bool full = false);

  uint64_t Digest(const Element& element) const;

 private:
  uint64_t seed_;
  int64_t whole_bytes_;  // an element of up to so many bytes counts whole
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_DIGEST_H_
