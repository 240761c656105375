#include "reader.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "socket.h"

namespace kerasfeed {
namespace {

constexpr int kPollMilliseconds = 500;
// Without a descriptor to be woken by, a wait looks often.
constexpr int kBlindPollMilliseconds = 10;
constexpr size_t kBufferBytes = size_t{64} << 10;
// Where elements are larger than this, little more than the head of one is
// received into the buffer, so that the rest needs no copy.
constexpr int64_t kLargeBytes = int64_t{32} << 10;
constexpr size_t kLargeReceiveBytes = size_t{4} << 10;
constexpr size_t kMaxDescriptors = 64;  // that came without their frame
// Releases wait for company, but not for more than this.
constexpr size_t kMaxReleases = 64;
constexpr int64_t kMaxReleaseBytes = int64_t{1} << 20;
// What is trained is said no more often than this, while steps are pulled.
constexpr std::chrono::milliseconds kSayEvery{10};
constexpr size_t kEpochsPerFrame = 10'000;
constexpr int64_t kMaxSpareBytes = int64_t{256} << 20;

using Clock = std::chrono::steady_clock;
using Wrong = std::optional<std::string>;  // an error in words

// Memory for blocks that is used again: fresh memory costs a page fault every
// 4 KB.
class SpareBlocks : public std::enable_shared_from_this<SpareBlocks> {
 public:
  ~SpareBlocks() {
    for (const auto& [size, data] : spare_) std::free(data);
  }

  std::shared_ptr<char> Allocate(int64_t size) {
    size = SlotBytes(std::max<int64_t>(size, 1));
    char* data = Take(size);
    if (!data) {
      data = static_cast<char*>(
          std::aligned_alloc(kAlignment, static_cast<size_t>(Aligned(size))));
      if (!data) throw std::bad_alloc();
    }
    return std::shared_ptr<char>(data, [self = shared_from_this(), size](
                                           char* p) { self->Give(size, p); });
  }

 private:
  char* Take(int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = spare_.find(size);
    if (found == spare_.end()) return nullptr;
    char* data = found->second;
    spare_.erase(found);
    bytes_ -= size;
    return data;
  }

  void Give(int64_t size, char* data) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (bytes_ + size <= kMaxSpareBytes) {
        spare_.emplace(size, data);
        bytes_ += size;
        return;
      }
    }
    std::free(data);
  }

  std::mutex mutex_;
  std::multimap<int64_t, char*> spare_;
  int64_t bytes_ = 0;
};

class Link;

// What a link hands on, frame by frame. An error breaks the link.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual Wrong Hear(Link* link, FrameType type, std::string_view payload) = 0;
  // Memory for an element whose bytes are to follow; null if nobody wants them.
  virtual Wrong Begin(Link* link, const ElementHead& head,
                      std::shared_ptr<char>* block) = 0;
  virtual Wrong End(Link* link, ElementHead head,
                    std::shared_ptr<char> block) = 0;
};

// One connection to the producer. Any thread may send and release; one at a
// time receives.
class Link {
 public:
  Link(Descriptor socket, bool local)
      : socket_(std::move(socket)), local_(local), buffer_(kBufferBytes) {}

  int fd() const { return socket_.fd(); }
  bool local() const { return local_; }
  // Wakes the thread that receives, over TCP.
  Event* event() { return &event_; }

  // ---- Sending ----

  // Sends frames, with releases that are due, or keeps them until Flush.
  void Say(const std::string& frames) {
    std::lock_guard<std::mutex> lock(mutex_);
    outbox_ += frames;
    SendOutbox();
  }

  void Flush() {
    std::lock_guard<std::mutex> lock(mutex_);
    SendOutbox();
  }

  // Whether there are frames that did not fit into the socket.
  bool backlogged() const { return backlogged_; }

