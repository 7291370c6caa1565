// The kernels of the simulated device. Each CUDA kernel of PyTorch is wrapped: its own host code runs as it is (so what
// it allocates, checks and launches is what a GPU would see), then the operator's CPU kernel is put on the current stream
// and fills the outputs when the stream gets there. Only addresses are kept until then, as on a GPU: an output that was
// let go of too early is overwritten, an input that has not arrived is read as it is.
#include "numbers.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

extern "C" {
void simulated_cuda_run(void *stream, const char *name, void (*function)(void *), void (*release)(void *), void *data,
                        const uint64_t *accesses, uint64_t count);
void *simulated_cuda_bytes_at(void *pointer);
void simulated_cuda_given_back(void *memory, uint64_t bytes, int device, void *stream);
void simulated_cuda_report(const char *mistake);
bool simulated_cuda_may_read(uint64_t begin, uint64_t end);
bool simulated_cuda_limit_reads(const uint64_t *ranges, uint64_t count);
}

namespace simulated_kernels {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::Stack;

} // namespace

RandomState RandomState::on_device() const {
  if (seed_of_replay == nullptr) return *this;
  auto at = [](int64_t *pointer) { return static_cast<uint64_t>(*static_cast<int64_t *>(simulated_cuda_bytes_at(pointer))); };
  return RandomState{at(seed_of_replay), at(offset_of_replay) + offset};
}

namespace {

bool setting(const char *name) {
  const char *text = std::getenv(name);
  return text != nullptr && *text != 0 && std::string(text) != "0";
}

// ---- tensors as the device sees them: an address and a shape -----------------------------------------------------

struct Placed {
  void *address = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type = at::kFloat;
  bool conjugated = false, negated = false;

  explicit Placed(const Tensor &tensor)
      : address(tensor.numel() ? tensor.storage().mutable_data_ptr().get() : nullptr), sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()), type(tensor.scalar_type()), conjugated(tensor.is_conj()), negated(tensor.is_neg()) {
    if (address) address = static_cast<char *>(address) + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  }

  Tensor on_host() const {
    auto options = at::TensorOptions().dtype(type);
    if (address == nullptr) return at::empty_strided(sizes, strides, options);
    Tensor found = at::from_blob(simulated_cuda_bytes_at(address), sizes, strides, options);
    if (conjugated) found._set_conj(true);
    if (negated) found._set_neg(true);
    return found;
  }

  void add_access(std::vector<uint64_t> &accesses, bool writes) const {
    if (address == nullptr) return;
    uint64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += static_cast<uint64_t>((sizes[i] - 1) * strides[i]);
    auto begin = reinterpret_cast<uint64_t>(address);
    accesses.insert(accesses.end(), {begin, begin + (last + 1) * c10::elementSize(type), writes});
  }
};

// An argument or a result, held without holding device memory.
struct Held {
  IValue value;                              // where it is no device tensor
  std::vector<std::optional<Placed>> placed; // one, or those of a list
  bool list = false, optional_list = false;
  std::vector<Tensor> others; // of a list: what does not lie on the device
};

bool on_device(const Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }

std::optional<Placed> place(const Tensor &tensor, std::vector<Tensor> &others) {
  if (on_device(tensor)) {
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized(),
                                "the simulated CUDA device has no numbers for tensors that are not dense");
    others.emplace_back();
    return Placed(tensor);
  }
  others.push_back(tensor.defined() ? tensor.clone() : tensor); // as it is now: the host goes on
  return std::nullopt;
}

Held hold(const IValue &value) {
  Held held;
  if (value.isTensor()) {
    held.placed.push_back(place(value.toTensor(), held.others));
  } else if (value.isTensorList()) {
    held.list = true;
    for (const Tensor &tensor : value.toTensorVector()) held.placed.push_back(place(tensor, held.others));
  } else if (value.isOptionalTensorList()) {
    held.optional_list = true;
    for (const auto &tensor : value.toOptionalTensorVector()) held.placed.push_back(place(tensor.value_or(Tensor()), held.others));
  } else if (value.isDevice()) {
    held.value = c10::Device(c10::kCPU);
  } else {
    held.value = value;
  }
  return held;
}

