// What an operator computes on the simulated device: its CPU kernel, or one of ours where the CPU has none.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace simulated_kernels {

// The state of the CUDA generator before the operator drew from it. A CPU generator seeded with both stands for the
// numbers that the device's threads would draw: the same ones whenever the state is the same.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  // In a graph: where each replay puts its seed and offset, to which `offset` is added then.
  int64_t *seed_of_replay = nullptr, *offset_of_replay = nullptr;
  RandomState on_device() const; // as the stream gets there
  at::Generator generator() const;
};

// Computes with tensors on the CPU: takes an operator's arguments, gives what it returns.
using Computation = std::function<std::vector<c10::IValue>(std::vector<c10::IValue> &, const RandomState &)>;

// Operators that the CPU has no kernel for, and random ones that take no generator. Null where there is none.
const Computation *own_computation(const std::string &name);

} // namespace simulated_kernels
