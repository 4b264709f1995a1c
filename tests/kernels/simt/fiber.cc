#include "tests/kernels/simt/fiber.h"

#include <cstdint>
#include <utility>
#include <vector>

// swapcontext() makes two system calls a switch, setjmp() none. AddressSanitizer follows the former only.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVRT_FIBER_SWAPCONTEXT 1
#endif

namespace kvrt::simt {
namespace {
constexpr std::size_t kStackBytes = 128 * 1024;

/// Stacks of fibers that have ended, for those to come: fresh ones would cost page faults. Of the thread that runs the fibers.
std::vector<std::unique_ptr<char[]>>& free_stacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}
std::unique_ptr<char[]> take_stack() {
  auto& stacks = free_stacks();
  if (stacks.empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);
  std::unique_ptr<char[]> stack = std::move(stacks.back());
  stacks.pop_back();
  return stack;
}
}

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(take_stack()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(static_cast<std::uint64_t>(self) >> 32));
}

Fiber::~Fiber() { free_stacks().push_back(std::move(stack_)); }

void Fiber::enter(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>(static_cast<std::uintptr_t>(static_cast<std::uint64_t>(high) << 32 | low));
  fiber->body_();
  fiber->is_done_ = true;
  fiber->suspend();
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
