// KerasfeedDataset: a rank's steps as a tf.data dataset. Python is asked where
// an iterator begins and whether it goes on at an epoch's end, and hears when a
// wait is long; while steps flow it takes no part.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/reader.h"
#include "core/reply.h"
#include "ops/c_api.h"
#include "ops/encode.h"
#include "ops/registry.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace kerasfeed {
namespace {

using tensorflow::DataTypeVector;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Status;
using tensorflow::Tensor;
using tensorflow::data::DatasetBase;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
namespace errors = tensorflow::errors;

using Clock = std::chrono::steady_clock;
// How often whoever waits asks Python whether it is worth it.
constexpr std::chrono::milliseconds kLookEvery{500};

// What a feed reads from, from one start to the next close of it.
struct Run {
  explicit Run(std::shared_ptr<Reader> reader) : reader(std::move(reader)) {}

  const std::shared_ptr<Reader> reader;
  std::atomic<bool> closed{false};
  std::atomic<int64_t> alerts{0};
  std::atomic<int64_t> interrupts{0};
};

class Feed {
 public:
  explicit Feed(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  // Null before the first one.
  std::shared_ptr<Run> run() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return run_;
  }

  void Begin(std::shared_ptr<Run> run) {
    std::lock_guard<std::mutex> lock(mutex_);
    run_ = std::move(run);
  }

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Run> run_;
};

Registry<Feed>& Feeds() {
  static auto* feeds = new Registry<Feed>();
  return *feeds;
}

KfFeedCallbacks& Callbacks() {
  static auto* callbacks = new KfFeedCallbacks();
  return *callbacks;
}

class FeedDatasetOp : public tensorflow::data::DatasetOpKernel {
 public:
  explicit FeedDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &types_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_shapes", &shapes_));
  }

  void MakeDataset(OpKernelContext* ctx, DatasetBase** output) override;

 private:
  class Dataset;

  DataTypeVector types_;
  std::vector<PartialTensorShape> shapes_;
};

class FeedDatasetOp::Dataset : public DatasetBase {
 public:
  Dataset(OpKernelContext* ctx, int64_t feed, bool direct,
          const DataTypeVector& types,
          const std::vector<PartialTensorShape>& shapes)
      : DatasetBase(tensorflow::data::DatasetContext(ctx)),
        feed_(feed),
        direct_(direct),
        types_(types),
        shapes_(shapes) {}

  std::unique_ptr<IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override;
  const DataTypeVector& output_dtypes() const override { return types_; }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return shapes_;
  }
  std::string DebugString() const override {
    return "KerasfeedDatasetOp::Dataset";
  }
  int64_t CardinalityInternal(
      tensorflow::data::CardinalityOptions) const override {
    return tensorflow::data::kUnknownCardinality;
  }
  Status InputDatasets(std::vector<const DatasetBase*>*) const override {
    return Status();
  }
  Status CheckExternalState() const override {
    return errors::FailedPrecondition(DebugString(), " depends on a feed.");
  }

 protected:
  Status AsGraphDefInternal(tensorflow::data::SerializationContext*,
                            DatasetGraphDefBuilder* builder,
                            tensorflow::Node** output) const override {
    tensorflow::Node* feed = nullptr;
    tensorflow::Node* direct = nullptr;
    TF_RETURN_IF_ERROR(builder->AddScalar(feed_, &feed));
    TF_RETURN_IF_ERROR(builder->AddScalar(direct_, &direct));
    return builder->AddDataset(this, {feed, direct}, output);
  }

 private:
  class Iterator;

  const int64_t feed_;
  const bool direct_;
  const DataTypeVector types_;
  const std::vector<PartialTensorShape> shapes_;
};

