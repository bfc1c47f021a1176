// The simulated device itself: memory, streams, events and random generators.
//
// All kernels run at once. What is put off are copies between pinned memory and the device: they
// are made when the host, or a stream, waits for them, and until then their targets hold NaN.
// Memory is NaN too when it is allocated and when it is freed.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>

namespace sim {
std::recursive_mutex lock;

namespace {
constexpr size_t kMemory = size_t{1} << 30;  // of a device, in bytes

struct Copy {
  int64_t number;  // of its piece of work in the stream
  bool to_device;
  std::function<void()> run;
};
struct Block {
  size_t size;
  StreamKey home;              // the stream that was current as it was allocated
  Clock uses;                  // the last piece of work of each stream that used it
  std::set<StreamKey> recorded;  // by record_stream
};
struct Event {
  StreamKey stream;
  Clock clock;
  int64_t num_kernels;
};

using Time = std::chrono::steady_clock;
struct Sleep {
  int64_t number;  // of its piece of work in the stream
  Time::time_point end;
};

std::map<StreamKey, std::deque<Copy>> copies;
std::map<StreamKey, Sleep> sleeps;  // the last one of each stream
std::map<StreamKey, Clock> clocks;
Clock host_clock;
std::map<const char*, Block> blocks;
std::map<StreamKey, std::vector<Block>> freed;  // since the last work of their home
std::map<const char*, size_t> pinned;
std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats;
std::array<size_t, kMaxDevices> limits{kMemory, kMemory};  // in bytes
int64_t kernels = 0;
std::atomic<int64_t> next_stream{1};
thread_local int device_now = 0;
thread_local std::map<int, c10::StreamId> streams_now;
py::object* listener = nullptr;

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, number] : from) into[stream] = std::max(into[stream], number);
}

// Makes the copies that stand in what a clock covers, under the lock. A stream that waits makes
// only those to the device: the host must wait for itself before it reads. The caller drops what
// was made after it has unlocked, since the end of a tensor may take Python's lock.
std::deque<Copy> make_copies(const Clock& until, bool for_host) {
  std::deque<Copy> made;
  for (auto& [stream, number] : until) {
    std::deque<Copy> left;
    for (auto& copy : copies[stream]) {
      const bool due = copy.number <= number && (for_host || copy.to_device);
      if (due) copy.run();
      (due ? made : left).push_back(std::move(copy));
    }
    copies[stream].swap(left);
  }
  return made;
}

bool is_asleep(const Clock& until) {
  Guarded guard(lock);
  for (auto& [stream, number] : until) {
    auto found = sleeps.find(stream);
    if (found != sleeps.end() && found->second.number <= number && Time::now() < found->second.end) return true;
  }
  return false;
}

void host_waits(const Clock& until) {
  while (is_asleep(until)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::deque<Copy> made;
  Guarded guard(lock);
  made = make_copies(until, true);
  merge(host_clock, until);
}

// The stream that a block returned to has new work, which may get the block: has it waited for the
// others that used it?
std::string unsafe_reuse(const Block& block) {
  for (auto& [stream, number] : block.uses) {
    if (stream == block.home || block.recorded.count(stream)) continue;
    if (clocks[block.home][stream] >= number) continue;
    return "stream " + std::to_string(block.home.second) + " may reuse memory that stream " +
        std::to_string(stream.second) + " still uses; record_stream is missing";
  }
  return "";
}

Clock clock_of(StreamKey stream) {
  Guarded guard(lock);
  return clocks[stream];
}
}  // namespace

void report(const std::string& kind, const std::string& what, int64_t until) {
  if (!listener || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (listener) (*listener)(kind, what, until);
}

// -- streams

int num_devices() {
  static const char* visible = std::getenv("SIM_VISIBLE_DEVICES");
  return visible ? std::atoi(visible) : kMaxDevices;
}
int current_device() { return device_now; }
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }
StreamKey current_stream(int device) { return {device, streams_now[device]}; }
int64_t num_kernels() { return kernels; }

void queue_work(StreamKey stream) {
  std::deque<Copy> made;
  std::string unsafe;
  {
    Guarded guard(lock);
    ++kernels;
    auto& clock = clocks[stream];
    const int64_t number = ++clock[stream];
    merge(clock, host_clock);
    made = make_copies({{stream, number}}, false);
    for (auto& block : freed[stream]) unsafe += unsafe_reuse(block);
    freed[stream].clear();
  }
  if (!unsafe.empty()) report("hazard", unsafe);
}

void put_off(StreamKey stream, bool to_device, std::function<void()> copy) {
  Guarded guard(lock);
  copies[stream].push_back({clocks[stream][stream], to_device, std::move(copy)});
}

void host_waits_for(StreamKey stream) { host_waits(clock_of(stream)); }

void sleep(StreamKey stream, std::chrono::nanoseconds duration) {
  queue_work(stream);
  Guarded guard(lock);
  auto& last = sleeps[stream];
  last = {clocks[stream][stream], std::max(last.end, Time::now()) + duration};
}

void wake() {
  Guarded guard(lock);
  sleeps.clear();
}

size_t num_copies_put_off() {
  Guarded guard(lock);
  size_t number = 0;
  for (auto& each : copies) number += each.second.size();
  return number;
}

// -- memory