IValue on_host(const Held &held) {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < held.placed.size(); ++i)
    tensors.push_back(held.placed[i] ? held.placed[i]->on_host() : held.others[i]);
  if (held.list) return c10::List<Tensor>(tensors);
  if (held.optional_list) {
    c10::List<std::optional<Tensor>> list;
    for (const Tensor &tensor : tensors) list.push_back(tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt);
    return list;
  }
  if (!tensors.empty()) return tensors[0];
  return held.value;
}

// ---- one operator's work on a stream ---------------------------------------------------------------------------

struct Job {
  OperatorHandle op;
  const char *name;
  std::vector<Held> arguments, results; // results: where to copy to; of an argument that the CPU kernel fills: nothing
  RandomState random;
  std::optional<size_t> generator_argument;
};

// The device takes memory for a batch's statistics even where it computes none, in evaluation; the CPU does not.
bool leaves_statistics_alone(const char *name) { return std::strstr(name, "batch_norm") != nullptr; }

void fill(const Held &result, const IValue &computed, const char *name) {
  std::vector<Tensor> found;
  if (computed.isTensor()) found.push_back(computed.toTensor());
  if (computed.isTensorList()) found = computed.toTensorVector();
  for (size_t i = 0; i < result.placed.size(); ++i) {
    if (!result.placed[i] || result.placed[i]->address == nullptr) continue;
    if (i >= found.size() || !found[i].defined()) {
      simulated_cuda_report((std::string(name) + ": the CPU does not compute one of the results").c_str());
      continue;
    }
    if (found[i].numel() == 0 && leaves_statistics_alone(name)) continue;
    Tensor target = result.placed[i]->on_host();
    if (target.sizes() != found[i].sizes()) {
      simulated_cuda_report((std::string(name) + ": the CPU's result has another shape than the device's").c_str());
      continue;
    }
    target.copy_(found[i]);
  }
}

std::vector<IValue> compute(const OperatorHandle &op, const std::string &name, std::vector<IValue> arguments,
                            const RandomState &random, std::optional<size_t> generator_argument) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (const Computation *own = own_computation(name)) return (*own)(arguments, random);
  if (generator_argument) arguments[*generator_argument] = random.generator();
  Stack stack(std::move(arguments));
  op.callBoxed(&stack);
  return stack;
}

