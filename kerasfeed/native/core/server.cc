#include "server.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "socket.h"

namespace kerasfeed {
namespace {

constexpr size_t kMaxPending = 256;
constexpr size_t kMaxLog = 100;
constexpr int kMaxPollMilliseconds = 60'000;
// Without descriptors nobody can be let in: look again soon.
constexpr int kExhaustedMilliseconds = 100;
constexpr size_t kReceiveBytes = size_t{64} << 10;
// One write has no more than this, and one item.
constexpr size_t kBatchBytes = size_t{256} << 10;
// Shorter buffers are copied next to their frame: a part of a write costs more.
constexpr int64_t kJoinBytes = 1024;

const char kGap[kAlignment] = {};

std::string Name(int64_t rank) { return "rank " + std::to_string(rank); }

// Frames for one write: small ones lie joined, long buffers stay where they
// are.
class Batch {
 public:
  std::string* frames() { return &frames_; }
  size_t bytes() const { return frames_.size() + long_bytes_; }
  bool empty() const { return frames_.empty(); }

  void AddElement(const ElementHead& head, ElementPtr element) {
    AppendElementHead(&frames_, head);
    int64_t position = 0;
    for (size_t i = 0; i < head.components.size(); ++i) {
      const Component& component = head.components[i];
      AddGap(component.offset - position);
      AddSpan(element->buffers[i]);
      position = component.offset + component.length;
    }
    AddGap(head.size - position);
    elements_.push_back(std::move(element));
  }

  // A frame of shared memory; deliveries are numbered.
  void AddShared(SharedFrame frame) {
    Append(&frames_, frame);
    deliveries_.emplace_back(frame.delivery, bytes());
  }

  // Blocks, and leaves the batch empty. Whether it was sent; `lost` are the
  // deliveries that were not, or not wholly.
  bool Send(int fd, std::vector<uint64_t>* lost) {
    std::vector<iovec> parts;
    parts.reserve(2 * spans_.size() + 1);
    size_t sent = 0;
    for (const auto& [end, span] : spans_) {
      if (end > sent) parts.push_back({&frames_[sent], end - sent});
      parts.push_back(
          {const_cast<char*>(span.data), static_cast<size_t>(span.size)});
      sent = end;
    }
    if (frames_.size() > sent) {
      parts.push_back({&frames_[sent], frames_.size() - sent});
    }
    size_t received = 0;
    const bool all = SendAll(fd, std::move(parts), -1, &received);
    for (const auto& [delivery, end] : deliveries_) {
      if (!all && end > received) lost->push_back(delivery);
    }
    frames_.clear();
    spans_.clear();
    deliveries_.clear();
    elements_.clear();
    long_bytes_ = 0;
    return all;
  }

 private:
  void AddSpan(const Span& span) {
    if (span.size < kJoinBytes) {
      if (span.size > 0) frames_.append(span.data, span.size);
      return;
    }
    spans_.emplace_back(frames_.size(), span);
    long_bytes_ += span.size;
  }

  void AddGap(int64_t size) {
    for (; size > 0; size -= kAlignment) {
      frames_.append(kGap, std::min(size, kAlignment));
    }
  }

  std::string frames_;
  std::vector<std::pair<size_t, Span>> spans_;  // after so many bytes of frames
  size_t long_bytes_ = 0;
  std::vector<std::pair<uint64_t, size_t>> deliveries_;  // where they end
  std::vector<ElementPtr> elements_;                     // keep the spans
};

// What connections tell the server.
class Desk {
 public:
  void Log(std::string message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (log_.size() < kMaxLog) {
      log_.push_back(std::move(message));
    } else {
      ++unlogged_;
    }
  }

  std::vector<std::string> TakeLog() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unlogged_ > 0) {
      log_.push_back(std::to_string(unlogged_) + " more messages");
      unlogged_ = 0;
    }
    return std::exchange(log_, {});
  }

  // Wakes the acceptor: a connection has ended, or was dismissed, or a rank was
  // told of a piece of shared memory, for which others may have gone.
  Event changed;

 private:
  std::mutex mutex_;
  std::vector<std::string> log_;
  int64_t unlogged_ = 0;
};