namespace {
// Counts memory of a device that is taken, or given back by a negative size.
void count(int device, int64_t size) {
  for (auto* bytes : {&stats[device].allocated_bytes[0], &stats[device].reserved_bytes[0]}) {
    if (size > 0) bytes->increase(size);
    else bytes->decrease(-size);
  }
}

void free_device(void* data) {
  {
    Guarded guard(lock);
    auto found = blocks.find(static_cast<char*>(data));
    const auto& block = found->second;
    std::memset(data, 0xFF, block.size);
    count(block.home.first, -static_cast<int64_t>(block.size));
    freed[block.home].push_back(block);
    blocks.erase(found);
  }
  std::free(data);
}

void free_pinned(void* data) {
  {
    Guarded guard(lock);
    pinned.erase(static_cast<char*>(data));
  }
  std::free(data);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Guarded guard(lock);
    const size_t taken = stats[device_now].allocated_bytes[0].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, taken + size <= limits[device_now], "sim out of memory. Tried to allocate ", size, " bytes, ",
        taken, " of ", limits[device_now], " are taken");
    void* data = std::malloc(std::max<size_t>(size, 1));
    std::memset(data, 0xFF, size);  // not a number in every width
    blocks[static_cast<char*>(data)] = {size, current_stream(device_now), {}, {}};
    count(device_now, static_cast<int64_t>(size));
    return {data, data, &free_device, c10::Device(kSim, device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Guarded guard(lock);
    auto found = blocks.find(static_cast<char*>(data.get()));
    if (found != blocks.end()) found->second.recorded.insert({stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Guarded guard(lock);
    return stats.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    stats.at(device).allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override { stats.at(device).allocated_bytes[0].reset_peak(); }
} device_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(std::max<size_t>(size, 1));
    Guarded guard(lock);
    pinned[static_cast<char*>(data)] = std::max<size_t>(size, 1);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} pinned_memory;
}  // namespace

c10::DeviceAllocator& allocator() { return device_memory; }

bool is_pinned(const void* data) {
  Guarded guard(lock);
  const auto* byte = static_cast<const char*>(data);
  auto found = pinned.upper_bound(byte);
  return found != pinned.begin() && (--found, byte < found->first + found->second);
}

void use(const at::Tensor& tensor, StreamKey stream) {
  Guarded guard(lock);
  auto found = blocks.find(static_cast<const char*>(tensor.storage().data()));
  if (found != blocks.end()) found->second.uses[stream] = clocks[stream][stream] + 1;
}

void resize(const c10::Storage& storage, size_t size) {
  auto data = device_memory.allocate(size);
  std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

size_t num_blocks() {
  Guarded guard(lock);
  return blocks.size();
}

// -- what torch asks a device for

namespace {
struct StreamsAndEvents final : c10::impl::DeviceGuardImplInterface {
  static StreamKey key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    const c10::Device indexed(kSim, static_cast<c10::DeviceIndex>(index_of(device)));
    return c10::Stream(c10::Stream::UNSAFE, indexed, id);
  }
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::Device getDevice() const override { return {kSim, static_cast<c10::DeviceIndex>(device_now)}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, streams_now[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, next_stream++); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, next_stream++); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    streams_now[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Guarded guard(lock);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key(stream), clocks[key(stream)], kernels};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::deque<Copy> made;
    Guarded guard(lock);
    auto& clock = static_cast<Event*>(event)->clock;
    made = make_copies(clock, false);
    merge(clocks[key(stream)], clock);
  }
  // Time passes while a program polls, so the answer is yes, unless a kernel takes long.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto& clock = static_cast<Event*>(event)->clock;
    if (is_asleep(clock)) return false;
    host_waits(clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const auto* recorded = static_cast<Event*>(event);
    report("event", "an event's synchronize", recorded->num_kernels);
    host_waits(recorded->clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for(key(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    report("sync", "a stream's synchronize");
    host_waits_for(key(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    report("sync", "the device's synchronize");
    Clock all;
    {
      Guarded guard(lock);
      for (auto& [stream, clock] : clocks)
        if (stream.first == device) merge(all, clock);
    }
    host_waits(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, StreamsAndEvents);

// A generator of the host under the device's name.
struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();
  explicit Generator(int device)
      : GeneratorImpl({kSim, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->host = host.clone();
    return made;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_now : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_now : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, static_cast<c10::DeviceIndex>(device_now)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize(storage, size); }
} hooks;
}  // namespace

at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators.at(device < 0 ? device_now : device);
}

at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}
}  // namespace sim

void register_collectives(py::module& module);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&sim::hooks);
  sim::register_kernels();
  register_collectives(module);
  module.def("listen", [](py::object function) {
    delete std::exchange(sim::listener, function.is_none() ? nullptr : new py::object(std::move(function)));
  });
  module.attr("memory") = sim::kMemory;
  module.def("num_devices", &sim::num_devices);
  module.def("limit_memory", [](int device, size_t limit) { sim::limits.at(device) = limit; });
  module.def("sleep", [](int device, int64_t duration_ns) {
    sim::sleep(sim::current_stream(device), std::chrono::nanoseconds(duration_ns));
  });
  module.def("wake", &sim::wake);
  module.def("num_kernels", &sim::num_kernels);
  module.def("num_blocks", &sim::num_blocks);
  module.def("num_copies_put_off", &sim::num_copies_put_off);
  module.def("default_generator", [](int device) { return sim::default_generator(device); });
}
