// The producer's data sockets for Python (ctypes), in the manners of c_api.h:
// kerasfeed/native/server.py is its only user.
#ifndef KERASFEED_NATIVE_CORE_SERVER_C_API_H_
#define KERASFEED_NATIVE_CORE_SERVER_C_API_H_

#include <stdint.h>

#include <memory>

#include "c_api.h"

struct KfServer;

// An empty name or host: no such socket. `pool_bytes`: the most that shared
// memory takes. The window must outlive the server. kKfNothing and why, in
// text, if it can't listen.
KF_API KfStatus kf_server_new(KfWindow* window, const char* unix_name,
                              const char* tcp_host, int64_t tcp_port,
                              int64_t pool_bytes, KfServer** server,
                              KfReply* reply);
KF_API void kf_server_free(KfServer* server);
// Numbers: the port.
KF_API KfStatus kf_server_port(KfServer* server, KfReply* reply);
// Proofs have kProofBytes.
KF_API KfStatus kf_server_admit(KfServer* server, int64_t rank,
                                const char* expected, const char* answer,
                                KfReply* reply);
KF_API KfStatus kf_server_dismiss(KfServer* server, int64_t rank,
                                  KfReply* reply);
// Text: what went wrong since the last call, line by line.
KF_API KfStatus kf_server_log(KfServer* server, KfReply* reply);
// Numbers: bytes of shared memory that are reserved, and used; pieces; blocks.
KF_API KfStatus kf_server_held(KfServer* server, KfReply* reply);

namespace kerasfeed {

class Pool;
class Server;

// The things themselves, for what uses them without Python.
Server* ServerOf(KfServer* server);
std::shared_ptr<Pool> PoolOf(KfServer* server);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_CORE_SERVER_C_API_H_
