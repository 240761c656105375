// Digests and journals for ctypes: the tests hold them to their reference in
// Python with it. Numbers and pointers only, no exception leaves it; where
// something fails, kerasfeed_digest_error says why.
#ifndef KERASFEED_NATIVE_CORE_DIGEST_C_API_H_
#define KERASFEED_NATIVE_CORE_DIGEST_C_API_H_

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

typedef struct KerasfeedXxh3 KerasfeedXxh3;
typedef struct KerasfeedDigester KerasfeedDigester;
typedef struct KerasfeedJournal KerasfeedJournal;

// Why the last call on this thread failed. Valid until the next one fails.
const char* kerasfeed_digest_error(void);

// ---- XXH3; `path` is 0 (portable), 1 (SSE2), 2 (AVX2) or -1 (the fastest)
// ----

int kerasfeed_xxh3_has(int path);
// Null if this machine has no such path.
KerasfeedXxh3* kerasfeed_xxh3_new(uint64_t seed, int path);
void kerasfeed_xxh3_delete(KerasfeedXxh3* hasher);
void kerasfeed_xxh3_update(KerasfeedXxh3* hasher, const void* data,
                           size_t size);
uint64_t kerasfeed_xxh3_digest(const KerasfeedXxh3* hasher);
uint64_t kerasfeed_xxh3_of(const void* data, size_t size, uint64_t seed);

// ---- Digests ----

KerasfeedDigester* kerasfeed_digester_new(const void* spec, size_t spec_bytes,
                                          int full);
void kerasfeed_digester_delete(KerasfeedDigester* digester);
// Of an element of so many components. `ranks` says how many of `dims`, one
// behind the other, are each one's. Returns 0, or -1 if it failed.
int kerasfeed_digester_digest(const KerasfeedDigester* digester,
                              int64_t components, const int64_t* ranks,
                              const int64_t* dims, const int64_t* lengths,
                              const void* const* buffers, int64_t size,
                              uint64_t* digest);

// ---- The journal: 1 and *known if something is known, else 0; -1 if the call
// failed ----

// Null if the file is no journal. `max_runs` is kMaxRuns, or less in tests.
KerasfeedJournal* kerasfeed_journal_open(int fd, int64_t max_runs);
void kerasfeed_journal_close(KerasfeedJournal* journal);
int kerasfeed_journal_note(KerasfeedJournal* journal, int64_t pass,
                           int64_t element, uint64_t digest, uint64_t* known);
int kerasfeed_journal_find(const KerasfeedJournal* journal, int64_t pass,
                           int64_t element, uint64_t* known);
int kerasfeed_journal_note_end(KerasfeedJournal* journal, int64_t pass,
                               int64_t elements, int64_t* known);
int kerasfeed_journal_elements(const KerasfeedJournal* journal, int64_t pass,
                               int64_t* known);
// `digests` has room for stop - first of them; 1 if all are known.
int kerasfeed_journal_digests(const KerasfeedJournal* journal, int64_t pass,
                              int64_t first, int64_t stop, uint64_t* digests);
int kerasfeed_journal_forget_before(KerasfeedJournal* journal, int64_t pass);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#ifdef __cplusplus
namespace kerasfeed {

class Digester;
class Journal;

// The things themselves, for what uses them without Python.
const Digester* DigesterOf(KerasfeedDigester* digester);
Journal* JournalOf(KerasfeedJournal* journal);

}  // namespace kerasfeed
#endif

#endif  // KERASFEED_NATIVE_CORE_DIGEST_C_API_H_
