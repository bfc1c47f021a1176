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

  struct Call {
    sim::HostView view;
    Tensors operator()(const Tensors& tensors) {
      Tensors made;
      for (auto& tensor : tensors) {
        TORCH_CHECK(sim::is_sim(tensor), "simccl: tensors must be on a sim device, got one on ", tensor.device());
        made.push_back(view.host(tensor));
        sim::queue_work(sim::current_stream(tensor.device().index()));
      }
      return made;
    }
  };
  static WorkPtr done(const WorkPtr& work, const Tensors& tensors) {
    work->wait();
    return c10::make_intrusive<Done>(tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Call host;
    auto made = host(tensors);
    return done(gloo->allreduce(made, options), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Call host;
    auto made = host(tensors);
    return done(gloo->allreduce_coalesced(made, options), tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Call host;
    auto made = host(tensors);
    return done(gloo->broadcast(made, options), tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Call host;
    std::vector<Tensors> made;
    for (auto& each : outputs) made.push_back(host(each));
    auto given = host(inputs);
    return done(gloo->allgather(made, given, options), outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Call host;
    auto made = host({output, input});
    return done(gloo->_allgather_base(made[0], made[1], options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Call host;
    auto made = host(outputs), given = host(inputs);
    return done(gloo->allgather_into_tensor_coalesced(made, given, options), outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Call host;
    auto made = host({output, input});
    return done(gloo->_reduce_scatter_base(made[0], made[1], options), {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Call host;
    auto made = host(outputs), given = host(inputs);
    return done(gloo->reduce_scatter_tensor_coalesced(made, given, options), outputs);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Call host;
    auto made = host({output, input});
    return done(gloo->alltoall_base(made[0], made[1], output_sizes, input_sizes, options), {output});
  }
};
}  // namespace

void register_collectives(py::module& module) {
  module.def(
      "collectives", [](BackendPtr gloo) -> BackendPtr { return c10::make_intrusive<Collectives>(std::move(gloo)); },
      py::call_guard<py::gil_scoped_release>());
}
