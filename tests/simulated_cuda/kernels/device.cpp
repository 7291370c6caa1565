// The kernels of the simulated device. Each CUDA kernel of PyTorch is wrapped: its own host code runs as it is (so what
// it allocates, checks and launches is what a GPU would see), then the operator's CPU kernel is put on the current stream
// and fills the outputs when the stream gets there. Only addresses are kept until then, as on a GPU: an output that was
// let go of too early is overwritten, an input that has not arrived is read as it is.
#include "numbers.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>

extern "C" {
void simulated_cuda_run(void *stream, const char *name, void (*function)(void *), void *data, const uint64_t *accesses,
                        uint64_t count);
void *simulated_cuda_bytes_at(void *pointer);
void simulated_cuda_given_back(void *memory, uint64_t bytes, int device, void *stream);
void simulated_cuda_report(const char *mistake);
}

namespace simulated_kernels {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::Stack;

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
  std::vector<Held> arguments, results; // results: of those that are no arguments too
  RandomState random;
  std::optional<size_t> generator_argument;
};

void fill(const Held &result, const IValue &computed, const char *name) {
  std::vector<Tensor> found;
  if (computed.isTensor()) found.push_back(computed.toTensor());
  if (computed.isTensorList()) found = computed.toTensorVector();
  for (size_t i = 0; i < result.placed.size(); ++i) {
    if (!result.placed[i] || result.placed[i]->address == nullptr) continue;
    if (i >= found.size() || !found[i].defined() || found[i].numel() == 0) continue;
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

void run(void *data) {
  std::unique_ptr<Job> job(static_cast<Job *>(data));
  try {
    std::vector<IValue> arguments;
    for (const Held &held : job->arguments) arguments.push_back(on_host(held));
    auto computed = compute(job->op, job->name, std::move(arguments), job->random, job->generator_argument);
    for (size_t i = 0; i < job->results.size() && i < computed.size(); ++i) fill(job->results[i], computed[i], job->name);
  } catch (const std::exception &error) {
    simulated_cuda_report((std::string(job->name) + " failed on the device: " + error.what()).c_str());
  }
}

// ---- which operators are treated how ---------------------------------------------------------------------------

bool starts_with(const std::string &text, const char *beginning) { return text.rfind(beginning, 0) == 0; }

bool writes(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool is_view(const c10::FunctionSchema &schema) {
  for (const auto &argument : schema.arguments())
    if (argument.alias_info() && !argument.alias_info()->isWrite()) return true;
  return false;
}

// Nothing is computed: memory is taken, shapes and storages are set.
bool is_about_metadata(const std::string &name) {
  static const std::set<std::string> names{
      "aten::resize_", "aten::_resize_output_", "aten::resize_as_", "aten::record_stream", "aten::is_set_to", "aten::_fused_sdp_choice",
      "aten::_local_scalar_dense", "aten::_pin_memory", "aten::is_pinned", "aten::equal", "aten::_assert_async",
      "aten::_use_cudnn_ctc_loss", "aten::_cudnn_init_dropout_state"};
  return names.count(name) || starts_with(name, "aten::empty") || starts_with(name, "aten::set_") || starts_with(name, "aten::new_empty");
}

// The host needs the result, or the device's library is not simulated: computed at once, and copied to the device.
bool is_immediate(const OperatorHandle &op, const std::string &name) {
  static const std::set<std::string> names{"aten::_ctc_loss", "aten::lu_unpack", "aten::ormqr", "aten::geqrf", "aten::triangular_solve",
                                           "aten::cholesky", "aten::cholesky_inverse", "aten::_cholesky_solve_helper",
                                           "aten::lstsq", "aten::_lu_with_info", "aten::histogramdd"};
  for (const char *beginning : {"aten::linalg_", "aten::_linalg_", "aten::_fft_", "aten::unique", "aten::_unique"})
    if (starts_with(name, beginning)) return true;
  return names.count(name) || op.hasTag(at::Tag::dynamic_output_shape);
}

thread_local int depth = 0; // operators of operators: their numbers come with the outer one's
struct Inner {
  Inner() { ++depth; }
  ~Inner() { --depth; }
};

std::atomic<bool> attached{false};

void attach() {
  if (attached.exchange(true)) return;
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
    bool nested = depth > 0 && !immediate_;
    c10::OptionalDeviceGuard guard(device_of(op, *stack));
    if (plain_ || nested || (copies_ && crosses(*stack))) return original_.callBoxed(op, keys, stack);
    if (immediate_) return at_once(op, stack);
    const auto &schema = op.schema();
    size_t count = schema.arguments().size();
    TORCH_CHECK_NOT_IMPLEMENTED(computable_, "the simulated CUDA device has no numbers for ", name_);
    auto job = std::make_unique<Job>(Job{op, name_.c_str(), {}, {}, random_ ? state_before(*stack, count) : RandomState{}, {}});
    if (random_) job->generator_argument = generator_argument_;
    std::vector<uint64_t> accesses;
    for (size_t i = 0; i < count; ++i) {
      job->arguments.push_back(hold((*stack)[stack->size() - count + i]));
      bool written = writes(schema.arguments()[i]);
      for (const auto &placed : job->arguments.back().placed)
        if (placed && !written) placed->add_access(accesses, false);
    }
    std::vector<IValue> inputs(stack->end() - static_cast<long>(count), stack->end());
    {
      Inner inner;
      original_.callBoxed(op, keys, stack);
    }
    // An output that was given may have been resized by now.
    for (size_t i = 0; i < count; ++i)
      if (writes(schema.arguments()[i])) {
        job->arguments[i] = hold(inputs[i]);
        for (const auto &placed : job->arguments[i].placed)
          if (placed) placed->add_access(accesses, true);
      }
    size_t returned = schema.returns().size();
    for (size_t i = 0; i < returned; ++i) {
      bool is_argument = schema.returns()[i].alias_info() != nullptr;
      Held held = is_argument ? Held{} : hold((*stack)[stack->size() - returned + i]);
      for (const auto &placed : held.placed)
        if (placed) placed->add_access(accesses, true);
      job->results.push_back(std::move(held));
    }
    simulated_cuda_run(c10::cuda::getCurrentCUDAStream().stream(), name_.c_str(), run, job.release(), accesses.data(),
                       accesses.size() / 3);
  }

private:
  static bool crosses(const Stack &stack) {
    const Tensor &there = stack[stack.size() - 3].toTensor(), &here = stack[stack.size() - 2].toTensor();
    return !on_device(there) || !on_device(here) || there.device() != here.device();
  }

  // An operator runs on the device of its tensors, whichever is the current one.
  static std::optional<at::Device> device_of(const OperatorHandle &op, const Stack &stack) {
    for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i)
      if (stack[i].isTensor() && on_device(stack[i].toTensor())) return stack[i].toTensor().device();
    return std::nullopt;
  }

  RandomState state_before(const Stack &stack, size_t count) const {
    at::Generator generator;
    if (generator_argument_) {
      const IValue &given = stack[stack.size() - count + *generator_argument_];
      if (!given.isNone()) generator = given.toGenerator();
    }
    if (!generator.defined())
      generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, c10::cuda::current_device()));
    std::lock_guard<std::mutex> lock(generator.mutex());
    return RandomState{generator.current_seed(), generator.get_offset()};
  }

  void at_once(const OperatorHandle &op, Stack *stack) const {
    size_t count = op.schema().arguments().size();
    c10::cuda::getCurrentCUDAStream().synchronize();
    std::vector<IValue> arguments;
    for (size_t i = 0; i < count; ++i) {
      bool written = writes(op.schema().arguments()[i]);
      TORCH_CHECK_NOT_IMPLEMENTED(!written, "the simulated CUDA device has no numbers for ", name_);
      arguments.push_back(on_host(hold((*stack)[stack->size() - count + i])));
    }
    auto computed = compute(op, name_, std::move(arguments), RandomState{}, std::nullopt);
    torch::jit::drop(*stack, count);
    for (IValue &value : computed) {
      if (value.isTensor()) value = copied_to_device(value.toTensor().clone());
      stack->push_back(std::move(value));
    }
  }

  c10::SafeKernelFunction original_;
  std::string name_;
  bool plain_ = false, immediate_ = false, copies_ = false, random_ = false, computable_ = false;
  std::optional<size_t> generator_argument_;
};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning &) override {} // that kernels are replaced is the point
};

std::string full_name(const c10::OperatorName &name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

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
    bool empty = starts_with(name.name, "aten::empty");
    if (!op || !(copies || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) || !(numbers || empty)) continue;
    if (is_view(op->schema())) continue;
    library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Wrapped>(*op, name.name, numbers)));
  }
}

const bool installed = (install(), true);

} // namespace
} // namespace simulated_kernels
