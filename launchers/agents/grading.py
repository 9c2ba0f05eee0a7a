"""Grade a mathematical answer: the last boxed expression against the label, by normal form first, then by algebra with a deadline."""

import re
from typing import Any

from molt_hpc.agents import score_in_subprocess


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces close."""
    found, at = None, 0
    while (start := text.find("\\boxed{", at)) >= 0:
        depth, end = 1, start + 7
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found = text[start + 7:end - 1]
        at = start + 7
    return found


def normal_form(answer: str) -> str:
    """A text that is equal for answers which differ in spelling only."""
    answer = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\(?:left|right|displaystyle|,|;|!|:|quad)(?![a-zA-Z])|\$|\\%|%", "", answer)
    answer = answer.replace("dfrac", "frac").replace("tfrac", "frac").replace("^\\circ", "").replace("^{\\circ}", "")
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", re.sub(r"(\d),(?=\d{3}(?!\d))", r"\1", answer))
    answer = re.sub(r"^[a-zA-Z]\w*=", "", "".join(answer.split()).rstrip("."))
    return re.sub(r"^(-?)\.", r"\g<1>0.", re.sub(r"(\.\d*?)0+$", r"\1", answer).rstrip("."))


def as_expression(answer: str) -> str:
    """LaTeX of the common kinds as what sympy reads."""
    answer = normal_form(answer)
    for _ in range(8):
        answer = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", answer)
        answer = re.sub(r"\\sqrt\[([^\[\]]*)\]\{([^{}]*)\}", r"((\2)**(1/(\1)))", answer)
        answer = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", answer)
        answer = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", answer)
    answer = answer.replace("\\cdot", "*").replace("\\times", "*").replace("\\pi", "pi").replace("\\infty", "oo").replace("^", "**")
    return answer.replace("\\{", "{").replace("\\}", "}").replace("\\", "")


def equal_by_algebra(one: str, other: str) -> bool:
    """Whether two expressions are the same number, tuple or function. Runs in a process of its own: sympy may take for ever."""
    from sympy import simplify
    from sympy.parsing.sympy_parser import implicit_multiplication, parse_expr, standard_transformations

    def read(text: str) -> Any:
        return parse_expr(text, transformations=(*standard_transformations, implicit_multiplication))

    a, b = read(one), read(other)
    if isinstance(a, tuple) or isinstance(b, tuple):
        same = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
        return same and all(simplify(x - y) == 0 for x, y in zip(a, b, strict=True))
    return bool(simplify(a - b) == 0)


def grade(text: str, label: Any, seconds: float = 3.0) -> dict[str, float]:
    """{reward: 0 or 1, answered: 0 or 1} for a reply; label: the answer, or a dict with `ground_truth`. Blocks for up to `seconds`."""
    truth = str(label["ground_truth"] if isinstance(label, dict) else label)
    truth = boxed(truth) or truth
    answer = boxed(text)
    if answer is None:
        return {"reward": 0.0, "answered": 0.0}
    if normal_form(answer) == normal_form(truth):
        return {"reward": 1.0, "answered": 1.0}
    try:
        equal = score_in_subprocess(equal_by_algebra, as_expression(answer), as_expression(truth), timeout=seconds)
        return {"reward": float(equal), "answered": 1.0}
    except (RuntimeError, TimeoutError):  # no expression, or one that sympy does not finish
        return {"reward": 0.0, "answered": 1.0}
