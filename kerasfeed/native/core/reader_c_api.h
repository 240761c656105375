// A rank's reader for Python (ctypes), in the manners of c_api.h:
// kerasfeed/native/reader.py is its only user.
#ifndef KERASFEED_NATIVE_CORE_READER_C_API_H_
#define KERASFEED_NATIVE_CORE_READER_C_API_H_

#include <stdint.h>

#include <memory>

#include "c_api.h"

struct KfReader;

// See ReaderOptions.
KF_API KfStatus kf_reader_new(int64_t free_bytes, int64_t max_kept_bytes,
                              KfReader** reader, KfReply* reply);
KF_API void kf_reader_free(KfReader* reader);
// Proofs have kProofBytes. kKfNothing and why, in text, if it can't.
KF_API KfStatus kf_reader_attach(KfReader* reader, const char* address,
                                 int64_t bytes, int64_t rank, const char* proof,
                                 const char* expected, double timeout,
                                 KfReply* reply);
KF_API KfStatus kf_reader_detach(KfReader* reader, KfReply* reply);
// kKfDone if it is; text: what broke the last connection.
KF_API KfStatus kf_reader_attached(KfReader* reader, KfReply* reply);
// `left`: null for none. Numbers: the read.
KF_API KfStatus kf_reader_read(KfReader* reader, int64_t epoch, int64_t step,
                               int32_t through_epochs, int64_t credit_steps,
                               int64_t credit_bytes, int64_t last_epoch,
                               const int64_t* left, int32_t direct,
                               int32_t free, KfReply* reply);
KF_API KfStatus kf_reader_void(KfReader* reader, KfReply* reply);
// Numbers: the steps, and the position.
KF_API KfStatus kf_reader_pulls(KfReader* reader, int64_t read, KfReply* reply);
// Numbers: 0 and the position; 1, epoch and steps; 2 and the failure's kind,
// its message in text; 3 if the read is void.
KF_API KfStatus kf_reader_peek(KfReader* reader, int64_t read, double seconds,
                               KfReply* reply);
// `trained`: for each of `trained_count` epochs its number and the steps.
KF_API KfStatus kf_reader_acknowledge(KfReader* reader, int64_t epoch,
                                      int64_t step, const int64_t* trained,
                                      int64_t trained_count, KfReply* reply);
// kKfDone if the producer has heard all.
KF_API KfStatus kf_reader_sync(KfReader* reader, double timeout,
                               KfReply* reply);
// Numbers: elements that came through shared memory and stayed there, were
// copied out of it, and came over the socket; bytes of shared memory that are
// kept now; what has arrived and was not handed out.
KF_API KfStatus kf_reader_counts(KfReader* reader, KfReply* reply);

namespace kerasfeed {

class Reader;

// The reader itself, for what reads without Python.
std::shared_ptr<Reader> ReaderOf(KfReader* reader);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_READER_C_API_H_
