#include "c_api.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "reply.h"
#include "window.h"

using kerasfeed::Answer;
using kerasfeed::BindError;
using kerasfeed::Component;
using kerasfeed::Delivery;
using kerasfeed::Do;
using kerasfeed::Element;
using kerasfeed::ElementPtr;
using kerasfeed::EpochCount;
using kerasfeed::EpochEnd;
using kerasfeed::Failure;
using kerasfeed::FailureKind;
using kerasfeed::News;
using kerasfeed::Numbers;
using kerasfeed::Place;
using kerasfeed::Position;
using kerasfeed::Produce;
using kerasfeed::ReadRequest;
using kerasfeed::Seek;
using kerasfeed::Segment;
using kerasfeed::Span;
using kerasfeed::Window;
using kerasfeed::WindowOptions;

struct KfElement {
  ElementPtr element;
};

struct KfWindow {
  std::shared_ptr<std::atomic<double>> clock;
  std::unique_ptr<Window> window;
};

namespace {

void Add(Numbers* numbers, std::initializer_list<int64_t> more) {
  numbers->insert(numbers->end(), more);
}
void Add(Numbers* numbers, const Position& p) {
  Add(numbers, {p.epoch, p.step});
}
void Add(Numbers* numbers, const Segment& s) {
  Add(numbers, {s.first_epoch, s.origin_pass, s.origin_element,
                s.steps_per_epoch.value_or(0), s.first_step});
}
void Add(Numbers* numbers, const EpochCount& c) {
  Add(numbers, {c.elements, c.steps, c.dropped, c.complete});
}
void Add(Numbers* numbers, const std::map<int64_t, int64_t>& pairs) {
  Add(numbers, {static_cast<int64_t>(pairs.size())});
  for (const auto& [key, value] : pairs) Add(numbers, {key, value});
}

std::optional<int64_t> StepsOrNone(int64_t steps) {
  return steps != 0 ? std::optional<int64_t>(steps) : std::nullopt;
}
std::optional<int64_t> WakesOrNone(int64_t wakes) {
  return wakes >= 0 ? std::optional<int64_t>(wakes) : std::nullopt;
}
std::string Text(const char* text, int64_t bytes) {
  return std::string(text, static_cast<size_t>(bytes));
}

Segment SegmentAt(const int64_t* numbers) {
  return Segment{numbers[0], numbers[1], numbers[2], StepsOrNone(numbers[3]),
                 numbers[4]};
}

}  // namespace

namespace kerasfeed {

Window* WindowOf(KfWindow* window) { return window->window.get(); }

}  // namespace kerasfeed

void kf_reply_free(KfReply* reply) {
  std::free(reply->numbers);
  std::free(reply->text);
  kerasfeed::Empty(reply);
}

// ---- Elements ----

KfStatus kf_element_new(int64_t size, const int64_t* components,
                        const char* const* buffers, int64_t count,
                        KfElement** element, KfReply* reply) {
  return Do(reply, [&] {
    auto made = std::make_shared<Element>();
    auto memory = std::make_shared<std::vector<std::string>>();
    memory->reserve(static_cast<size_t>(count));
    made->size = size;
    for (int64_t i = 0; i < count; ++i) {
      Component component;
      component.offset = *components++;
      component.length = *components++;
      const int64_t dims = *components++;
      component.shape.assign(components, components + dims);
      components += dims;
      memory->push_back(Text(buffers[i], component.length));
      made->buffers.push_back(Span{memory->back().data(), component.length});
      made->components.push_back(std::move(component));
    }
    made->owner = std::move(memory);
    *element = new KfElement{std::move(made)};
  });
}

KfStatus kf_element_describe(const KfElement* element, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, {element->element->size});
    for (const Component& c : element->element->components) {
      Add(numbers, {c.offset, c.length, static_cast<int64_t>(c.shape.size())});
      numbers->insert(numbers->end(), c.shape.begin(), c.shape.end());
    }
    return kKfDone;
  });
}

const char* kf_element_buffer(const KfElement* element, int64_t component) {
  return element->element->buffers[static_cast<size_t>(component)].data;
}

void kf_element_free(KfElement* element) { delete element; }

// ---- The window ----