// Pulls of several threads come one after the other.
class FeedDatasetOp::Dataset::Iterator
    : public tensorflow::data::DatasetIterator<Dataset> {
 public:
  explicit Iterator(const Params& params)
      : tensorflow::data::DatasetIterator<Dataset>(params),
        message_(kKfMessageBytes) {}

  ~Iterator() override {
    if (manager_ != nullptr) manager_->DeregisterCallback(token_);
  }

  Status Initialize(IteratorContext* ctx) override {
    const int64_t number = dataset()->feed_;
    feed_ = Feeds().Find(number);
    if (!feed_) {
      return errors::FailedPrecondition(
          "feed ", number,
          " is not one of this process: a DataFeeder can't be used in another "
          "one, or when it is gone");
    }
    auto* manager = ctx->cancellation_manager();
    if (manager == nullptr) return Status();
    token_ = manager->get_cancellation_token();
    const auto cancel = [feed = feed_, cancelled = cancelled_] {
      *cancelled = true;
      if (const auto run = feed->run()) run->reader->Wake();
    };
    if (manager->RegisterCallback(token_, cancel)) {
      manager_ = manager;
    } else {
      *cancelled_ = true;
    }
    return Status();
  }

  Status GetNextInternal(IteratorContext*, std::vector<Tensor>* tensors,
                         bool* end) override {
    tensorflow::mutex_lock lock(mutex_);
    *end = over_;
    if (over_) return Status();
    const auto& ask = Callbacks();
    const int64_t number = dataset()->feed_;
    if (!run_) {
      read_ = ask.open(number, dataset()->direct_, message_.data());
      if (read_ < 0) return Told();
      run_ = feed_->run();
    }
    if (run_->closed) return Closed();
    while (true) {
      Received received = Next();
      if (auto* element = std::get_if<ReceivedElement>(&received)) {
        return DecodeElement(element->components, element->size,
                             std::move(element->block), dataset()->types_,
                             tensors);
      }
      if (run_->closed) return Closed();
      if (*cancelled_) return errors::Cancelled("the iterator was cancelled");
      if (const auto* epoch = std::get_if<EpochEnd>(&received)) {
        const int64_t more = ask.ended(number, read_, epoch->epoch,
                                       epoch->steps, message_.data());
        if (more < 0) return Told();
        if (more > 0) continue;
        *end = over_ = true;
        return Status();
      }
      if (const auto* failure = std::get_if<Failure>(&received)) {
        ask.failed(number, read_, static_cast<int64_t>(failure->kind),
                   failure->message.c_str(), message_.data());
      } else if (!told_) {
        ask.failed(number, read_, -1,
                   std::get<Interrupted>(received).message.c_str(),
                   message_.data());
      }
      return Told();
    }
  }

 protected:
  Status SaveInternal(tensorflow::data::SerializationContext*,
                      tensorflow::data::IteratorStateWriter*) override {
    return errors::FailedPrecondition(
        "an iterator over a DataFeeder can't be saved: save feeder.checkpoint "
        "or feeder.state()");
  }
  Status RestoreInternal(IteratorContext*,
                         tensorflow::data::IteratorStateReader*) override {
    return errors::FailedPrecondition(
        "an iterator over a DataFeeder can't be restored: restore "
        "feeder.checkpoint or feeder.restore()");
  }

 private:
  Received Next() {
    const Clock::time_point began = Clock::now();
    Clock::time_point look_at = began + kLookEvery;
    int64_t alerts = run_->alerts;
    const int64_t interrupts = run_->interrupts;
    told_ = false;
    return run_->reader->Next(read_, [&]() -> std::optional<std::string> {
      if (*cancelled_ || run_->closed) return "";
      const Clock::time_point now = Clock::now();
      const bool interrupted = run_->interrupts != interrupts;
      if (!interrupted && run_->alerts == alerts && now < look_at) return {};
      alerts = run_->alerts;
      look_at = now + kLookEvery;
      const double seconds = std::chrono::duration<double>(now - began).count();
      if (Callbacks().waiting(dataset()->feed_, read_, seconds, interrupted,
                              message_.data()) >= 0) {
        return {};
      }
      told_ = true;
      return "";
    });
  }

  Status Told() { return errors::Internal(message_.data()); }

  Status Closed() const {
    return errors::Internal("FeedClosedError: feed '", feed_->name(),
                            "' was closed while an iterator was in use");
  }

  std::shared_ptr<Feed> feed_;
  tensorflow::CancellationManager* manager_ = nullptr;
  tensorflow::CancellationToken token_ = 0;
  const std::shared_ptr<std::atomic<bool>> cancelled_ =
      std::make_shared<std::atomic<bool>>(false);

  tensorflow::mutex mutex_;
  std::vector<char> message_;  // that Python left
  bool told_ = false;
  bool over_ = false;
  std::shared_ptr<Run> run_;  // none before the first pull
  int64_t read_ = -1;
};

