// Descriptor: owns one file descriptor. All descriptors of the collectives live in such objects,
// because each is closed in a forked child that never calls exec (a data-loader process, say): a
// child that outlives its rank must not hold the rank's connections open and so hide its death from
// the peers. Exec'd children are covered by close-on-exec. Thread-compatible.
#pragma once

#include <utility>

namespace everstep::collective {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd_ >= 0) Remember(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Descriptor() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Gives the number away; it stays on the list of those closed in forked children.
  int Release() { return std::exchange(fd_, -1); }
  void Reset() {
    if (fd_ >= 0) ForgetAndClose(std::exchange(fd_, -1));
  }

 private:
  static void Remember(int fd);
  static void ForgetAndClose(
      int fd);  // does nothing in a child in which the descriptor was closed at fork
  int fd_ = -1;
};

// For a descriptor that a library owns (a listening socket inside Asio): closed in forked children
// too.
void CloseInForkedChildren(int fd);
void StopClosingInForkedChildren(int fd);

}  // namespace everstep::collective
