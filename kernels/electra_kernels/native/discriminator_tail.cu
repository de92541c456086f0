// CUDA C++ version of the discriminator tail (see discriminator_tail.py): the same two passes without Triton.
//
// The interface is a plain C ABI over device pointers and a stream, loaded by ctypes. It needs no torch headers, so
// one library works with every version of torch. Each function returns a cudaError_t as int. Nothing is allocated and
// nothing waits for the device.
//
// Forward: one warp handles one token. Backward: a block handles every P-th token, and each thread keeps the parameter
// gradients of its own columns in registers; the caller adds the partial sums [P, H], in a fixed order.
// Inputs are read 16 bytes at a time where the width allows, and one element at a time otherwise.
//
// Shapes: T tokens, H hidden, P blocks of the backward pass.

#include <cuda_runtime.h>
#include <stdint.h>

#ifndef ELECTRA_LAUNCH  // tests define it to run the kernels on a CPU
#define ELECTRA_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace {

constexpr int kWarp = 32;
constexpr int kForwardThreads = 256;
constexpr int kMaxThreads = 1024;
constexpr int kMaxForwardBlocks = 4096;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;  // mask of the threads that take part in a warp's exchange
constexpr float kRootHalf = 0.70710678f;
constexpr float kDensityAt0 = 0.39894228f;  // of the normal distribution

// bfloat16 as its bits, without a header of CUDA.
struct bf16 {
  uint16_t bits;
};

// Convert to fp32, exactly.
__device__ float to_float(float x) { return x; }
__device__ float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Store fp32 in the precision of the output.
__device__ void round_to(float x, float* out) { *out = x; }
__device__ void round_to(float x, bf16* out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits = __float_as_uint(x);
  bits = x != x ? 0x7FC00000u : bits + 0x7FFFu + ((bits >> 16) & 1u);
  out->bits = static_cast<uint16_t>(bits >> 16);
}

// N elements that are read or written in one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// Return sigmoid(z) - label as one quotient over the common denominator 1 + e, with e = exp(-|z|). The plain
// difference would round to 0 for a token that is predicted correctly with confidence. The numerator is
// (1 - label) - label * e for z >= 0, and (1 - label) * e - label for z < 0.
__device__ float sigmoid_minus(float z, float label) {
  const float small = expf(-fabsf(z));
  const float numerator = z >= 0.0f ? fmaf(-label, small, 1.0f - label) : fmaf(1.0f - label, small, -label);
  return numerator / (1.0f + small);
}

// Return the cumulative normal distribution at a; gelu(a) = a * gelu_cdf(a).
__device__ float gelu_cdf(float a) { return fmaf(erff(a * kRootHalf), 0.5f, 0.5f); }

// Write logit and masked loss of each token: one warp a token, N neighbouring columns a thread. The logit is
// out_weight . gelu(dense + bias) + out_bias; the loss is its sigmoid cross-entropy times the mask.
template <typename T, int N>
__global__ void tail_forward(const T* dense, const float* bias, const float* out_weight, const float* out_bias,
                             const float* label, const float* mask, float* loss, float* logits, int64_t tokens,
                             int hidden) {
  const int lane = threadIdx.x % kWarp;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  for (int64_t t = warp; t < tokens; t += num_warps) {
    // Each thread adds its own columns.
    float sum = 0.0f;
    for (int h = lane * N; h < hidden; h += kWarp * N) {
      const auto x = *reinterpret_cast<const Pack<T, N>*>(dense + t * hidden + h);
      const auto b = *reinterpret_cast<const Pack<float, N>*>(bias + h);
      const auto w = *reinterpret_cast<const Pack<float, N>*>(out_weight + h);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float a = to_float(x.at[i]) + b.at[i];
        sum += a * gelu_cdf(a) * w.at[i];
      }
    }
    // Butterfly: after log2(kWarp) exchanges, every thread has the sum of the warp.
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) {
      const float z = sum + out_bias[0];
      logits[t] = z;
      loss[t] = (fmaxf(z, 0.0f) + log1pf(expf(-fabsf(z))) - label[t] * z) * mask[t];
    }
  }
}

