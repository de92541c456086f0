// Takes the place of NVIDIA's management library (NVML): a node that has one GPU, whatever CUDA says of it.
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API int nvmlInitWithFlags(unsigned) { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = device, 0; }
API int nvmlSystemGetDriverVersion(char* version, unsigned) { return strcpy(version, "550.54.15"), 0; }
API const char* nvmlErrorString(int) { return "not pretended"; }
