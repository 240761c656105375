#include "xxh3.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kerasfeed {
namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1;
constexpr uint64_t kPrime32_2 = 0x85EBCA77;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMix1 = 0x165667919E3779F9;
constexpr uint64_t kPrimeMix2 = 0x9FB21C651E98DF25;

constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c,
    0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97,
    0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26,
    0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// A block is as many stripes as the secret has places for, 8 bytes apart.
constexpr size_t kStripesPerBlock = 16;
constexpr size_t kScrambleAt = 128;  // in the secret
constexpr size_t kLastStripeAt = 121;
constexpr size_t kMergeAt = 11;

uint64_t Read64(const uint8_t* data) {
  uint64_t value;
  std::memcpy(&value, data, sizeof(value));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

uint32_t Read32(const uint8_t* data) {
  uint32_t value;
  std::memcpy(&value, data, sizeof(value));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap32(value);
#endif
  return value;
}

void Write64(uint8_t* data, uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  std::memcpy(data, &value, sizeof(value));
}

uint64_t RotatedLeft(uint64_t value, int bits) {
  return value << bits | value >> (64 - bits);
}

// Both halves of the product of 128 bits, folded into one.
uint64_t FoldedProduct(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t Avalanche(uint64_t value) {
  value ^= value >> 37;
  value *= kPrimeMix1;
  return value ^ value >> 32;
}

uint64_t AvalancheXxh64(uint64_t value) {
  value ^= value >> 33;
  value *= kPrime64_2;
  value ^= value >> 29;
  value *= kPrime64_3;
  return value ^ value >> 32;
}

// ---- Up to 240 bytes ----

uint64_t Mixed16(const uint8_t* data, size_t secret_at, uint64_t seed) {
  return FoldedProduct(
      Read64(data) ^ (Read64(kSecret + secret_at) + seed),
      Read64(data + 8) ^ (Read64(kSecret + secret_at + 8) - seed));
}

uint64_t OfUpTo3(const uint8_t* data, size_t size, uint64_t seed) {
  const uint32_t combined =
      uint32_t{data[size - 1]} | static_cast<uint32_t>(size) << 8 |
      uint32_t{data[0]} << 16 | uint32_t{data[size >> 1]} << 24;
  const uint64_t secret = Read32(kSecret) ^ Read32(kSecret + 4);
  return AvalancheXxh64((secret + seed) ^ combined);
}

uint64_t OfUpTo8(const uint8_t* data, size_t size, uint64_t seed) {
  seed ^= uint64_t{__builtin_bswap32(static_cast<uint32_t>(seed))} << 32;
  const uint64_t combined = Read32(data + size - 4) | uint64_t{Read32(data)}
                                                          << 32;
  uint64_t value =
      ((Read64(kSecret + 8) ^ Read64(kSecret + 16)) - seed) ^ combined;
  value ^= RotatedLeft(value, 49) ^ RotatedLeft(value, 24);
  value *= kPrimeMix2;
  value ^= (value >> 35) + size;
  value *= kPrimeMix2;
  return value ^ value >> 28;
}

uint64_t OfUpTo16(const uint8_t* data, size_t size, uint64_t seed) {
  const uint64_t low =
      ((Read64(kSecret + 24) ^ Read64(kSecret + 32)) + seed) ^ Read64(data);
  const uint64_t high = ((Read64(kSecret + 40) ^ Read64(kSecret + 48)) - seed) ^
                        Read64(data + size - 8);
  return Avalanche(size + __builtin_bswap64(low) + high +
                   FoldedProduct(low, high));
}

uint64_t OfUpTo128(const uint8_t* data, size_t size, uint64_t seed) {
  uint64_t sum = size * kPrime64_1;
  for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    sum += Mixed16(data + 16 * i, 32 * i, seed);
    sum += Mixed16(data + size - 16 * i - 16, 32 * i + 16, seed);
  }
  return Avalanche(sum);
}

uint64_t OfUpTo240(const uint8_t* data, size_t size, uint64_t seed) {
  uint64_t sum = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) sum += Mixed16(data + 16 * i, 16 * i, seed);
  sum = Avalanche(sum);
  for (size_t i = 8; i < size / 16; ++i)
    sum += Mixed16(data + 16 * i, 16 * (i - 8) + 3, seed);
  sum += Mixed16(data + size - 16, 119, seed);
  return Avalanche(sum);
}

