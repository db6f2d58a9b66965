"""What pyproject.toml cannot express: the README on PyPI has absolute links. Everything else stands in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup

published = runpy.run_path(str(Path(__file__).parent / "tools" / "published_readme.py"))
setup(long_description=published["published_readme"](), long_description_content_type="text/markdown")
