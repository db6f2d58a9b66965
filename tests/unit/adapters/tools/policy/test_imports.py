"""A policy needs no executor: a service that only chooses tools starts without it."""

import subprocess
import sys

CODE = """
import sys
from typing import Literal
from adapters.tools import Tool, ToolCatalogue, ToolSelectionPolicy

def convert(to: Literal["feet", "miles"]) -> str:
    "Convert a length."
    return to

policy = ToolSelectionPolicy(ToolCatalogue([Tool.from_function(convert)]))
[call] = policy.predict(["how many feet"])
assert call.tool == "convert"
policy.score_groups(["how many feet"], policy.sample_actions(["how many feet"], 2).actions)
print(sorted(name for name in sys.modules if name.startswith("adapters.tools.execution")))
from adapters.tools import ToolExecutor
print("adapters.tools.execution.executor" in sys.modules)
"""


def test_a_policy_is_made_and_used_without_importing_the_executor() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "True"]
