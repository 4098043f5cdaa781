#include "worker/io/probe_listener.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include "worker/io/socket_address.h"

namespace everstep {

Result<std::unique_ptr<ProbeListener>> ProbeListener::Create(EventLoop& loop, const std::string& host) {
  std::unique_ptr<ProbeListener> probe(new ProbeListener(loop));
  EVERSTEP_ASSIGN_OR_RETURN(probe->listener_, ListenTcp(host, probe->address_));
  const int listener = probe->listener_.get();
  EVERSTEP_RETURN_IF_ERROR(loop.Watch(listener, EPOLLIN, [listener](uint32_t) {
    for (;;) {
      UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (!fd.valid()) return;
    }
  }));
  return probe;
}

ProbeListener::~ProbeListener() {
  if (listener_.valid()) loop_.Unwatch(listener_.get());
}

}  // namespace everstep