bool writes(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Where the device keeps statistics or sums in single precision, and the CPU's kernel would not, or takes no mixture.
bool is_wider_on_device(const std::string &name) {
  for (const char *part : {"batch_norm", "native_layer_norm", "native_group_norm", "slow_conv_transpose", "_embedding_bag"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

IValue widened(const IValue &value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const Tensor &tensor = value.toTensor();
  bool narrow = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return narrow ? IValue(tensor.to(at::kFloat)) : value;
}

// What was written in single precision goes back to the tensors that were given.
std::vector<IValue> compute_wide(const OperatorHandle &op, const std::string &name, const std::vector<IValue> &arguments,
                                 const RandomState &random) {
  std::vector<IValue> wide;
  for (const IValue &argument : arguments) wide.push_back(widened(argument));
  auto computed = compute(op, name, wide, random, std::nullopt);
  for (size_t i = 0; i < arguments.size(); ++i)
    if (writes(op.schema().arguments()[i]) && arguments[i].isTensor() && !wide[i].toTensor().is_same(arguments[i].toTensor()))
      arguments[i].toTensor().copy_(wide[i].toTensor());
  return computed;
}

void run(void *data) {
  const auto *job = static_cast<const Job *>(data);
  try {
    std::vector<IValue> arguments;
    for (const Held &held : job->arguments) arguments.push_back(on_host(held));
    RandomState random = job->random.on_device();
    auto computed = is_wider_on_device(job->name)
                        ? compute_wide(job->op, job->name, arguments, random)
                        : compute(job->op, job->name, std::move(arguments), random, job->generator_argument);
    for (size_t i = 0; i < job->results.size() && i < computed.size(); ++i) fill(job->results[i], computed[i], job->name);
  } catch (const std::exception &error) {
    simulated_cuda_report((std::string(job->name) + " failed on the device: " + error.what()).c_str());
  }
}

void release(void *data) { delete static_cast<Job *>(data); }

// ---- which operators are treated how ---------------------------------------------------------------------------

bool starts_with(const std::string &text, const char *beginning) { return text.rfind(beginning, 0) == 0; }

bool is_view(const c10::FunctionSchema &schema) {
  for (const auto &argument : schema.arguments())
    if (argument.alias_info() && !argument.alias_info()->isWrite()) return true;
  return false;
}

// Nothing is computed: memory is taken, shapes and storages are set.
bool is_about_metadata(const std::string &name) {
  static const std::set<std::string> names{
      "aten::resize_", "aten::_resize_output_", "aten::resize_as_", "aten::record_stream", "aten::is_set_to", "aten::_fused_sdp_choice",
      "aten::_local_scalar_dense", "aten::_pin_memory", "aten::is_pinned",
      "aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss", "aten::_cudnn_init_dropout_state"};
  return names.count(name) || starts_with(name, "aten::empty") || starts_with(name, "aten::set_") || starts_with(name, "aten::new_empty");
}

// The host needs the result, or the device's library is not simulated: computed at once, and copied to the device.
bool is_immediate(const OperatorHandle &op, const std::string &name) {
  static const std::set<std::string> names{"aten::equal", "aten::conj_physical_", "aten::_ctc_loss", "aten::lu_unpack", "aten::ormqr", "aten::geqrf", "aten::triangular_solve",
                                           "aten::cholesky", "aten::cholesky_inverse", "aten::_cholesky_solve_helper",
                                           "aten::lstsq", "aten::_lu_with_info", "aten::histogramdd"};
  static const std::set<std::string> kernels{"aten::linalg_vector_norm", "aten::linalg_cross"}; // PyTorch's own
  if (kernels.count(name)) return false;
  for (const char *beginning : {"aten::linalg_", "aten::_linalg_", "aten::_fft_", "aten::unique", "aten::_unique"})
    if (starts_with(name, beginning)) return true;
  return names.count(name) || op.hasTag(at::Tag::dynamic_output_shape);
}

// Operators of operators: their numbers come with the outer one's. So the host may read what the outer one was given,
// and nothing else: where it tries, the outer one is computed at once.
thread_local const std::vector<uint64_t> *given_ranges = nullptr;

class Inner {
public:
  explicit Inner(const std::vector<uint64_t> &ranges) {
    given_ranges = &ranges;
    simulated_cuda_limit_reads(ranges.data(), ranges.size() / 2);
  }
  ~Inner() { end(); }
  // Whether the host wanted to read what is not there.
  bool end() {
    if (given_ranges == nullptr) return false;
    given_ranges = nullptr;
    return simulated_cuda_limit_reads(nullptr, 0);
  }
};

std::vector<uint64_t> ranges_of(const std::vector<Held> &arguments) {
  std::vector<uint64_t> accesses, ranges{0, 0}; // never empty: its address tells that there is a limit
  for (const Held &held : arguments)
    for (const auto &placed : held.placed)
      if (placed) placed->add_access(accesses, false);
  for (size_t i = 0; i < accesses.size(); i += 3) ranges.insert(ranges.end(), {accesses[i], accesses[i + 1]});
  return ranges;
}

std::atomic<bool> attached{false};

void attach() {
  if (attached.exchange(true)) return;
  if (c10::cuda::CUDACachingAllocator::get()->name() != "native") return; // it has no such trace
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::CachingDeviceAllocator::TraceEntry &entry) {
    if (entry.action_ == c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED)
      simulated_cuda_given_back(reinterpret_cast<void *>(entry.addr_), entry.size_, entry.device_, entry.stream_);
  });
}

Tensor copied_to_device(const Tensor &tensor) {
  return tensor.defined() ? tensor.to(at::Device(at::kCUDA, c10::cuda::current_device())) : tensor;
}

// ---- the wrapper -------------------------------------------------------------------------------------------------

class Wrapped final : public c10::OperatorKernel {
public:
  Wrapped(const OperatorHandle &op, std::string name, bool numbers)
      : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)), name_(std::move(name)) {
    const auto &schema = op.schema();
    arguments_ = schema.arguments().size();
    plain_ = !numbers || is_view(schema) || is_about_metadata(name_);
    immediate_ = is_immediate(op, name_);
    copies_ = name_ == "aten::copy_";
    random_ = op.hasTag(at::Tag::nondeterministic_seeded) || own_computation(name_) != nullptr;
    for (size_t i = 0; i < schema.arguments().size(); ++i)
      if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) generator_argument_ = i;
    computable_ = own_computation(name_) != nullptr || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  }

  void operator()(const OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    attach();
    c10::cuda::OptionalCUDAGuard guard(device_of_arguments(*stack)); // as the generated code around each kernel does
    bool nested = given_ranges != nullptr;
    if (plain_ || (nested && !immediate_) || (copies_ && crosses(*stack))) return original_.callBoxed(op, keys, stack);
    if (immediate_) return at_once(op, stack);
    TORCH_CHECK_NOT_IMPLEMENTED(computable_, "the simulated CUDA device has no numbers for ", name_);
    auto job = std::make_unique<Job>(Job{op, name_.c_str(), {}, {}, random_ ? state_before(*stack) : RandomState{}, {}});
    if (random_) job->generator_argument = generator_argument_;
    std::vector<IValue> inputs(stack->end() - static_cast<long>(arguments_), stack->end());
    for (const IValue &input : inputs) job->arguments.push_back(hold(input));
    if (!run_host_code(op, keys, stack, ranges_of(job->arguments))) {
      stack->insert(stack->end(), inputs.begin(), inputs.end());
      return at_once(op, stack);
    }
    put_on_stream(op, std::move(job), inputs, *stack);
  }