// One connection of a rank that has proven itself; see Server.
class Connection {
 public:
  Connection(int64_t rank, Descriptor socket, bool local, Window* window,
             std::shared_ptr<Pool> pool, Desk* desk)
      : rank_(rank),
        socket_(std::move(socket)),
        local_(local),
        window_(window),
        pool_(std::move(pool)),
        desk_(desk) {}

  ~Connection() {
    Kill();
    JoinSender();
    if (listener_.joinable()) listener_.join();
  }

  // Throws std::system_error if there are no threads to be had.
  void Start() {
    const std::string rank = std::to_string(rank_);
    sender_ = StartThread("kf-send-" + rank, [this] { Send(); });
    listener_ = StartThread("kf-listen-" + rank, [this] { Listen(); });
  }

  // Nothing more is sent, and only RELEASE is heard.
  void End() {
    bool lingers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      lingers = Lingers();
    }
    // The rank sees the end of the stream. A call of this side that blocks
    // returns.
    shutdown(socket_.fd(), lingers ? SHUT_WR : SHUT_RDWR);
    WakeSender();
  }

  // Ends at once, whatever the rank still uses.
  void Kill() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = killed_ = true;
    }
    shutdown(socket_.fd(), SHUT_RDWR);
    WakeSender();
  }

  // After End or Kill.
  void JoinSender() {
    if (sender_.joinable()) sender_.join();
  }

  // Whether the listener has ended: the connection can be destroyed.
  bool ended() const { return ended_; }
  int64_t rank() const { return rank_; }
  void WakeSender() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_.notify_all();
    }
    window_->Wake(rank_);
  }

 private:
  // With the mutex held: whether the rank may use memory that it was sent.
  bool Lingers() const { return local_ && !killed_ && !held_.empty(); }

  // ---- The sender's thread ----

  void Send() {
    try {
      Batch batch;
      while (!over_) {
        AddReplies(&batch);
        if (!read_heard_) {
          if (batch.empty()) {
            std::unique_lock<std::mutex> lock(mutex_);
            woken_.wait(lock, [this] { return Interrupted() || read_heard_; });
            continue;
          }
        } else {
          std::optional<Item> item =
              batch.empty() ? window_->WaitForItem(
                                  rank_, [this] { return Interrupted(); })
                            : window_->TryItem(rank_);
          bool broken = false;
          while (item && !broken) {
            broken = !Add(&batch, *item);
            if (broken || batch.bytes() >= kBatchBytes) break;
            item = window_->TryItem(rank_);
          }
          if (broken) break;
        }
        if (!Flush(&batch)) break;
      }
    } catch (const std::exception& error) {
      desk_->Log(Name(rank_) + " can't be sent anything: " + error.what());
    }
    End();
  }

  // Whether it was sent. The rank does not hold what it has not got.
  bool Flush(Batch* batch) {
    std::vector<uint64_t> lost;
    if (batch->Send(socket_.fd(), &lost)) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint64_t number : lost) held_.erase(number);
    return false;
  }

  // Whether the sender has something to do besides what the window has for it.
  bool Interrupted() const {
    return over_ || replies_due_ || pool_->given_up() != given_up_seen_;
  }

  void AddReplies(Batch* batch) {
    if (replies_due_) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const SyncFrame& sync : replies_) {
        AppendSynced(batch->frames(), sync);
      }
      replies_.clear();
      replies_due_ = false;
    }
    const int64_t given_up = pool_->given_up();
    if (given_up != given_up_seen_) {
      given_up_seen_ = given_up;
      for (auto piece = pieces_.begin(); piece != pieces_.end();) {
        if (pool_->PieceBytes(*piece) > 0) {
          ++piece;
          continue;
        }
        Append(batch->frames(), ForgetFrame{*piece});
        piece = pieces_.erase(piece);
      }
    }
  }

  bool Add(Batch* batch, const Item& item) {
    if (const auto* end = std::get_if<EpochEnd>(&item)) {
      Append(batch->frames(), EndFrame{end->reader, end->epoch, end->steps});
      return true;
    }
    if (const auto* failure = std::get_if<Failure>(&item)) {
      Append(batch->frames(), *failure);
      return true;
    }
    const auto& delivery = std::get<Delivery>(item);
    const Element& element = *delivery.element;
    ElementHead head{delivery.reader, delivery.position, element.size,
                     element.components};
    if (auto wrong = CheckHead(head)) {
      Append(batch->frames(),
             Failure{FailureKind::kProducer,
                     "the element of " + delivery.position.ToString() +
                         " can't be sent: " + wrong->message,
                     delivery.position});
      return true;
    }
    if (!local_ || !element.block) {
      batch->AddElement(head, delivery.element);
      return true;
    }
    const uint32_t piece = element.block->piece;
    if (pieces_.count(piece) == 0) {
      bool sent = false;
      if (!SendPiece(batch, piece, &sent)) return false;
      if (!sent) {
        batch->AddElement(head, delivery.element);
        return true;
      }
    }
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = ++deliveries_;
      held_.emplace(number, delivery.element);
    }
    batch->AddShared(
        SharedFrame{std::move(head), number, piece, element.block->offset});
    return true;
  }

  // False if the connection broke. `sent` is false if there is no descriptor
  // to be had.
  bool SendPiece(Batch* batch, uint32_t piece, bool* sent) {
    const Descriptor descriptor(pool_->Descriptor(piece));
    if (!descriptor) return true;
    if (!Flush(batch)) return false;
    std::string frame;
    Append(&frame, PieceFrame{piece, pool_->PieceBytes(piece)});
    if (!SendAll(socket_.fd(), {{frame.data(), frame.size()}},
                 descriptor.fd())) {
      return false;
    }
    pieces_.insert(piece);
    desk_->changed.Set();
    *sent = true;
    return true;
  }

  // ---- The listener's thread ----

  void Listen() {
    std::string wrong;
    try {
      wrong = Hear();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) {
      desk_->Log("the data connection of " + Name(rank_) +
                 " was closed: " + wrong);
    }
    End();
    if (!wrong.empty()) WaitForHangUp();
    std::unordered_map<uint64_t, ElementPtr> held;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      killed_ = true;
      held.swap(held_);
    }
    held.clear();
    ended_ = true;
    desk_->changed.Set();
  }

  // What was wrong, or nothing if the connection ended.
  std::string Hear() {
    std::vector<char> buffer(kReceiveBytes);
    size_t begin = 0, end = 0;
    while (true) {
      if (over_) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!Lingers()) return "";
      }
      const ssize_t received =
          recv(socket_.fd(), buffer.data() + end, buffer.size() - end, 0);
      if (received < 0 && errno == EINTR) continue;
      if (received <= 0) return "";
      end += received;
      size_t needed = 0;
      while (end - begin >= kFrameHeadBytes) {
        const std::string_view bytes(buffer.data() + begin, end - begin);
        const auto head = ParseHead(bytes.substr(0, kFrameHeadBytes));
        if (const auto* error = std::get_if<WireError>(&head)) {
          return error->message;
        }
        const FrameHead& frame = std::get<FrameHead>(head);
        if (frame.payload > kMaxControlPayload) {
          return "expected a frame of at most " +
                 std::to_string(kMaxControlPayload) +
                 " bytes. Received: " + FrameName(frame.type) + " of " +
                 std::to_string(frame.payload);
        }
        const size_t size = kFrameHeadBytes + frame.payload;
        if (bytes.size() < size) {
          needed = size;
          break;
        }
        const std::string wrong = Hear(
            frame.type, bytes.substr(kFrameHeadBytes, size - kFrameHeadBytes));
        if (!wrong.empty()) return wrong;
        begin += size;
      }
      std::memmove(buffer.data(), buffer.data() + begin, end - begin);
      end -= begin;
      begin = 0;
      if (needed > buffer.size()) buffer.resize(needed);
    }
  }

  std::string Hear(FrameType type, std::string_view payload) {
    switch (type) {
      case FrameType::kRead:
        return Hear(ParseRead(payload), [this](const ReadRequest& request) {
          window_->Read(rank_, request);
          read_heard_ = true;
          woken_.notify_all();
        });
      case FrameType::kProgress:
        return Hear(ParseProgress(payload), [this](const ProgressFrame& p) {
          window_->Progress(rank_, p.reader, p.pulled, p.acknowledged,
                            p.trained, p.waiting);
        });
      case FrameType::kSync: {
        const std::string wrong =
            Hear(ParseSync(payload), [this](const SyncFrame& sync) {
              replies_.push_back(sync);
              replies_due_ = true;
            });
        WakeSender();
        return wrong;
      }
      case FrameType::kRelease: {
        auto release = ParseRelease(payload);
        if (auto* error = std::get_if<WireError>(&release)) {
          return error->message;
        }
        return Release(std::get<ReleaseFrame>(release));
      }
      default:
        return FrameName(type) + " is not expected from a rank";
    }
  }

  template <typename Frame, typename Action>
  std::string Hear(const std::variant<Frame, WireError>& frame,
                   const Action& action) {
    if (const auto* error = std::get_if<WireError>(&frame)) {
      return error->message;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) action(std::get<Frame>(frame));
    return "";
  }

  std::string Release(const ReleaseFrame& release) {
    std::vector<ElementPtr> released;  // freed without the mutex
    released.reserve(release.deliveries.size());
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint64_t number : release.deliveries) {
      const auto found = held_.find(number);
      if (found == held_.end()) {
        return "it released delivery " + std::to_string(number) + " of " +
               std::to_string(deliveries_) + ", which it does not hold";
      }
      released.push_back(std::move(found->second));
      held_.erase(found);
    }
    return "";
  }

  // A rank that talks nonsense may use memory all the same. Its words are left
  // unread.
  void WaitForHangUp() {
    while (true) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!Lingers()) return;
      }
      pollfd polled{socket_.fd(), 0, 0};
      if (poll(&polled, 1, kMaxPollMilliseconds) > 0) return;
    }
  }

  const int64_t rank_;
  const Descriptor socket_;
  const bool local_;
  Window* const window_;
  const std::shared_ptr<Pool> pool_;
  Desk* const desk_;
  std::thread sender_, listener_;
  std::atomic<bool> over_{false}, read_heard_{false}, replies_due_{false};
  std::atomic<bool> ended_{false};

  std::mutex mutex_;
  std::condition_variable woken_;  // the sender, before the first read
  bool killed_ = false;
  std::vector<SyncFrame> replies_;
  uint64_t deliveries_ = 0;
  std::unordered_map<uint64_t, ElementPtr> held_;  // by the rank

  // The sender's own.
  std::set<uint32_t> pieces_;  // that the rank knows
  int64_t given_up_seen_ = 0;
};

}  // namespace

