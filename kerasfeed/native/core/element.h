// An element as bytes: where each of its component tensors lies, and the memory
// of each, not yet joined. The layout is that of kerasfeed/spec.py: one block,
// in which each component starts at a multiple of 64 bytes.
#ifndef KERASFEED_NATIVE_CORE_ELEMENT_H_
#define KERASFEED_NATIVE_CORE_ELEMENT_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace kerasfeed {

constexpr int64_t kAlignment = 64;

inline int64_t Aligned(int64_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

struct Span {
  const char* data = nullptr;
  int64_t size = 0;
};

// One component tensor: its shape, and which bytes of the block are its own.
struct Component {
  std::vector<int64_t> shape;
  int64_t offset = 0;
  int64_t length = 0;
};

struct Block;  // of pool.h

// Immutable once it is made, and shared between the window and whoever sends
// it.
struct Element {
  std::vector<Component> components;
  std::vector<Span> buffers;          // of each component
  int64_t size = 0;                   // of the block, gaps included
  std::shared_ptr<const void> owner;  // keeps the memory of the buffers
  // Where the buffers lie if that is shared memory: from the block's first byte
  // on, each component at its offset. Null if it is not.
  std::shared_ptr<Block> block;
};

using ElementPtr = std::shared_ptr<const Element>;

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_ELEMENT_H_