uint64_t OfSmall(const uint8_t* data, size_t size, uint64_t seed) {
  if (size > 128) return OfUpTo240(data, size, seed);
  if (size > 16) return OfUpTo128(data, size, seed);
  if (size > 8) return OfUpTo16(data, size, seed);
  if (size > 3) return OfUpTo8(data, size, seed);
  if (size > 0) return OfUpTo3(data, size, seed);
  return AvalancheXxh64(seed ^ Read64(kSecret + 56) ^ Read64(kSecret + 64));
}

// ---- Taking in whole stripes of 64 bytes, of larger inputs ----

size_t TakePortable(uint64_t* accumulators, const uint8_t* data, size_t stripes,
                    size_t at, const uint8_t* secret) {
  for (; stripes > 0; --stripes, data += 64) {
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t lane = Read64(data + 8 * i);
      const uint64_t value = lane ^ Read64(secret + 8 * (at + i));
      accumulators[i ^ 1] += lane;
      accumulators[i] += (value & 0xFFFFFFFF) * (value >> 32);
    }
    if (++at < kStripesPerBlock) continue;
    at = 0;
    for (size_t i = 0; i < 8; ++i) {
      accumulators[i] ^= accumulators[i] >> 47;
      accumulators[i] ^= Read64(secret + kScrambleAt + 8 * i);
      accumulators[i] *= kPrime32_1;
    }
  }
  return at;
}

#if defined(__x86_64__)

// The same for each of the two widths: four registers of 16 bytes, and two of
// 32, which only a machine with AVX2 may meet.

inline __m128i Load16(const void* data) {
  return _mm_loadu_si128(static_cast<const __m128i*>(data));
}

inline __m128i Accumulated16(__m128i sum, const uint8_t* data,
                             const uint8_t* secret) {
  const __m128i lanes = Load16(data);
  const __m128i value = _mm_xor_si128(lanes, Load16(secret));
  const __m128i product = _mm_mul_epu32(value, _mm_srli_epi64(value, 32));
  const __m128i swapped = _mm_shuffle_epi32(lanes, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm_add_epi64(sum, _mm_add_epi64(product, swapped));
}

inline __m128i Scrambled16(__m128i sum, const uint8_t* secret) {
  const __m128i prime = _mm_set1_epi64x(kPrime32_1);
  sum = _mm_xor_si128(sum, _mm_srli_epi64(sum, 47));
  sum = _mm_xor_si128(sum, Load16(secret));
  const __m128i high = _mm_mul_epu32(_mm_srli_epi64(sum, 32), prime);
  return _mm_add_epi64(_mm_mul_epu32(sum, prime), _mm_slli_epi64(high, 32));
}

size_t TakeSse2(uint64_t* accumulators, const uint8_t* data, size_t stripes,
                size_t at, const uint8_t* secret) {
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = Load16(accumulators + 2 * i);
  while (stripes > 0) {
    const size_t end = std::min(at + stripes, kStripesPerBlock);
    stripes -= end - at;
    for (; at < end; ++at, data += 64) {
      for (int i = 0; i < 4; ++i)
        sums[i] =
            Accumulated16(sums[i], data + 16 * i, secret + 8 * at + 16 * i);
    }
    if (at < kStripesPerBlock) break;
    at = 0;
    for (int i = 0; i < 4; ++i)
      sums[i] = Scrambled16(sums[i], secret + kScrambleAt + 16 * i);
  }
  for (int i = 0; i < 4; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(accumulators + 2 * i), sums[i]);
  return at;
}

#define KERASFEED_AVX2 __attribute__((target("avx2")))

KERASFEED_AVX2 inline __m256i Load32(const void* data) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(data));
}

KERASFEED_AVX2 inline __m256i Accumulated32(__m256i sum, const uint8_t* data,
                                            const uint8_t* secret) {
  const __m256i lanes = Load32(data);
  const __m256i value = _mm256_xor_si256(lanes, Load32(secret));
  const __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
  const __m256i swapped = _mm256_shuffle_epi32(lanes, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
}

KERASFEED_AVX2 inline __m256i Scrambled32(__m256i sum, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
  sum = _mm256_xor_si256(sum, Load32(secret));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(sum, prime),
                          _mm256_slli_epi64(high, 32));
}

