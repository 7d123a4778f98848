// Splits independent tasks over whatever threads the caller owns.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ortolan::cpu {

class ParallelFor {
 public:
  using Task = void (*)(void* context, int64_t index);

  virtual ~ParallelFor() = default;

  // Runs task(context, i) for every i in [0, count); returns when all are done.
  virtual void run(int64_t count, Task task, void* context) = 0;

  template <typename Body>
  void each(int64_t count, Body&& body) {
    using Stored = std::remove_reference_t<Body>;
    run(
        count, [](void* context, int64_t index) { (*static_cast<Stored*>(context))(index); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

}  // namespace ortolan::cpu
