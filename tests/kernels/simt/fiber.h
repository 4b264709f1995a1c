#pragma once
// Cooperative threads of control with stacks of their own.

#include <ucontext.h>

#include <csetjmp>
#include <functional>
#include <memory>

namespace kvrt::simt {

/// Runs `body` in slices: resume() until the body calls suspend() or ends. No exception may leave the body.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  void resume();
  /// Another body for a fiber that is done: a new stack would cost page faults and system calls.
  void restart(std::function<void()> body);
  void suspend();  ///< from inside the body
  bool is_done() const noexcept { return is_done_; }

 private:
  static void enter(unsigned low, unsigned high);
  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  ucontext_t context_{}, resumer_{};
  std::jmp_buf fiber_jump_{}, resumer_jump_{};
  bool is_started_ = false, is_done_ = false;
};

}  // namespace kvrt::simt