// Write the gradient of the dense output, and row blockIdx.x of the partial sums of the parameters' gradients. Block p
// of P handles tokens p, p + P and so on; a thread handles N neighbouring columns of all of them, so it adds the
// gradients of its parameters in registers, without other threads.
template <typename T, int N>
__global__ void tail_backward(const T* dense, const float* bias, const float* out_weight, const float* label,
                              const float* mask, const float* logits, const float* upstream, T* grad_dense,
                              float* grad_bias, float* grad_out_weight, float* grad_out_bias, int64_t tokens,
                              int hidden) {
  for (int h = threadIdx.x * N; h < hidden; h += blockDim.x * N) {
    const auto b = *reinterpret_cast<const Pack<float, N>*>(bias + h);
    const auto w = *reinterpret_cast<const Pack<float, N>*>(out_weight + h);
    Pack<float, N> sum_b = {}, sum_w = {};
    float sum_out = 0.0f;
    for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
      const float grad_logit = sigmoid_minus(logits[t], label[t]) * (mask[t] * upstream[t]);
      const auto x = *reinterpret_cast<const Pack<T, N>*>(dense + t * hidden + h);
      Pack<T, N> grad;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float a = to_float(x.at[i]) + b.at[i];
        const float cdf = gelu_cdf(a);
        const float gelu_slope = cdf + a * kDensityAt0 * expf(-0.5f * a * a);
        const float grad_a = grad_logit * w.at[i] * gelu_slope;
        round_to(grad_a, &grad.at[i]);
        sum_b.at[i] += grad_a;
        sum_w.at[i] += grad_logit * a * cdf;
      }
      *reinterpret_cast<Pack<T, N>*>(grad_dense + t * hidden + h) = grad;
      sum_out += grad_logit;
    }
    const int64_t partial = static_cast<int64_t>(blockIdx.x) * hidden + h;
    *reinterpret_cast<Pack<float, N>*>(grad_bias + partial) = sum_b;
    *reinterpret_cast<Pack<float, N>*>(grad_out_weight + partial) = sum_w;
    if (h == 0) grad_out_bias[blockIdx.x] = sum_out;
  }
}

// Launch the forward kernel for element type T and N columns per access; return a cudaError_t.
template <typename T, int N>
int forward(const void* dense, const float* bias, const float* out_weight, const float* out_bias, const float* label,
            const float* mask, float* loss, float* logits, int64_t tokens, int hidden, void* stream) {
  constexpr int kTokensPerBlock = kForwardThreads / kWarp;
  const int64_t needed = (tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  const int blocks = static_cast<int>(needed < kMaxForwardBlocks ? needed : kMaxForwardBlocks);
  ELECTRA_LAUNCH((tail_forward<T, N>), blocks, kForwardThreads, static_cast<cudaStream_t>(stream),
                 static_cast<const T*>(dense), bias, out_weight, out_bias, label, mask, loss, logits, tokens, hidden);
  return static_cast<int>(cudaGetLastError());
}

// Launch the backward kernel for element type T and N columns per access; return a cudaError_t.
template <typename T, int N>
int backward(const void* dense, const float* bias, const float* out_weight, const float* label, const float* mask,
             const float* logits, const float* upstream, void* grad_dense, float* grad_bias, float* grad_out_weight,
             float* grad_out_bias, int64_t tokens, int hidden, int blocks, void* stream) {
  const int packs = (hidden + N - 1) / N;  // of N columns; one thread each, in whole warps
  const int threads = packs < kMaxThreads ? (packs + kWarp - 1) / kWarp * kWarp : kMaxThreads;
  ELECTRA_LAUNCH((tail_backward<T, N>), blocks, threads, static_cast<cudaStream_t>(stream),
                 static_cast<const T*>(dense), bias, out_weight, label, mask, logits, upstream,
                 static_cast<T*>(grad_dense), grad_bias, grad_out_weight, grad_out_bias, tokens, hidden);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

// Launch the forward pass; see tail_forward. With is_bf16, the dense output is bf16, otherwise fp32. All other arrays
// are fp32. tokens must be above 0, and every array aligned to 16 bytes.
extern "C" int electra_tail_forward(int is_bf16, const void* dense, const float* bias, const float* out_weight,
                                    const float* out_bias, const float* label, const float* mask, float* loss,
                                    float* logits, int64_t tokens, int hidden, void* stream) {
  // 16 bytes per access where rows of dense begin at multiples of 16 bytes.
  auto run = is_bf16 ? (hidden % 8 == 0 ? forward<bf16, 8> : forward<bf16, 1>)
                     : (hidden % 4 == 0 ? forward<float, 4> : forward<float, 1>);
  return run(dense, bias, out_weight, out_bias, label, mask, loss, logits, tokens, hidden, stream);
}

// Launch the backward pass; see tail_backward. grad_dense has the type of dense. grad_bias and grad_out_weight,
// [blocks, hidden], and grad_out_bias, [blocks], are partial sums that the caller adds over blocks.
extern "C" int electra_tail_backward(int is_bf16, const void* dense, const float* bias, const float* out_weight,
                                     const float* label, const float* mask, const float* logits,
                                     const float* upstream, void* grad_dense, float* grad_bias,
                                     float* grad_out_weight, float* grad_out_bias, int64_t tokens, int hidden,
                                     int blocks, void* stream) {
  auto run = is_bf16 ? (hidden % 8 == 0 ? backward<bf16, 8> : backward<bf16, 1>)
                     : (hidden % 4 == 0 ? backward<float, 4> : backward<float, 1>);
  return run(dense, bias, out_weight, label, mask, logits, upstream, grad_dense, grad_bias, grad_out_weight,
             grad_out_bias, tokens, hidden, blocks, stream);
}
