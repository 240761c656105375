#include "reader_c_api.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "reader.h"
#include "reply.h"

using kerasfeed::Answer;
using kerasfeed::Do;
using kerasfeed::Numbers;

struct KfReader {
  std::shared_ptr<kerasfeed::Reader> reader;
};

namespace {

void Describe(const kerasfeed::Peeked& peeked, Numbers* numbers,
              std::string* text) {
  if (const auto* position = std::get_if<kerasfeed::Position>(&peeked)) {
    *numbers = {0, position->epoch, position->step};
  } else if (const auto* end = std::get_if<kerasfeed::EpochEnd>(&peeked)) {
    *numbers = {1, end->epoch, end->steps};
  } else if (const auto* failure = std::get_if<kerasfeed::Failure>(&peeked)) {
    *numbers = {2, static_cast<int64_t>(failure->kind)};
    *text = failure->message;
  } else {
    *numbers = {3};
  }
}

}  // namespace

KfStatus kf_reader_new(int64_t free_bytes, int64_t max_kept_bytes,
                       KfReader** reader, KfReply* reply) {
  return Do(reply, [&] {
    kerasfeed::ReaderOptions options;
    options.free_bytes = free_bytes;
    options.max_kept_bytes = max_kept_bytes;
    *reader =
        new KfReader{std::make_shared<kerasfeed::Reader>(std::move(options))};
  });
}

void kf_reader_free(KfReader* reader) { delete reader; }

KfStatus kf_reader_attach(KfReader* reader, const char* address, int64_t bytes,
                          int64_t rank, const char* proof, const char* expected,
                          double timeout, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    const auto wrong = reader->reader->Attach(
        std::string(address, bytes), rank, kerasfeed::ProofOf(proof),
        kerasfeed::ProofOf(expected), timeout);
    if (!wrong) return kKfDone;
    *text = *wrong;
    return kKfNothing;
  });
}

KfStatus kf_reader_detach(KfReader* reader, KfReply* reply) {
  return Do(reply, [&] { reader->reader->Detach(); });
}

KfStatus kf_reader_attached(KfReader* reader, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    *text = reader->reader->trouble();
    return reader->reader->attached() ? kKfDone : kKfNothing;
  });
}

KfStatus kf_reader_read(KfReader* reader, int64_t epoch, int64_t step,
                        int32_t through_epochs, int64_t credit_steps,
                        int64_t credit_bytes, int64_t last_epoch,
                        const int64_t* left, int32_t direct, int32_t free,
                        KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    kerasfeed::ReadRequest request;
    request.position = {epoch, step};
    request.through_epochs = through_epochs != 0;
    request.credit_steps = credit_steps;
    request.credit_bytes = credit_bytes;
    request.last_epoch = last_epoch;
    if (left != nullptr) request.left = kerasfeed::Position{left[0], left[1]};
    request.direct = direct != 0;
    numbers->push_back(reader->reader->Read(std::move(request), free != 0));
    return kKfDone;
  });
}

KfStatus kf_reader_void(KfReader* reader, KfReply* reply) {
  return Do(reply, [&] { reader->reader->Void(); });
}

KfStatus kf_reader_pulls(KfReader* reader, int64_t read, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto pulls = reader->reader->GetPulls(read);
    if (!pulls) return kKfNothing;
    *numbers = {pulls->steps, pulls->next.epoch, pulls->next.step};
    return kKfDone;
  });
}

KfStatus kf_reader_peek(KfReader* reader, int64_t read, double seconds,
                        KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string* text) {
    const auto peeked = reader->reader->Peek(read, seconds);
    if (!peeked) return kKfNothing;
    Describe(*peeked, numbers, text);
    return kKfDone;
  });
}

KfStatus kf_reader_acknowledge(KfReader* reader, int64_t epoch, int64_t step,
                               const int64_t* trained, int64_t trained_count,
                               KfReply* reply) {
  return Do(reply, [&] {
    std::map<int64_t, int64_t> steps;
    for (int64_t i = 0; i < trained_count; ++i) {
      steps[trained[2 * i]] = trained[2 * i + 1];
    }
    reader->reader->Acknowledge({epoch, step}, steps);
  });
}

KfStatus kf_reader_sync(KfReader* reader, double timeout, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string*) {
    return reader->reader->Sync(timeout) ? kKfDone : kKfNothing;
  });
}

KfStatus kf_reader_counts(KfReader* reader, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto counts = reader->reader->GetCounts();
    *numbers = {counts.shared, counts.copied, counts.received,
                counts.kept_bytes, counts.queued};
    return kKfDone;
  });
}

namespace kerasfeed {

std::shared_ptr<Reader> ReaderOf(KfReader* reader) { return reader->reader; }

}  // namespace kerasfeed
