// Collectives of the simulated device: Gloo's, over the same memory, done before they return.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct Done final : c10d::Work {
  using Future = c10::ivalue::Future;
  c10::intrusive_ptr<Future> future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
  explicit Done(Tensors tensors) { future->markCompleted(c10::IValue(std::move(tensors))); }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<Future> getFuture() override { return future; }
};

struct Collectives final : c10d::Backend {
  BackendPtr gloo;
  explicit Collectives(BackendPtr made) : Backend(made->getRank(), made->getSize()), gloo(std::move(made)) {}
  const std::string getBackendName() const override { return "simccl"; }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  using Run = std::function<WorkPtr(Tensors& outputs, Tensors& inputs)>;

  // Runs a collective of Gloo's over the same memory. One without inputs works on its outputs in place.
  static WorkPtr call(const Tensors& outputs, const Tensors& inputs, const Run& run) {
    sim::HostView view;
    auto host = [&view](const Tensors& tensors) {
      Tensors made;
      for (auto& tensor : tensors) {
        TORCH_CHECK(sim::is_sim(tensor), "simccl: tensors must be on a sim device, got one on ", tensor.device());
        made.push_back(view.host(tensor));
        sim::queue_work(sim::current_stream(tensor.device().index()));
      }
      return made;
    };
    auto made = host(outputs), given = host(inputs);
    run(made, given)->wait();
    return c10::make_intrusive<Done>(outputs);
  }

  // As NCCL does: the end of a group waits for what the device has queued, unless it is aborted.
  void shutdown() override {
    for (int device = 0; device < sim::num_devices(); ++device) sim::host_waits_for(sim::current_stream(device));
    gloo->shutdown();
  }
  void abort() override {
    sim::wake();
    gloo->abort();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return call(tensors, {}, [&](auto& made, auto&) { return gloo->allreduce(made, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return call(tensors, {}, [&](auto& made, auto&) { return gloo->allreduce_coalesced(made, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return call(tensors, {}, [&](auto& made, auto&) { return gloo->broadcast(made, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return call(outputs.at(0), inputs, [&](auto& made, auto& given) {
      std::vector<Tensors> lists{made};
      return gloo->allgather(lists, given, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return call({output}, {input}, [&](auto& made, auto& given) { return gloo->_allgather_base(made[0], given[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return call(outputs, inputs, [&](auto& made, auto& given) {
      return gloo->allgather_into_tensor_coalesced(made, given, options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return call({output}, {input}, [&](auto& made, auto& given) {
      return gloo->_reduce_scatter_base(made[0], given[0], options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return call(outputs, inputs, [&](auto& made, auto& given) {
      return gloo->reduce_scatter_tensor_coalesced(made, given, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return call({output}, {input}, [&](auto& made, auto& given) {
      return gloo->alltoall_base(made[0], given[0], output_sizes, input_sizes, options);
    });
  }
};
}  // namespace

void register_collectives(py::module& module) {
  module.def(
      "collectives", [](BackendPtr gloo) -> BackendPtr { return c10::make_intrusive<Collectives>(std::move(gloo)); },
      py::call_guard<py::gil_scoped_release>());
}
