"""Two processes, each on a device of its own, are one process on the CPU."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

import accel_fn as af
from tests.sim.worlds import RECIPES, train
from tests.support.processes import launch

CASES = [
    ("ddp", "float64", "fused"),
    ("ddp", "float64", "foreach"),
    ("ddp", "fp16", "fused"),
    ("fsdp", "float64", "fused"),
    ("fsdp", "bf16", "fused"),
    ("fsdp(offload)", "float64", "foreach"),
    ("reproducible", "float64", "fused"),
]
NAMED = {
    "foreach": {"update.py"},  # reads whether the update is applied
    "reproducible": {"virtual_ranks.py"},  # reads metrics
    "fsdp(offload)": {"_fsdp_param_group.py"},  # gradients arrive on the host
}
"""Where the host waits, as a docstring's `Cost` names it."""


@pytest.mark.parametrize(("strategy", "precision", "optimizer"), CASES)
def test_two_devices_train_evaluate_save_and_load_as_one_cpu(
    strategy, precision, optimizer, tmp_path
):
    said = launch(
        f"""
        import json, accel_fn as af
        from pathlib import Path
        from tests.sim import worlds

        state = af.init(timeout_s=60)
        folder = Path({str(tmp_path)!r})
        said = worlds.train(state, {strategy!r}, {precision!r}, {optimizer!r}, folder)
        say(json.dumps(said))
        """
    )
    ranks = sorted(map(json.loads, said.splitlines()), key=lambda rank: rank["rank"])
    alone = strategy if strategy == "reproducible" else "none"
    expected = reference(alone, precision, optimizer)
    assert [rank["device"] for rank in ranks] == ["sim:0", "sim:1"]
    # The learning rate is chosen on the device, in float32; bfloat16 has 8 bits.
    atol = {"float64": 1e-7, "fp16": 2e-3, "bf16": 1e-2}[precision]
    for rank in ranks:
        for name in ("losses", "evaluated", "parameters"):
            torch.testing.assert_close(rank[name], expected[name], rtol=0, atol=atol)
        assert rank["changed"]
        assert rank["loaded"]
        assert rank["hazards"] == []
        assert {*rank["waits"]} <= NAMED.get(strategy, set()) | NAMED.get(optimizer, set())
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@functools.cache
def reference(strategy, precision, optimizer):
    with tempfile.TemporaryDirectory() as folder:
        return train(af.init(device="cpu"), strategy, precision, optimizer, Path(folder))


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_devices_train_as_two_cpus(recipe):
    def run(device):
        said = launch(
            f"""
            import json, accel_fn as af
            from tests.sim import worlds

            state = af.init(device={device!r}, timeout_s=60)
            say(json.dumps(worlds.train_parts(state, {recipe!r})))
            """
        )
        return sorted(map(json.loads, said.splitlines()), key=lambda rank: rank["rank"])

    found, expected = run(None), run("cpu")
    for rank in found:  # a full device cuts its batches, and those of its peers
        assert rank.pop("num_microbatches") == (2 if recipe == "full" else 1)
    for rank in expected:
        assert rank.pop("num_microbatches") == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
