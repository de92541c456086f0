// Enough of CUDA to run discriminator_tail.cu on a CPU, so that its values can be tested without a GPU: a warp is 32
// threads that meet at a barrier in every shuffle; warps and blocks run one after another.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

struct Index {
  int x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
inline std::barrier<> cuda_warp_barrier(32);
inline float cuda_warp_words[32];

using cudaStream_t = void*;
inline int cudaGetLastError() { return 0; }

#define __device__ inline
#define __global__ inline
#define alignas(bytes)

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __shfl_xor_sync(uint32_t, float value, int other) {
  const int lane = threadIdx.x % 32;
  cuda_warp_words[lane] = value;
  cuda_warp_barrier.arrive_and_wait();
  const float received = cuda_warp_words[lane ^ other];
  cuda_warp_barrier.arrive_and_wait();
  return received;
}

template <typename Body>
void cuda_on_cpu(int blocks, int threads, Body body) {
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([=] {
      for (int block = 0; block < blocks; ++block) {
        for (int warp = 0; warp < threads / 32; ++warp) {
          threadIdx = {warp * 32 + lane}, blockIdx = {block}, blockDim = {threads}, gridDim = {blocks};
          body();
          cuda_warp_barrier.arrive_and_wait();
        }
      }
    });
  }
  for (auto& lane : lanes) lane.join();
}

#define ELECTRA_UNPACK(...) __VA_ARGS__
#define ELECTRA_LAUNCH(kernel, blocks, threads, stream, ...) \
  (void)(stream), cuda_on_cpu(blocks, threads, [=] { ELECTRA_UNPACK kernel(__VA_ARGS__); })
