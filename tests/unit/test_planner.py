"""Properties of the plan: nothing lost, nothing twice, equal counts, the budget kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.train.planner import Plan, attention_costs, pack, plan_batch, token_shares

segments = st.lists(st.tuples(st.integers(0, 6), st.integers(2, 300)), min_size=1, max_size=60)
cases = st.tuples(segments, st.integers(1, 8), st.integers(1, 400), st.integers(0, 4))


def build(case) -> tuple[Plan, list[int], list[int], int]:
    rows, world_size, budget, groups_per_step = case
    groups, lengths = [g for g, _ in rows], [n for _, n in rows]
    plan = plan_batch(groups, lengths, [n - 1 for n in lengths], world_size, budget, groups_per_step)
    return plan, groups, lengths, budget


@given(cases)
@settings(max_examples=200, deadline=None)
def test_every_segment_is_planned_exactly_once(case):
    plan, groups, _, _ = build(case)
    planned = [s for step in plan.steps for rank in step.micro_batches for micro in rank for s in micro]
    assert sorted(planned) == list(range(len(groups)))


@given(cases)
@settings(max_examples=200, deadline=None)
def test_all_ranks_run_the_same_number_of_micro_batches(case):
    plan, _, _, _ = build(case)
    for step in plan.steps:
        assert len(step.micro_batches) == case[1]
        assert {len(rank) for rank in step.micro_batches} == {step.micro_batch_count}
        assert step.micro_batch_count >= 1


@given(cases)
@settings(max_examples=200, deadline=None)
def test_only_a_single_long_segment_exceeds_the_budget(case):
    plan, _, lengths, budget = build(case)
    for step in plan.steps:
        for rank in step.micro_batches:
            for micro in rank:
                assert sum(lengths[s] for s in micro) <= budget or len(micro) == 1


@given(cases)
@settings(max_examples=100, deadline=None)
def test_groups_are_never_divided_between_optimizer_steps(case):
    plan, groups, lengths, _ = build(case)
    seen: set[int] = set()
    for step in plan.steps:
        planned = [s for rank in step.micro_batches for micro in rank for s in micro]
        mine = {groups[s] for s in planned}
        assert not mine & seen
        assert case[3] == 0 or len(mine) <= case[3]
        assert step.denominator == sum(lengths[s] - 1 for s in planned)
        seen |= mine


@given(cases)
@settings(max_examples=100, deadline=None)
def test_a_plan_survives_the_way_through_arrays(case):
    plan, _, _, _ = build(case)
    assert Plan.from_bytes(plan.to_bytes()) == plan


def test_the_plan_is_a_function_of_its_inputs():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 500, 200).tolist()
    plans = [plan_batch([0] * 200, lengths, lengths, 4, 1000) for _ in range(2)]
    assert plans[0] == plans[1]


def test_ranks_get_similar_loads():
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 500, 400).tolist()
    plan = plan_batch([0] * 400, lengths, lengths, 4, 2048)
    loads = [sum(lengths[s] for micro in rank for s in micro) for rank in plan.steps[0].micro_batches]
    assert max(loads) / min(loads) < 1.05
    assert plan.steps[0].micro_batch_count <= -(-sum(lengths) // (4 * 2048)) + 1


def test_packing_fills_bins_before_it_opens_new_ones():
    assert len(pack([6, 4, 5, 5, 3, 7], 10)) == 3


def test_a_step_without_action_tokens_is_refused():
    with pytest.raises(ValueError, match="without an action token"):
        plan_batch([0, 0], [5, 5], [0, 0], 2, 10)


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="max_tokens_per_gpu"):
        plan_batch([0], [5], [1], 2, 0)


def test_long_segments_weigh_more_than_their_tokens():
    lengths = [4000] + [500] * 8
    plan = plan_batch([0] * 9, lengths, lengths, 2, 8192, costs=attention_costs(lengths, 128))
    ranks = [sum(rank, []) for rank in plan.steps[0].micro_batches]
    assert sorted(map(len, ranks)) == [1, 8], "the rank with the long segment gets none of the short ones"
    assert sorted(len(sum(rank, [])) for rank in plan_batch([0] * 9, lengths, lengths, 2, 8192).steps[0].micro_batches) == [1, 8]
    lengths = [4000] + [500] * 12
    plan = plan_batch([0] * 13, lengths, lengths, 2, 8192, costs=attention_costs(lengths, 128))
    by_tokens = plan_batch([0] * 13, lengths, lengths, 2, 8192)
    longest = [next(len(sum(rank, [])) for rank in p.steps[0].micro_batches if 0 in sum(rank, [])) for p in (plan, by_tokens)]
    assert longest[0] < longest[1]


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.sampled_from(AGGREGATIONS), st.randoms())
@settings(deadline=None)
def test_shares_are_the_textbook_means_in_any_order(sequence, name, random):
    sequence = np.array(sequence)
    losses = np.random.default_rng(len(sequence)).normal(size=len(sequence))
    rows = [losses[sequence == s] for s in np.unique(sequence)]
    expected = {"token-mean": losses.mean(), "seq-mean-token-mean": np.mean([r.mean() for r in rows]),
                "seq-mean-token-sum": np.mean([r.sum() for r in rows]), "seq-mean-token-sum-norm": np.mean([r.sum() / 50 for r in rows])}
    order = list(range(len(sequence)))
    random.shuffle(order)
    assert (losses[order] * token_shares(name, sequence[order], 50)).sum() == pytest.approx(expected[name])
