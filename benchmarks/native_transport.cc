// What an element costs from the pump's copy to a rank's hands: a pump that
// copies out of more memory than any cache holds, and two ranks that are
// processes of their own, over Unix sockets with shared memory and over TCP.
//
//   g++ -std=c++17 -O2 -pthread -Ikerasfeed/native/core -o /tmp/transport
//     benchmarks/native_transport.cc kerasfeed/native/core/*.cc
//   /tmp/transport [repetitions [case [unix|tcp]]]
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "pool.h"
#include "reader.h"
#include "server.h"
#include "window.h"
#include "wire.h"

namespace kerasfeed {
namespace {

constexpr int64_t kRanks = 2;
constexpr int64_t kRingBytes = int64_t{192} << 20;
constexpr int64_t kGigabyte = int64_t{1} << 30;
constexpr int64_t kCreditSteps = 8;  // a feed's default
constexpr int64_t kReadyBytes = int64_t{256} << 10;
constexpr int64_t kCreditBytes = int64_t{64} << 20;

struct Case {
  const char* name;
  int64_t bytes;
  int64_t steps;
};

constexpr Case kCases[] = {
    {"2 KB", 2 << 10, 300'000},
    {"200 KB", 200 << 10, 20'000},
    {"9.6 MB", 9'633'792, 400},
    {"38.5 MB", 38'535'168, 120},
};

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::_Exit(1);
}

Proof ProofOf(int64_t rank, bool answer) {
  Proof proof;
  proof.fill(static_cast<uint8_t>(2 * rank + answer));
  return proof;
}

// Microseconds an element, without the first few.
double RunRank(const std::string& address, int64_t rank, const Case& run) {
  Reader reader({});
  if (auto wrong = reader.Attach(address, rank, ProofOf(rank, false),
                                 ProofOf(rank, true), 10)) {
    Die(*wrong);
  }
  ReadRequest request;
  request.credit_steps = kCreditSteps;
  request.credit_bytes = kCreditBytes;
  const int64_t read = reader.Read(request);
  const int64_t warm_up = run.steps / 10;
  auto start = std::chrono::steady_clock::now();
  std::shared_ptr<char> kept;
  for (int64_t step = 0; step < run.steps + warm_up; ++step) {
    if (step == warm_up) start = std::chrono::steady_clock::now();
    auto received = reader.Next(read, {});
    auto* element = std::get_if<ReceivedElement>(&received);
    if (!element || element->position.step != step) Die("no element");
    if (element->block.get()[element->size - 1] != 1) Die("wrong bytes");
    kept = std::move(element->block);  // until the next one is there
    reader.Acknowledge({0, step}, {{0, step}});
  }
  const std::chrono::duration<double, std::micro> took =
      std::chrono::steady_clock::now() - start;
  return took.count() / run.steps;
}

// Copies for ranks that share memory; others are sent from where it lies.
void RunPump(Window* window, Server* server, const std::shared_ptr<Pool>& pool,
             const std::vector<char>& ring, int64_t bytes) {
  int64_t place = 0;
  for (int64_t number = 0;; ++number) {
    Work work;
    do {
      work = window->WaitForWork();
      if (std::holds_alternative<Stop>(work)) return;
    } while (!std::holds_alternative<Produce>(work));
    auto element = std::make_shared<Element>();
    element->components = {{{bytes}, 0, bytes}};
    element->size = bytes;
    if (place + bytes > kRingBytes) place = 0;
    const char* data = &ring[place];
    place += Aligned(bytes);
    if (server->Shares(number % kRanks)) {
      element->block = pool->Allocate(bytes);
      if (element->block) {
        std::memcpy(element->block->data, data, bytes);
        data = element->block->data;
      }
    }
    element->buffers = {{data, bytes}};
    window->Put(std::get<Produce>(work).generation, std::move(element));
  }
}

double Measure(const Case& run, bool local, const std::vector<char>& ring) {
  const std::string name = "kerasfeed-benchmark-" + std::to_string(getpid());
  int to_ranks[2], from_ranks[2];
  if (pipe(to_ranks) || pipe(from_ranks)) Die("no pipes");
  std::vector<pid_t> ranks;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) Die("can't fork");
    if (pid == 0) {
      int port;
      if (read(to_ranks[0], &port, sizeof(port)) != sizeof(port))
        Die("no port");
      const double result = RunRank(
          local ? "unix:" + name : "tcp:127.0.0.1:" + std::to_string(port),
          rank, run);
      std::_Exit(write(from_ranks[1], &result, sizeof(result)) !=
                 sizeof(result));
    }
    ranks.push_back(pid);
  }
  WindowOptions window_options;
  window_options.size = kRanks;
  window_options.max_bytes = kGigabyte;
  window_options.ready_bytes = kReadyBytes;
  window_options.steps_per_epoch = int64_t{1} << 40;
  Window window(window_options);
  PoolOptions pool_options;
  pool_options.max_bytes = kGigabyte;
  const auto pool = Pool::Create(pool_options);
  ServerOptions server_options;
  server_options.unix_name = name;
  server_options.tcp_host = "127.0.0.1";
  auto started = Server::Start(server_options, &window, pool);
  if (auto* error = std::get_if<std::string>(&started)) Die(*error);
  auto& server = std::get<std::unique_ptr<Server>>(started);
  const int port = server->tcp_port();
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    window.Attend(rank, {}, {});
    server->Admit(rank, ProofOf(rank, false), ProofOf(rank, true));
  }
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    if (write(to_ranks[1], &port, sizeof(port)) != sizeof(port)) Die("no rank");
  }
  std::thread pump(RunPump, &window, server.get(), pool, std::cref(ring),
                   run.bytes);
  double slowest = 0;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    double result;
    if (read(from_ranks[0], &result, sizeof(result)) != sizeof(result)) {
      Die("a rank died");
    }
    slowest = std::max(slowest, result);
  }
  for (const pid_t pid : ranks) waitpid(pid, nullptr, 0);
  window.StopPump();
  pump.join();
  for (const std::string& line : server->TakeLog()) {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  for (const int fd :
       {to_ranks[0], to_ranks[1], from_ranks[0], from_ranks[1]}) {
    close(fd);
  }
  return slowest;
}

}  // namespace
}  // namespace kerasfeed

int main(int argc, char** argv) {
  using namespace kerasfeed;
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 3;
  const std::vector<char> ring(kRingBytes, 1);
  std::printf(
      "microseconds an element and rank, %d ranks (least to most of %d)\n",
      static_cast<int>(kRanks), repetitions);
  for (const Case& run : kCases) {
    if (argc > 2 && std::strcmp(argv[2], run.name)) continue;
    for (const bool local : {true, false}) {
      if (argc > 3 && std::strcmp(argv[3], local ? "unix" : "tcp")) continue;
      std::vector<double> results;
      for (int i = 0; i < repetitions; ++i) {
        results.push_back(Measure(run, local, ring));
      }
      const auto [least, most] =
          std::minmax_element(results.begin(), results.end());
      std::printf("%-8s %-5s %10.1f to %10.1f\n", run.name,
                  local ? "unix" : "tcp", *least, *most);
      std::fflush(stdout);
    }
  }
}
