"""`import grpo` imports about half of the package; the other public names are imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).resolve().parents[2]


def printed(script: str) -> str:
    """The output of a new interpreter: in this one, other tests have imported everything already."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_trainer_is_imported_when_it_is_first_used() -> None:
    script = "import sys, grpo; print('grpo.trainer' in sys.modules, grpo.GRPOTrainer, 'grpo.trainer' in sys.modules)"
    assert printed(script) == "False <class 'grpo.trainer.GRPOTrainer'> True"


@pytest.mark.slow
def test_every_public_name_is_found_and_listed_in_a_new_interpreter() -> None:
    script = "import grpo; listed = {*dir(grpo)}; from grpo import *; print({*grpo.__all__} - listed)"
    assert printed(script) == "set()"


@pytest.mark.slow
def test_grpo_objective_is_the_function_whatever_was_imported_first() -> None:
    """Its module has the same name, and importing a module makes it an attribute of its package."""
    assert printed(
        "from grpo.trainer import GRPOTrainer; from grpo import grpo_objective; print(type(grpo_objective))"
    ) == ("<class 'function'>")


def test_type_checkers_see_every_name_where_it_is_found_at_run_time() -> None:
    tree = ast.parse((ROOT / "grpo" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == grpo._IMPORTED_AT_FIRST_USE  # type: ignore[attr-defined]
    assert set(seen) <= set(grpo.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'grpo' has no attribute 'GRPOTraner'"):
        _ = grpo.GRPOTraner  # type: ignore[attr-defined]
