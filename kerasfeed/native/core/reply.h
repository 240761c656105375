// What the functions for ctypes have in common: numbers and text for a KfReply,
// and no exception that gets out.
#ifndef KERASFEED_NATIVE_CORE_REPLY_H_
#define KERASFEED_NATIVE_CORE_REPLY_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "c_api.h"

namespace kerasfeed {

using Numbers = std::vector<int64_t>;

inline void Empty(KfReply* reply) { *reply = KfReply{nullptr, 0, nullptr, 0}; }

// Puts copies of numbers and text into an empty reply.
inline void Fill(KfReply* reply, const Numbers& numbers,
                 const std::string& text) {
  if (!numbers.empty()) {
    const size_t bytes = numbers.size() * sizeof(int64_t);
    reply->numbers = static_cast<int64_t*>(std::malloc(bytes));
    if (reply->numbers == nullptr) throw std::bad_alloc();
    std::memcpy(reply->numbers, numbers.data(), bytes);
    reply->count = static_cast<int64_t>(numbers.size());
  }
  if (!text.empty()) {
    reply->text = static_cast<char*>(std::malloc(text.size() + 1));
    if (reply->text == nullptr) throw std::bad_alloc();
    std::memcpy(reply->text, text.c_str(), text.size() + 1);
    reply->bytes = static_cast<int64_t>(text.size());
  }
}

// Calls `body` with numbers and text to fill in, and puts them into the reply.
template <typename Body>
KfStatus Answer(KfReply* reply, Body body) noexcept {
  Empty(reply);
  std::string wrong;
  try {
    Numbers numbers;
    std::string text;
    const KfStatus status = body(&numbers, &text);
    Fill(reply, numbers, text);
    return status;
  } catch (const std::exception& error) {
    // Whatever it is, its text is short or there is no memory for it.
    kf_reply_free(reply);
    reply->text = strdup(error.what());
  } catch (...) {
    kf_reply_free(reply);
    reply->text = strdup("an exception of an unknown kind");
  }
  if (reply->text != nullptr)
    reply->bytes = static_cast<int64_t>(std::strlen(reply->text));
  return kKfBroken;
}

// As Answer, for what has nothing to say.
template <typename Body>
KfStatus Do(KfReply* reply, Body body) noexcept {
  return Answer(reply, [&body](Numbers*, std::string*) {
    body();
    return kKfDone;
  });
}

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_REPLY_H_
