"""Cores and memory nodes, read from folders as kernels show them."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.launcher.hardware import (
    Processors,
    bind_ranks,
    parse_cpus,
    read_processors,
)


def tree(root, *, siblings, nodes=(), cpu_max=None):
    for group in siblings:
        for cpu in group:
            path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            path.parent.mkdir(parents=True)
            path.write_text(",".join(map(str, group)) + "\n")
    for number, cpus in enumerate(nodes):
        path = root / f"sys/devices/system/node/node{number}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(cpus + "\n")
    if cpu_max:
        path = root / "sys/fs/cgroup/cpu.max"
        path.parent.mkdir(parents=True)
        path.write_text(cpu_max + "\n")
    return root


FOUR_CORES = [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_only_what_may_be_used_counts(tmp_path):
    root = tree(tmp_path, siblings=FOUR_CORES, nodes=["0-1,4-5", "2-3,6-7"])
    assert read_processors(root, allowed=[0, 1, 4]) == Processors(2, ((0, 1, 4),))
    assert read_processors(root, allowed=range(8)) == Processors(4, ((0, 1, 4, 5), (2, 3, 6, 7)))


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("max 100000", 4),
        ("900000 100000", 4),
    ],
)
def test_a_containers_share_bounds_the_cores(tmp_path, cpu_max, cores):
    root = tree(tmp_path, siblings=FOUR_CORES, cpu_max=cpu_max)
    assert read_processors(root, allowed=range(8)).cores == cores


def test_a_node_without_processors_is_none(tmp_path):
    """The node has only memory, like that of some accelerators."""
    root = tree(tmp_path, siblings=[], nodes=["0-1", "", "2-3"])
    assert read_processors(root, allowed=range(4)).nodes == ((0, 1), (2, 3))


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_processors_is_read_as_the_kernel_writes_it(cpus):
    runs = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
    assert parse_cpus(text + "\n") == cpus


@given(num_nodes=st.integers(2, 8), num_ranks=st.integers(2, 32))
def test_ranks_keep_to_nodes_use_all_of_them_and_are_spread_evenly(num_nodes, num_ranks):
    nodes = tuple((2 * node, 2 * node + 1) for node in range(num_nodes))
    bound = bind_ranks(Processors(2 * num_nodes, nodes), num_ranks)
    assert len(bound) == num_ranks
    assert set(chain(*bound)) == set(range(2 * num_nodes))
    if num_ranks >= num_nodes:
        shares = [sum(set(cpus) == set(node) for cpus in bound) for node in nodes]
        assert sum(shares) == num_ranks
        assert max(shares) - min(shares) <= 1
    else:
        assert len(list(chain(*bound))) == 2 * num_nodes  # no two ranks share a node
        sizes = [len(cpus) for cpus in bound]
        assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize(("num_nodes", "num_ranks"), [(1, 4), (2, 1)])
def test_on_one_node_or_with_one_rank_none_is_bound(num_nodes, num_ranks):
    assert bind_ranks(Processors(4, ((0, 1), (2, 3))[:num_nodes]), num_ranks) is None
