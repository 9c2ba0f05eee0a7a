"""What the engine chose is chosen again in training: the tokens it sampled among, and the experts of every token."""

from __future__ import annotations

import asyncio
import base64
import io
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from molt_hpc import wire
from molt_hpc.config import FsdpConfig, RolloutConfig, RunConfig, load
from molt_hpc.config_checks import check_replay
from molt_hpc.data.references import Producer, resolve
from molt_hpc.data.shards import Batch, build_batch
from molt_hpc.records import Rollout
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import EngineError, is_cpu_build, serve_arguments
from molt_hpc.rollout.generate import Turn, parse_answer
from molt_hpc.rollout.sampling import Unsupported, parse_sampling, run_sampling
from molt_hpc.rollout.session import Session
from molt_hpc.slurm.preflight import check_inputs
from molt_hpc.train.logprob import Kept, TokenScores, pack_segments
from molt_hpc.train.micro import TokenTable, build_micro_batch
from molt_hpc.train.model import build_model
from molt_hpc.train.routing import lay_out, replayed_routers
from tests.batches import random_batch, with_choices
from tests.chat_templates import make_tokenizer
from tests.process_run import small_config
from tests.scripted_model import ScriptedEngine, chat_config, lease_of

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    return Dialect(make_tokenizer("chatml"))


# sampling masks ----------------------------------------------------------------------------

MASKS = [[1, 4], [0, 1, 2, 3, 4, 5], [], [3], [5, 0, 2], [4, 5], [], [1, 2], [2, 0], [3, 1, 4]]
"""Among which of 6 tokens each of 10 was sampled; none: all."""
TARGETS = torch.tensor([4, 1, 2, 3, 0, 5, 0, 1, 2, 3])


