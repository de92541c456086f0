// Takes the place of CUDA's driver library, for Triton: kernels are loaded and counted, and nothing runs.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))
#define DOES_NOTHING(name, ...) \
  API CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

namespace {

struct Kernel {
  char name[200];
};

// The counts are in the pretended runtime, which is loaded first.
CUresult launch(CUfunction kernel) {
  using Count = void (*)(const char*, const char*, size_t);
  static auto count = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "pretended_count"));
  if (count) count("launch", reinterpret_cast<Kernel*>(kernel)->name, 0);
  return CUDA_SUCCESS;
}

int attribute(CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3201000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 6144;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    default: return 0;
  }
}

CUcontext context() { return reinterpret_cast<CUcontext>(1); }

}  // namespace

DOES_NOTHING(cuInit, unsigned)
API CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  return *value = attribute(which), CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* current) { return *current = context(), CUDA_SUCCESS; }
DOES_NOTHING(cuCtxSetCurrent, CUcontext)
API CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* limit, CUlimit) { return *limit = 1 << 20, CUDA_SUCCESS; }
DOES_NOTHING(cuCtxSetLimit, CUlimit, size_t)
API CUresult cuStreamGetCtx(CUstream, CUcontext* current) { return *current = context(), CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* current, CUdevice) { return *current = context(), CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  return *active = 1, CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult, const char** text) { return *text = "error of the pretended GPU", CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult, const char** text) { return *text = "error of the pretended GPU", CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = static_cast<CUmodule>(malloc(16)), CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* module, const char*) {
  return *module = static_cast<CUmodule>(malloc(16)), CUDA_SUCCESS;
}
DOES_NOTHING(cuModuleUnload, CUmodule)
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  auto* kernel = static_cast<Kernel*>(calloc(1, sizeof(Kernel)));
  snprintf(kernel->name, sizeof kernel->name, "triton %s", name);
  return *function = reinterpret_cast<CUfunction>(kernel), CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
DOES_NOTHING(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
DOES_NOTHING(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  return memcpy(value, &pointer, sizeof pointer), CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream, void**, void**) {
  return launch(kernel);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction kernel, void**, void**) { return launch(kernel); }
API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  return *clusters = 1, CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  return *blocks = 2, CUDA_SUCCESS;
}
