#include "cuda_workspace.h"

#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ortolan {
namespace {

constexpr size_t kSmallestBytes = size_t{1} << 20;
constexpr size_t kLargeBytes = size_t{64} << 20;
constexpr size_t kCounterBytes = cuda::kCounters * sizeof(unsigned);

// Counters, and scratch memory behind them.
struct Buffer {
  unsigned char* data;
  size_t bytes;              // of the scratch memory
  bool is_captured = false;  // a graph may point into it

  static cudaError_t allocate(cudaStream_t stream, size_t bytes, Buffer& buffer) {
    void* data = nullptr;
    cudaError_t error = cudaMallocAsync(&data, kCounterBytes + bytes, stream);
    if (error != cudaSuccess) return error;
    error = cudaMemsetAsync(data, 0, kCounterBytes, stream);
    if (error != cudaSuccess) cudaFreeAsync(data, stream);
    buffer = {static_cast<unsigned char*>(data), bytes};
    return error;
  }
};

// What is allocated for a request: few sizes, so that buffers seldom grow, but no more than kLargeBytes in
// vain.
size_t allocated_bytes(size_t bytes) {
  if (bytes <= kLargeBytes) return std::bit_ceil(bytes < kSmallestBytes ? kSmallestBytes : bytes);
  return (bytes + kLargeBytes - 1) / kLargeBytes * kLargeBytes;
}

// Whether work put on the stream now goes into a graph.
cudaError_t is_captured(cudaStream_t stream, bool& captured) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  captured = status != cudaStreamCaptureStatusNone;
  return error;
}

class Workspaces {
 public:
  ~Workspaces() {
    // Memory of cudaMallocAsync is freed at once, though work that uses it may be under way. Errors are
    // dropped: at the end of the process the driver may be gone already.
    int previous = 0;
    cudaGetDevice(&previous);
    for (const auto& [key, buffers] : buffers_) {
      cudaSetDevice(key.first);
      cudaDeviceSynchronize();
      for (const Buffer& buffer : buffers) cudaFree(buffer.data);
    }
    cudaSetDevice(previous);
    cudaGetLastError();  // the thread forgets what is dropped
  }

  cudaError_t get(cuda::Launch& launch) {
    const cudaStream_t stream = launch.stream;
    const size_t bytes = launch.workspace_bytes;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Buffer>& buffers = buffers_[{device, stream}];
    const bool is_enough = !buffers.empty() && buffers.back().bytes >= bytes;
    if (!is_enough || !buffers.back().is_captured) {
      bool captured = false;
      error = is_captured(stream, captured);
      if (error == cudaSuccess && !is_enough)
        error = captured ? cudaErrorStreamCaptureUnsupported : grow(buffers, stream, bytes);
      if (error != cudaSuccess) return error;
      buffers.back().is_captured = captured;
    }
    launch.counters = reinterpret_cast<unsigned*>(buffers.back().data);
    launch.workspace = buffers.back().data + kCounterBytes;
    return cudaSuccess;
  }

  cudaError_t cublas(cudaStream_t stream, cuda::Cublas** handle) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = handles_.find({device, stream});
    if (known != handles_.end()) {
      *handle = known->second.get();
      return cudaSuccess;
    }
    bool captured = false;
    error = is_captured(stream, captured);
    if (error != cudaSuccess || captured) return error;
    *handle = (handles_[{device, stream}] = cuda::Cublas::create()).get();
    return cudaSuccess;
  }

 private:
  using Key = std::pair<int, cudaStream_t>;  // device, stream

  // The last buffer goes first, in order with the work that uses it, so that both need not fit.
  static cudaError_t grow(std::vector<Buffer>& buffers, cudaStream_t stream, size_t bytes) {
    if (!buffers.empty() && !buffers.back().is_captured) {
      const cudaError_t error = cudaFreeAsync(buffers.back().data, stream);
      if (error != cudaSuccess) return error;
      buffers.pop_back();
    }
    Buffer grown;
    const cudaError_t error = Buffer::allocate(stream, allocated_bytes(bytes), grown);
    if (error == cudaSuccess) buffers.push_back(grown);
    return error;
  }

  std::mutex mutex_;
  std::map<Key, std::vector<Buffer>> buffers_;
  std::map<Key, std::unique_ptr<cuda::Cublas>> handles_;
};

std::mutex current_mutex;
std::weak_ptr<Workspaces> current;

}  // namespace

std::shared_ptr<void> acquire_workspaces() {
  const std::lock_guard<std::mutex> lock(current_mutex);
  std::shared_ptr<Workspaces> workspaces = current.lock();
  if (!workspaces) current = workspaces = std::make_shared<Workspaces>();
  return workspaces;
}

cudaError_t stream_workspace(cuda::Launch& launch) {
  if (launch.workspace_bytes == 0) return cudaSuccess;
  return std::static_pointer_cast<Workspaces>(acquire_workspaces())->get(launch);
}

cudaError_t stream_cublas(cudaStream_t stream, cuda::Cublas** cublas) {
  *cublas = nullptr;
  return std::static_pointer_cast<Workspaces>(acquire_workspaces())->cublas(stream, cublas);
}

}  // namespace ortolan
