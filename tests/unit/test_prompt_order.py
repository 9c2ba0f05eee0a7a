"""The order of prompts: mixing weights and difficulty, each kept row once an epoch, the same again after a crash."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.broker.groups import ledger_config
from molt_hpc.broker.journal import Journal
from molt_hpc.broker.store import recover, snapshot
from molt_hpc.config import DataConfig, RunConfig, dump, load
from molt_hpc.data.order import epoch_order, kept_rows
from molt_hpc.data.prompts import PromptOrder, read_files

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
NEEDED = ["--output_dir", "r", "--actor.model_name_or_path", "m", "--train.agent_path", "a"]


def files_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@given(sizes=SIZES, data=st.data(), shuffle=st.booleans(), seed=st.integers(0, 2**40), epoch=st.integers(0, 5), weighted=st.booleans())
def test_every_kept_row_comes_exactly_once(sizes, data, shuffle, seed, epoch, weighted):
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes))) if weighted else []
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes))))
    order = epoch_order(files_of(sizes), weights, shuffle, seed, epoch, kept)
    assert sorted(order.tolist()) == np.flatnonzero(kept).tolist()
    assert order.tolist() == epoch_order(files_of(sizes), weights, shuffle, seed, epoch, kept).tolist()
    everything = epoch_order(files_of(sizes), weights, shuffle, seed, epoch)
    for file in range(len(sizes)) if weights else ():  # leaving rows out does not move the others of their file
        own = [r for r in everything if files_of(sizes)[r] == file and kept[r]]
        assert [r for r in order if files_of(sizes)[r] == file] == own


@given(sizes=st.lists(st.integers(30, 60), min_size=2, max_size=3), seed=st.integers(0, 1000), epoch=st.integers(0, 3))
def test_another_seed_or_epoch_is_another_order(sizes, seed, epoch):
    for weights in ([], [1.0] * len(sizes)):
        first = epoch_order(files_of(sizes), weights, True, seed, epoch).tolist()
        assert first != epoch_order(files_of(sizes), weights, True, seed + 1, epoch).tolist()
        assert first != epoch_order(files_of(sizes), weights, True, seed, epoch + 1).tolist()


@settings(max_examples=60)
@given(weights=st.lists(st.floats(0.2, 5), min_size=2, max_size=4), seed=st.integers(0, 10_000))
def test_weights_hold_as_long_as_no_file_is_used_up(weights, seed):
    sizes = [4000] * len(weights)
    first = files_of(sizes)[epoch_order(files_of(sizes), weights, True, seed, 0)][:3000]
    shares = np.bincount(first, minlength=len(weights)) / len(first)
    wanted = np.array(weights) / sum(weights)
    assert np.all(np.abs(shares - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / len(first)))


def test_when_a_file_is_used_up_the_others_go_on_by_their_weights():
    sizes, weights = [50, 4000, 4000], [10.0, 1.0, 3.0]
    files = files_of(sizes)[epoch_order(files_of(sizes), weights, True, 7, 0)]
    last_of_first = np.flatnonzero(files == 0)[-1]
    assert last_of_first < 120
    after = files[last_of_first + 1:last_of_first + 3001]
    assert (after == 2).mean() == pytest.approx(0.75, abs=0.04)


def test_the_places_of_equal_weights_are_not_a_pattern():
    files = files_of([3000, 3000])[epoch_order(files_of([3000, 3000]), [1.0, 1.0], False, 3, 0)][:4000]
    assert (files[1:] == files[:-1]).mean() == pytest.approx(0.5, abs=0.04)


def thresholds(easy, hard, easy_fraction, hard_fraction):
    return DataConfig(easy_threshold=easy, hard_threshold=hard, easy_fraction=easy_fraction, hard_fraction=hard_fraction)


@given(st.lists(st.one_of(st.just(float("nan")), st.floats(0, 1, width=32)), min_size=1, max_size=60),
       st.integers(0, 99), st.integers(1, 9))
def test_fraction_one_keeps_and_zero_leaves_out_and_the_middle_always_stays(rates, seed, epoch):
    rates = np.array(rates, np.float32)
    kept = kept_rows(rates, thresholds(0.8, 0.2, 0.0, 1.0), seed, epoch)
    assert kept.tolist() == [not rate >= 0.8 for rate in rates]
    assert kept_rows(rates, thresholds(0.8, 0.2, 1.0, 0.0), seed, epoch).tolist() == [not rate <= 0.2 for rate in rates]


def test_fractions_are_met_and_drawn_anew_every_epoch():
    rates = np.repeat(np.array([0.0, 0.5, 1.0], np.float32), 4000)
    kept = [kept_rows(rates, thresholds(1.0, 0.0, 0.2, 0.5), 1, epoch).reshape(3, 4000) for epoch in (1, 2)]
    for found in kept:
        assert found.mean(axis=1) == pytest.approx([0.5, 1.0, 0.2], abs=0.04)
    assert (kept[0][0] & kept[1][0]).mean() == pytest.approx(0.25, abs=0.04)


# files and options -------------------------------------------------------------------------


def write(folder, sizes):
    for file, size in enumerate(sizes):
        rows = [{"prompt": f"q{i}", "id": f"{file}-{i}"} for i in range(size)]
        (folder / f"part{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / f"part{file}.jsonl") for file in range(len(sizes))]


def made(folder, sizes, epochs=1, **data):
    config = RunConfig()
    config.data.prompt_dataset, config.train.num_episodes = write(folder, sizes), epochs
    for key, value in data.items():
        setattr(config.data, key, value)
    return config


@pytest.mark.parametrize("words", [["--data.prompt_dataset", "a.jsonl", "b.jsonl", "--data.prompt_probs", "1", "3"],
                                   ["--data.prompt_dataset", "a.jsonl,b.jsonl", "--data.prompt_probs", "1,3"],
                                   ["--data.prompt_dataset=a.jsonl", "--data.prompt_dataset=b.jsonl", "--data.prompt_probs=1,3"]])
def test_files_and_weights_are_read_however_they_are_written(words, tmp_path):
    config = load(RunConfig, None, [*NEEDED, *words])
    assert config.data.prompt_dataset == ["a.jsonl", "b.jsonl"] and config.data.prompt_probs == [1.0, 3.0]
    (tmp_path / "c.toml").write_text(dump(config))
    assert load(RunConfig, tmp_path / "c.toml") == config
    (tmp_path / "c.toml").write_text('[data]\nprompt_dataset = "a.jsonl"\n')
    assert load(RunConfig, tmp_path / "c.toml", NEEDED).data.prompt_dataset == ["a.jsonl"]


CURRICULUM = ["--data.difficulty_sampling", "--train.num_episodes", "2"]


@pytest.mark.parametrize("words, text", [
    (["--data.prompt_probs", "1", "2", "3"], "expected one weight for each of the 2 files, got 3"),
    (["--data.prompt_probs", "1", "0"], "data.prompt_probs: expected weights above 0"),
    (["--data.prompt_probs", "1", "nan"], "data.prompt_probs: expected weights above 0"),
    (["--data.prompt_probs", "1", "much"], "data.prompt_probs.1: .*number.*'much'"),
    (["--data.prompt_dataset", "a", "--data.prompt_probs", "1"], "prompt_probs has no effect with one file"),
    (["--data.difficulty_sampling"], "no effect with train.num_episodes 1"),
    (["--data.easy_fraction", "0.5"], "data.easy_fraction has no effect without data.difficulty_sampling"),
    ([*CURRICULUM, "--data.easy_threshold", "0"], "data.hard_threshold: expected less than data.easy_threshold 0.0, got 0.0"),
    ([*CURRICULUM, "--data.hard_fraction", "1.5"], "data.hard_fraction: expected 0..1, got 1.5"),
    ([*CURRICULUM, "--data.hard_fraction", "1", "--data.easy_fraction", "1"], "difficulty_sampling has no effect with"),
])
def test_wrong_and_idle_options_are_refused(words, text):
    with pytest.raises(ValueError, match=text) as error:
        load(RunConfig, None, [*NEEDED, "--data.prompt_dataset", "a", "b", *words])
    assert "\n" not in str(error.value)


def test_a_broken_row_of_any_file_is_named(tmp_path):
    config = made(tmp_path, [3, 3])
    (tmp_path / "part1.jsonl").write_text('{"prompt": "fine"}\n{"question": "x"}\n')
    with pytest.raises(ValueError, match=f"{tmp_path}/part1.jsonl:2: expected an object with the column 'prompt'"):
        read_files(config.data)
    (tmp_path / "part0.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="part0.jsonl has no rows"):
        read_files(config.data)


def test_a_row_is_of_its_file_unless_it_says_otherwise(tmp_path):
    order = PromptOrder(made(tmp_path, [2, 3], shuffle=False))
    assert [order.prompt(i).source for i in range(5)] == ["part0"] * 2 + ["part1"] * 3
    (tmp_path / "part1.jsonl").write_text('{"prompt": "x", "source": "web"}\n{"prompt": "y"}\n')
    config = made(tmp_path, [2], shuffle=False)
    config.data.prompt_dataset = [str(tmp_path / "part1.jsonl"), str(tmp_path / "part0.jsonl")]
    assert [PromptOrder(config).prompt(i).source for i in range(4)] == ["web", "part1", "part0", "part0"]
    assert sum(map(len, read_files(config.data))) == 4


def test_a_single_file_is_one_pool_in_a_new_order_each_epoch(tmp_path):
    config = made(tmp_path, [10], epochs=2)
    order = PromptOrder(config)
    expected = [np.random.default_rng([42, epoch]).permutation(10).tolist() for epoch in (0, 1)]
    assert [order.row(i) for i in range(20)] == sum(expected, [])
    assert order.has(19) and not order.has(20) and order.total == 20


# the curriculum through ledger, journal and crashes ----------------------------------------


class Run:
    """Ledger, journal and prompt order as the broker puts them together, without sockets."""

    def __init__(self, folder: Path, config: RunConfig):
        self.folder, self.config = folder, config
        self.ordinals: list[int] = []
        self.start()

    def start(self):
        self.prompts = PromptOrder(self.config)
        settings_ = ledger_config(self.config, self.prompts.total, self.prompts.epoch_rows)
        self.ledger, self.places, number = recover(self.folder, settings_, 0.0)
        for rows in self.ledger.epochs:
            self.prompts.begin_epoch(rows)
        self.journal = Journal(self.folder, number, snapshot(self.ledger, self.places))
        self.ledger.version(self.ledger.trained_steps)
        self.commit()

    def crash(self):
        before = self.ledger.epochs, self.ledger.rates, self.ledger.recorded, self.ledger.known_prompts, self.ledger.total_prompts
        self.journal.close()
        self.start()
        assert before == (self.ledger.epochs, self.ledger.rates, self.ledger.recorded, self.ledger.known_prompts, self.ledger.total_prompts)

    def commit(self):
        for event in self.ledger.events():
            place = self.journal.append(event, [b"x"] if event["kind"] == "finish" else ())
            if event["kind"] == "finish":
                self.places[event["group"], event["sample"]] = place

    def advance(self, score):
        """Everything that can happen now: an epoch begins, a rollout of each lease is scored, a batch is trained."""
        while self.ledger.epoch_wanted():
            rows, rates = self.prompts.choose(self.ledger.rates, self.ledger.recorded)
            self.prompts.begin_epoch(rows)
            self.ledger.begin_epoch(rows, rates)
        for _ in range(5):
            if grant := self.ledger.lease("w", 0.0):
                assert self.prompts.has(grant.group.ordinal)
                value = score(self.prompts.row(grant.group.ordinal), grant.sample)
                self.ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, value)
                self.commit()
        step = self.ledger.trained_steps + 1
        again = self.ledger.batch(step)
        if shipped := (step, again) if again else self.ledger.ship():
            self.ordinals += [g.ordinal for g in shipped[1]]
            self.ledger.close_admission()
            self.ledger.trained(step)
            self.ledger.version(step)
        self.commit()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), epochs=st.integers(2, 4), batch=st.integers(1, 4), lag=st.integers(0, 2),
       easy=st.sampled_from([0.0, 0.5]), hard=st.sampled_from([0.0, 0.5]), crashes=st.sets(st.integers(0, 60)), weighted=st.booleans(),
       scores=st.integers(0, 2**30))
def test_a_curriculum_trains_each_prompt_once_and_goes_on_the_same_after_a_crash(sizes, epochs, batch, lag, easy, hard, crashes, weighted,
                                                                                  scores):
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    weights = [1.0, 2.0, 3.0][:len(sizes)] if weighted and len(sizes) > 1 else []
    config = made(folder, sizes, epochs, difficulty_sampling=True, easy_fraction=easy, hard_fraction=hard, prompt_probs=weights)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.max_lag = batch, 2, lag
    values = np.random.default_rng(scores).integers(0, 3, sum(sizes))  # how many of a row's two rollouts pass
    runs = [Run(folder / name, config) for name in ("steady", "crashing")]
    for tick in range(400):
        for run in runs:
            run.advance(lambda row, sample: float(sample < values[row]))
        if tick in crashes:
            runs[1].crash()
        if all(run.ledger.done() for run in runs):
            break
    for run in runs:
        assert run.ledger.done() and run.ledger.balance() == 0 and len(run.ledger.epochs) == epochs - 1
        total = sum(sizes) + sum(len(rows) // 4 for rows in run.ledger.epochs)
        assert Counter(run.ordinals) == Counter(range(total)) and run.ledger.total_prompts == total
        assert run.ledger.trained_steps == run.ledger.total_steps == -(-total // batch)
        assert run.ledger.planned_steps == -(-sum(sizes) * epochs // batch)
        for rows in run.ledger.epochs:
            assert max(Counter(np.frombuffer(rows, "<i4").tolist()).values(), default=1) == 1
        if lag == 0 and not sum(sizes) % batch:  # every group of the first epoch has closed when the second is chosen
            second = set(np.frombuffer(run.ledger.epochs[0], "<i4").tolist())
            assert {row for row in range(sum(sizes)) if values[row] == 1} <= second
            assert easy or not any(values[row] == 2 for row in second)
            assert hard or not any(values[row] == 0 for row in second)
    if lag == 0 and not sum(sizes) % batch and epochs == 2:
        assert runs[0].ledger.epochs == runs[1].ledger.epochs
    again = PromptOrder(config)
    for rows in runs[1].ledger.epochs:
        again.begin_epoch(rows)
    assert [again.prompt(o) for o in sorted(runs[1].ordinals)] == [runs[1].prompts.prompt(o) for o in sorted(runs[1].ordinals)]
    for run in runs:
        run.journal.close()
    shutil.rmtree(folder)


def test_an_epoch_of_solved_prompts_only_is_empty_and_the_run_ends_early(tmp_path):
    config = made(tmp_path, [5], 3, difficulty_sampling=True, easy_fraction=0.0)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.max_lag = 2, 2, 1
    run = Run(tmp_path / "journal", config)
    while not run.ledger.done():
        run.advance(lambda row, sample: 1.0)
    # rates of groups that were still open when the second epoch was chosen came too late: those prompts come twice, at most
    assert sorted(run.ordinals) == list(range(run.ledger.total_prompts)) and run.ledger.total_prompts < 9
    assert run.ledger.epochs[-1] == b"" and run.ledger.planned_steps == 8
