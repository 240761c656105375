// XXH3 of 64 bits with a seed: bytes flow in, at once or in pieces, and 8 bytes
// that stand for all of them flow out. Written after xxHash's published
// description (doc/xxhash_spec.md there); the result is that of every other
// implementation.
#ifndef KERASFEED_NATIVE_CORE_XXH3_H_
#define KERASFEED_NATIVE_CORE_XXH3_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kerasfeed {

// Ways to the same result: what the machine can do decides how fast it comes.
enum class Xxh3Path { kPortable, kSse2, kAvx2 };

// Whether this machine can go that way.
bool Xxh3Has(Xxh3Path path);
// The fastest one that this machine can go.
Xxh3Path FastestXxh3Path();

// Hashes what it is given piece by piece: where a piece ends does not count. It
// allocates nothing.
class Xxh3 {
 public:
  // `path` is one that this machine has.
  explicit Xxh3(uint64_t seed = 0, Xxh3Path path = FastestXxh3Path());

  void Update(const void* data, size_t size) {
    if (size > kBufferBytes || buffered_ > kBufferBytes - size) {
      UpdateLarge(static_cast<const uint8_t*>(data), size);
    } else if (size > 0) {
      std::memcpy(buffer_ + buffered_, data, size);
      buffered_ += size;
    }
  }

  // Of all that has come so far; more may come.
  uint64_t Digest() const;

 private:
  static constexpr size_t kStripeBytes = 64;
  static constexpr size_t kSecretBytes = 192;
  // At least 240 bytes, the most that is hashed another way; a whole block, so
  // that many small pieces are taken in together.
  static constexpr size_t kBufferBytes = 1024;

  using Accumulators = std::array<uint64_t, 8>;

  void UpdateLarge(const uint8_t* data, size_t size);
  uint64_t DigestLarge() const;

  uint64_t seed_;
  // Takes stripes in; the first one is number `at` of its block. Returns which
  // one is next.
  size_t (*take_)(uint64_t* accumulators, const uint8_t* data, size_t stripes,
                  size_t at, const uint8_t* secret);
  Accumulators accumulators_;
  size_t at_ = 0;          // of the block, the stripe that comes next
  uint64_t consumed_ = 0;  // bytes that were taken in, of whole stripes
  // Bytes that wait at the buffer's start: from the first taking in on, one at
  // least. The last 64 bytes that were taken in then lie at the buffer's end,
  // unless those that wait are at least as many.
  size_t buffered_ = 0;
  uint8_t secret_[kSecretBytes];
  uint8_t buffer_[kBufferBytes];
};

inline uint64_t Xxh3Of(const void* data, size_t size, uint64_t seed = 0) {
  Xxh3 hasher(seed);
  hasher.Update(data, size);
  return hasher.Digest();
}

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_XXH3_H_
