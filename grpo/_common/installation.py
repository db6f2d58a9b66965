"""How the extras of this package are installed where it is."""

import json
from importlib.metadata import PackageNotFoundError, distribution

DISTRIBUTION = "model-agnostic-grpo"


def install_command(extra: str) -> str:
    """The command that installs an extra, such as `pip install ".[gym]" in the checkout`.

    The name of the package is right only where an index has it: where the package came from one, or from a file or a
    repository that the command names.

    Args:
        extra: Name of the extra, in brackets after the package.
    """
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # recovery: the checkout is used without being installed
        return f'pip install ".[{extra}]" in the checkout'
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if "dir_info" in origin or found.read_text("RECORD") is None:  # without RECORD, a build left it in the checkout
        return f'pip install ".[{extra}]" in the checkout'
    kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f'pip install "{DISTRIBUTION}[{extra}]' + (f' @ {kind}{origin["url"]}"' if origin else '"')
