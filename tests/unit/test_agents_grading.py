"""The grader of the reference agents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launchers" / "agents"))

from grading import boxed, grade, normal_form


def test_the_last_box_that_closes_counts():
    assert boxed(r"so \boxed{1} and \boxed{\frac{1}{2}} then \boxed{3") == r"\frac{1}{2}"
    assert boxed("nothing") is None and boxed(r"\boxed{a{b}c}") == "a{b}c"


@pytest.mark.parametrize("one, other", [(r"\dfrac{1}{2}", r"\frac12"), ("1,000", "1000"), ("x = 5", "5"), (r"5\%", "5"), ("0.50", ".5"), ("3.", "3"),
                                        (r"\left( 1, 2 \right)", "(1,2)"), (r"90^\circ", "90"), (r"\text{yes}", "yes"), ("2.0", "2")])
def test_spellings_of_one_answer_have_one_normal_form(one, other):
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize("answer, label, reward", [
    (r"\frac{1}{2}", "0.5", 1), (r"\sqrt{8}", r"2\sqrt{2}", 1), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1), ("(1, 2)", "(1.0, 2)", 1),
    ("x^2+2x+1", "(x+1)^2", 1), (r"2\pi", r"\pi\cdot 2", 1), ("0.333", r"\frac13", 0), ("7", "8", 0), ("(1,2)", "3", 0), ("[((", "5", 0)])
def test_algebra_decides_where_spelling_does_not(answer, label, reward):
    assert grade(rf"it is \boxed{{{answer}}}", {"ground_truth": label}) == {"reward": reward, "answered": 1.0}


def test_an_answer_that_algebra_does_not_finish_is_wrong_in_time():
    assert grade(r"\boxed{2^{2^{2^{2^{2^2}}}}}", "5", seconds=1.0)["reward"] == 0.0
    assert grade("no box", "5") == {"reward": 0.0, "answered": 0.0}


def test_an_attack_on_the_parser_reaches_nothing(tmp_path):
    mark = tmp_path / "pwned"
    attack = rf"\boxed{{__import__('os').system('touch {mark}; nc -l 1 | head')}}"
    assert grade(attack, "5", seconds=2.0)["reward"] == 0.0
