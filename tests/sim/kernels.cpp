// The kernels of the simulated device: the CPU's, over the device's memory.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// -- one tensor over another's memory

namespace {
at::Tensor tensor_over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}
}  // namespace

at::Tensor HostView::host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "sim: tensors must be dense");
  for (auto& [device, host] : pairs)
    if (device.is_same(tensor)) return host;
  auto& storage = storages[tensor.storage().unsafeGetStorageImpl()];
  if (!storage) {
    c10::DataPtr data(tensor.storage().mutable_data(), c10::Device(c10::kCPU));
    storage = c10::Storage(
        c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
    use(tensor, current_stream(tensor.device().index()));
  }
  pairs.emplace_back(tensor, tensor_over(storage, tensor, c10::DispatchKey::CPU));
  return pairs.back().second;
}

// A result is one of the arguments, a view of one, or new.
at::Tensor HostView::device(const at::Tensor& tensor, int index) {
  for (auto& [device, host] : pairs)
    if (host.is_same(tensor)) return device;
  for (auto& [device, host] : pairs)
    if (host.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
      return tensor_over(device.storage(), tensor, c10::DispatchKey::PrivateUse1);
  c10::DeviceGuard guard({kSim, static_cast<c10::DeviceIndex>(index)});
  const auto size = tensor.storage().nbytes();
  auto data = allocator().allocate(size);
  std::memcpy(data.get(), tensor.storage().data(), size);
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data), &allocator(), true);
  return tensor_over(std::move(storage), tensor, c10::DispatchKey::PrivateUse1);
}

void HostView::write_back_resized() {
  for (auto& [device, host] : pairs) {
    if (host.sizes() == device.sizes() && host.storage().data() == device.storage().data()) continue;
    if (host.storage().nbytes() > device.storage().nbytes()) resize(device.storage(), host.storage().nbytes());
    std::memcpy(device.storage().mutable_data(), host.storage().data(), host.storage().nbytes());
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  }
}

namespace {
// -- any operation

// On CUDA the host waits in these, since the result's size or value depends on data.
const std::set<std::string> kWaits{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::histc"};
// Others take a number on the host as an argument of their kernel; this one copies it to the device first.
const std::set<std::string> kCopiesNumbers{"aten::where"};
const std::set<std::string> kTakesHostIndices{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

// Lets the CPU's kernels draw from the device's generator, which they know only as the default one.
struct DrawFromDevice {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator& device;
  at::Tensor before = host.get_state();
  explicit DrawFromDevice(int index) : device(host_generator(default_generator(index))) {
    host.set_state(device.get_state());
  }
  ~DrawFromDevice() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

struct Operation {
  const c10::FunctionSchema& schema;
  int device = current_device();
  bool found_device = false;
  HostView view{};

  at::Tensor argument(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return tensor;
    if (is_sim(tensor)) {
      const int index = tensor.device().index();
      TORCH_CHECK(!found_device || device == index || !tensor.dim(), "sim: ", schema.name(), " got tensors of two devices");
      if (!found_device || tensor.dim()) device = index;
      found_device = true;
      return view.host(tensor);
    }
    const bool indices = kTakesHostIndices.count(schema.name());
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    TORCH_CHECK(
        (!tensor.dim() && !written) || indices, "sim: Expected all tensors to be on the same device, ", schema.name(),
        " got ", argument.name(), " on ", tensor.device());
    if (tensor.dim()) report("sync", schema.name() + " by indices on the host");
    else if (kCopiesNumbers.count(schema.name())) report("copy", schema.name() + " of a number on the host");
    return tensor;
  }

  c10::IValue argument(c10::IValue value, const c10::Argument& argument) {
    if (value.isTensor()) return this->argument(value.toTensor(), argument);
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(this->argument(each, argument));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (std::optional<at::Tensor> each : value.toOptionalTensorList()) {
        if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte))
          report("sync", schema.name() + " by a mask");
        made.push_back(each ? std::optional(this->argument(*each, argument)) : each);
      }
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      device = index_of(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator()) return host_generator(value.toGenerator());
    return value;
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) return view.device(value.toTensor(), device);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(each.defined() ? view.device(each, device) : each);
    return made;
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Operation operation{schema};
  const auto num_arguments = schema.arguments().size();
  auto arguments = stack->end() - static_cast<std::ptrdiff_t>(num_arguments);
  for (size_t i = 0; i < num_arguments; ++i) arguments[i] = operation.argument(arguments[i], schema.arguments()[i]);
  const auto stream = current_stream(operation.device);
  queue_work(stream);
  if (kWaits.count(schema.name())) {
    report("sync", schema.name());
    host_waits_for(stream);
  }
  {
    std::optional<DrawFromDevice> draw;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) draw.emplace(operation.device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  operation.view.write_back_resized();
  for (auto value = stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size()); value != stack->end(); ++value)
    *value = operation.result(*value);
}

// -- operations of the device's own

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, c10::dtype_or_default(dtype));
}

// Keeps autograd, and the counting of versions, out of copies.
struct PlainCopies {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard exclude{
      c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

void make_wrong(at::Tensor target) {
  if (target.is_floating_point() || target.is_complex()) target.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (target.scalar_type() == at::kBool) target.logical_not_();
  else target.bitwise_not_();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!from.numel()) return to;
  PlainCopies plain;
  const bool to_device = is_sim(to);
  const auto stream = current_stream((to_device ? to : from).device().index());
  auto view = std::make_shared<HostView>();
  auto source = is_sim(from) ? view->host(from) : from;
  auto target = to_device ? view->host(to) : to;
  queue_work(stream);
  if (is_sim(from) && to_device && from.device() != to.device()) queue_work(current_stream(from.device().index()));
  if (is_sim(from) && to_device) {
    target.copy_(source);
    return to;
  }
  const auto what = std::string(to_device ? "copy to the device: " : "copy to the host: ") +
      std::to_string(from.numel()) + " " + c10::toString(from.scalar_type());
  if (!non_blocking || !is_pinned((to_device ? from : to).const_data_ptr())) {
    // From pageable memory the driver stages the copy, so the host may go on; to it, it waits.
    report(non_blocking && to_device ? "staged" : "copy", what);
    if (!(non_blocking && to_device)) host_waits_for(stream);
    target.copy_(source);
    return to;
  }
  if (!to_device) source = source.clone();  // as it is in its turn, whatever later kernels write
  make_wrong(target);
  put_off(stream, to_device, [view, source, target, from, to]() mutable {
    PlainCopies plain;
    target.copy_(source);
  });
  return to;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { allocator().recordStream(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("record_stream", &record_stream);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
}  // namespace

// The CPU's kernel is taken wherever there is one: else torch would prefer its composite ones.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const std::set<std::string> torchs{"aten::is_pinned", "aten::_pin_memory"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || torchs.count(name.name)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}
}  // namespace sim

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace at::autocast