std::unique_ptr<IteratorBase> FeedDatasetOp::Dataset::MakeIteratorInternal(
    const std::string& prefix) const {
  return std::make_unique<Iterator>(
      Iterator::Params{this, prefix + "::Kerasfeed"});
}

void FeedDatasetOp::MakeDataset(OpKernelContext* ctx, DatasetBase** output) {
  int64_t feed;
  bool direct;
  OP_REQUIRES_OK(
      ctx, tensorflow::data::ParseScalarArgument<int64_t>(ctx, "feed", &feed));
  OP_REQUIRES_OK(
      ctx, tensorflow::data::ParseScalarArgument<bool>(ctx, "direct", &direct));
  *output = new Dataset(ctx, feed, direct, types_, shapes_);
}

REGISTER_OP("KerasfeedDataset")
    .Input("feed: int64")
    .Input("direct: bool")
    .Output("handle: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* ctx) {
      ctx->set_output(0, ctx->Scalar());
      return Status();
    })
    .Doc("The steps that a rank gets from a feed.");
REGISTER_KERNEL_BUILDER(Name("KerasfeedDataset").Device(tensorflow::DEVICE_CPU),
                        FeedDatasetOp);

}  // namespace
}  // namespace kerasfeed

void kf_feed_set_callbacks(const KfFeedCallbacks* callbacks) {
  kerasfeed::Callbacks() = *callbacks;
}

namespace {

// Calls `body` with the run that this feed is in, if it is in one.
template <typename Body>
KfStatus WithRun(int64_t feed, KfReply* reply, Body body) {
  return kerasfeed::Answer(reply, [&](kerasfeed::Numbers*, std::string*) {
    const auto found = kerasfeed::Feeds().Find(feed);
    const auto run = found ? found->run() : nullptr;
    if (!run) return kKfNothing;
    body(run.get());
    run->reader->Wake();
    return kKfDone;
  });
}

}  // namespace

KfStatus kf_feed_new(const char* name, int64_t bytes, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    numbers->push_back(
        Feeds().Add(std::make_shared<Feed>(std::string(name, bytes))));
    return kKfDone;
  });
}

KfStatus kf_feed_free(int64_t feed, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers*, std::string*) {
    return Feeds().Remove(feed) ? kKfDone : kKfNothing;
  });
}

KfStatus kf_feed_begin(int64_t feed, KfReader* reader, KfReply* reply) {
  using namespace kerasfeed;
  return Answer(reply, [&](Numbers*, std::string*) {
    const auto found = Feeds().Find(feed);
    if (!found) return kKfNothing;
    found->Begin(std::make_shared<Run>(ReaderOf(reader)));
    return kKfDone;
  });
}

KfStatus kf_feed_alert(int64_t feed, KfReply* reply) {
  return WithRun(feed, reply, [](auto* run) { ++run->alerts; });
}

KfStatus kf_feed_interrupt(int64_t feed, KfReply* reply) {
  return WithRun(feed, reply, [](auto* run) { ++run->interrupts; });
}

KfStatus kf_feed_close(int64_t feed, KfReply* reply) {
  return WithRun(feed, reply, [](auto* run) { run->closed = true; });
}
