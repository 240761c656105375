#include "socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

namespace kerasfeed {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxParts = 1024;  // IOV_MAX
constexpr size_t kMaxDescriptorsAtOnce = 16;
constexpr int kBacklog = 1024;
// A link without traffic is probed after so many seconds; a peer that does not
// answer for kLostSeconds is lost.
constexpr int kProbeAfterSeconds = 15;
constexpr int kProbeEverySeconds = 5;
constexpr int kLostSeconds = 60;
constexpr int kRetryMilliseconds = 5;

// Room for the control message that carries descriptors.
struct alignas(cmsghdr) Control {
  char bytes[CMSG_SPACE(kMaxDescriptorsAtOnce * sizeof(int))];
};

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

std::variant<Address, std::string> UnixAddress(const std::string& name) {
  Address address;
  auto* target = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (name.empty() || name.size() >= sizeof(target->sun_path)) {
    return "expected a socket name of 1 to " +
           std::to_string(sizeof(target->sun_path) - 1) +
           " characters. Received: " + std::to_string(name.size());
  }
  target->sun_family = AF_UNIX;
  std::memcpy(target->sun_path + 1, name.data(), name.size());
  address.length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return address;
}

std::variant<Address, std::string> TcpAddress(const std::string& host,
                                              const std::string& port,
                                              int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error) return host + ":" + port + ": " + gai_strerror(error);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found,
                                                             freeaddrinfo);
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  return address;
}

std::variant<Descriptor, std::string> Listen(const Address& address,
                                             const std::string& where) {
  Descriptor socket(::socket(address.storage.ss_family,
                             SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (address.storage.ss_family != AF_UNIX) {
    // A producer that restarts has the port of the one before it.
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  }
  if (!socket ||
      bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address.storage),
           address.length) ||
      listen(socket.fd(), kBacklog)) {
    return "can't listen on " + where + ": " + ErrorText(errno);
  }
  return socket;
}

}  // namespace

Deadline After(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(seconds));
}

int MillisecondsUntil(Deadline deadline, int most) {
  const Clock::duration left = deadline - Clock::now();
  if (left <= Clock::duration::zero()) return 0;
  if (left >= std::chrono::milliseconds(most)) return most;
  return static_cast<int>(
             std::chrono::duration_cast<std::chrono::milliseconds>(left)
                 .count()) +
         1;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = other.Take();
  }
  return *this;
}

int Descriptor::Take() { return std::exchange(fd_, -1); }

void Descriptor::Close() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

Event::Event() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void Event::Set() {
  const uint64_t one = 1;
  // Fails only if it is set already, or without a descriptor.
  if (write(fd(), &one, sizeof(one)) < 0) return;
}

void Event::Clear() {
  uint64_t count;
  if (read(fd(), &count, sizeof(count)) < 0) return;
}

namespace {
// How many forks lie between this process and the one that loaded this.
std::atomic<int64_t> forks{0};
}  // namespace

Origin::Origin()
    : forks_([] {
        static const int registered =
            pthread_atfork(nullptr, nullptr, [] { ++forks; });
        static_cast<void>(registered);
        return forks.load();
      }()) {}

bool Origin::Forked() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

std::string ErrorText(int error) {
  char text[256];
  return strerror_r(error, text, sizeof(text));
}

std::thread StartThread(std::string name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto restore = [&before](void*) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  };
  const std::unique_ptr<void, decltype(restore)> owner(&before, restore);
  return std::thread([name = std::move(name), body = std::move(body)] {
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    body();
  });
}

std::variant<Descriptor, std::string> ListenUnix(const std::string& name) {
  auto address = UnixAddress(name);
  if (auto* error = std::get_if<std::string>(&address)) return *error;
  return Listen(std::get<Address>(address), "the Unix socket " + name);
}

std::variant<Descriptor, std::string> ListenTcp(const std::string& host,
                                                int port) {
  auto address = TcpAddress(host, std::to_string(port), AI_NUMERICHOST);
  if (auto* error = std::get_if<std::string>(&address)) return *error;
  return Listen(std::get<Address>(address), host + ":" + std::to_string(port));
}

