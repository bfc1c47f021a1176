"""Tensors that another rank has pickled on its accelerator come to this rank's device."""

import pickle

import pytest
import torch
from torch import nn

from accel_fn.core.primitives import unpickled


@pytest.fixture
def pickled_on_cuda(monkeypatch):
    """Pickle host tensors as a rank on cuda:0 would: under the name of that device."""

    def pickled(value):
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
            return pickle.dumps(value)

    return pickled


def test_a_tensor_of_a_senders_device_comes_to_this_ranks_device(pickled_on_cuda):
    data = pickled_on_cuda({"mean": torch.arange(3.0), "epoch": 4})
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
        pickle.loads(data)
    found = unpickled(data, torch.device("cpu"))
    assert found["epoch"] == 4
    assert found["mean"].tolist() == [0.0, 1.0, 2.0]
    assert unpickled(data, torch.device("meta"))["mean"].device.type == "meta"


def test_tensors_of_the_host_stay_there():
    found = unpickled(pickle.dumps(torch.ones(2)), torch.device("meta"))
    assert found.tolist() == [1.0, 1.0]


def test_parameters_stay_parameters_and_shared_memory_stays_shared(pickled_on_cuda):
    model = nn.Linear(2, 2)
    found, view = unpickled(pickled_on_cuda((model, model.weight[0])), torch.device("cpu"))
    assert isinstance(found.weight, nn.Parameter)
    assert torch.equal(found.weight, model.weight)
    assert view.tolist() == model.weight[0].tolist()
