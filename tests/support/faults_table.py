"""The table of `docs/reliability.md` after the tests of faults, with what was found this time."""

from collections import defaultdict

import pytest

LINES = {
    "test_a_run_of_30_iterations_survives_a_stop_at_every_update": "stops of runs of 30 iterations",
    "test_a_run_stopped_at_every_call_on_one_rank_continues_on_both": "the same on two ranks, the stop on one of them",
    "test_every_kind_of_run_survives_a_stop_at_every_call": "stops at every call of 32 kinds of runs",
    "test_500_kills_lose_nothing": "SIGKILL at a random time of a run, 500 times",
    "test_200_signals_lose_nothing": "SIGTERM or SIGINT at a random time, 200 times",
    "test_after_100_kills_both_ranks_load_the_same_newest_checkpoint": "SIGKILL of one rank or both, 100 times",
    "test_a_fault_at_every_file_call_loses_no_earlier_checkpoint": "SIGKILL, ENOSPC, EIO, EACCES and EMFILE",
    "test_every_flip_and_cut_is_detected_on_all_ranks_and_the_file_is_named": "5,000 flipped bits and 500 cut files",
    "test_a_rank_that_ends_or_hangs_in_any_phase_is_named_on_all_others": "each of 2 or 3 ranks killed",
    "test_a_thousand_iterations_count_every_failure_and_leave_no_process": "1,000 iterations with 20 % of the reward calls",
    "test_the_second_500_iterations_need_at_most_5_mb_more": "resident memory from iteration 500 to 1,000",
    "test_a_thousand_conversations_leave_no_file_open": "1,000 conversations of agent programs",
}
"""The test of each line of the table, by the beginning of the line. Other tests have their names."""


def write_faults_table(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each test: how many cases passed of how many, and the figures that they recorded."""
    passed, of, figures = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, list[str]](list)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            file, _, name = report.nodeid.split("[")[0].rpartition("::")
            if "tests/faults/" in file and (report.when == "call" or outcome != "passed"):
                line = LINES.get(name, name.removeprefix("test_").replace("_", " "))
                of[line] += 1
                passed[line] += outcome == "passed"
                figures[line] += [f"{case}: {figure}" for case, figure in report.user_properties]
    if of:
        terminalreporter.section("the table of docs/reliability.md")
    for line in of:
        terminalreporter.write_line(
            f"| {line} | {'; '.join([f'{passed[line]} of {of[line]} passed', *sorted(set(figures[line]))])} |"
        )
