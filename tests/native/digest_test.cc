// XXH3 is XXH3 however its bytes come, and digests are those of the Python
// engine.
#include "core/digest.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "core/xxh3.h"

namespace {

using kerasfeed::Digester;
using kerasfeed::Element;
using kerasfeed::Xxh3;
using kerasfeed::Xxh3Of;
using kerasfeed::Xxh3Path;

constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;

std::vector<Xxh3Path> Paths() {
  std::vector<Xxh3Path> paths;
  for (Xxh3Path path : {Xxh3Path::kPortable, Xxh3Path::kSse2, Xxh3Path::kAvx2})
    if (kerasfeed::Xxh3Has(path)) paths.push_back(path);
  return paths;
}

std::vector<uint8_t> Random(size_t size, int seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint8_t> data(size);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
  return data;
}

// Memory of exactly this size for each component: what reads beyond it is seen
// by the address sanitizer.
struct Parts {
  std::vector<std::unique_ptr<char[]>> memory;
  Element element;

  explicit Parts(const std::vector<int64_t>& sizes,
                 const char* data = nullptr) {
    int64_t offset = 0;
    for (int64_t size : sizes) {
      memory.emplace_back(new char[size]());
      if (data != nullptr) std::copy_n(data, size, memory.back().get());
      element.components.push_back({{size}, offset, size});
      element.buffers.push_back({memory.back().get(), size});
      element.size = offset + size;
      offset = kerasfeed::Aligned(element.size);
    }
  }
};

uint64_t DigestOf(const Element& element, bool full = false) {
  return Digester("spec", full).Digest(element);
}

}  // namespace

TEST(Xxh3IsThatOfOtherImplementations) {
  std::vector<uint8_t> data(5000);
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<uint8_t>(i * i * 7 + i / 3);
  // What xxh3_64_intdigest of Python's xxhash 4.1.0 says, without a seed and
  // with kSeed.
  const struct {
    size_t size;
    uint64_t plain, seeded;
  } known[] = {
      {0, 0x2d06800538d394c2, 0x602b0e2cd6662c8b},
      {1, 0xc44bdff4074eecdb, 0x062b185e4e01441a},
      {3, 0xc18747dd6a92c907, 0xd2672b4946682e45},
      {4, 0xd5edf422017ffc22, 0x0b99cd52afbe0c82},
      {8, 0xfcebd701dfecbc13, 0xf48bccdf5ffce0d4},
      {9, 0xd9760b3cede867e1, 0xddf8847c5728122b},
      {16, 0xe087db3d5d03ae53, 0xe25be4afb31c76a6},
      {17, 0x97fc5e49160a44f7, 0xe0e94d113daf6ac2},
      {128, 0xe7e694cc41fed4a6, 0x7996594005cc7fb2},
      {129, 0x813fd953c2ae6c62, 0xd9fb8297ecb63635},
      {240, 0x9ec48d06749fd3cd, 0xec64c6fdfc235b1b},
      {241, 0x7822064bc3b1053e, 0xe8d37f38beb706a8},
      {1024, 0xe7ba1bc9411738a8, 0x7678598c46b77f18},
      {1025, 0xe638fd088dcf92f5, 0x0c8a6b461605f375},
      {2048, 0x175dc85b948df87a, 0x862a4e7ed1d27045},
      {5000, 0xb492a79736c0affd, 0xa21ee50fa003658f},
  };
  for (const auto& each : known) {
    CHECK_EQ(Xxh3Of(data.data(), each.size), each.plain);
    CHECK_EQ(Xxh3Of(data.data(), each.size, kSeed), each.seeded);
  }
}

TEST(Xxh3IsTheSameOnAllPathsAndInPieces) {
  std::mt19937_64 generator(1);
  std::vector<size_t> sizes = {4096, 10000, 100000};
  for (size_t size = 0; size <= 2100; ++size) sizes.push_back(size);
  for (size_t size : sizes) {
    const std::vector<uint8_t> data = Random(size, static_cast<int>(size));
    const uint64_t seed = generator();
    const uint64_t whole = Xxh3Of(data.data(), size, seed);
    for (Xxh3Path path : Paths()) {
      Xxh3 once(seed, path), pieces(seed, path);
      once.Update(data.data(), size);
      CHECK_EQ(once.Digest(), whole);
      const size_t most = generator() % 3 ? 200 : 3000;
      for (size_t at = 0; at < size;) {
        const size_t piece = std::min<size_t>(generator() % most, size - at);
        pieces.Update(data.data() + at, piece);
        at += piece;
        // Asking between two pieces changes nothing.
        if (size < 600)
          CHECK_EQ(pieces.Digest(), Xxh3Of(data.data(), at, seed));
      }
      CHECK_EQ(pieces.Digest(), whole);
    }
  }
}