KfStatus kf_window_new(const KfOptions* given, const int64_t* segment,
                       const int64_t* counts, int64_t counts_count,
                       const int64_t* pass_lengths, int64_t pass_lengths_count,
                       const int64_t* left, int64_t left_count,
                       KfWindow** window, KfReply* reply) {
  return Do(reply, [&] {
    WindowOptions options;
    options.size = given->size;
    options.prefetch = given->prefetch;
    options.ready_bytes = given->ready_bytes;
    options.max_bytes = given->max_bytes;
    options.steps_per_epoch = StepsOrNone(given->steps_per_epoch);
    if (segment != nullptr) options.segment = SegmentAt(segment);
    options.cardinality = given->cardinality;
    options.start_timeout = given->start_timeout;
    options.rank_timeout = given->rank_timeout;
    options.cut_grace = given->cut_grace;
    options.poll_seconds = given->poll_seconds;
    options.holds_ends = given->holds_ends != 0;
    for (int64_t i = 0; i < counts_count; ++i, counts += 5)
      options.counts[counts[0]] =
          EpochCount{counts[1], counts[2], counts[3], counts[4] != 0};
    for (int64_t i = 0; i < pass_lengths_count; ++i, pass_lengths += 2)
      options.pass_lengths[pass_lengths[0]] = pass_lengths[1];
    for (int64_t i = 0; i < left_count; ++i) {
      auto& trained = options.left[*left++];
      for (int64_t epochs = *left++; epochs > 0; --epochs, left += 2)
        trained[left[0]] = left[1];
    }
    auto made = std::make_unique<KfWindow>();
    if (given->own_clock) {
      made->clock = std::make_shared<std::atomic<double>>(0.0);
      options.clock = [clock = made->clock] { return clock->load(); };
    }
    made->window = std::make_unique<Window>(std::move(options));
    *window = made.release();
  });
}

void kf_window_free(KfWindow* window) { delete window; }

void kf_window_set_clock(KfWindow* window, double seconds) {
  if (window->clock) window->clock->store(seconds);
}

// ---- The pump's side ----

KfStatus kf_window_work(KfWindow* window, int32_t interrupted, double seconds,
                        int64_t wakes, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto work =
        window->window->TryWork([interrupted] { return interrupted != 0; },
                                seconds, WakesOrNone(wakes));
    if (!work) return kKfNothing;
    if (const auto* seek = std::get_if<Seek>(&*work)) {
      Add(numbers,
          {kKfSeek, seek->generation, seek->pass, seek->element, seek->joined});
    } else if (const auto* produce = std::get_if<Produce>(&*work)) {
      Add(numbers, {kKfProduce, produce->generation});
    } else {
      const bool pause = std::holds_alternative<kerasfeed::Pause>(*work);
      Add(numbers, {pause ? kKfPause : kKfStop});
    }
    return kKfDone;
  });
}

KfStatus kf_window_wake_pump(KfWindow* window, KfReply* reply) {
  return Do(reply, [&] { window->window->WakePump(); });
}

KfStatus kf_window_pump_wakes(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, {window->window->PumpWakes()});
    return kKfDone;
  });
}

KfStatus kf_window_untrained(KfWindow* window, int64_t epoch, int64_t step,
                             KfReply* reply) {
  std::vector<std::unique_ptr<KfElement>> handles;
  const KfStatus status = Answer(reply, [&](Numbers* numbers, std::string*) {
    auto elements = window->window->Untrained(Position{epoch, step});
    if (!elements) return kKfNothing;
    for (ElementPtr& element : *elements) {
      handles.push_back(
          std::make_unique<KfElement>(KfElement{std::move(element)}));
      Add(numbers, {reinterpret_cast<intptr_t>(handles.back().get())});
    }
    return kKfDone;
  });
  // Only now the caller has them.
  if (status == kKfDone)
    for (auto& handle : handles) handle.release();
  return status;
}

KfStatus kf_window_put(KfWindow* window, int64_t generation,
                       const KfElement* element, KfReply* reply) {
  return Do(reply, [&] { window->window->Put(generation, element->element); });
}

KfStatus kf_window_end_pass(KfWindow* window, int64_t generation, int64_t pass,
                            int64_t elements, KfReply* reply) {
  return Do(reply,
            [&] { window->window->EndPass(generation, pass, elements); });
}