def over_kept(hidden: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies), token by token: the softmax over the kept logits alone."""
    scores, entropies = [], []
    for token, mask in enumerate(MASKS):
        ids = mask or list(range(6))
        log_probs = torch.log_softmax((weight @ hidden[token])[ids] * inverse[token], 0)
        scores.append(log_probs[ids.index(TARGETS[token])])
        entropies.append(-(log_probs.exp() * log_probs).sum())
    return torch.stack(scores), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_scores_over_the_kept_tokens_and_their_gradients_are_those_of_a_small_softmax(chunk: int):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((10, 4), (6, 4)))
    inverse = torch.linspace(0.5, 2, 10, dtype=torch.float64)
    kept = Kept.of(np.array([len(mask) for mask in MASKS]), np.concatenate(MASKS).astype(np.int32), CPU)
    outer = torch.randn((2, 10), generator=generator, dtype=torch.float64)
    expected = over_kept(hidden, weight, inverse)
    wanted = torch.autograd.grad(sum((w * e).sum() for w, e in zip(outer, expected)), (hidden, weight))
    found = TokenScores.apply(hidden, weight, TARGETS, inverse, chunk, 0, None, True, kept)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(sum((w * f).sum() for w, f in zip(outer, found)), (hidden, weight)), wanted)
    scores, _ = TokenScores.apply(hidden, weight, TARGETS, inverse, chunk, 0, None, False, kept)
    torch.testing.assert_close(torch.autograd.grad((outer[0] * scores).sum(), (hidden, weight)),
                               torch.autograd.grad((outer[0] * over_kept(hidden, weight, inverse)[0]).sum(), (hidden, weight)))


def test_every_part_of_the_vocabulary_excludes_its_own():
    kept = Kept.of(np.array([len(mask) for mask in MASKS]), np.concatenate(MASKS).astype(np.int32), CPU)
    whole = kept.exclude(torch.zeros(7, 6), slice(2, 9), 0)
    assert torch.equal(torch.cat([kept.exclude(torch.zeros(7, 2), slice(2, 9), start) for start in (0, 2, 4)], 1), whole)
    assert [row.nonzero()[:, 0].tolist() for row in whole == 0] == [sorted(mask) or list(range(6)) for mask in MASKS[2:9]]


def test_masks_cost_no_tensor_of_tokens_times_vocabulary():
    saved: list[int] = []
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    kept = Kept.of(np.full(64, 5), np.tile(np.arange(5), 64), CPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        TokenScores.apply(hidden, weight, torch.arange(64) % 5, torch.ones(64), 4, 0, None, True, kept)[0].sum().backward()
    assert max(*saved, kept.ids.numel()) == weight.numel() < 64 * 1000


# router replay -----------------------------------------------------------------------------


def exact(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.fixture(scope="module")
def played(tiny_models):
    """(folder, segments, the experts that an engine chose in each, its log-probs): its routers are a little off, as by another precision."""
    folder, rng, generator = tiny_models("qwen3_moe"), np.random.default_rng(0), torch.Generator().manual_seed(1)
    engine, segments = exact(folder), [rng.integers(3, 330, n) for n in (30, 45, 12)]
    for layer in engine.model.layers:
        layer.mlp.gate.weight.data += 0.02 * torch.randn(layer.mlp.gate.weight.shape, generator=generator, dtype=torch.float64)
    routed, scores = [], []
    for ids in segments:
        with torch.no_grad():
            answer = engine(input_ids=torch.tensor(ids)[None], output_router_logits=True)
        routed.append(np.stack([logits.topk(2, -1).indices.numpy() for logits in answer.router_logits], 1)[:-1].astype(np.uint8))
        scores.append(torch.log_softmax(answer.logits[0], -1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0])
    return folder, segments, routed, torch.cat(scores)


def with_fixed_experts(model: torch.nn.Module, ids: np.ndarray, routed: np.ndarray) -> torch.Tensor:
    """Log-probs [T - 1] of a segment by a model whose routers are written anew: the softmax at the given experts, made to sum to 1."""
    def forward(gate, chosen, hidden):
        logits = hidden @ gate.weight.T
        weights = torch.softmax(logits, -1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        gate.forward = partial(forward, gate, torch.from_numpy(routed[:, number].astype(np.int64)))
    logits = model(input_ids=torch.tensor(ids)[None, :-1]).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def choices_of(model) -> list[torch.Tensor]:
    """A list that receives the experts which each router of the model hands on, in the order of its layers."""
    seen = []
    for part in model.module.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(lambda module, inputs, output: seen.append(output[2].detach().clone()))
    return seen


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_with_replay_the_experts_are_the_engines_the_gap_falls_and_routers_learn(played, recompute):
    folder, segments, routed, scores = played
    model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32"), gradient_checkpoint=recompute)
    packed = pack_segments(segments, [np.arange(len(ids)) > 0 for ids in segments], [1.0] * 3, CPU)
    own, _ = model.score(packed)
    model.routers = replayed_routers(model.module)
    packed.routed, seen = lay_out(routed, CPU), choices_of(model)
    replayed, _ = model.score(packed)
    weights = torch.linspace(-1, 1, len(scores), dtype=torch.float64)
    (replayed * weights).sum().backward()
    assert len(seen) == (4 if recompute == "full" else 2)  # recomputed layers choose the same again
    for number, layer in enumerate((0, 1, 1, 0)[:len(seen)]):
        rows = torch.cat([part[:-1] for part in seen[number].split([len(ids) for ids in segments])])
        assert torch.equal(rows, torch.from_numpy(np.concatenate(routed)[:, layer].astype(np.int64)))
    assert (replayed - scores).abs().mean() < 0.5 * (own - scores).abs().mean()
    reference = exact(folder)
    expected = torch.cat([with_fixed_experts(reference, *pair) for pair in zip(segments, routed)])
    (expected * weights).sum().backward()
    assert (replayed - expected).abs().max() < 1e-5
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        difference = (parameter.grad.full_tensor() - wanted[name].grad).abs().max()
        assert difference < 1e-4 * wanted[name].grad.abs().max() and wanted[name].grad.abs().max() > 0, name
    packed.routed = None  # what no engine has seen chooses for itself
    assert torch.equal(model.score(packed)[0], own)


def test_what_cannot_be_replayed_is_refused(played, tiny_qwen3):
    folder, segments, routed, _ = played
    with pytest.raises(ValueError, match="no router that is known"):
        replayed_routers(build_model(tiny_qwen3, "transformers", FsdpConfig(param_dtype="float32")).module)
    model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32"))
    model.routers = replayed_routers(model.module)
    packed = pack_segments(segments, [np.arange(len(ids)) > 0 for ids in segments], [1.0] * 3, CPU)
    packed.routed = lay_out(routed, CPU).repeat(1, 1, 2)
    with pytest.raises(ValueError, match="the engine chose"):
        model.score(packed)


# from the engine's answer to the micro-batch ------------------------------------------------


def test_a_micro_batch_has_the_choices_of_its_own_tokens_after_file_wire_and_shard(tmp_path):
    rollouts = [with_choices(rollout, np.random.default_rng(i)) for i, rollout in enumerate(random_batch(2, rollouts_only=True))]
    referring = Producer(tmp_path, "worker").put([wire.encode("rollout", *rollout.to_wire()) for rollout in rollouts])
    read = [resolve(tmp_path, wire.decode(message)) for message in referring]
    travelled = [Rollout.from_wire(message.fields, message.arrays()) for message in read]
    batch = Batch.from_bytes(build_batch(1, 1, travelled).to_bytes())
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    chosen = [3, 0, len(segments) - 1]
    packed = build_micro_batch(TokenTable(batch), chosen, CPU).packed
    assert packed.kept.ids.tolist() == np.concatenate([segments[s].extras["kept_ids"] for s in chosen]).tolist()
    assert np.diff(packed.kept.offsets).tolist() == np.concatenate([segments[s].extras["kept_counts"] for s in chosen]).tolist()
    for number, target in enumerate(packed.targets.tolist()):
        assert target in packed.kept.ids[packed.kept.offsets[number]:packed.kept.offsets[number + 1]].tolist()
    start = 0
    for s in chosen:
        routed = segments[s].extras["routed_experts"]
        assert np.array_equal(packed.routed[start:start + len(routed)].numpy(), routed) and (packed.routed[start + len(routed)] == -1).all()
        start += len(routed) + 1
    assert start == len(packed.routed) == packed.token_ids.shape[1]
    dummy = build_micro_batch(TokenTable(batch), [], CPU).packed
    assert dummy.kept is None and dummy.routed is None
    del travelled[1].segments[0].extras["kept_ids"], travelled[1].segments[0].extras["kept_counts"]
    with pytest.raises(ValueError, match="lack the engine's choices"):
        TokenTable(build_batch(1, 1, travelled))
    with pytest.raises(ValueError, match="routed_experts"):
        TokenTable(random_batch(0), {"routed_experts": True})


def answer(**fields) -> dict:
    choice = {"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}] * 2}, "finish_reason": "stop",
              "weight_versions": [{"version": "3", "start": 0, "end": 2}]}
    return {"choices": [choice | fields]}


def test_an_answer_with_choices_is_read_and_one_that_contradicts_itself_is_refused():
    file = io.BytesIO()
    np.save(file, np.arange(24, dtype=np.uint16).reshape(6, 2, 2))
    turn = parse_answer(answer(sampling_mask=[[5, 9], [6]], routed_experts=base64.b64encode(file.getvalue()).decode()), "here")
    assert [part.tolist() for part in turn.kept] == [[2, 1], [5, 9, 6]] and {part.dtype for part in turn.kept} == {np.dtype(np.int32)}
    assert turn.routed.dtype == np.int16 and turn.routed.shape == (6, 2, 2) and turn.routed[5, 1, 1] == 23
    assert parse_answer(answer(), "here").kept is None and parse_answer(answer(), "here").routed is None
    for fields in ({"sampling_mask": [[5, 9]]}, {"sampling_mask": [[5], [7]]}, {"routed_experts": "AAAA"}):
        with pytest.raises(EngineError, match="here"):
            parse_answer(answer(**fields), "here")


def test_what_leaves_out_tokens_needs_masks_and_what_moves_probability_is_never_trained():
    plain, masked = run_sampling(RolloutConfig()), run_sampling(RolloutConfig(top_k=50, top_p=0.9))
    assert plain.engine_fields().keys() == {"stop", "stop_token_ids"} and masked.extra == {"top_p": 0.9, "top_k": 50}
    asked = {"top_p": 0.5, "min_p": 0.1, "structured_outputs": {"json": {"type": "object"}}, "min_tokens": 3}
    assert parse_sampling(asked, masked).extra == {"top_k": 50, **asked}
    for name, value in asked.items():
        with pytest.raises(Unsupported, match="without sampling masks"):
            parse_sampling({name: value}, plain)
    for fields in ({"presence_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": 0}):
        with pytest.raises(Unsupported, match=next(iter(fields))):
            parse_sampling(fields, masked)
    greedy = parse_sampling({"temperature": 0}, masked, trained=False)
    assert (greedy.temperature, greedy.extra["top_k"]) == (1.0, 1)
    assert parse_sampling({"temperature": 0}, plain, trained=False).temperature == 0


def test_options_that_vllm_cannot_serve_are_refused_before_anything_starts(tmp_path):
    config = small_config(tmp_path)
    assert not {"--return-sampling-mask", "--enable-return-routed-experts"} & set(serve_arguments(config, tmp_path, 0))
    for options, words in (({"rollout.top_p": 0.9}, "needs rollout.top_k"), ({"rollout.top_p": 1.1}, "at most 1"),
                           ({"rollout.top_k": -1}, "at least 0"),
                           ({"train.routing_replay": True, "vllm.enable_prefix_caching": False}, "enable_prefix_caching"),
                           ({"train.routing_replay": True, "fsdp.tp_size": 2}, "tp_size 1")):
        words_given = [word for name, value in options.items() for word in (f"--{name}", str(value).lower())]
        with pytest.raises(ValueError, match=words):
            check_replay(load(RunConfig, None, words_given, check=False))
    config.rollout.top_k, config.train.routing_replay = 50, True
    assert {"--return-sampling-mask", "--enable-return-routed-experts"} < set(serve_arguments(config, tmp_path, 0))
    if is_cpu_build():
        with pytest.raises(ValueError, match="rollout.top_k needs vLLM's model runner V2"):
            check_inputs(config)


def turn_of(plan, length: int) -> Turn:
    """A reply whose experts at each position are the position itself, and whose masks hold the sampled token alone."""
    ids = np.arange(length, dtype=np.int32) + 20
    rows = np.arange(plan.routed_from, plan.length + length - 1, dtype=np.int16)
    return Turn(ids, np.full(length, -0.5, np.float32), np.array([[0, length, 1]], np.int32), "length", None, (np.ones(length, np.int32), ids),
                np.broadcast_to(rows[:, None, None], (len(rows), 2, 2)))


def test_segments_of_several_turns_and_branches_have_the_experts_of_every_position(dialect):
    session = Session(dialect, 200)
    first = session.commit(plan := session.plan_ids(None, [5, 6, 7]), turn_of(plan, 4), 1.0)
    second = session.commit(plan := session.plan_ids(first, [8, 9]), turn_of(plan, 3), 1.0)
    session.commit(plan := session.plan_ids(second, []), turn_of(plan, 5), 0.7)  # goes on at once, at another temperature
    session.commit(plan := session.plan_ids(first, [10]), turn_of(plan, 2), 1.0)
    segments = session.segments()
    assert [len(s.token_ids) for s in segments] == [12, 17, 10]
    for segment in segments:
        rows = segment.extras["routed_experts"]
        assert rows.shape == (len(segment.token_ids) - 1, 2, 2) and (rows == np.arange(len(rows))[:, None, None]).all()
        assert segment.extras["kept_ids"].tolist() == segment.token_ids[segment.action_mask()].tolist()


def test_a_reply_that_lacks_masks_or_the_experts_of_a_token_is_not_taken(dialect):
    config = chat_config()
    engine = ScriptedEngine(dialect, lambda prompt, sampling: "fine")
    for section, option, words in ((config.rollout, "top_k", "no sampling masks"),
                                   (config.train, "routing_replay", "experts of 0 tokens, 7 expected")):
        setattr(section, option, 1)
        episode = ChatEpisode(lease_of(), config, dialect, engine, None, server=None)
        with pytest.raises(EngineError, match=words):
            asyncio.run(episode.sample(episode.session.plan_ids(None, [5, 6, 7]), episode.default))
        setattr(section, option, 0)
    assert engine.calls[0][1]["top_k"] == 1 and engine.calls[1][1]["routed_experts_prompt_start"] == 0
