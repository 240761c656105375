// The producer's side of the data sockets: lets in ranks that prove themselves,
// and sends each what the window has for it. A rank that misbehaves, is slow or
// goes away harms nobody else: its connection ends. That a rank has come or is
// gone, the window hears from the control plane.
#ifndef KERASFEED_NATIVE_CORE_SERVER_H_
#define KERASFEED_NATIVE_CORE_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "pool.h"
#include "socket.h"
#include "window.h"
#include "wire.h"

namespace kerasfeed {

struct ServerOptions {
  // Where to listen: "unix:" for a socket without a name in the file system
  // (Linux's abstract addresses), and "tcp:<IPv4 or IPv6 address>:<port>", port
  // 0 for a free one. Empty: not at all.
  std::string unix_name;  // the abstract name, without its leading zero byte;
                          // empty: no Unix socket
  std::string tcp_host;   // empty: no TCP
  int tcp_port = 0;
  double hello_timeout =
      10;  // seconds in which a connection has to prove itself
};

// Threads: one accepts, and hears the first words of all connections at once,
// so that those who say nothing keep nobody waiting. Each connection of a rank
// has one that sends (Window::WaitForItem) and one that listens. Only the
// acceptor starts and joins these, and it starts those of a rank's new
// connection when the sender of the earlier one has ended: what the window
// hands out for a read goes to the connection on which that read was heard.
//
// Shared memory that a rank was sent stays as it is until the rank says that
// nobody uses it, or until its end of that connection is closed (as the kernel
// does when it dies). So a connection which this side ends, while the rank
// still uses what came over it, lingers: nothing is sent and only RELEASE is
// heard.
//
// Locks: the server's own guards who is admitted and which connections there
// are, a connection's what the rank holds and whether it is heard. The window
// is called with the latter held, never the other way round.
class Server {
 public:
  // Listens at once. The window must outlive it.
  static std::variant<std::unique_ptr<Server>, std::string> Start(
      ServerOptions options, Window* window, std::shared_ptr<Pool> pool);
  // Ends all connections and threads. In a child of fork() it does nothing.
  ~Server();

  int tcp_port() const;

  // Rank `rank` may connect, once, with `expected`, and is answered with
  // `answer`. A new permission takes the place of one that was not used, and
  // ends a connection that this rank has.
  void Admit(int64_t rank, const Proof& expected, const Proof& answer);
  // Ends what this rank has: its permission and its connection.
  void Dismiss(int64_t rank);
  // Whether this rank's connection is over a Unix socket, so that it shares
  // memory with this process. While it has none: whether its last one was.
  bool Shares(int64_t rank) const;
  // What went wrong since the last call, in words: refused connections, and
  // ranks that were cut off.
  std::vector<std::string> TakeLog();

 private:
  class State;
  explicit Server(std::unique_ptr<State> state);
  const Origin origin_;
  std::unique_ptr<State> state_;
};

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_SERVER_H_
