"""Import this first in a subprocess: then `adapters.tools.execution.executor` and `mcp_tools` can be imported without torch.

The packages' own modules import everything that they export, which takes seconds. Here they are empty packages of the same
folders.
"""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for name in ("grpo", "adapters", "adapters.tools"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules[name] = package
