"""A workbench of real tools with generated requests, for examples, tests and benchmarks.

Every tool can be executed. The categories are text, arithmetic, dates, conversion, lists, and files in a folder.
"""

from .tasks import make_workbench_tasks, shares_words, workbench_split
from .tools import ADDED_LATER, WORKBENCH_FILES, make_workbench_files, workbench_catalogue

__all__ = [
    "ADDED_LATER",
    "WORKBENCH_FILES",
    "make_workbench_files",
    "make_workbench_tasks",
    "shares_words",
    "workbench_catalogue",
    "workbench_split",
]