class Server::State {
 public:
  State(ServerOptions options, Window* window, std::shared_ptr<Pool> pool)
      : options_(std::move(options)),
        window_(window),
        pool_(std::move(pool)),
        hello_bytes_([] {
          std::string frame;
          Append(&frame, HelloFrame{});
          return frame.size();
        }()) {}

  ~State() {
    stopped_ = true;
    desk_.changed.Set();
    if (acceptor_.joinable()) acceptor_.join();
    // First all are told, then all are waited for.
    for (auto& [rank, state] : ranks_) {
      if (state.connection) ending_.push_back(std::move(state.connection));
    }
    for (const auto& connection : ending_) connection->Kill();
    ending_.clear();
  }

  std::optional<std::string> Start() {
    if (desk_.changed.fd() < 0) {
      return "can't make an event: " + ErrorText(errno);
    }
    if (!options_.unix_name.empty()) {
      auto listener = ListenUnix(options_.unix_name);
      if (auto* error = std::get_if<std::string>(&listener)) return *error;
      listeners_.push_back({std::move(std::get<Descriptor>(listener)), true});
    }
    if (!options_.tcp_host.empty()) {
      auto listener = ListenTcp(options_.tcp_host, options_.tcp_port);
      if (auto* error = std::get_if<std::string>(&listener)) return *error;
      listeners_.push_back({std::move(std::get<Descriptor>(listener)), false});
      tcp_port_ = LocalPort(listeners_.back().socket.fd());
    }
    try {
      acceptor_ = StartThread("kf-accept", [this] { Accept(); });
    } catch (const std::system_error& error) {
      return std::string("can't start a thread: ") + error.what();
    }
    return std::nullopt;
  }