int LocalPort(int fd) {
  Address address;
  address.length = sizeof(address.storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage),
                  &address.length)) {
    return 0;
  }
  if (address.storage.ss_family == AF_INET6) {
    return ntohs(
        reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  }
  return ntohs(
      reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

Descriptor Accept(int listener) {
  return Descriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
}

std::variant<Connected, std::string> Connect(
    const std::string& address, Deadline deadline, const Event& cancel,
    const std::function<bool()>& canceled) {
  const std::string failed = "can't connect to " + address + ": ";
  Connected connected;
  std::variant<Address, std::string> target;
  if (address.rfind("unix:", 0) == 0) {
    connected.local = true;
    target = UnixAddress(address.substr(5));
  } else {
    const size_t colon = address.rfind(':');
    if (address.rfind("tcp:", 0) != 0 || colon < 4) {
      return failed + "expected unix:<name> or tcp:<host>:<port>";
    }
    std::string host = address.substr(4, colon - 4);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    }
    const std::string port = address.substr(colon + 1);
    target = TcpAddress(host, port, AI_NUMERICHOST);
    if (std::holds_alternative<std::string>(target)) {
      target = TcpAddress(host, port, 0);
    }
  }
  if (auto* error = std::get_if<std::string>(&target)) return failed + *error;
  const Address& to = std::get<Address>(target);
  connected.socket = Descriptor(socket(
      to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = connected.socket.fd();
  if (fd < 0) return failed + ErrorText(errno);
  while (
      connect(fd, reinterpret_cast<const sockaddr*>(&to.storage), to.length)) {
    // A Unix socket whose backlog is full says EAGAIN, and can't be polled.
    const bool again = errno == EAGAIN || errno == EINTR;
    if (!again && errno != EINPROGRESS && errno != EALREADY) {
      if (errno == EISCONN) break;
      return failed + ErrorText(errno);
    }
    const int left = MillisecondsUntil(deadline, 60'000);
    if (left == 0) return failed + "no answer in time";
    pollfd polled[] = {{again ? -1 : fd, POLLOUT, 0}, {cancel.fd(), POLLIN, 0}};
    poll(polled, 2, again ? std::min(left, kRetryMilliseconds) : left);
    if (canceled()) return failed + "given up";
    if (polled[0].revents) {
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      if (error) return failed + ErrorText(error);
      break;
    }
  }
  if (!connected.local) TuneTcp(fd);
  return connected;
}

void TuneTcp(int fd) {
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfterSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeEverySeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT,
      (kLostSeconds - kProbeAfterSeconds) / kProbeEverySeconds);
  // Keepalive does not count while data is on its way.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kLostSeconds * 1000);
}

bool SendAll(int fd, std::vector<iovec> parts, int descriptor, size_t* sent) {
  size_t first = 0;
  while (first < parts.size()) {
    msghdr message{};
    message.msg_iov = &parts[first];
    message.msg_iovlen = std::min(parts.size() - first, kMaxParts);
    Control control;
    if (descriptor >= 0) {
      message.msg_control = control.bytes;
      message.msg_controllen = CMSG_SPACE(sizeof(int));
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &descriptor, sizeof(int));
    }
    const ssize_t count = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    if (count > 0) descriptor = -1;
    if (sent) *sent += count;
    size_t left = static_cast<size_t>(count);
    while (first < parts.size() && left >= parts[first].iov_len) {
      left -= parts[first++].iov_len;
    }
    if (left > 0) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + left;
      parts[first].iov_len -= left;
    }
  }
  return true;
}

ssize_t SendSome(int fd, const char* data, size_t size) {
  ssize_t sent;
  do {
    sent = send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

ssize_t ReceiveSome(int fd, char* data, size_t size,
                    std::vector<Descriptor>* descriptors) {
  ssize_t received;
  if (!descriptors) {
    do {
      received = recv(fd, data, size, MSG_DONTWAIT);
    } while (received < 0 && errno == EINTR);
    return received;
  }
  iovec part{data, size};
  Control control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  do {
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    received = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return received;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int passed;
      std::memcpy(&passed, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      descriptors->emplace_back(passed);
    }
  }
  return received;
}

}  // namespace kerasfeed
