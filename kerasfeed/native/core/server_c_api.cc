#include "server_c_api.h"

#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "pool.h"
#include "reply.h"
#include "server.h"

using kerasfeed::Answer;
using kerasfeed::Do;
using kerasfeed::Numbers;

struct KfServer {
  std::shared_ptr<kerasfeed::Pool> pool;
  std::unique_ptr<kerasfeed::Server> server;
};

KfStatus kf_server_new(KfWindow* window, const char* unix_name,
                       const char* tcp_host, int64_t tcp_port,
                       int64_t pool_bytes, KfServer** server, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    kerasfeed::PoolOptions pool_options;
    pool_options.max_bytes = pool_bytes;
    auto made = std::make_unique<KfServer>();
    made->pool = kerasfeed::Pool::Create(std::move(pool_options));
    kerasfeed::ServerOptions options;
    options.unix_name = unix_name;
    options.tcp_host = tcp_host;
    options.tcp_port = static_cast<int>(tcp_port);
    auto started = kerasfeed::Server::Start(
        std::move(options), kerasfeed::WindowOf(window), made->pool);
    if (auto* error = std::get_if<std::string>(&started)) {
      *text = *error;
      return kKfNothing;
    }
    made->server =
        std::move(std::get<std::unique_ptr<kerasfeed::Server>>(started));
    *server = made.release();
    return kKfDone;
  });
}

void kf_server_free(KfServer* server) { delete server; }

KfStatus kf_server_port(KfServer* server, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    numbers->push_back(server->server->tcp_port());
    return kKfDone;
  });
}

KfStatus kf_server_admit(KfServer* server, int64_t rank, const char* expected,
                         const char* answer, KfReply* reply) {
  return Do(reply, [&] {
    server->server->Admit(rank, kerasfeed::ProofOf(expected),
                          kerasfeed::ProofOf(answer));
  });
}

KfStatus kf_server_dismiss(KfServer* server, int64_t rank, KfReply* reply) {
  return Do(reply, [&] { server->server->Dismiss(rank); });
}

KfStatus kf_server_log(KfServer* server, KfReply* reply) {
  return Answer(reply, [&](Numbers*, std::string* text) {
    for (const std::string& line : server->server->TakeLog()) {
      *text += line + "\n";
    }
    return text->empty() ? kKfNothing : kKfDone;
  });
}

KfStatus kf_server_held(KfServer* server, KfReply* reply) {
  return Answer(reply, [&](Numbers* numbers, std::string*) {
    const auto held = server->pool->GetHeld();
    *numbers = {held.reserved_bytes, held.used_bytes, held.pieces, held.blocks};
    return kKfDone;
  });
}

namespace kerasfeed {

Server* ServerOf(KfServer* server) { return server->server.get(); }

std::shared_ptr<Pool> PoolOf(KfServer* server) { return server->pool; }

}  // namespace kerasfeed
