// KerasfeedPump: takes elements from an iterator that Python made, so that
// tf.train.Checkpoint can save that iterator between two calls, and puts them
// into the window, until something rare is to be done.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/pump.h"
#include "core/reply.h"
#include "core/server.h"
#include "ops/c_api.h"
#include "ops/encode.h"
#include "ops/registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/kernels/data/iterator_ops.h"
#include "tensorflow/core/platform/errors.h"

namespace kerasfeed {
namespace {

struct PumpState {
  PumpContext context;
  PumpOutcome outcome;
};

Registry<PumpState>& Pumps() {
  static auto* pumps = new Registry<PumpState>();
  return *pumps;
}

// Each number is stored at once: a death in between leaves the old one or the
// new one.
void NoteProgress(int64_t* words, int64_t pass, int64_t elements) {
  if (std::make_pair(pass, elements) <= std::make_pair(words[0], words[1])) {
    return;
  }
  __atomic_store_n(&words[0], pass, __ATOMIC_RELEASE);
  __atomic_store_n(&words[1], elements, __ATOMIC_RELEASE);
}

class PumpOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const auto number = [ctx](int index) {
      return ctx->input(index).scalar<int64_t>()();
    };
    tensorflow::core::RefCountPtr<tensorflow::data::IteratorResource> iterator;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupResource(
                       ctx, tensorflow::HandleFromInput(ctx, 0), &iterator));
    const std::shared_ptr<PumpState> pump = Pumps().Find(number(1));
    OP_REQUIRES(
        ctx, pump != nullptr,
        tensorflow::errors::InvalidArgument("there is no pump ", number(1)));
    PumpRequest request;
    request.place = {number(2), number(3)};
    request.limit = number(4);
    request.wakes = number(5);
    request.tolerance = static_cast<Tolerance>(number(6));
    tensorflow::Status status;
    pump->outcome = PumpOutcome();
    pump->outcome = Pump(&pump->context, request, [&](Element* element) {
      std::vector<tensorflow::Tensor> tensors;
      bool end = false;
      status = iterator->GetNext(ctx, &tensors, &end);
      if (status.ok() && end) return SourceResult::kEnd;
      if (status.ok()) status = EncodeElement(std::move(tensors), element);
      return status.ok() ? SourceResult::kElement : SourceResult::kError;
    });
    OP_REQUIRES_OK(ctx, status);
  }
};

REGISTER_OP("KerasfeedPump")
    .Input("iterator: resource")
    .Input("pump: int64")
    .Input("in_pass: int64")
    .Input("element: int64")
    .Input("limit: int64")
    .Input("wakes: int64")
    .Input("tolerance: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext*) {
      return tensorflow::Status();
    })
    .Doc("Pumps from an iterator into a feed's window.");
REGISTER_KERNEL_BUILDER(Name("KerasfeedPump").Device(tensorflow::DEVICE_CPU),
                        PumpOp);

}  // namespace
}  // namespace kerasfeed

KfStatus kf_pump_new(KfWindow* window, KfServer* server,
                     KerasfeedDigester* digester, KerasfeedJournal* journal,
                     int64_t* progress, int64_t ahead, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    auto pump = std::make_shared<PumpState>();
    PumpContext& context = pump->context;
    context.window = WindowOf(window);
    context.digester = DigesterOf(digester);
    context.journal = JournalOf(journal);
    if (server != nullptr) {
      context.pool = PoolOf(server);
      context.shares = [server = ServerOf(server)](int64_t rank) {
        return server->Shares(rank);
      };
    }
    context.progress = [progress](int64_t pass, int64_t elements) {
      NoteProgress(progress, pass, elements);
    };
    context.ahead = ahead;
    numbers->push_back(Pumps().Add(std::move(pump)));
    return kKfDone;
  });
}

KfStatus kf_pump_outcome(int64_t pump, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const std::shared_ptr<PumpState> found = Pumps().Find(pump);
    if (!found) return kKfNothing;
    const PumpOutcome& outcome = found->outcome;
    const Seek& seek = outcome.seek;
    *numbers = {static_cast<int64_t>(outcome.kind),
                outcome.produced,
                outcome.generation,
                seek.generation,
                seek.pass,
                seek.element,
                seek.joined,
                static_cast<int64_t>(outcome.was),
                static_cast<int64_t>(outcome.now)};
    return kKfDone;
  });
}

KfStatus kf_pump_free(int64_t pump, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers*, std::string*) {
    return Pumps().Remove(pump) ? kKfDone : kKfNothing;
  });
}