private:
  std::optional<c10::Device> device_of_arguments(const Stack &stack) const {
    std::optional<c10::Device> wanted;
    for (size_t i = stack.size() - arguments_; i < stack.size(); ++i) {
      const IValue &value = stack[i];
      if (value.isTensor() && on_device(value.toTensor())) return value.toTensor().device();
      if (value.isTensorList())
        for (const Tensor &tensor : value.toTensorVector())
          if (on_device(tensor)) return tensor.device();
      if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) wanted = value.toDevice();
    }
    return wanted;
  }

  static bool crosses(const Stack &stack) {
    const Tensor &there = stack[stack.size() - 3].toTensor(), &here = stack[stack.size() - 2].toTensor();
    return !on_device(there) || !on_device(here) || there.device() != here.device();
  }

  // False: it needs numbers that its inner kernels would have computed. The stack is without the arguments then.
  bool run_host_code(const OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack, const std::vector<uint64_t> &ranges) const {
    size_t below = stack->size() - arguments_;
    Inner inner(ranges);
    try {
      original_.callBoxed(op, keys, stack);
    } catch (const std::exception &) {
      if (!inner.end()) throw;
      stack->resize(below);
      return false;
    }
    if (!inner.end()) return true;
    stack->resize(below); // it went on without
    return false;
  }

  void put_on_stream(const OperatorHandle &op, std::unique_ptr<Job> job, const std::vector<IValue> &inputs, const Stack &stack) const {
    const auto &schema = op.schema();
    std::vector<uint64_t> accesses;
    for (size_t i = 0; i < inputs.size(); ++i) {
      bool written = writes(schema.arguments()[i]);
      if (written) job->arguments[i] = hold(inputs[i]); // an output that was given may have been resized by now
      for (const auto &placed : job->arguments[i].placed)
        if (placed) placed->add_access(accesses, written);
    }
    for (int64_t *read : {job->random.seed_of_replay, job->random.offset_of_replay})
      if (auto begin = reinterpret_cast<uint64_t>(read)) accesses.insert(accesses.end(), {begin, begin + sizeof *read, false});
    size_t returned = schema.returns().size();
    bool fills_arguments = own_computation(name_) == nullptr;
    for (size_t i = 0; i < returned; ++i) {
      bool is_argument = schema.returns()[i].alias_info() != nullptr;
      Held held = is_argument && fills_arguments ? Held{} : hold(stack[stack.size() - returned + i]);
      for (const auto &placed : held.placed)
        if (placed) placed->add_access(accesses, true);
      job->results.push_back(std::move(held));
    }
    simulated_cuda_run(c10::cuda::getCurrentCUDAStream().stream(), name_.c_str(), run, release, job.release(),
                       accesses.data(), accesses.size() / 3);
  }

  at::Generator generator_of(const Stack &stack) const {
    if (generator_argument_) {
      const IValue &given = stack[stack.size() - arguments_ + *generator_argument_];
      if (!given.isNone()) return given.toGenerator();
    }
    return at::globalContext().defaultGenerator(at::Device(at::kCUDA, c10::cuda::current_device()));
  }

  RandomState state_before(const Stack &stack) const {
    at::Generator generator = generator_of(stack);
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None)
      return RandomState{generator.current_seed(), generator.get_offset()};
    at::PhiloxCudaState state = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(0);
    return RandomState{0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
  }

  RandomState draw(const Stack &stack) const {
    RandomState state = state_before(stack);
    at::Generator generator = generator_of(stack);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_offset(state.offset + 4);
    return state;
  }

  // The host waits for the stream, the CPU computes with copies of the device's tensors, and what it wrote or returns is
  // copied to the device. Outputs that are given may so be resized.
  void at_once(const OperatorHandle &op, Stack *stack) const {
    TORCH_CHECK_NOT_IMPLEMENTED(computable_, "the simulated CUDA device has no numbers for ", name_);
    const auto &schema = op.schema();
    std::vector<IValue> given(stack->end() - static_cast<long>(arguments_), stack->end()), arguments;
    std::vector<Held> held;
    for (const IValue &value : given) held.push_back(hold(value));
    if (given_ranges != nullptr) check_given(ranges_of(held));
    RandomState random = random_ ? draw(*stack) : RandomState{};
    note_reads(held);
    cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()); // by itself: PyTorch tells of waits of its own alone
    for (size_t i = 0; i < arguments_; ++i)
      arguments.push_back(writes(schema.arguments()[i]) ? cloned(on_host(held[i])) : on_host(held[i]));
    auto computed = compute(op, name_, arguments, random, random_ ? generator_argument_ : std::nullopt);
    torch::jit::drop(*stack, arguments_);
    size_t written = 0; // outputs are returned in the order in which they are given
    for (size_t i = 0; i < computed.size(); ++i) {
      const c10::AliasInfo *alias = schema.returns()[i].alias_info();
      if (alias == nullptr) {
        stack->push_back(on_device_again(computed[i]));
        continue;
      }
      while (!writes(schema.arguments()[written])) ++written;
      give(given[written], computed[i]);
      stack->push_back(given[written++]);
    }
    if (computed.empty() || schema.returns()[0].alias_info() == nullptr)
      for (size_t i = 0; i < arguments_; ++i)
        if (writes(schema.arguments()[i])) give(given[i], arguments[i]);
  }

  void note_reads(const std::vector<Held> &held) const {
    std::vector<uint64_t> accesses;
    for (const Held &one : held)
      for (const auto &placed : one.placed)
        if (placed) placed->add_access(accesses, false);
    simulated_cuda_run(c10::cuda::getCurrentCUDAStream().stream(), name_.c_str(), nullptr, nullptr, nullptr,
                       accesses.data(), accesses.size() / 3);
  }

  // What an inner operator is to read at once must be there.
  static void check_given(const std::vector<uint64_t> &wanted) {
    for (size_t i = 2; i < wanted.size(); i += 2)
      TORCH_CHECK_NOT_IMPLEMENTED(simulated_cuda_may_read(wanted[i], wanted[i + 1]), "the numbers are not there yet");
  }

  static IValue cloned(const IValue &value) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(value.toTensor().clone()) : value;
    std::vector<Tensor> tensors;
    for (const Tensor &tensor : value.toTensorVector()) tensors.push_back(tensor.clone());
    return c10::List<Tensor>(tensors);
  }

  static IValue on_device_again(const IValue &value) {
    if (value.isTensor()) return copied_to_device(value.toTensor().clone());
    if (!value.isTensorList()) return value;
    std::vector<Tensor> tensors;
    for (const Tensor &tensor : value.toTensorVector()) tensors.push_back(copied_to_device(tensor));
    return c10::List<Tensor>(tensors);
  }

  static void give(const IValue &given, const IValue &computed) {
    if (given.isTensorList()) {
      auto targets = given.toTensorVector(), sources = computed.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i]);
    } else if (Tensor target = given.toTensor(); target.defined()) {
      Tensor source = computed.toTensor().resolve_conj().resolve_neg();
      if (target.sizes() != source.sizes()) target.resize_(source.sizes());
      target.copy_(source);
    }
  }

  c10::SafeKernelFunction original_;
  std::string name_;
  size_t arguments_ = 0;
  bool plain_ = false, immediate_ = false, copies_ = false, random_ = false, computable_ = false;
  std::optional<size_t> generator_argument_;
};

