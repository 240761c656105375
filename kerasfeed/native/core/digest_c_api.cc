#include "digest_c_api.h"

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "digest.h"
#include "element.h"
#include "journal.h"
#include "xxh3.h"

struct KerasfeedXxh3 {
  kerasfeed::Xxh3 hasher;
};

struct KerasfeedDigester {
  kerasfeed::Digester digester;
};

struct KerasfeedJournal {
  std::unique_ptr<kerasfeed::Journal> journal;
};

namespace {

std::string& Error() {
  thread_local std::string error;
  return error;
}

// What `work` returns, or `failed` if it throws, which only want of memory can
// bring about.
template <typename Result, typename Work>
Result Guarded(Result failed, Work work) noexcept {
  try {
    return work();
  } catch (const std::exception& error) {
    try {
      Error() = error.what();
    } catch (...) {
      Error().clear();
    }
    return failed;
  }
}

template <typename Value>
int Answer(const std::optional<Value>& found, Value* known) {
  if (!found) return 0;
  *known = *found;
  return 1;
}

bool Has(int path) {
  return path >= 0 && path <= 2 &&
         kerasfeed::Xxh3Has(static_cast<kerasfeed::Xxh3Path>(path));
}

}  // namespace

extern "C" {

const char* kerasfeed_digest_error(void) {
  return Guarded("", [] { return Error().c_str(); });
}

int kerasfeed_xxh3_has(int path) { return Has(path); }

KerasfeedXxh3* kerasfeed_xxh3_new(uint64_t seed, int path) {
  return Guarded<KerasfeedXxh3*>(nullptr, [&]() -> KerasfeedXxh3* {
    if (path == -1) return new KerasfeedXxh3{kerasfeed::Xxh3(seed)};
    if (!Has(path)) {
      Error() = "this machine has no path " + std::to_string(path);
      return nullptr;
    }
    return new KerasfeedXxh3{
        kerasfeed::Xxh3(seed, static_cast<kerasfeed::Xxh3Path>(path))};
  });
}

void kerasfeed_xxh3_delete(KerasfeedXxh3* hasher) { delete hasher; }

void kerasfeed_xxh3_update(KerasfeedXxh3* hasher, const void* data,
                           size_t size) {
  hasher->hasher.Update(data, size);
}

uint64_t kerasfeed_xxh3_digest(const KerasfeedXxh3* hasher) {
  return hasher->hasher.Digest();
}

uint64_t kerasfeed_xxh3_of(const void* data, size_t size, uint64_t seed) {
  return kerasfeed::Xxh3Of(data, size, seed);
}

KerasfeedDigester* kerasfeed_digester_new(const void* spec, size_t spec_bytes,
                                          int full) {
  return Guarded<KerasfeedDigester*>(nullptr, [&] {
    const std::string_view bytes(static_cast<const char*>(spec), spec_bytes);
    return new KerasfeedDigester{kerasfeed::Digester(bytes, full != 0)};
  });
}

void kerasfeed_digester_delete(KerasfeedDigester* digester) { delete digester; }

int kerasfeed_digester_digest(const KerasfeedDigester* digester,
                              int64_t components, const int64_t* ranks,
                              const int64_t* dims, const int64_t* lengths,
                              const void* const* buffers, int64_t size,
                              uint64_t* digest) {
  return Guarded(-1, [&] {
    kerasfeed::Element element;
    element.size = size;
    int64_t offset = 0;
    for (int64_t i = 0; i < components; ++i) {
      element.components.push_back(
          {{dims, dims + ranks[i]}, offset, lengths[i]});
      element.buffers.push_back(
          {static_cast<const char*>(buffers[i]), lengths[i]});
      dims += ranks[i];
      offset = kerasfeed::Aligned(offset + lengths[i]);
    }
    *digest = digester->digester.Digest(element);
    return 0;
  });
}

KerasfeedJournal* kerasfeed_journal_open(int fd, int64_t max_runs) {
  return Guarded<KerasfeedJournal*>(nullptr, [&]() -> KerasfeedJournal* {
    auto opened = kerasfeed::Journal::Open(fd, max_runs);
    if (auto* error = std::get_if<std::string>(&opened)) {
      Error() = std::move(*error);
      return nullptr;
    }
    return new KerasfeedJournal{std::move(std::get<0>(opened))};
  });
}

void kerasfeed_journal_close(KerasfeedJournal* journal) { delete journal; }

int kerasfeed_journal_note(KerasfeedJournal* journal, int64_t pass,
                           int64_t element, uint64_t digest, uint64_t* known) {
  return Guarded(-1, [&] {
    return Answer(journal->journal->Note(pass, element, digest), known);
  });
}

int kerasfeed_journal_find(const KerasfeedJournal* journal, int64_t pass,
                           int64_t element, uint64_t* known) {
  return Guarded(
      -1, [&] { return Answer(journal->journal->Find(pass, element), known); });
}

int kerasfeed_journal_note_end(KerasfeedJournal* journal, int64_t pass,
                               int64_t elements, int64_t* known) {
  return Guarded(-1, [&] {
    return Answer(journal->journal->NoteEnd(pass, elements), known);
  });
}

int kerasfeed_journal_elements(const KerasfeedJournal* journal, int64_t pass,
                               int64_t* known) {
  return Guarded(
      -1, [&] { return Answer(journal->journal->Elements(pass), known); });
}

int kerasfeed_journal_digests(const KerasfeedJournal* journal, int64_t pass,
                              int64_t first, int64_t stop, uint64_t* digests) {
  return Guarded(-1, [&] {
    return journal->journal->Digests(pass, first, stop, digests) ? 1 : 0;
  });
}

int kerasfeed_journal_forget_before(KerasfeedJournal* journal, int64_t pass) {
  return Guarded(-1, [&] {
    journal->journal->ForgetBefore(pass);
    return 0;
  });
}

}  // extern "C"

namespace kerasfeed {

const Digester* DigesterOf(KerasfeedDigester* digester) {
  return &digester->digester;
}

Journal* JournalOf(KerasfeedJournal* journal) { return journal->journal.get(); }

}  // namespace kerasfeed
