// What no transport can be faster than: copying by one thread, and bytes over
// TCP from one sender to receivers that are processes of their own.
//
//   floors copy BYTES SECONDS         from one ring of memory into another
//   floors tcp BYTES RECEIVERS SECONDS
//
// Prints the time of an element in seconds; for TCP, of an element for each
// receiver; and the CPU time of the sender and of all receivers for that.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kRingBytes = size_t{192} << 20;
constexpr int kReceiveBuffers = 3;

[[noreturn]] void Die(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

void Check(bool good, const char* what) {
  if (!good) Die(what);
}

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double CpuSeconds(int who) {
  rusage usage;
  Check(getrusage(who, &usage) == 0, "getrusage");
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Memory of which every page has been written.
char* NewMemory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Check(memory != MAP_FAILED, "mmap");
  std::memset(memory, 1, bytes);
  return static_cast<char*>(memory);
}

void Copy(size_t bytes, double seconds) {
  const size_t places = std::max<size_t>(1, kRingBytes / bytes);
  const char* from = NewMemory(places * bytes);
  char* to = NewMemory(places * bytes);
  // The clock is asked once for about a megabyte.
  const size_t batch = std::max<size_t>(1, (size_t{1} << 20) / bytes);
  size_t place = 0;
  size_t copied = 0;
  const double cpu = CpuSeconds(RUSAGE_SELF);
  const double began = Now();
  double now = began;
  while (now - began < seconds) {
    for (size_t k = 0; k < batch; ++k) {
      std::memcpy(to + place * bytes, from + place * bytes, bytes);
      place = place + 1 == places ? 0 : place + 1;
    }
    copied += batch;
    now = Now();
  }
  const double count = static_cast<double>(copied);
  std::printf("{\"seconds\": %.9g, \"producer_cpu\": %.9g, \"ranks_cpu\": 0}\n",
              (now - began) / count, (CpuSeconds(RUSAGE_SELF) - cpu) / count);
}

// Receives elements until the sender hangs up.
[[noreturn]] void Receive(uint16_t port, size_t bytes) {
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = port;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Check(connect(connection, reinterpret_cast<sockaddr*>(&address),
                sizeof(address)) == 0,
        "connect");
  char* buffers = NewMemory(kReceiveBuffers * bytes);
  for (size_t element = 0;; ++element) {
    char* buffer = buffers + element % kReceiveBuffers * bytes;
    for (size_t got = 0; got < bytes;) {
      const ssize_t count =
          recv(connection, buffer + got, bytes - got, MSG_WAITALL);
      Check(count >= 0, "recv");
      if (count == 0) std::_Exit(0);
      got += count;
    }
  }
}

void SendAll(int connection, const char* data, size_t bytes) {
  for (size_t sent = 0; sent < bytes;) {
    const ssize_t count =
        send(connection, data + sent, bytes - sent, MSG_NOSIGNAL);
    Check(count > 0, "send");
    sent += count;
  }
}

void Tcp(size_t bytes, int receivers, double seconds) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* name = reinterpret_cast<sockaddr*>(&address);
  Check(bind(listener, name, length) == 0, "bind");
  Check(listen(listener, receivers) == 0, "listen");
  Check(getsockname(listener, name, &length) == 0, "getsockname");
  for (int k = 0; k < receivers; ++k) {
    const pid_t child = fork();
    Check(child >= 0, "fork");
    if (child == 0) Receive(address.sin_port, bytes);
  }
  std::vector<int> connections;
  for (int k = 0; k < receivers; ++k) {
    connections.push_back(accept(listener, nullptr, nullptr));
    Check(connections.back() >= 0, "accept");
    const int on = 1;
    setsockopt(connections.back(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  const char* data = NewMemory(bytes);
  std::atomic<size_t> sent{0};
  const double cpu = CpuSeconds(RUSAGE_SELF);
  const double began = Now();
  std::vector<std::thread> threads;
  for (const int connection : connections) {
    threads.emplace_back([&, connection] {
      size_t count = 0;
      while (Now() - began < seconds) {
        SendAll(connection, data, bytes);
        ++count;
      }
      sent += count;
      close(connection);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double sender_cpu = CpuSeconds(RUSAGE_SELF) - cpu;
  // What is still in the sockets is received, too, before a receiver ends.
  for (int k = 0; k < receivers; ++k) {
    int status = 0;
    Check(wait(&status) > 0 && status == 0, "a receiver has failed");
  }
  const double count = static_cast<double>(sent);
  std::printf(
      "{\"seconds\": %.9g, \"producer_cpu\": %.9g, \"ranks_cpu\": %.9g}\n",
      (Now() - began) * receivers / count, sender_cpu / count,
      CpuSeconds(RUSAGE_CHILDREN) / count);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "copy" && argc == 4) {
    Copy(std::strtoull(argv[2], nullptr, 10), std::atof(argv[3]));
  } else if (what == "tcp" && argc == 5) {
    Tcp(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]),
        std::atof(argv[4]));
  } else {
    std::fprintf(stderr,
                 "floors copy BYTES SECONDS | tcp BYTES RECEIVERS SECONDS\n");
    return 2;
  }
  return 0;
}