  // A delivery of shared memory is not used any more. A child of this process
  // has copies of what refers to it, whose end says nothing.
  void Release(uint64_t delivery, int64_t bytes) {
    if (origin_.Forked()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    releases_.deliveries.push_back(delivery);
    release_bytes_ += bytes;
    if (retired_) Discard();
    if (retired_ || releases_.deliveries.size() >= kMaxReleases ||
        release_bytes_ >= kMaxReleaseBytes) {
      SendOutbox();
    }
  }

  // Another takes its place, or none: only releases are said from now on, and
  // nobody receives but this itself. A Unix socket stays open while somebody
  // uses memory that came over it.
  void Retire() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      retired_ = true;
      Discard();
      SendOutbox();
    }
    if (!local_) shutdown(fd(), SHUT_RDWR);
    event_.Set();
  }

  bool retired() const { return retired_; }

  // ---- Receiving ----

  Mappings* mappings() { return &mappings_; }
  // The descriptor that came with the frame that is heard now.
  Descriptor TakeDescriptor() {
    if (descriptors_.empty()) return Descriptor();
    Descriptor descriptor = std::move(descriptors_.front());
    descriptors_.erase(descriptors_.begin());
    return descriptor;
  }

  // Receives once, without blocking, and hands on what is complete. Whether
  // something came, if only the end; an error in words if the link is broken.
  bool Receive(Sink* sink, Wrong* wrong) {
    const bool body = body_received_ < body_.size;
    char* target;
    size_t room;
    if (body) {
      const int64_t left = body_.size - body_received_;
      target = block_ ? block_.get() + body_received_ : buffer_.data();
      room = block_ ? left : std::min<int64_t>(left, buffer_.size());
    } else {
      target = buffer_.data() + end_;
      room = buffer_.size() - end_;
      if (large_) room = std::min(room, kLargeReceiveBytes);
    }
    const ssize_t received =
        ReceiveSome(fd(), target, room, local_ ? &descriptors_ : nullptr);
    if (received < 0 && errno == EAGAIN) return false;
    if (received <= 0) {
      broken_ = true;
      *wrong = received ? ErrorText(errno) : "the producer closed it";
      return true;
    }
    if (body) {
      body_received_ += received;
      if (body_received_ == body_.size) *wrong = EndBody(sink);
    } else {
      end_ += received;
      *wrong = Parse(sink);
    }
    if (!*wrong && descriptors_.size() > kMaxDescriptors) {
      *wrong = "the producer passed descriptors that nobody asked for";
    }
    broken_ = wrong->has_value();
    return true;
  }

 private:
  // Lets go of everything.
  class Discarding : public Sink {
   public:
    explicit Discarding(ReleaseFrame* releases) : releases_(releases) {}

    Wrong Hear(Link* link, FrameType type, std::string_view payload) override {
      if (type == FrameType::kPiece) link->TakeDescriptor();
      if (type != FrameType::kShared) return std::nullopt;
      auto shared = ParseShared(payload);
      if (auto* error = std::get_if<WireError>(&shared)) return error->message;
      releases_->deliveries.push_back(std::get<SharedFrame>(shared).delivery);
      return std::nullopt;
    }
    Wrong Begin(Link*, const ElementHead&, std::shared_ptr<char>*) override {
      return std::nullopt;
    }
    Wrong End(Link*, ElementHead, std::shared_ptr<char>) override {
      return std::nullopt;
    }

   private:
    ReleaseFrame* const releases_;
  };

  // With the mutex held, when it is retired: what has come and was never looked
  // at would be held for this rank as long as the socket is open.
  void Discard() {
    if (!local_) return;
    Discarding sink(&releases_);
    Wrong wrong;
    while (!broken_ && Receive(&sink, &wrong)) continue;
  }

  // With the mutex held.
  void SendOutbox() {
    if (sent_ == outbox_.size() && !releases_.deliveries.empty()) {
      Append(&outbox_, releases_);
      releases_.deliveries.clear();
      release_bytes_ = 0;
    }
    while (sent_ < outbox_.size()) {
      const ssize_t sent =
          SendSome(fd(), outbox_.data() + sent_, outbox_.size() - sent_);
      if (sent < 0) {
        // If it is broken, whoever receives finds out.
        if (errno != EAGAIN) sent_ = outbox_.size();
        break;
      }
      sent_ += sent;
    }
    if (sent_ == outbox_.size()) {
      outbox_.clear();
      sent_ = 0;
    } else {
      event_.Set();
    }
    backlogged_ = !outbox_.empty();
  }

  Wrong Parse(Sink* sink) {
    size_t needed = 0;
    while (end_ - begin_ >= kFrameHeadBytes) {
      const std::string_view bytes(buffer_.data() + begin_, end_ - begin_);
      const auto head = ParseHead(bytes.substr(0, kFrameHeadBytes));
      if (const auto* error = std::get_if<WireError>(&head)) {
        return error->message;
      }
      const FrameHead& frame = std::get<FrameHead>(head);
      size_t size = kFrameHeadBytes;  // of what has to be there
      if (frame.type == FrameType::kElement) {
        if (bytes.size() < size + 8) break;
        const auto more =
            ElementHeadBytes(bytes.substr(size, 8), frame.payload);
        if (const auto* error = std::get_if<WireError>(&more)) {
          return error->message;
        }
        size += std::get<int64_t>(more);
      } else {
        size += frame.payload;
      }
      if (bytes.size() < size) {
        needed = size;
        break;
      }
      const std::string_view payload =
          bytes.substr(kFrameHeadBytes, size - kFrameHeadBytes);
      begin_ += size;
      if (frame.type != FrameType::kElement) {
        if (auto wrong = sink->Hear(this, frame.type, payload)) return wrong;
        continue;
      }
      auto element = ParseElementHead(payload, frame.payload);
      if (auto* error = std::get_if<WireError>(&element)) {
        return error->message;
      }
      if (auto wrong = BeginBody(sink, std::get_if<ElementHead>(&element))) {
        return wrong;
      }
      if (body_received_ < body_.size) break;
      if (auto wrong = EndBody(sink)) return wrong;
    }
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    if (needed > buffer_.size()) buffer_.resize(needed);
    return std::nullopt;
  }

  // Takes what of the body is in the buffer.
  Wrong BeginBody(Sink* sink, ElementHead* head) {
    body_ = std::move(*head);
    large_ = body_.size > kLargeBytes;
    if (auto wrong = sink->Begin(this, body_, &block_)) return wrong;
    body_received_ = std::min<int64_t>(body_.size, end_ - begin_);
    if (block_ && body_received_ > 0) {
      std::memcpy(block_.get(), buffer_.data() + begin_, body_received_);
    }
    begin_ += body_received_;
    return std::nullopt;
  }

  Wrong EndBody(Sink* sink) {
    Wrong wrong;
    if (block_) wrong = sink->End(this, std::move(body_), std::move(block_));
    body_ = ElementHead();
    block_.reset();
    body_received_ = 0;
    return wrong;
  }

  const Origin origin_;
  const Descriptor socket_;
  const bool local_;
  Event event_;

  std::mutex mutex_;
  std::string outbox_;
  size_t sent_ = 0;  // of the outbox
  ReleaseFrame releases_;
  int64_t release_bytes_ = 0;
  std::atomic<bool> backlogged_{false}, retired_{false};

  // Of whoever receives.
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;  // of what was not parsed
  ElementHead body_;            // of the element whose bytes come now
  int64_t body_received_ = 0;
  std::shared_ptr<char> block_;
  bool large_ = false;
  bool broken_ = false;
  std::vector<Descriptor> descriptors_;
  Mappings mappings_;
};

