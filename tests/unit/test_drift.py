"""The verdict on a drift probe."""

import logging

import numpy as np
import pytest

from molt_hpc.config import WeightsConfig
from molt_hpc.train.drift import DriftError, judge

OURS = np.linspace(-5, -1, 6, dtype=np.float32).reshape(2, 3)


def engine(*offsets):
    return (OURS + np.array(offsets, np.float32).reshape(2, 3)).astype("<f4").tobytes()


def test_the_worst_engine_gives_the_mean_and_any_token_the_maximum():
    found = judge(WeightsConfig(drift_prompts=2), 7, OURS, {"a": engine(0, 0, 0, 0, 0, 0.6), "b": engine(*[-0.2] * 6)})
    assert found == {"drift_mean": pytest.approx(0.2, rel=1e-5), "drift_max": pytest.approx(0.6, rel=1e-5)}


def test_no_answer_is_no_verdict():
    assert judge(WeightsConfig(drift_prompts=2), 7, OURS, {}) == {}


@pytest.mark.parametrize("value", [0.2, np.nan, np.inf])
def test_above_the_bounds_an_error_is_logged_and_then_the_run_stops_with_the_engine_named(value, caplog):
    engines = {"good": engine(*[0.0] * 6), "n1_e0": engine(*[value] * 6)}
    config = WeightsConfig(drift_prompts=2, drift_alarm=0.1)
    with caplog.at_level(logging.ERROR):
        judge(config, 7, OURS, engines)
    assert "version 7: log-probs of n1_e0" in caplog.text and "weights.drift_alarm is 0.1" in caplog.text
    config.drift_stop = 0.15
    with pytest.raises(DriftError, match="n1_e0 .* weights.drift_stop is 0.15"):
        judge(config, 7, OURS, engines)


def test_below_the_bounds_nothing_is_said(caplog):
    with caplog.at_level(logging.ERROR):
        judge(WeightsConfig(drift_prompts=2, drift_alarm=0.1, drift_stop=0.1), 7, OURS, {"a": engine(*[0.05] * 6)})
    assert not caplog.text
