"""Tests take public names, and what stands on the page of internals: then files of the library may move.

What is listed here is imported by its own tests: pure functions and tables with a contract, and what
no public name reaches, in the launcher and the command line, which that page may not import.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PUBLIC = (
    *("accel_fn", "accel_fn.checkpoint", "accel_fn.data", "accel_fn.errors", "accel_fn.extend"),
    *("accel_fn.launcher", "accel_fn.testing", "accel_fn.testing.internals"),
)
DEEP_LINE = re.compile(
    r"^\s*(from|import) accel_fn\.(?!errors|testing import|testing$)", re.MULTILINE
)
PUBLIC_AFTER_A_DOT = ("accel_fn.testing.strategies", "accel_fn.contrib.transformers")
DEEP = {
    "core/test_add_alpha.py": {"core.add_alpha", "core.torch_compile"},
    "core/test_batches.py": {"core.split_batch"},
    "checkpoint/test_weights.py": {"checkpoint.save_weights"},
    "cli/commands.py": {"cli"},
    "cli/test_config_questions.py": {"cli.config"},
    "cli/test_launch_function.py": {"launcher.child"},
    "cli/test_launch_notebook.py": {"launcher.notebook"},
    "parallel/test_meshes.py": {"core.mesh_axes"},
    "parallel/test_nodes.py": {"parallel.clusters", "parallel.world"},
    "parallel/test_tasks.py": {"parallel.clusters", "parallel.world"},
    "parallel/test_unpickle.py": {"core.primitives"},
    "parallel/test_world.py": {"core.primitives", "parallel.world"},
    "data/test_fetch.py": {"data.fetch"},
    "data/test_order.py": {"data.order"},
    "data/test_random_generators.py": {"data.random_generators"},
    "contrib/deepspeed/engine/cases.py": {"core.dtensor"},
    "contrib/transformers/test_tp_styles.py": {"parallel.tp.styles"},
    "launcher/test_cpus.py": {"launcher.hardware"},
    "launcher/test_detect.py": {"launcher.hardware"},
    "launcher/test_failures.py": {"launcher.failures"},
    "launcher/test_plan_launch.py": {
        "launcher.hardware",
        "launcher.machines",
        "launcher.plan_launch",
    },
    "launcher/test_store_rendezvous.py": {"launcher.machines"},
    "launcher/test_traceback_lines.py": {"launcher.failures"},
    "laws/law09_hashing.py": {"checkpoint.files"},
    "observe/test_log_files.py": {
        "contrib.runs.charts",
        "contrib.runs.goodput",
        "contrib.runs.run_log",
    },
    "observe/test_phase_times.py": {"observe.phase_times"},
    "observe/test_profile.py": {"observe.phase_times"},
    "observe/test_writers.py": {"observe.log_writers"},
    "ray/devices.py": {"parallel.world"},
    "sim/test_checkpoints.py": {"checkpoint.tensors"},
    "sim/test_hazards.py": {"parallel.same_on_all_ranks"},
    "sim/test_log.py": {"core.delayed_read"},
    "package/test_package.py": {"names"},
    "core/test_frozen_models.py": {"checkpoint.manifest"},
    "support/late_reads.py": {"core.delayed_read"},
    "support/launch_settings.py": {
        "launcher.hardware",
        "launcher.settings",
        "launcher.settings_files",
    },
    "support/out_of_memory.py": {"core.split_batch", "core.dtensor"},
    "support/schedules.py": {"transforms.schedule.advance"},
    "support/strategies.py": {"core"},
    "tools/benchmarks/loading.py": {"data.order"},
    "tools/benchmarks/test_counting.py": {"core"},
    "tools/benchmarks/saving.py": {"checkpoint.background", "checkpoint.files"},
    "tools/mutants/probe.py": {"testing.promises"},
    "tools/mutants/test_mutants.py": {"transforms"},
    "tools/pages.py": {"contrib.runs.plot_page", "contrib.runs.run_log"},
    "transforms/test_check_replicas.py": {"parallel.same_on_all_ranks"},
    "transforms/test_compiled_changes.py": {"core.torch_compile"},
    "transforms/test_fsdp.py": {"parallel.blocks"},
    "transforms/test_hoist_scalars.py": {"transforms.compile.pass_hoist_scalars"},
    "transforms/test_tp_plans.py": {"parallel.tp.styles"},
    "transforms/test_tp_styles.py": {"parallel.tp.styles"},
    "transforms/test_wrap_cp.py": {"core.torch_internals"},
    "transforms/test_wrap_cp_checks.py": {"checks.sequences"},
    "transforms/test_wrap_cp_cost.py": {"parallel.cp"},
    "transforms/test_tree_sum.py": {"parallel.reproducible", "parallel.reproducible.tree_sum"},
}


def modules_of(tree):
    """The modules of the library that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def deep_imports(path):
    text = path.read_text()
    if not DEEP_LINE.search(text):  # parsing takes longer
        return set()
    found = {name for name in modules_of(ast.parse(text)) if is_ours(name)}
    found -= {*PUBLIC, *PUBLIC_AFTER_A_DOT}
    return {name.removeprefix("accel_fn.") for name in found if not is_of_its_plug_in(path, name)}


def is_of_its_plug_in(path, module):
    """Tests of a plug-in lie in a folder of its name, and may import its modules."""
    folder = path.parent
    while folder.parent not in (folder, TESTS / "contrib"):
        folder = folder.parent
    plug_in = f"accel_fn.contrib.{folder.name}"
    return folder.name != "" and f"{module}.".startswith(f"{plug_in}.")


def is_ours(module):
    return module == "accel_fn" or module.startswith("accel_fn.")


def test_no_test_imports_a_deep_module_but_those_that_are_listed():
    every = {str(path.relative_to(TESTS)): deep_imports(path) for path in TESTS.rglob("*.py")}
    assert {name: found for name, found in every.items() if found} == DEEP


def test_the_page_of_internals_is_small():
    page = TESTS.parent / "accel_fn" / "testing" / "internals.py"
    assert len(page.read_text().splitlines()) < 400


@pytest.mark.parametrize("line", ["import accel_fn.core.loop", "from accel_fn.core import loop"])
def test_a_deep_import_is_found(tmp_path, line):
    path = tmp_path / "test_it.py"
    path.write_text(f"def test_it():\n    {line}\n")
    (found,) = deep_imports(path)
    assert re.fullmatch("core(.loop)?", found)