TEST(Xxh3OfNothingNeedsNoMemory) {
  Xxh3 hasher;
  hasher.Update(nullptr, 0);
  CHECK_EQ(hasher.Digest(), Xxh3Of("", 0));
}

TEST(DigestsAreThoseOfThePythonEngine) {
  // The very numbers of tests/unit/test_digest.py.
  char bytes[24];
  for (int i = 0; i < 24; ++i) bytes[i] = static_cast<char>(i);
  Element small;
  small.components = {{{2, 3}, 0, 24}, {{}, 64, 5}};
  small.buffers = {{bytes, 24}, {"label", 5}};
  small.size = 69;
  CHECK_EQ(DigestOf(small), 4823403604120583947u);

  std::vector<uint32_t> numbers(3000000);
  for (uint32_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
  const char* data = reinterpret_cast<const char*>(numbers.data());
  CHECK_EQ(DigestOf(Parts({200000}, data).element), 3837291827505337859u);
  CHECK_EQ(DigestOf(Parts({200000, 500}, data).element), 263993850361174560u);
  CHECK_EQ(DigestOf(Parts({50000, 60000, 500, 70000}, data).element),
           5609725539901572291u);
  CHECK_EQ(DigestOf(Parts({9600000, 5000}, data).element),
           8467533198211609013u);
}

TEST(EachByteOfASmallElementCounts) {
  Parts parts({700, 1, 0, 300});
  std::set<uint64_t> seen = {DigestOf(parts.element)};
  for (size_t i : {0, 1, 3}) {
    for (int64_t at = 0; at < parts.element.buffers[i].size; ++at) {
      parts.memory[i][at] ^= 1;
      seen.insert(DigestOf(parts.element));
      parts.memory[i][at] ^= 1;
    }
  }
  CHECK_EQ(seen.size(), 1002u);
}

TEST(OfALargeElementFirstAndLastBytesCount) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{40000}, {3000000}, {20000, 20000, 5000}}) {
    Parts parts(sizes);
    std::set<uint64_t> seen = {DigestOf(parts.element)};
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (int64_t at : {int64_t{0}, sizes[i] - 1}) {
        parts.memory[i][at] ^= 1;
        CHECK(seen.insert(DigestOf(parts.element)).second);
        parts.memory[i][at] ^= 1;
      }
      // Between its blocks, only `full` sees it.
      const uint64_t full = DigestOf(parts.element, true);
      parts.memory[i][200] ^= 1;
      CHECK_EQ(seen.count(DigestOf(parts.element)), 1u);
      CHECK(DigestOf(parts.element, true) != full);
      parts.memory[i][200] ^= 1;
    }
  }
}

TEST(SpecShapesAndLengthsCount) {
  char zeros[24] = {};
  const auto digest = [&](std::vector<int64_t> one, std::vector<int64_t> other,
                          int64_t size) {
    Element element;
    element.components = {{std::move(one), 0, size},
                          {std::move(other), 64, 24 - size}};
    element.buffers = {{zeros, size}, {zeros + size, 24 - size}};
    element.size = 64 + 24 - size;
    return DigestOf(element);
  };
  const std::set<uint64_t> seen = {digest({2, 3}, {3, 2}, 12),
                                   digest({3, 2}, {2, 3}, 12),
                                   digest({2, 12}, {}, 12),
                                   digest({2}, {12}, 12),
                                   digest({}, {2, 12}, 12),
                                   digest({2, 3}, {3, 2}, 11),
                                   DigestOf(Element()),
                                   DigestOf(Parts({0}).element),
                                   DigestOf(Parts({0, 0}).element)};
  CHECK_EQ(seen.size(), 9u);
  const Element element = Parts({0}).element;
  CHECK(Digester("float32").Digest(element) !=
        Digester("int32").Digest(element));
}

TEST(NothingBeyondAnyComponentIsRead) {
  std::mt19937_64 generator(2);
  const int64_t edges[] = {0,     1,     127,     128,     129,    4095,
                           4096,  4097,  32767,   32768,   32769,  65536,
                           65537, 99999, 2424832, 2500001, 4500000};
  for (int round = 0; round < 60; ++round) {
    std::vector<int64_t> sizes;
    for (size_t i = generator() % 6 + 1; i > 0; --i)
      sizes.push_back(edges[generator() % std::size(edges)]);
    const Parts parts(sizes);
    CHECK_EQ(DigestOf(parts.element), DigestOf(parts.element));
  }
  // A component that its share of blocks covers counts whole.
  Parts covered({39990000, 10000});
  const uint64_t before = DigestOf(covered.element);
  covered.memory[1][200] = 1;
  CHECK(DigestOf(covered.element) != before);
}