  int tcp_port() const { return tcp_port_; }

  void Admit(int64_t rank, const Proof& expected, const Proof& answer) {
    if (rank < 0 || rank >= window_->size()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    Rank& state = ranks_[rank];
    state.permission = Permission{expected, answer};
    Forsake(&state);
  }

  void Dismiss(int64_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return;
    Rank& state = found->second;
    state.permission.reset();
    state.shares = false;
    Forsake(&state);
  }

  bool Shares(int64_t rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ranks_.find(rank);
    return found != ranks_.end() && found->second.shares;
  }

  std::vector<std::string> TakeLog() { return desk_.TakeLog(); }

 private:
  struct Listener {
    Descriptor socket;
    bool local;
  };

  // A connection that has not proven itself.
  struct Pending {
    Descriptor socket;
    bool local;
    Deadline deadline;
    std::string bytes;  // of its HELLO
  };

  struct Permission {
    Proof expected, answer;
  };

  struct Rank {
    std::optional<Permission> permission;
    std::unique_ptr<Connection> connection;
    bool shares = false;
    int64_t changes = 0;  // of the two above
  };

  // With the mutex held.
  void Forsake(Rank* rank) {
    ++rank->changes;
    if (!rank->connection) return;
    rank->connection->End();
    ending_.push_back(std::move(rank->connection));
    desk_.changed.Set();
  }

  // ---- The acceptor's thread ----

  void Accept() {
    std::deque<Pending> pending;
    while (!stopped_) {
      std::vector<pollfd> polled;
      polled.push_back({desk_.changed.fd(), POLLIN, 0});
      for (const Listener& listener : listeners_) {
        polled.push_back({listener.socket.fd(), POLLIN, 0});
      }
      for (const Pending& one : pending) {
        polled.push_back({one.socket.fd(), POLLIN, 0});
      }
      const int milliseconds = pending.empty()
                                   ? kMaxPollMilliseconds
                                   : MillisecondsUntil(pending.front().deadline,
                                                       kMaxPollMilliseconds);
      poll(polled.data(), polled.size(), milliseconds);
      if (polled[0].revents) desk_.changed.Clear();
      if (stopped_) return;
      TellOfPieces();
      Reap();
      for (size_t i = 0; i < pending.size(); ++i) {
        if (polled[1 + listeners_.size() + i].revents) Hear(&pending[i]);
      }
      for (size_t i = 0; i < listeners_.size(); ++i) {
        if (polled[1 + i].revents) Accept(listeners_[i], &pending);
      }
      const Deadline now = std::chrono::steady_clock::now();
      for (Pending& one : pending) {
        if (one.socket && one.deadline <= now) one.socket.Close();
      }
      pending.erase(std::remove_if(pending.begin(), pending.end(),
                                   [](const Pending& p) { return !p.socket; }),
                    pending.end());
    }
  }

  void Accept(const Listener& listener, std::deque<Pending>* pending) {
    // No more at a time than there is room for.
    for (size_t i = 0; i < kMaxPending; ++i) {
      Descriptor socket = ::kerasfeed::Accept(listener.socket.fd());
      if (!socket) {
        if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS &&
            errno != ENOMEM) {
          return;
        }
        desk_.Log("can't accept a connection: " + ErrorText(errno));
        if (pending->empty()) {
          pollfd polled{desk_.changed.fd(), POLLIN, 0};
          poll(&polled, 1, kExhaustedMilliseconds);
          return;
        }
        pending->pop_front();
        continue;
      }
      if (!listener.local) TuneTcp(socket.fd());
      // An honest one says HELLO at once: it is not the oldest of many.
      if (pending->size() >= kMaxPending) pending->pop_front();
      pending->push_back({std::move(socket), listener.local,
                          After(options_.hello_timeout), std::string()});
    }
  }

