#include "digest.h"

#include <algorithm>
#include <limits>

#include "xxh3.h"

namespace kerasfeed {
namespace {

constexpr int64_t kWholeBytes = 32 << 10;
constexpr int64_t kWholeComponentBytes = 4 << 10;
constexpr int64_t kBlockBytes = 128;
constexpr int64_t kBytesPerBlock = 64 << 10;
// So many blocks ahead memory is asked for: blocks lie too far apart for the
// machine to see by itself which comes next, and waiting for each in turn takes
// a quarter longer.
constexpr int64_t kAhead = 16;

void Prefetch(const char* block) {
  __builtin_prefetch(block);
  __builtin_prefetch(block + kBlockBytes - 1);
}

// Blocks that lie evenly in a buffer, the last one at its end.
void UpdateBlocks(const Span& buffer, int64_t gaps, Xxh3* hasher) {
  const int64_t last = buffer.size - kBlockBytes;
  const int64_t step = last / gaps;
  for (int64_t i = 0; i < std::min(kAhead, gaps); ++i)
    Prefetch(buffer.data + i * step);
  Prefetch(buffer.data + last);
  for (int64_t i = 0; i < gaps; ++i) {
    if (i + kAhead < gaps) Prefetch(buffer.data + (i + kAhead) * step);
    hasher->Update(buffer.data + i * step, kBlockBytes);
  }
  hasher->Update(buffer.data + last, kBlockBytes);
}

// The bytes that count of a large element.
void UpdateSampled(const Element& element, Xxh3* hasher) {
  int64_t large = 0;
  for (const Span& buffer : element.buffers) {
    if (buffer.size > kWholeComponentBytes)
      ++large;
    else
      hasher->Update(buffer.data, buffer.size);
  }
  if (large == 0) return;
  const int64_t components = element.buffers.size();
  const int64_t blocks = std::max<int64_t>(8, 17 - 3 * components);
  const int64_t few = std::max<int64_t>(1, blocks / large / 2 * 2 - 1);
  const int64_t more = element.size / kBytesPerBlock - 30 - 7 * components;
  __extension__ using Wide = __int128;  // for a TiB, squared
  for (const Span& buffer : element.buffers) {
    if (buffer.size <= kWholeComponentBytes) continue;
    int64_t gaps = few;
    if (more > 0) {
      const auto by_size = static_cast<int64_t>(static_cast<Wide>(more) *
                                                buffer.size / element.size);
      gaps += (more / large + by_size) / 4 * 2;
      if ((gaps + 1) * kBlockBytes >= buffer.size) {
        hasher->Update(buffer.data, buffer.size);
        continue;
      }
    }
    UpdateBlocks(buffer, gaps, hasher);
  }
}

}  // namespace

Digester::Digester(std::string_view spec, bool full)
    : seed_(Xxh3Of(spec.data(), spec.size())),
      whole_bytes_(full ? std::numeric_limits<int64_t>::max() : kWholeBytes) {}

uint64_t Digester::Digest(const Element& element) const {
  Xxh3 hasher(seed_);
  // Shapes and lengths go first: then it is clear from which component each of
  // the bytes behind them is.
  for (const Component& component : element.components) {
    const auto rank = static_cast<int64_t>(component.shape.size());
    hasher.Update(&rank, sizeof(rank));
    hasher.Update(component.shape.data(), rank * sizeof(int64_t));
    hasher.Update(&component.length, sizeof(component.length));
  }
  if (element.size > whole_bytes_) {
    UpdateSampled(element, &hasher);
  } else {
    for (const Span& buffer : element.buffers)
      hasher.Update(buffer.data, buffer.size);
  }
  return hasher.Digest();
}

}  // namespace kerasfeed
