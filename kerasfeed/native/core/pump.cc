#include "pump.h"

#include <cstring>
#include <optional>
#include <utility>
#include <variant>

namespace kerasfeed {
namespace {

// How long to wait for work before looking again who else wants something.
constexpr double kLookSeconds = 0.5;

void Prepare(PumpContext* context, int64_t size) {
  if (size <= context->prepared_bytes) return;
  context->prepared_bytes = size;
  context->pool->Prepare(size, context->ahead);
}

}  // namespace

ElementPtr Placed(Pool* pool, Element element) {
  std::shared_ptr<Block> block = pool->Allocate(element.size);
  if (!block) return std::make_shared<const Element>(std::move(element));
  int64_t at = 0;
  for (size_t i = 0; i < element.components.size(); ++i) {
    const Component& component = element.components[i];
    // What was in the block before is nobody's business.
    std::memset(block->data + at, 0, component.offset - at);
    Span& buffer = element.buffers[i];
    if (buffer.size > 0) {
      std::memcpy(block->data + component.offset, buffer.data, buffer.size);
    }
    buffer.data = block->data + component.offset;
    at = component.offset + component.length;
  }
  element.block = block;
  element.owner = std::move(block);
  return std::make_shared<const Element>(std::move(element));
}

PumpOutcome Pump(PumpContext* context, const PumpRequest& request,
                 const Source& source) {
  using Kind = PumpOutcome::Kind;
  PumpOutcome outcome;
  const auto ends_as = [&outcome](Kind kind) {
    outcome.kind = kind;
    return outcome;
  };
  const int64_t pass = request.place.first;
  const std::optional<int64_t> known_end = context->journal->Elements(pass);
  while (outcome.produced != request.limit) {
    const auto work = context->window->TryWork({}, kLookSeconds, request.wakes);
    if (context->window->PumpWakes() != request.wakes) {
      // Nothing is lost: what the window wants it says again, but for a seek.
      if (!work || !std::holds_alternative<Seek>(*work)) {
        return ends_as(Kind::kInterrupted);
      }
    }
    if (!work) continue;
    if (const auto* seek = std::get_if<Seek>(&*work)) {
      outcome.seek = *seek;
      return ends_as(Kind::kSeek);
    }
    if (std::holds_alternative<Pause>(*work)) return ends_as(Kind::kPause);
    if (std::holds_alternative<Stop>(*work)) return ends_as(Kind::kStop);
    const Produce& produce = std::get<Produce>(*work);
    outcome.generation = produce.generation;
    Element element;
    switch (source(&element)) {
      case SourceResult::kEnd:
        return ends_as(Kind::kEnd);
      case SourceResult::kError:
        return ends_as(Kind::kError);
      case SourceResult::kElement:
        break;
    }
    const int64_t index = request.place.second + outcome.produced;
    ++outcome.produced;
    std::optional<Kind> strange;
    if (known_end && index >= *known_end) strange = Kind::kPastEnd;
    const uint64_t now = context->digester->Digest(element);
    const std::optional<uint64_t> was =
        context->journal->Note(pass, index, now);
    if (!strange && was && *was != now) {
      strange = Kind::kMismatch;
      outcome.was = *was;
      outcome.now = now;
    }
    if (strange && request.tolerance == Tolerance::kNone) {
      return ends_as(*strange);
    }
    ElementPtr placed;
    if (context->pool && context->shares(produce.rank)) {
      Prepare(context, element.size);
      placed = Placed(context->pool.get(), std::move(element));
    } else {
      placed = std::make_shared<const Element>(std::move(element));
    }
    context->window->Put(produce.generation, std::move(placed));
    context->progress(pass, index + 1);
    if (strange && request.tolerance == Tolerance::kTell) {
      return ends_as(*strange);
    }
  }
  return ends_as(Kind::kLimit);
}

}  // namespace kerasfeed
