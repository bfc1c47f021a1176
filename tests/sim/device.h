// A simulated accelerator, `sim`: what its three parts share.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 2;
// Fewer, if SIM_VISIBLE_DEVICES says so, as CUDA_VISIBLE_DEVICES hides some.
int num_devices();

using StreamKey = std::pair<int, c10::StreamId>;  // device, stream
using Clock = std::map<StreamKey, int64_t>;       // of each stream: how much of its work is known to be done

// Guards everything below. Never held while the listener is called, which takes Python's lock.
extern std::recursive_mutex lock;
using Guarded = std::lock_guard<std::recursive_mutex>;

// Calls Python's listener: what the host waits for, or did wrong. Of an event, `until` is the number
// of kernels that had been queued as it was recorded.
void report(const std::string& kind, const std::string& what, int64_t until = 0);

// Streams.
StreamKey current_stream(int device);
int current_device();
int index_of(c10::Device device);
int64_t num_kernels();
// Begins a piece of work on a stream: copies to the device that stand before it in its stream are made.
void queue_work(StreamKey stream);
// Puts a copy off until the host or another stream waits for the work that was queued last.
void put_off(StreamKey stream, bool to_device, std::function<void()> copy);
void host_waits_for(StreamKey stream);
// Queues a kernel that takes so long: the host waits for it where it waits for its stream.
void sleep(StreamKey stream, std::chrono::nanoseconds duration);
// Ends all of them.
void wake();
size_t num_copies_put_off();

// Memory.
c10::DeviceAllocator& allocator();
bool is_pinned(const void* data);
// Notes that the work which is queued next on this stream uses the tensor.
void use(const at::Tensor& tensor, StreamKey stream);
void resize(const c10::Storage& storage, size_t num_bytes);
size_t num_blocks();

// Random numbers.
at::Generator& default_generator(int device);
at::Generator& host_generator(const at::Generator& generator);

// Kernels: tensors of the host over the memory of tensors of the device, for one piece of work; they
// are made before it is queued.
struct HostView {
  at::Tensor host(const at::Tensor& tensor);
  at::Tensor device(const at::Tensor& tensor, int index);
  void write_back_resized();

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // the device's, the host's
};
bool is_sim(const at::Tensor& tensor);
void register_kernels();
}  // namespace sim
