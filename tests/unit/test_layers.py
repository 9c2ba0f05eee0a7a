"""The import rule: data flows one way, and no module reaches back to its owner."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "molt_hpc"
BASE = {"config", "config_checks", "options", "records", "guard"}
ALLOWED = {
    "options": set(), "records": set(), "guard": set(), "config": {"options", "config_checks"},
    "config_checks": {"config", "options"},
    "wire": BASE, "data": BASE | {"wire"}, "agents": BASE | {"wire", "data"},
    "broker": BASE | {"wire", "data"}, "weights": BASE | {"wire", "data"},
    "rollout": BASE | {"wire", "data", "agents", "broker", "weights"},
    "train": BASE | {"wire", "data", "broker", "weights"},
    "slurm": BASE | {"wire", "data", "agents", "broker", "weights", "rollout", "train"},
    "observe": BASE | {"wire", "data", "agents", "broker", "weights", "rollout", "train", "slurm"},
}
"""What each part may import besides itself. rollout/ and train/ never import each other."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names that a module imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_lies_below_it(path):
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("molt_hpc.")}
    assert parts - {part(path), "__version__"} <= ALLOWED[part(path)]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_vllm_is_imported_at_module_level_only_where_it_is_at_home(path):
    uses = any(name.split(".")[0] == "vllm" for name in imported(path, top_level_only=True))
    assert not uses or part(path) == "weights" or path.name == "engine.py"


def test_nothing_pickles_or_forks_a_socket():
    for path in MODULES:
        text = path.read_text()
        assert "recv_pyobj" not in text and "send_pyobj" not in text and "import pickle" not in text, path
        assert "wait_for(" not in text.replace("_changed.wait_for(", "").replace("_wait_for_", ""), f"{path}: a cancelled receive loses a message"