  // Reads no further than the HELLO goes: what follows is for the listener.
  void Hear(Pending* pending) {
    std::string& bytes = pending->bytes;
    const size_t before = bytes.size();
    bytes.resize(hello_bytes_);
    const ssize_t received = ReceiveSome(pending->socket.fd(), &bytes[before],
                                         hello_bytes_ - before);
    bytes.resize(before + std::max<ssize_t>(received, 0));
    if (received == 0 || (received < 0 && errno != EAGAIN)) {
      pending->socket.Close();
      return;
    }
    if (bytes.size() < kFrameHeadBytes) return;
    const std::string_view all(bytes);
    const auto head = ParseHead(all.substr(0, kFrameHeadBytes));
    const auto* frame = std::get_if<FrameHead>(&head);
    if (!frame || frame->type != FrameType::kHello ||
        kFrameHeadBytes + frame->payload != hello_bytes_) {
      Refuse(pending, "it does not say HELLO");
      return;
    }
    if (bytes.size() < hello_bytes_) return;
    const auto hello = ParseHello(all.substr(kFrameHeadBytes));
    if (const auto* error = std::get_if<WireError>(&hello)) {
      Refuse(pending, error->message);
      return;
    }
    LetIn(pending, std::get<HelloFrame>(hello));
  }

