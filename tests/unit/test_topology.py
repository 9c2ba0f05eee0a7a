"""Roles are placed from the configuration and the environment alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_hpc.config import RunConfig
from molt_hpc.slurm.topology import Machine, expand_nodes, plan, smallest_count

LAPTOP = Machine("laptop", 8)
PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"}
HET = {"SLURM_JOB_ID": "4", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST": "n1",
       "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4(x2)", "SLURM_GPUS_PER_NODE_HET_GROUP_0": "2",
       "SLURM_JOB_NODELIST_HET_GROUP_1": "n3", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "6",
       "SLURM_JOB_NODELIST_HET_GROUP_2": "n[5,7]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_2": "16(x2)"}


def config(training: int = 1, rollout: int = 1, procs: int = 2, engines: int = 1) -> RunConfig:
    made = RunConfig()
    made.actor.num_nodes, made.actor.num_procs_per_node = training, procs
    made.rollout.num_nodes, made.vllm.num_engines = rollout, engines
    return made


def test_local_machine_is_shared_by_both_roles():
    topology = plan(config(), {}, LAPTOP)
    assert topology.launcher == "local"
    assert [(s.role, s.nodes, s.cores, s.omp_threads) for s in topology.steps] == [
        ("actor", ("laptop",), 4, 2), ("rollout", ("laptop",), 4, 4)]


def test_local_machine_refuses_more_than_one_node_a_role():
    with pytest.raises(ValueError, match=r"needs 2 training \+ 1 rollout nodes .* the local launcher has 1 machine"):
        plan(config(training=2), {}, LAPTOP)


def test_local_gpus_are_split_between_the_roles():
    topology = plan(config(procs=2, engines=1), {}, Machine("box", 8, ("0", "1", "5")))
    assert [(s.gpus, s.devices) for s in topology.steps] == [(2, ("0", "1")), (1, ("5",))]


def test_local_gpus_that_do_not_suffice_are_an_error():
    with pytest.raises(ValueError, match="needs 3 GPUs .* box shows 2"):
        plan(config(procs=2, engines=1), {}, Machine("box", 8, ("0", "1")))


def test_plain_allocation_is_split_by_node():
    topology = plan(config(training=2), PLAIN, LAPTOP)
    assert topology.launcher == "srun"
    assert [(s.role, s.nodes, s.het_group, s.cores, s.omp_threads) for s in topology.steps] == [
        ("actor", ("n1", "n2"), None, 4, 2), ("rollout", ("n3",), None, 4, 4)]


def test_plain_allocation_with_too_few_nodes_says_both_numbers():
    with pytest.raises(ValueError, match=r"needs 2 training \+ 1 rollout nodes .*, the allocation has 2"):
        plan(config(training=2), PLAIN | {"SLURM_JOB_NODELIST": "n[1-2]"}, LAPTOP)


def test_spare_nodes_are_noted():
    assert plan(config(), PLAIN, LAPTOP).notes == ("1 nodes of the allocation stay idle: n3",)


def test_het_job_trains_on_component_0_and_rolls_out_on_the_others():
    topology = plan(config(training=2, rollout=3, engines=6), HET, LAPTOP)
    assert [(s.role, s.nodes, s.het_group, s.first_rank, s.cores, s.omp_threads, s.gpus) for s in topology.steps] == [
        ("actor", ("n1", "n2"), 0, 0, 4, 2, 2), ("rollout", ("n3",), 1, 0, 6, 3, 0), ("rollout", ("n5", "n7"), 2, 1, 16, 8, 0)]
    names = [s.task_name(i) for s in topology.steps for i in range(len(s.nodes))]
    assert names == ["actor", "actor", "rollout_n0", "rollout_n1", "rollout_n2"]


@pytest.mark.parametrize("training, rollout", [(3, 1), (1, 4)])
def test_het_job_with_too_few_nodes_is_an_error(training, rollout):
    with pytest.raises(ValueError, match="component 0 has 2 and the others have 3"):
        plan(config(training=training, rollout=rollout, engines=rollout), HET, LAPTOP)


def test_launcher_choice():
    local = config()
    local.launch.launcher = "local"
    assert plan(local, PLAIN, LAPTOP).launcher == "local"
    local.launch.launcher = "srun"
    with pytest.raises(ValueError, match="srun needs a Slurm job"):
        plan(local, {}, LAPTOP)


def test_cpus_per_node_overrides_what_was_found():
    wide = config()
    wide.launch.cpus_per_node = 32
    assert [s.cores for s in plan(wide, {}, LAPTOP).steps] == [16, 16]
    assert [s.cores for s in plan(wide, PLAIN, LAPTOP).steps] == [32, 32]


@given(st.integers(1, 16), st.integers(1, 64))
def test_threads_never_exceed_cores_and_never_vanish(procs, cores):
    for step in plan(config(procs=procs), {}, Machine("m", cores)).steps:
        assert step.omp_threads >= 1
        assert step.omp_threads == 1 or step.omp_threads * step.processes <= cores


@pytest.mark.parametrize("text, names", [
    ("n1", ["n1"]), ("n[1-3,5]", ["n1", "n2", "n3", "n5"]), ("n[08-10]", ["n08", "n09", "n10"]), ("a1,b[1-2],c", ["a1", "b1", "b2", "c"]),
    ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"])])
def test_node_lists(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[1-3", "n[a-b]", "n]1["])
def test_unreadable_node_lists_are_errors(text):
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(text)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_node_lists_of_numbers(numbers):
    assert expand_nodes("n[" + ",".join(map(str, numbers)) + "]") == [f"n{n}" for n in numbers]


def test_smallest_count():
    assert smallest_count("8(x3),4,16(x2)") == 4