// A delivery that has arrived; its memory is released when it ends.
struct SharedElement {
  ElementHead head;
  std::shared_ptr<char> memory;
};

}  // namespace

class Reader::State {
 public:
  explicit State(ReaderOptions options)
      : options_(std::move(options)), kept_(std::make_shared<Kept>()) {
    if (!options_.allocate) {
      options_.allocate = [spare = std::make_shared<SpareBlocks>()](
                              int64_t size) { return spare->Allocate(size); };
    }
  }

  ~State() { Detach(); }

  std::optional<std::string> Attach(const std::string& address, int64_t rank,
                                    const Proof& proof, const Proof& expected,
                                    double timeout) {
    std::lock_guard<std::mutex> attaching(attaching_);
    const Deadline deadline = After(timeout);
    int64_t detached;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      detached = detached_;
    }
    Waiter waiter(this);
    const auto given_up = [&] {
      std::lock_guard<std::mutex> lock(mutex_);
      waiter.Renew();
      return detached != detached_;
    };
    auto connected = Connect(address, deadline, *waiter.event(), given_up);
    if (auto* error = std::get_if<std::string>(&connected)) return *error;
    auto& [socket, local] = std::get<Connected>(connected);
    if (auto wrong = Greet(socket.fd(), rank, proof, expected, deadline,
                           &waiter, given_up)) {
      return "the producer at " + address + " did not let rank " +
             std::to_string(rank) + " in: " + *wrong;
    }
    const auto link = std::make_shared<Link>(std::move(socket), local);
    std::shared_ptr<Link> earlier;
    std::thread receiver;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (detached != detached_) return "detached meanwhile";
      std::thread started;
      if (!local) {
        try {
          started = StartThread("kf-receive", [this, link] { Receive(link); });
        } catch (const std::system_error& error) {
          return std::string("can't start a thread: ") + error.what();
        }
      }
      earlier = std::exchange(link_, link);
      if (!earlier) earlier = earlier_.lock();
      receiver = std::exchange(receiver_, std::move(started));
      trouble_.clear();
      // What is queued comes again.
      ClearItems();
      next_ = pulled_;
      failed_.reset();
      Introduce();
      WakeAll();
    }
    // The producer has sent all that it will send over the earlier one.
    if (earlier) earlier->Retire();
    if (receiver.joinable()) receiver.join();
    return std::nullopt;
  }

  void Detach() {
    std::shared_ptr<Link> earlier;
    std::thread receiver;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++detached_;
      earlier = std::move(link_);
      if (earlier) earlier_ = earlier;
      receiver = std::move(receiver_);
      WakeAll();
    }
    if (earlier) earlier->Retire();
    if (receiver.joinable()) receiver.join();
  }

  bool attached() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!link_) return false;
    // Nobody receives unless somebody waits: look whether it has ended.
    pollfd polled{link_->fd(), POLLRDHUP, 0};
    return poll(&polled, 1, 0) <= 0;
  }

  std::string trouble() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return trouble_;
  }

  int64_t Read(ReadRequest request, bool free) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unsaid_) SayProgress();
    ClearItems();
    request.reader = ++number_;
    request.free_bytes = options_.free_bytes;
    pulled_ = next_ = request.position;
    read_ = std::move(request);
    ended_.reset();
    failed_.reset();
    waiting_ = false;
    Pulled none;
    pulled_unsaid_ = none;
    void_ = false;
    free_ = free;
    untrained_.reset();
    steps_ = 0;
    SayRead();
    WakeAll();
    return number_;
  }

  void Void() {
    std::lock_guard<std::mutex> lock(mutex_);
    void_ = true;
    ClearItems();
    WakeAll();
  }

  std::optional<Peeked> Peek(int64_t reader, double seconds) {
    const Deadline deadline = After(seconds);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (!IsPresent(reader)) return Interrupted{VoidText(reader)};
      if (!items_.empty()) return First();
      if (failed_) return *failed_;
      if (ended_) return *ended_;
      if (Drain()) continue;
      if (Clock::now() >= deadline) return std::nullopt;
      BeginWaiting();
      Wait(&lock, deadline, {});
    }
  }

  Received Next(
      int64_t reader,
      const std::function<std::optional<std::string>()>& interrupted) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (!IsPresent(reader)) return Interrupted{VoidText(reader)};
      if (items_.empty()) {
        if (failed_) return *failed_;
        if (ended_) return *ended_;
        if (Drain()) continue;
      } else {
        return Take(&lock);
      }
      BeginWaiting();
      if (auto message = Wait(&lock, After(3600), interrupted)) {
        waiting_ = false;
        return Interrupted{*message};
      }
    }
  }

  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    WakeAll();
  }

  void Acknowledge(Position acknowledged,
                   const std::map<int64_t, int64_t>& trained) {
    std::lock_guard<std::mutex> lock(mutex_);
    acknowledged_ = acknowledged;
    for (const auto& [epoch, steps] : trained) {
      const auto [known, is_new] = trained_.emplace(epoch, steps);
      if (!is_new && known->second == steps) continue;
      known->second = steps;
      trained_unsaid_[epoch] = steps;
    }
    unsaid_ = true;
    ++acknowledged_unsaid_.steps;
    acknowledged_unsaid_.bytes += last_bytes_;
    if (IsMuch(acknowledged_unsaid_) || Clock::now() >= say_after_) {
      SayProgress();
    }
  }

  bool Sync(double timeout) {
    const Deadline deadline = After(timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t number = ++syncs_;
    if (unsaid_) SayProgress();
    SaySync();
    while (synced_ < number) {
      if (Clock::now() >= deadline) return false;
      if (!Drain()) Wait(&lock, deadline, {});
    }
    return true;
  }

  Position pulled() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return pulled_;
  }

  std::optional<Pulls> GetPulls(int64_t reader) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!read_ || reader != number_) return std::nullopt;
    return Pulls{steps_, pulled_};
  }

  Counts GetCounts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    Counts counts = counts_;
    counts.kept_bytes = kept_->bytes;
    counts.queued = static_cast<int64_t>(items_.size());
    return counts;
  }

 private:
  struct Kept {
    std::atomic<int64_t> bytes{0};
  };

  using Queued = std::variant<ReceivedElement, SharedElement, EpochEnd>;

  struct Pulled {
    int64_t steps = 0, bytes = 0;
  };

  // An event that the reader's mutex guards the list of: set by WakeAll.
  class Waiter {
   public:
    explicit Waiter(State* state) : state_(state) {
      std::lock_guard<std::mutex> lock(state_->mutex_);
      event_ = state_->BeginWait();
    }
    ~Waiter() {
      std::lock_guard<std::mutex> lock(state_->mutex_);
      state_->EndWait(std::move(event_));
    }
    Event* event() { return event_.get(); }
    // With the mutex held: waits for the next time.
    void Renew() {
      if (!state_->Unregister(event_.get())) event_->Clear();
      state_->waiting_events_.push_back(event_.get());
    }

   private:
    State* const state_;
    std::unique_ptr<Event> event_;
  };

  // Hands on to a reader: with its mutex held already (whoever waits receives),
  // or not (a thread receives, and must not keep others from the queue).
  class Hearing : public Sink {
   public:
    Hearing(State* state, bool locks) : state_(state), locks_(locks) {}

    Wrong Hear(Link* link, FrameType type, std::string_view payload) override {
      const auto lock = Lock();
      return state_->Hear(link, type, payload);
    }

    Wrong Begin(Link* link, const ElementHead& head,
                std::shared_ptr<char>* block) override {
      {
        const auto lock = Lock();
        if (!state_->Wanted(link, head.reader)) return std::nullopt;
      }
      try {
        *block = state_->options_.allocate(head.size);
      } catch (const std::bad_alloc&) {
        return "there is no memory for an element of " +
               std::to_string(head.size) + " bytes";
      }
      return std::nullopt;
    }

    Wrong End(Link* link, ElementHead head,
              std::shared_ptr<char> block) override {
      const auto lock = Lock();
      if (!state_->Wanted(link, head.reader)) return std::nullopt;
      if (auto wrong = state_->Arrived(head.position, head.size)) {
        return wrong;
      }
      ReceivedElement element;
      element.reader = head.reader;
      element.position = head.position;
      element.size = head.size;
      element.components = std::move(head.components);
      element.block = std::move(block);
      state_->items_.emplace_back(std::move(element));
      state_->WakeAll();
      return std::nullopt;
    }

   private:
    std::unique_lock<std::mutex> Lock() {
      return locks_ ? std::unique_lock<std::mutex>(state_->mutex_)
                    : std::unique_lock<std::mutex>();
    }

    State* const state_;
    const bool locks_;
  };

  // ---- Greeting (without the mutex) ----

  static Wrong Greet(int fd, int64_t rank, const Proof& proof,
                     const Proof& expected, Deadline deadline, Waiter* waiter,
                     const std::function<bool()>& given_up) {
    std::string hello, welcome;
    Append(&hello, HelloFrame{rank, proof});
    Append(&welcome, WelcomeFrame{});
    // It fits into the buffer of any new socket.
    if (SendSome(fd, hello.data(), hello.size()) !=
        static_cast<ssize_t>(hello.size())) {
      return ErrorText(errno);
    }
    size_t received = 0;
    while (received < welcome.size()) {
      // No further than that: what follows is for the link.
      const ssize_t more =
          ReceiveSome(fd, &welcome[received], welcome.size() - received);
      if (more > 0) {
        received += more;
        continue;
      }
      if (more == 0) return "it hung up";
      if (errno != EAGAIN) return ErrorText(errno);
      const int left = MillisecondsUntil(deadline, 60'000);
      if (left == 0) return "it did not answer in time";
      pollfd polled[] = {{fd, POLLIN, 0}, {waiter->event()->fd(), POLLIN, 0}};
      poll(polled, 2, left);
      if (given_up()) return "given up";
    }
    const std::string_view bytes(welcome);
    const auto head = ParseHead(bytes.substr(0, kFrameHeadBytes));
    if (const auto* error = std::get_if<WireError>(&head)) {
      return error->message;
    }
    const FrameHead& frame = std::get<FrameHead>(head);
    if (frame.type != FrameType::kWelcome ||
        kFrameHeadBytes + frame.payload != welcome.size()) {
      return "it does not say WELCOME";
    }
    const auto answer = ParseWelcome(bytes.substr(kFrameHeadBytes));
    if (const auto* error = std::get_if<WireError>(&answer)) {
      return error->message;
    }
    if (!SameProof(std::get<WelcomeFrame>(answer).proof, expected)) {
      return "it does not prove to be this feed's producer";
    }
    return std::nullopt;
  }

  // ---- Waiting (with the mutex held, but for the wait itself) ----

  std::unique_ptr<Event> BeginWait() {
    std::unique_ptr<Event> event;
    if (!idle_.empty()) {
      event = std::move(idle_.back());
      idle_.pop_back();
    } else {
      event = std::make_unique<Event>();
    }
    waiting_events_.push_back(event.get());
    return event;
  }

  void EndWait(std::unique_ptr<Event> event) {
    if (!Unregister(event.get())) event->Clear();
    if (event->fd() >= 0) idle_.push_back(std::move(event));
  }

  // Whether it was not set.
  bool Unregister(Event* event) {
    const auto found =
        std::find(waiting_events_.begin(), waiting_events_.end(), event);
    if (found == waiting_events_.end()) return false;
    waiting_events_.erase(found);
    return true;
  }

  // Each wait is woken once.
  void WakeAll() {
    for (Event* event : waiting_events_) event->Set();
    waiting_events_.clear();
  }

  // Blocks until there may be something new, for half a second at most. The
  // message of `interrupted`, if it has one.
  Wrong Wait(std::unique_lock<std::mutex>* lock, Deadline deadline,
             const std::function<std::optional<std::string>()>& interrupted) {
    if (unsaid_) SayProgress();
    std::shared_ptr<Link> link = link_;
    if (link) link->Flush();
    std::unique_ptr<Event> event = BeginWait();
    lock->unlock();
    Wrong message;
    try {
      if (interrupted) message = interrupted();
    } catch (...) {
      lock->lock();
      EndWait(std::move(event));
      throw;
    }
    if (!message) {
      pollfd polled[] = {{event->fd(), POLLIN, 0}, {-1, POLLIN, 0}};
      if (link && link->local()) {
        polled[1].fd = link->fd();
        if (link->backlogged()) polled[1].events |= POLLOUT;
      }
      poll(polled, 2,
           MillisecondsUntil(deadline, event->fd() >= 0
                                           ? kPollMilliseconds
                                           : kBlindPollMilliseconds));
      if (polled[1].revents & POLLOUT) link->Flush();
    }
    lock->lock();
    EndWait(std::move(event));
    return message;
  }

  // ---- Receiving (with the mutex held) ----

  // Over a Unix socket: receives what is there until an item has come. Whether
  // something came.
  bool Drain() {
    if (!link_ || !link_->local()) return false;
    const std::shared_ptr<Link> link = link_;
    Hearing hearing(this, false);
    const size_t before = items_.size();
    bool some = false;
    Wrong wrong;
    while (link->Receive(&hearing, &wrong)) {
      some = true;
      if (wrong || items_.size() > before) break;
    }
    if (wrong) Break(link, *wrong);
    return some;
  }

  // Over TCP, in a thread of its own, without the mutex.
  void Receive(const std::shared_ptr<Link>& link) {
    Hearing hearing(this, true);
    Wrong wrong;
    try {
      while (!link->retired()) {
        while (!wrong && link->Receive(&hearing, &wrong)) {
          if (link->retired()) return;
        }
        if (wrong) break;
        const short events = link->backlogged() ? POLLIN | POLLOUT : POLLIN;
        pollfd polled[] = {{link->fd(), events, 0},
                           {link->event()->fd(), POLLIN, 0}};
        poll(polled, 2, kPollMilliseconds);
        if (polled[1].revents) link->event()->Clear();
        if (polled[0].revents & POLLOUT) link->Flush();
      }
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    Break(link, wrong.value_or(""));
  }

  // Next waits on until Attach brings another.
  void Break(const std::shared_ptr<Link>& link, const std::string& why) {
    if (link != link_) return;
    trouble_ = why;
    link_.reset();
    link->Retire();
    WakeAll();
  }

  bool Wanted(const Link* link, int64_t reader) const {
    return link == link_.get() && IsPresent(reader);
  }

  bool IsPresent(int64_t reader) const {
    return read_ && reader == number_ && !void_;
  }

  static std::string VoidText(int64_t reader) {
    return "read " + std::to_string(reader) +
           " is void: another one has taken its place";
  }

  void ClearItems() {
    items_.clear();
    queued_bytes_ = 0;
  }

  void BeginWaiting() {
    if (waiting_) return;
    waiting_ = true;
    unsaid_ = true;
  }

  // Of the queue.
  Peeked First() const {
    const Queued& item = items_.front();
    if (const auto* end = std::get_if<EpochEnd>(&item)) return *end;
    const auto* shared = std::get_if<SharedElement>(&item);
    return shared ? shared->head.position
                  : std::get<ReceivedElement>(item).position;
  }

  Wrong Arrived(const Position& position, int64_t size) {
    if (position != next_ || ended_) {
      return position.ToString() + " came, " + next_.ToString() +
             " was expected";
    }
    const int64_t steps = static_cast<int64_t>(items_.size());
    const int64_t bytes = queued_bytes_ + size;
    if (queued_bytes_ > 0 && bytes > read_->credit_bytes) {
      return std::to_string(bytes) + " bytes came ahead, no more than " +
             std::to_string(read_->credit_bytes) + " were asked for";
    }
    if (steps >= std::max(read_->credit_steps, kMaxSmallSteps)) {
      return "more than " + std::to_string(steps) +
             " steps came ahead, no more than " +
             std::to_string(read_->credit_steps) + " were asked for";
    }
    queued_bytes_ = bytes;
    next_ = position.Next();
    // An answer shows that the producer has heard it.
    read_->left.reset();
    return std::nullopt;
  }

  Wrong Hear(Link* link, FrameType type, std::string_view payload) {
    if (link != link_.get()) return std::nullopt;
    switch (type) {
      case FrameType::kShared:
        return Hear(ParseShared(payload), &State::HearShared);
      case FrameType::kPiece:
        return Hear(ParsePiece(payload), &State::HearPiece);
      case FrameType::kForget:
        return Hear(ParseForget(payload), &State::HearForget);
      case FrameType::kEnd:
        return Hear(ParseEnd(payload), &State::HearEnd);
      case FrameType::kFailure:
        return Hear(ParseFailure(payload), &State::HearFailure);
      case FrameType::kSynced:
        return Hear(ParseSync(payload), &State::HearSynced);
      default:
        return FrameName(type) + " is not expected from a producer";
    }
  }

  template <typename Frame>
  Wrong Hear(std::variant<Frame, WireError> parsed,
             Wrong (State::*hear)(Frame* frame)) {
    if (auto* error = std::get_if<WireError>(&parsed)) return error->message;
    return (this->*hear)(std::get_if<Frame>(&parsed));
  }

  Wrong HearShared(SharedFrame* frame) {
    if (!link_->local()) return "shared memory was sent over TCP";
    ElementHead& head = frame->head;
    if (!Wanted(link_.get(), head.reader)) {
      link_->Release(frame->delivery, head.size);
      return std::nullopt;
    }
    auto mapped =
        link_->mappings()->Find(frame->piece, frame->offset, head.size);
    if (!mapped) {
      return "bytes " + std::to_string(frame->offset) + " to " +
             std::to_string(frame->offset + head.size) + " of piece " +
             std::to_string(frame->piece) + " are not known here";
    }
    char* const data = mapped.get();
    std::shared_ptr<char> memory(
        data,
        [mapped = std::move(mapped), link = link_, delivery = frame->delivery,
         size = head.size](char*) { link->Release(delivery, size); });
    if (auto wrong = Arrived(head.position, head.size)) return wrong;
    items_.emplace_back(SharedElement{std::move(head), std::move(memory)});
    WakeAll();
    return std::nullopt;
  }

  Wrong HearPiece(PieceFrame* frame) {
    Descriptor descriptor = link_->TakeDescriptor();
    if (!descriptor) {
      return "piece " + std::to_string(frame->piece) +
             " came without its descriptor: are there too many open files?";
    }
    return link_->mappings()->Add(frame->piece, descriptor.Take());
  }

  Wrong HearForget(ForgetFrame* frame) {
    link_->mappings()->Forget(frame->piece);
    return std::nullopt;
  }

  Wrong HearEnd(EndFrame* frame) {
    if (!Wanted(link_.get(), frame->reader)) return std::nullopt;
    if (frame->epoch != next_.epoch || frame->steps > next_.step) {
      return "the end of epoch " + std::to_string(frame->epoch) + " after " +
             std::to_string(frame->steps) + " steps came, " + next_.ToString() +
             " was expected";
    }
    next_ = {frame->epoch + 1, 0};
    read_->left.reset();
    items_.emplace_back(EpochEnd{frame->reader, frame->epoch, frame->steps});
    WakeAll();
    return std::nullopt;
  }

  Wrong HearFailure(Failure* failure) {
    // One that this read has not come to was said to an earlier one, and is
    // said again.
    if (!read_ || (failure->position && next_ < *failure->position)) {
      return std::nullopt;
    }
    failed_ = std::move(*failure);
    WakeAll();
    return std::nullopt;
  }

  Wrong HearSynced(SyncFrame* frame) {
    synced_ = std::max(synced_, frame->number);
    WakeAll();
    return std::nullopt;
  }

  // ---- Handing out ----

  // The first of the queue. Lets go of the mutex.
  Received Take(std::unique_lock<std::mutex>* lock) {
    Queued item = std::move(items_.front());
    items_.pop_front();
    waiting_ = false;
    if (const auto* end = std::get_if<EpochEnd>(&item)) {
      pulled_ = {end->epoch + 1, 0};
      if (free_) TrainAllBefore(pulled_);
      if (!read_->through_epochs) ended_ = *end;
      SayProgress();
      return *end;
    }
    if (auto* element = std::get_if<ReceivedElement>(&item)) {
      HandedOut(element->position, element->size);
      ++counts_.received;
      return std::move(*element);
    }
    auto& shared = std::get<SharedElement>(item);
    ElementHead& head = shared.head;
    HandedOut(head.position, head.size);
    ReceivedElement element;
    element.reader = head.reader;
    element.position = head.position;
    element.size = head.size;
    element.components = std::move(head.components);
    if (kept_->bytes + head.size > options_.max_kept_bytes) {
      ++counts_.copied;
      lock->unlock();
      element.block = options_.allocate(head.size);
      if (head.size > 0) {
        std::memcpy(element.block.get(), shared.memory.get(), head.size);
      }
      return element;
    }
    ++counts_.shared;
    kept_->bytes += head.size;
    lock->unlock();
    char* const data = shared.memory.get();
    element.block = std::shared_ptr<char>(
        data, [memory = std::move(shared.memory), kept = kept_,
               size = head.size](char*) { kept->bytes -= size; });
    element.shared = true;
    return element;
  }

  void HandedOut(const Position& position, int64_t size) {
    queued_bytes_ -= size;
    pulled_ = position.Next();
    ++steps_;
    if (free_) {
      TrainAllBefore(position);
      untrained_ = position;
    }
    unsaid_ = true;
    ++pulled_unsaid_.steps;
    pulled_unsaid_.bytes += size;
    last_bytes_ = size;
    if (IsMuch(pulled_unsaid_)) SayProgress();
  }

  // Whether it is half of what the producer may send ahead.
  bool IsMuch(const Pulled& unsaid) const {
    if (!read_ || 2 * unsaid.bytes >= read_->credit_bytes) return true;
    if (2 * unsaid.steps < read_->credit_steps) return false;
    return 2 * unsaid.bytes > read_->free_bytes ||
           2 * unsaid.steps >= kMaxSmallSteps;
  }

  // Of a free read.
  void TrainAllBefore(const Position& position) {
    acknowledged_ = std::max(acknowledged_, position);
    if (!untrained_) return;
    trained_unsaid_[untrained_->epoch] = ++trained_[untrained_->epoch];
    untrained_.reset();
  }

  // ---- Saying (with the mutex held) ----

  // To a connection that is new.
  void Introduce() {
    if (read_ && !ended_ && !void_) SayRead();
    trained_unsaid_ = trained_;
    SayProgress();
    if (synced_ < syncs_) SaySync();
  }

  void SayRead() {
    if (!link_) return;
    ReadRequest request = *read_;
    request.position = pulled_;
    std::string frames;
    Append(&frames, request);
    link_->Say(frames);
  }

  void SaySync() {
    if (!link_) return;
    std::string frames;
    Append(&frames, SyncFrame{syncs_});
    link_->Say(frames);
  }

  // What is not said now, for want of a connection or because it takes nothing,
  // stays unsaid.
  void SayProgress() {
    if (!link_ || link_->backlogged()) return;
    std::string frames;
    do {
      ProgressFrame progress{number_, pulled_, acknowledged_, waiting_, {}};
      if (trained_unsaid_.size() <= kEpochsPerFrame) {
        progress.trained.swap(trained_unsaid_);
      } else {
        for (size_t i = 0; i < kEpochsPerFrame; ++i) {
          progress.trained.insert(
              trained_unsaid_.extract(trained_unsaid_.begin()));
        }
      }
      Append(&frames, progress);
    } while (!trained_unsaid_.empty());
    unsaid_ = false;
    pulled_unsaid_ = Pulled();
    acknowledged_unsaid_ = Pulled();
    say_after_ = Clock::now() + kSayEvery;
    link_->Say(frames);
  }

  ReaderOptions options_;
  const std::shared_ptr<Kept> kept_;
  std::mutex attaching_;  // one Attach at a time; taken before the other

  mutable std::mutex mutex_;
  std::vector<Event*> waiting_events_;  // that were not set yet
  std::vector<std::unique_ptr<Event>> idle_;
  std::shared_ptr<Link> link_;
  std::weak_ptr<Link> earlier_;  // that Detach retired
  std::thread receiver_;         // of the link, or of one that broke
  std::string trouble_;
  int64_t detached_ = 0;

  int64_t number_ = 0;
  std::optional<ReadRequest> read_;
  Position pulled_;  // the first step that was not handed out
  Position next_;    // the first step that has not arrived
  std::deque<Queued> items_;
  int64_t queued_bytes_ = 0;       // of the items
  std::optional<Failure> failed_;  // comes after the items
  std::optional<EpochEnd> ended_;  // was handed out, and nothing follows
  bool waiting_ = false;
  bool void_ = false;
  bool free_ = false;
  std::optional<Position> untrained_;  // of a free read: pulled last
  int64_t steps_ = 0;                  // that were handed out of this read

  Position acknowledged_;
  std::map<int64_t, int64_t> trained_, trained_unsaid_;
  bool unsaid_ = false;  // whether there is progress that was not said
  Pulled pulled_unsaid_, acknowledged_unsaid_;
  int64_t last_bytes_ = 0;  // of the step that was handed out last
  Clock::time_point say_after_{};
  uint64_t syncs_ = 0, synced_ = 0;
  Counts counts_;
};

Reader::Reader(ReaderOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}
Reader::~Reader() {
  if (origin_.Forked()) static_cast<void>(state_.release());
}

std::optional<std::string> Reader::Attach(const std::string& address,
                                          int64_t rank, const Proof& proof,
                                          const Proof& expected,
                                          double timeout) {
  return state_->Attach(address, rank, proof, expected, timeout);
}

void Reader::Detach() { state_->Detach(); }

bool Reader::attached() const { return state_->attached(); }

std::string Reader::trouble() const { return state_->trouble(); }

int64_t Reader::Read(ReadRequest request, bool free) {
  return state_->Read(std::move(request), free);
}

void Reader::Void() { state_->Void(); }

std::optional<Peeked> Reader::Peek(int64_t reader, double seconds) {
  return state_->Peek(reader, seconds);
}

std::optional<Pulls> Reader::GetPulls(int64_t reader) const {
  return state_->GetPulls(reader);
}

Received Reader::Next(
    int64_t reader,
    const std::function<std::optional<std::string>()>& interrupted) {
  return state_->Next(reader, interrupted);
}

void Reader::Wake() { state_->Wake(); }

void Reader::Acknowledge(Position acknowledged,
                         const std::map<int64_t, int64_t>& trained) {
  state_->Acknowledge(acknowledged, trained);
}

bool Reader::Sync(double timeout) { return state_->Sync(timeout); }

Position Reader::pulled() const { return state_->pulled(); }

Reader::Counts Reader::GetCounts() const { return state_->GetCounts(); }

}  // namespace kerasfeed
