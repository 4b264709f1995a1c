#include "tests/kernels/simt/fiber.h"

#include <cstdint>
#include <utility>

// swapcontext() makes two system calls a switch, setjmp() none. AddressSanitizer follows the former only.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVRT_FIBER_SWAPCONTEXT 1
#endif

namespace kvrt::simt {
namespace {
constexpr std::size_t kStackBytes = 128 * 1024;
}

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new char[kStackBytes]) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(static_cast<std::uint64_t>(self) >> 32));
}

void Fiber::restart(std::function<void()> body) {
  body_ = std::move(body);
  is_done_ = false;
}

void Fiber::enter(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>(static_cast<std::uintptr_t>(static_cast<std::uint64_t>(high) << 32 | low));
  for (;;) {
    fiber->body_();
    fiber->is_done_ = true;
    fiber->suspend();
  }
}

#if defined(KVRT_FIBER_SWAPCONTEXT)
void Fiber::resume() { swapcontext(&resumer_, &context_); }
void Fiber::suspend() { swapcontext(&context_, &resumer_); }
#else
void Fiber::resume() {
  if (_setjmp(resumer_jump_) != 0) return;
  if (is_started_) _longjmp(fiber_jump_, 1);
  is_started_ = true;
  setcontext(&context_);
}
void Fiber::suspend() {
  if (_setjmp(fiber_jump_) == 0) _longjmp(resumer_jump_, 1);
}
#endif

}  // namespace kvrt::simt