KERASFEED_AVX2 size_t TakeAvx2(uint64_t* accumulators, const uint8_t* data,
                               size_t stripes, size_t at,
                               const uint8_t* secret) {
  __m256i low = Load32(accumulators);
  __m256i high = Load32(accumulators + 4);
  while (stripes > 0) {
    const size_t end = std::min(at + stripes, kStripesPerBlock);
    stripes -= end - at;
    for (; at < end; ++at, data += 64) {
      low = Accumulated32(low, data, secret + 8 * at);
      high = Accumulated32(high, data + 32, secret + 8 * at + 32);
    }
    if (at < kStripesPerBlock) break;
    at = 0;
    low = Scrambled32(low, secret + kScrambleAt);
    high = Scrambled32(high, secret + kScrambleAt + 32);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(accumulators), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(accumulators + 4), high);
  return at;
}

#undef KERASFEED_AVX2

#endif  // defined(__x86_64__)

}  // namespace

bool Xxh3Has(Xxh3Path path) {
  switch (path) {
    case Xxh3Path::kPortable:
      return true;
#if defined(__x86_64__)
    case Xxh3Path::kSse2:
      return true;
    case Xxh3Path::kAvx2:
      return __builtin_cpu_supports("avx2");
#endif
    default:
      return false;
  }
}

Xxh3Path FastestXxh3Path() {
  static const Xxh3Path path = Xxh3Has(Xxh3Path::kAvx2)   ? Xxh3Path::kAvx2
                               : Xxh3Has(Xxh3Path::kSse2) ? Xxh3Path::kSse2
                                                          : Xxh3Path::kPortable;
  return path;
}

Xxh3::Xxh3(uint64_t seed, Xxh3Path path)
    : seed_(seed),
      take_(TakePortable),
      accumulators_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                    kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {
#if defined(__x86_64__)
  if (path == Xxh3Path::kSse2) take_ = TakeSse2;
  if (path == Xxh3Path::kAvx2) take_ = TakeAvx2;
#else
  static_cast<void>(path);
#endif
  for (size_t i = 0; i < kSecretBytes; i += 16) {
    Write64(secret_ + i, Read64(kSecret + i) + seed);
    Write64(secret_ + i + 8, Read64(kSecret + i + 8) - seed);
  }
}

void Xxh3::UpdateLarge(const uint8_t* data, size_t size) {
  if (buffered_ > 0) {
    const size_t room = kBufferBytes - buffered_;
    std::memcpy(buffer_ + buffered_, data, room);
    data += room;
    size -= room;
    at_ = take_(accumulators_.data(), buffer_, kBufferBytes / kStripeBytes, at_,
                secret_);
    consumed_ += kBufferBytes;
  }
  // The last stripe of all is hashed in its own way: something always waits.
  if (const size_t stripes = (size - 1) / kStripeBytes) {
    at_ = take_(accumulators_.data(), data, stripes, at_, secret_);
    const size_t taken = stripes * kStripeBytes;
    data += taken;
    size -= taken;
    consumed_ += taken;
    std::memcpy(buffer_ + kBufferBytes - kStripeBytes, data - kStripeBytes,
                kStripeBytes);
  }
  std::memcpy(buffer_, data, size);
  buffered_ = size;
}

uint64_t Xxh3::Digest() const {
  if (consumed_ + buffered_ > 240) return DigestLarge();
  return OfSmall(buffer_, buffered_, seed_);
}

uint64_t Xxh3::DigestLarge() const {
  Accumulators sums = accumulators_;
  take_(sums.data(), buffer_, (buffered_ - 1) / kStripeBytes, at_, secret_);
  const uint8_t* last = buffer_ + buffered_ - kStripeBytes;
  uint8_t joined[kStripeBytes];
  if (buffered_ < kStripeBytes) {
    const size_t before = kStripeBytes - buffered_;
    std::memcpy(joined, buffer_ + kBufferBytes - before, before);
    std::memcpy(joined + before, buffer_, buffered_);
    last = joined;
  }
  take_(sums.data(), last, 1, 0, secret_ + kLastStripeAt);
  uint64_t result = (consumed_ + buffered_) * kPrime64_1;
  for (size_t i = 0; i < 8; i += 2) {
    const uint8_t* secret = secret_ + kMergeAt + 8 * i;
    result += FoldedProduct(sums[i] ^ Read64(secret),
                            sums[i + 1] ^ Read64(secret + 8));
  }
  return Avalanche(result);
}

}  // namespace kerasfeed
