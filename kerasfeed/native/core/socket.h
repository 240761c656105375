// What servers and readers need of Linux: descriptors with an owner, sockets
// that are closed on exec and never raise SIGPIPE, and threads with names.
#ifndef KERASFEED_NATIVE_CORE_SOCKET_H_
#define KERASFEED_NATIVE_CORE_SOCKET_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

namespace kerasfeed {

using Deadline = std::chrono::steady_clock::time_point;

Deadline After(double seconds);
// For poll: milliseconds until then, rounded up, at most `most`.
int MillisecondsUntil(Deadline deadline, int most);

// A descriptor, closed when its owner ends.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Take()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { Close(); }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int Take();
  void Close();

 private:
  int fd_ = -1;
};

// Wakes whoever polls its descriptor, until it is cleared. Without a
// descriptor (there may be none left) it wakes nobody.
class Event {
 public:
  Event();
  void Set();
  void Clear();
  int fd() const { return descriptor_.fd(); }

 private:
  Descriptor descriptor_;
};

std::string ErrorText(int error);

// The process that made it. In a child of fork() its threads don't exist, its
// mutexes may be locked for ever, and its sockets are the parent's: what has an
// origin leaves them alone there.
class Origin {
 public:
  Origin();
  // Whether this is a child of that process.
  bool Forked() const;

 private:
  const int64_t forks_;
};

// A thread with a name of up to 15 characters. It gets no signals: those are
// for threads that Python knows.
std::thread StartThread(std::string name, std::function<void()> body);

// Sockets that listen; an error in words if they can't.
std::variant<Descriptor, std::string> ListenUnix(const std::string& name);
std::variant<Descriptor, std::string> ListenTcp(const std::string& host,
                                                int port);
int LocalPort(int fd);
// The next connection, blocking; none, with errno, if nobody is there.
Descriptor Accept(int listener);

struct Connected {
  Descriptor socket;  // does not block
  bool local = false;
};
// Connects to "unix:<abstract name>" or "tcp:<host>:<port>". `canceled` is
// looked at when `cancel` is set.
std::variant<Connected, std::string> Connect(
    const std::string& address, Deadline deadline, const Event& cancel,
    const std::function<bool()>& canceled);

// Small frames leave at once; a peer that can't be reached is noticed, one that
// pauses for some seconds keeps its connection.
void TuneTcp(int fd);

// Blocks until all is sent, the descriptor (if there is one) with the first
// byte. False, with errno, if the connection broke; `sent` bytes went before.
bool SendAll(int fd, std::vector<iovec> parts, int descriptor = -1,
             size_t* sent = nullptr);
// What can be sent at once: a number of bytes, or -1 with errno.
ssize_t SendSome(int fd, const char* data, size_t size);
// What is there: a number of bytes, 0 at the end, -1 with errno (EAGAIN:
// nothing now). Descriptors that came with it are appended.
ssize_t ReceiveSome(int fd, char* data, size_t size,
                    std::vector<Descriptor>* descriptors = nullptr);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_SOCKET_H_