std::string full_name(const c10::OperatorName &name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Kernels for tensors that are not dense: not simulated, apart from those that only take tensors apart and put together.
bool is_about_parts(const std::string &name) {
  static const std::set<std::string> names{
      "aten::_indices", "aten::_values", "aten::indices", "aten::values", "aten::_nnz", "aten::_dimI", "aten::_dimV",
      "aten::sparse_dim", "aten::dense_dim", "aten::is_coalesced", "aten::_coalesced_", "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors", "aten::copy_sparse_to_sparse_", "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_", "aten::crow_indices", "aten::col_indices", "aten::ccol_indices", "aten::row_indices",
      "aten::clone", "aten::copy_", "aten::zero_", "aten::detach", "aten::is_pinned", "aten::_pin_memory", "aten::record_stream"};
  return names.count(name) || starts_with(name, "aten::empty") || starts_with(name, "aten::resize_as_sparse") ||
         starts_with(name, "aten::_nested") || starts_with(name, "aten::_sparse_compressed");
}

class Refused final : public c10::OperatorKernel {
public:
  explicit Refused(std::string name) : name_(std::move(name)) {}
  void operator()(const OperatorHandle &, c10::DispatchKeySet, Stack *) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulated CUDA device has no numbers for ", name_, " of tensors that are not dense");
  }

private:
  std::string name_;
};

