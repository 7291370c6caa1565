// Settings from the environment, and small helpers.
#include "core.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace simulated {

thread_local int current_device = 0;
thread_local int last_error = 0;

namespace {
double number(const char *name, double otherwise) {
  const char *text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char *end = nullptr;
  double value = std::strtod(text, &end);
  if (*end != 0 || value < 0) {
    std::fprintf(stderr, "simulated CUDA: %s='%s' is not a number\n", name, text);
    std::abort();
  }
  return value;
}

// As the driver reads it: numbers of devices, up to the first that is none.
int visible(int devices) {
  const char *text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return devices;
  int found = 0;
  for (char *end = nullptr; *text != 0; text = *end == ',' ? end + 1 : end) {
    long device = std::strtol(text, &end, 10);
    if (end == text || (*end != 0 && *end != ',') || device < 0 || device >= devices) break;
    ++found;
  }
  return found;
}
} // namespace

const Settings &settings() {
  static const Settings read{
      visible(static_cast<int>(number("SIMULATED_CUDA_DEVICES", 1))),
      static_cast<uint64_t>(number("SIMULATED_CUDA_MEMORY_MIB", 4096)) << 20,
      number("SIMULATED_CUDA_KERNEL_US", 10),
      number("SIMULATED_CUDA_COPY_GB_PER_S", 8) * 1e3,
      number("SIMULATED_CUDA_ON_DEVICE_GB_PER_S", 400) * 1e3,
      number("SIMULATED_CUDA_POISON", 0) != 0,
      number("SIMULATED_CUDA_INTEGRATED", 0) != 0,
  };
  return read;
}

void merge(Clock &into, const Clock &other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i)
    if (into[i] < other[i]) into[i] = other[i];
}

} // namespace simulated