KfStatus kf_window_note_pass_length(KfWindow* window, int64_t pass,
                                    int64_t elements, KfReply* reply) {
  return Do(reply, [&] { window->window->NotePassLength(pass, elements); });
}

KfStatus kf_window_pass_length(KfWindow* window, int64_t pass, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto length = window->window->PassLength(pass);
    if (!length) return kKfNothing;
    Add(numbers, {*length});
    return kKfDone;
  });
}

KfStatus kf_window_fail(KfWindow* window, int64_t generation,
                        const char* message, int64_t bytes, int64_t kind,
                        KfReply* reply) {
  return Do(reply, [&] {
    window->window->Fail(generation, Text(message, bytes),
                         static_cast<FailureKind>(kind));
  });
}

KfStatus kf_window_first_pass(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, {window->window->FirstPass()});
    return kKfDone;
  });
}

// ---- The ranks' side ----

KfStatus kf_window_attend(KfWindow* window, int64_t rank, int64_t epoch,
                          int64_t step, const int64_t* segment,
                          KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    std::optional<Segment> believed;
    if (segment != nullptr) believed = SegmentAt(segment);
    const auto error =
        window->window->Attend(rank, Position{epoch, step}, believed);
    if (!error) return kKfDone;
    *text = error->message;
    return kKfBindError;
  });
}

KfStatus kf_window_read(KfWindow* window, int64_t rank, int64_t reader,
                        int64_t epoch, int64_t step, int32_t through_epochs,
                        int64_t credit_steps, int64_t credit_bytes,
                        int64_t last_epoch, const int64_t* left, int32_t direct,
                        KfReply* reply) {
  return Do(reply, [&] {
    ReadRequest request;
    request.reader = reader;
    request.position = Position{epoch, step};
    request.through_epochs = through_epochs != 0;
    request.credit_steps = credit_steps;
    request.credit_bytes = credit_bytes;
    request.last_epoch = last_epoch;
    if (left != nullptr) request.left = Position{left[0], left[1]};
    request.direct = direct != 0;
    window->window->Read(rank, request);
  });
}

KfStatus kf_window_progress(KfWindow* window, int64_t rank, int64_t reader,
                            int64_t pulled_epoch, int64_t pulled_step,
                            int64_t acknowledged_epoch,
                            int64_t acknowledged_step, const int64_t* trained,
                            int64_t trained_count, int32_t waiting,
                            KfReply* reply) {
  return Do(reply, [&] {
    std::map<int64_t, int64_t> by_epoch;
    for (int64_t i = 0; i < trained_count; ++i, trained += 2)
      by_epoch[trained[0]] = trained[1];
    window->window->Progress(rank, reader, Position{pulled_epoch, pulled_step},
                             Position{acknowledged_epoch, acknowledged_step},
                             by_epoch, waiting != 0);
  });
}

KfStatus kf_window_bind(KfWindow* window, int64_t rank, int64_t binding,
                        int64_t epoch, int64_t step, int64_t steps_per_epoch,
                        KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string* text) {
    const auto bound = window->window->Bind(
        rank, binding, Position{epoch, step}, StepsOrNone(steps_per_epoch));
    if (const auto* error = std::get_if<BindError>(&bound)) {
      *text = error->message;
      return kKfBindError;
    }
    const auto& [segment, position] =
        std::get<std::pair<Segment, Position>>(bound);
    Add(numbers, segment);
    Add(numbers, position);
    return kKfDone;
  });
}

KfStatus kf_window_locate(KfWindow* window, int64_t epoch, int64_t step,
                          KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto place = window->window->Locate(Position{epoch, step});
    if (!place) return kKfNothing;
    Add(numbers, {place->first, place->second});
    return kKfDone;
  });
}

KfStatus kf_window_leave(KfWindow* window, int64_t rank, const char* error,
                         int64_t bytes, KfReply* reply) {
  return Do(reply, [&] { window->window->Leave(rank, Text(error, bytes)); });
}

KfStatus kf_window_disconnected(KfWindow* window, int64_t rank,
                                KfReply* reply) {
  return Do(reply, [&] { window->window->Disconnected(rank); });
}

