import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_hpc.observe.report import HEIGHT, WIDTH, draw, plot, text


def write_run(folder, rewards, **more):
    records = [{"step": i + 1, "attempt": 1, "reward_mean": r, "loss": 0.1, "time": 100.0 + 2 * i, **more} for i, r in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_the_first_and_last_five_steps_are_compared(tmp_path):
    shown = text(write_run(tmp_path, [0.1] * 5 + [0.9] + [0.7] * 5, pass_rate=0.5))
    assert "reward_mean  first 5 steps: 0.100   last 5 steps: 0.700   gain: +0.600" in shown
    assert "pass_rate    first 5 steps: 0.500   last 5 steps: 0.500   gain: +0.000" in shown and shown.endswith("11 steps in 20 s")


def test_a_short_run_is_compared_over_what_it_has(tmp_path):
    shown = text(write_run(tmp_path, [0.2, 0.4]))
    assert "last 2 steps: 0.300   gain: +0.000" in shown and "pass_rate" not in shown


def test_the_last_attempt_of_a_step_counts(tmp_path):
    run = write_run(tmp_path, [0.2, 0.4])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "attempt": 2, "reward_mean": 0.8, "time": 200.0}) + "\n")
    assert "last 2 steps: 0.500" in text(run)


def test_the_picture_is_a_png_in_the_run_folder(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot(write_run(tmp_path, [0.1, 0.5, 0.3], entropy_mean=0.2, pass_rate=0.4))
    assert path == tmp_path / "reward.png" and path.read_bytes().startswith(b"\x89PNG")


def test_the_text_shows_curve_and_numbers(tmp_path):
    shown = text(write_run(tmp_path, [0.0, 0.25, 0.5, 1.0]))
    assert "gain: +0.000" in shown and "1.000 |" in shown and "0.000 |" in shown and "step 1" in shown


def test_a_run_without_steps_is_named(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl"):
        text(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step with a reward"):
        text(tmp_path)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=400))
def test_any_curve_fits_the_terminal_and_shows_every_column(values):
    lines = draw(values, 1, len(values)).splitlines()
    assert len(lines) == HEIGHT + 2 and max(map(len, lines)) <= WIDTH + 12
    bottom = lines[HEIGHT - 1].split("|")[1]
    assert len(bottom) == lines[HEIGHT].count("-") and " " not in bottom


@given(st.lists(st.floats(0, 1), min_size=2, max_size=WIDTH))
def test_a_rising_curve_is_drawn_rising(values):
    rows = [line.split("|")[1] for line in draw(sorted(values), 1, len(values)).splitlines()[:HEIGHT]]
    heights = [sum(column < len(row) and row[column] != " " for row in rows) for column in range(len(rows[-1]))]
    assert heights == sorted(heights)