  void Refuse(Pending* pending, const std::string& why) {
    desk_.Log("a data connection was refused: " + why);
    pending->socket.Close();
  }

  void LetIn(Pending* pending, const HelloFrame& hello) {
    Permission permission;
    int64_t changes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = ranks_.find(hello.rank);
      if (found == ranks_.end() || !found->second.permission ||
          !SameProof(found->second.permission->expected, hello.proof)) {
        Refuse(pending, "it does not prove to be " + Name(hello.rank));
        return;
      }
      permission = *found->second.permission;
      found->second.permission.reset();
      Forsake(&found->second);
      changes = found->second.changes;
    }
    // The window has nothing to give to the earlier connection any more.
    for (Connection* connection : Ending()) {
      if (connection->rank() == hello.rank) connection->JoinSender();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    Rank& rank = ranks_[hello.rank];
    if (rank.changes != changes) {  // dismissed meanwhile
      pending->socket.Close();
      return;
    }
    std::string welcome;
    Append(&welcome, WelcomeFrame{permission.answer});
    const int fd = pending->socket.fd();
    auto connection =
        std::make_unique<Connection>(hello.rank, std::move(pending->socket),
                                     pending->local, window_, pool_, &desk_);
    if (SendSome(fd, welcome.data(), welcome.size()) !=
        static_cast<ssize_t>(welcome.size())) {
      return;
    }
    try {
      connection->Start();
    } catch (const std::system_error& error) {
      desk_.Log(Name(hello.rank) +
                " can't be served, as there are no threads: " + error.what());
      return;
    }
    rank.connection = std::move(connection);
    rank.shares = pending->local;
  }

  std::vector<Connection*> Ending() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Connection*> ending;
    for (const auto& connection : ending_) ending.push_back(connection.get());
    return ending;
  }

  // Destroys connections that have ended.
  void Reap() {
    std::vector<std::unique_ptr<Connection>> ended;
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [rank, state] : ranks_) {
      if (state.connection && state.connection->ended()) {
        ended.push_back(std::move(state.connection));
      }
    }
    for (auto& connection : ending_) {
      if (connection->ended()) ended.push_back(std::move(connection));
    }
    ending_.erase(std::remove(ending_.begin(), ending_.end(), nullptr),
                  ending_.end());
  }

  // Pieces have gone: ranks that nothing is sent to now hear of it, too.
  void TellOfPieces() {
    const int64_t given_up = pool_->given_up();
    if (given_up == given_up_told_) return;
    given_up_told_ = given_up;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, state] : ranks_) {
      if (state.connection) state.connection->WakeSender();
    }
  }

  const ServerOptions options_;
  Window* const window_;
  const std::shared_ptr<Pool> pool_;
  const size_t hello_bytes_;
  std::vector<Listener> listeners_;
  int tcp_port_ = 0;
  Desk desk_;
  std::atomic<bool> stopped_{false};
  std::thread acceptor_;
  int64_t given_up_told_ = 0;  // the acceptor's own

  mutable std::mutex mutex_;
  std::map<int64_t, Rank> ranks_;
  std::vector<std::unique_ptr<Connection>> ending_;
};

std::variant<std::unique_ptr<Server>, std::string> Server::Start(
    ServerOptions options, Window* window, std::shared_ptr<Pool> pool) {
  auto state =
      std::make_unique<State>(std::move(options), window, std::move(pool));
  if (auto error = state->Start()) return *error;
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}
Server::~Server() {
  if (origin_.Forked()) static_cast<void>(state_.release());
}

int Server::tcp_port() const { return state_->tcp_port(); }

void Server::Admit(int64_t rank, const Proof& expected, const Proof& answer) {
  state_->Admit(rank, expected, answer);
}

void Server::Dismiss(int64_t rank) { state_->Dismiss(rank); }

bool Server::Shares(int64_t rank) const { return state_->Shares(rank); }

std::vector<std::string> Server::TakeLog() { return state_->TakeLog(); }

}  // namespace kerasfeed