void refuse_what_is_not_dense() {
  auto &dispatcher = c10::Dispatcher::singleton();
  for (auto key : {c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCUDA}) {
    auto &library = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    for (const auto &name : dispatcher.getAllOpNames()) {
      if (!starts_with(name.name, "aten::") || is_about_parts(name.name)) continue;
      auto op = dispatcher.findSchema(name);
      if (!op || !op->hasKernelForDispatchKey(key)) continue;
      library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Refused>(name.name)));
    }
  }
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning &) override {} // that kernels are replaced is the point
};

void install() {
  at::globalContext().setUserEnabledCuDNN(false);
  bool numbers = setting("SIMULATED_CUDA_NUMBERS");
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto &dispatcher = c10::Dispatcher::singleton();
  static auto &library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto &name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) continue;
    auto op = dispatcher.findSchema(name);
    bool copies = name.name == "aten::copy_" && name.overload_name.empty();
    bool launches = full_name(name) == "aten::mode.values"; // registered for all devices, and has kernels of its own
    bool empty = starts_with(name.name, "aten::empty");
    if (!op || !(copies || launches || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) || !(numbers || empty)) continue;
    if (is_view(op->schema())) continue;
    library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Wrapped>(*op, name.name, numbers)));
  }
  if (numbers) refuse_what_is_not_dense();
}

const bool installed = (install(), true);

} // namespace
} // namespace simulated_kernels