KfStatus kf_window_item(KfWindow* window, int64_t rank, double seconds,
                        int64_t wakes, KfReply* reply) {
  std::unique_ptr<KfElement> handle;
  const KfStatus status =
      Answer(reply, [&](Numbers* numbers, std::string* text) {
        const auto item =
            window->window->TryItem(rank, seconds, WakesOrNone(wakes));
        if (!item) return kKfNothing;
        if (const auto* delivery = std::get_if<Delivery>(&*item)) {
          handle = std::make_unique<KfElement>(KfElement{delivery->element});
          Add(numbers, {kKfDelivery, delivery->reader});
          Add(numbers, delivery->position);
          Add(numbers, {reinterpret_cast<intptr_t>(handle.get())});
        } else if (const auto* end = std::get_if<EpochEnd>(&*item)) {
          Add(numbers, {kKfEpochEnd, end->reader, end->epoch, end->steps});
        } else {
          const Failure& failure = std::get<Failure>(*item);
          Add(numbers, {kKfFailure, static_cast<int64_t>(failure.kind),
                        failure.position.has_value()});
          Add(numbers, failure.position.value_or(Position{}));
          *text = failure.message;
        }
        return kKfDone;
      });
  // Only now the caller has it.
  if (status == kKfDone) handle.release();
  return status;
}

KfStatus kf_window_broken(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string* text) {
    const auto failure = window->window->Broken();
    if (!failure) return kKfNothing;
    numbers->push_back(static_cast<int64_t>(failure->kind));
    *text = failure->message;
    return kKfDone;
  });
}

KfStatus kf_window_wake(KfWindow* window, int64_t rank, KfReply* reply) {
  return Do(reply, [&] { window->window->Wake(rank); });
}

KfStatus kf_window_wakes(KfWindow* window, int64_t rank, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, {window->window->Wakes(rank)});
    return kKfDone;
  });
}

// ---- Life and news ----

KfStatus kf_window_refuse(KfWindow* window, const char* message, int64_t bytes,
                          KfReply* reply) {
  return Do(reply, [&] { window->window->Refuse(Text(message, bytes)); });
}

KfStatus kf_window_abandon(KfWindow* window, const char* message, int64_t bytes,
                           KfReply* reply) {
  return Do(reply, [&] { window->window->Abandon(Text(message, bytes)); });
}

KfStatus kf_window_stop(KfWindow* window, KfReply* reply) {
  return Do(reply, [&] { window->window->StopPump(); });
}

KfStatus kf_window_drained(KfWindow* window, double seconds, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string*) {
    return window->window->WaitUntilDrained(seconds) ? kKfDone : kKfNothing;
  });
}

KfStatus kf_window_segment(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, window->window->segment());
    return kKfDone;
  });
}

KfStatus kf_window_furthest(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    Add(numbers, window->window->Furthest());
    return kKfDone;
  });
}

KfStatus kf_window_waiting_for(KfWindow* window, int64_t rank, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    *text = window->window->WaitingFor(rank);
    return kKfDone;
  });
}

KfStatus kf_window_statistics(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    for (const auto& of_epoch : window->window->GetStatistics()) {
      Add(numbers, {of_epoch.epoch});
      Add(numbers, of_epoch.count);
      Add(numbers, of_epoch.trained);
    }
    return kKfDone;
  });
}

KfStatus kf_window_news(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string* text) {
    const std::vector<News> taken = window->window->TakeNews(0);
    for (const News& news : taken) {
      Add(numbers, {static_cast<int64_t>(news.kind), news.number});
      Add(numbers, news.count);
      Add(numbers, {static_cast<int64_t>(news.text.size())});
      Add(numbers, news.trained);
      *text += news.text;
    }
    return taken.empty() ? kKfNothing : kKfDone;
  });
}

KfStatus kf_window_reported_epoch_end(KfWindow* window, int64_t epoch,
                                      KfReply* reply) {
  return Do(reply, [&] { window->window->ReportedEpochEnd(epoch); });
}

KfStatus kf_window_wait_for_news(KfWindow* window, double seconds,
                                 KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string*) {
    return window->window->WaitForNews(seconds) ? kKfDone : kKfNothing;
  });
}

KfStatus kf_window_held(KfWindow* window, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const Window::Held held = window->window->GetHeld();
    Add(numbers, {held.bytes, held.steps});
    numbers->insert(numbers->end(), held.remainders.begin(),
                    held.remainders.end());
    return kKfDone;
  });
}
