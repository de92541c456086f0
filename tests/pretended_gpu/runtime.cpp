// Takes the place of CUDA's runtime library: a pretended H200 whose kernels do nothing and are counted by name.
//
// Device memory is host memory that takes pages only when it is touched. Copies are made if they are short or begin or
// end on the host, so that numbers which the host writes and reads arrive; kernels leave memory as it is, mostly zero.
// All work is done when it is launched, so events and streams are placeholders.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "counters.h"

#define API extern "C" __attribute__((visibility("default")))
#define DOES_NOTHING(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

namespace {

constexpr size_t kMemory = 150'000'000'000;
constexpr size_t kUsedByContext = 600'000'000;
constexpr size_t kPage = 1 << 21;           // device addresses are multiples of it, as CUDA's are
constexpr size_t kLargestRealCopy = 1 << 20;  // between two places on the device

struct Count {
  long events = 0;
  size_t bytes = 0;
};

// Never destroyed, because libraries call until the process has ended.
struct State {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, Count> counts;
  std::map<const void*, std::string> kernels;  // host address of a kernel -> its mangled name
  std::map<uintptr_t, size_t> device, pinned;  // begin -> bytes
  size_t used = 0;                             // device memory
};
State& state() {
  static State* all = new State;
  return *all;
}

bool holds(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  auto range = std::prev(next);
  return address < range->first + range->second;
}

cudaError_t reserve(void** pointer, size_t bytes, bool on_device) {
  size_t size = (bytes + kPage) / kPage * kPage;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (on_device && state().used + size > kMemory - kUsedByContext) return cudaErrorMemoryAllocation;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  (on_device ? state().device : state().pinned)[begin] = size;
  if (on_device) state().used += size;
  *pointer = reinterpret_cast<void*>(begin);
  return cudaSuccess;
}

cudaError_t release(void* pointer, bool on_device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& ranges = on_device ? state().device : state().pinned;
  auto range = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (range == ranges.end()) return cudaSuccess;
  if (on_device) state().used -= range->second;
  munmap(pointer, range->second);
  ranges.erase(range);
  return cudaSuccess;
}

void copy(void* to, const void* from, size_t bytes) {
  bool from_device, to_device, from_pinned;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    from_device = holds(state().device, from);
    to_device = holds(state().device, to);
    from_pinned = holds(state().pinned, from);
  }
  const char* name = "within the device";
  if (!from_device) name = from_pinned ? "to the device" : "to the device, pageable";
  if (from_device && !to_device) name = "to the host";
  pretended_count("copy", name, bytes);
  bool within = from_device && to_device;
  if (bytes <= kLargestRealCopy || !within) memmove(to, from, bytes);
}

void fill(void* pointer, int value, size_t bytes) {
  pretended_count("fill", "memset", bytes);
  if (bytes <= kLargestRealCopy) memset(pointer, value, bytes);
}

void launch(const void* kernel) {
  std::string mangled;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto found = state().kernels.find(kernel);
    mangled = found == state().kernels.end() ? "unknown" : found->second;
  }
  int status = 0;
  char* name = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  pretended_count("launch", name ? std::string(name).substr(0, 240).c_str() : mangled.c_str(), 0);
  free(name);
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
  *handle = reinterpret_cast<Handle>(malloc(64));
  return cudaSuccess;
}

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
  }
}

}  // namespace

// Counts.

API void pretended_count(const char* kind, const char* name, size_t bytes) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Count& count = state().counts[{kind, name}];
  count.events++;
  count.bytes += bytes;
}

API void pretended_write(const char* path) {
  std::lock_guard<std::mutex> lock(state().mutex);
  FILE* file = fopen(path, "w");
  for (const auto& [key, count] : state().counts)
    fprintf(file, "%s\t%s\t%ld\t%zu\n", key.first.c_str(), key.second.c_str(), count.events, count.bytes);
  fclose(file);
  state().counts.clear();
}

// The device.

// With PRETENDED_DRIVER=12040 the driver is of CUDA 12.4, too old for this build of torch.
int driver_version() { return getenv("PRETENDED_DRIVER") ? atoi(getenv("PRETENDED_DRIVER")) : CUDART_VERSION; }
API cudaError_t cudaGetDeviceCount(int* count) {
  if (driver_version() < CUDART_VERSION) return *count = 0, cudaErrorInsufficientDriver;
  return *count = 1, cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
API cudaError_t cudaDriverGetVersion(int* version) { return *version = driver_version(), cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = attribute(which), cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  memset(device, 0, sizeof *device);
  strcpy(device->name, "NVIDIA H200");
  device->totalGlobalMem = kMemory;
  device->major = attribute(cudaDevAttrComputeCapabilityMajor);
  device->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  device->warpSize = attribute(cudaDevAttrWarpSize);
  device->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  device->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  device->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  device->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device->regsPerBlock = device->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  device->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  device->maxGridSize[1] = device->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimY);
  device->textureAlignment = 512;
  device->concurrentKernels = device->unifiedAddressing = device->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return snprintf(text, size, "0000:01:00.0"), cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = nullptr, cudaSuccess; }
API const char* cudaGetErrorName(cudaError_t) { return "error of the pretended GPU"; }
API const char* cudaGetErrorString(cudaError_t) { return "error of the pretended GPU"; }
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaPeekAtLastError)
DOES_NOTHING(cudaProfilerStart)
DOES_NOTHING(cudaProfilerStop)

// Memory and copies.

API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return reserve(pointer, bytes, true); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return reserve(pointer, bytes, false); }
API cudaError_t cudaFree(void* pointer) { return release(pointer, true); }
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer, false); }
DOES_NOTHING(cudaHostRegister, void*, size_t, unsigned)
DOES_NOTHING(cudaHostUnregister, void*)
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *total = kMemory;
  *free_bytes = kMemory - kUsedByContext - state().used;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> lock(state().mutex);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (holds(state().device, pointer)) attributes->type = cudaMemoryTypeDevice;
  if (holds(state().pinned, pointer)) attributes->type = cudaMemoryTypeHost;
  if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = const_cast<void*>(pointer);
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes);
  pretended_count("wait", "copy", 0);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes), cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) { return fill(pointer, value, bytes), cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  return fill(pointer, value, bytes), cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[4096];
  return *address = symbol, cudaSuccess;
}

// Streams and events.

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_handle(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_handle(stream); }
DOES_NOTHING(cudaStreamDestroy, cudaStream_t)
DOES_NOTHING(cudaStreamQuery, cudaStream_t)
DOES_NOTHING(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*)
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  return function(data), cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_handle(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return new_handle(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
DOES_NOTHING(cudaEventRecord, cudaEvent_t, cudaStream_t)
DOES_NOTHING(cudaEventRecordWithFlags, cudaEvent_t, cudaStream_t, unsigned)
DOES_NOTHING(cudaEventQuery, cudaEvent_t)
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return pretended_count("wait", "stream", 0), cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return pretended_count("wait", "event", 0), cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { return pretended_count("wait", "device", 0), cudaSuccess; }

// Kernels. A library registers its kernels when it is loaded.

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[16];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().kernels[kernel] = name;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel), cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel), cudaSuccess;
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel), cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return launch(kernel), cudaSuccess;
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
DOES_NOTHING(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
  return *blocks = 2, cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
