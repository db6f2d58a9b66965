"""Before and after training: in words, as a chart of the states, and as both policies' answers side by side."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from adapters.plots import is_installed
from grpo.evaluation import Answer, ComparisonReport, StateComparison

from .charts import Chart, Line, before_after, line_chart
from .markup import Html, element, joined
from .tables import folded, long_text, row_of, table_of
from .words import counted, number, percent

MAX_STATES = 30
"""Number of states in the chart and the tables: half from the largest gains, half from the largest losses."""

FEW_STATES = 20
"""Number of states below which a bootstrap interval is too narrow: see `grpo.evaluation.paired_interval`."""

MAX_OPEN = 10
"""Number of states whose answers are not behind a fold."""


def comparison_section(report: ComparisonReport) -> Html:
    """Before and after in words, as a chart of the states, and with an answer of both policies in each state."""
    ranked = sorted(report.states, key=lambda state: -state.difference)
    shown, left_out = _both_ends(ranked, MAX_STATES)
    first, others = _both_ends(shown, MAX_OPEN)
    return joined(
        element("p", *comparison_words(report), class_="lead"),
        _passes_of(report),
        _parts_of(report),
        element("figure", before_after(shown), element("figcaption", *_legend(shown, len(left_out))))
        if is_installed()
        else "",
        element("h3", "Answers side by side"),
        _answers(first),
        folded(f"The answers in {counted(len(others), 'further state')}", _answers(others)) if others else "",
    )


def _both_ends(states: Sequence[StateComparison], count: int) -> tuple[list[StateComparison], list[StateComparison]]:
    """The first and the last states of a ranking, `count` together, and the states between them."""
    if len(states) <= count:
        return [*states], []
    half = count // 2
    return [*states[:half], *states[-half:]], [*states[half:-half]]


def _legend(shown: Sequence[StateComparison], num_left_out: int) -> list[str]:
    half = len(shown) // 2
    most = "gained most" if shown[half - 1].difference >= 0 else "lost least"
    least = "lost most" if shown[-half].difference < 0 else "gained least"
    cut = f"The {half} states that {most} and the {half} that {least}; {num_left_out:,} states are not shown. "
    dots = [element("i", class_=f"dot {name}") for name in ("before", "after")]
    words = "after training: mean reward of the sampled actions in each state."
    return [cut if num_left_out else "", dots[0], "before ", dots[1], words]


def _answers(states: Sequence[StateComparison]) -> Html:
    rows = [
        row_of(
            [
                long_text(state.label),
                _answer(state.before, state.answer_before),
                _answer(state.after, state.answer_after),
                number(state.difference, signed=True),
            ],
            classes=["text", "text", "text", f"number {state.outcome}"],
        )
        for state in states
    ]
    header = ["state", "before", "after", "difference"]
    return table_of(header, rows, ["text", "text", "text", "number"], class_="answers")


def _answer(mean: float, answer: Answer) -> Html:
    reward = f"mean reward {number(mean)}, this answer {number(answer.reward)}"
    return joined(long_text(answer.text), element("div", reward, class_="small"))


def comparison_words(report: ComparisonReport) -> list[str]:
    """The comparison in sentences. There is a percentage only if the mean before is positive."""
    share = report.improvement_percent
    relative = "" if share is None else f" ({share:+.3g} %)"
    interval = report.confidence_interval
    bounds = (
        "One state gives no interval."
        if interval is None
        else f"With {percent(report.confidence)} confidence, the difference is between {number(interval[0], signed=True)} and "
        f"{number(interval[1], signed=True)}, if other states are like these."
    )
    if interval is not None and len(report.states) < FEW_STATES:
        bounds += f" From fewer than {FEW_STATES} states, the interval is too narrow."
    counts = f"{report.num_improved:,} improved, {report.num_worse:,} worse, {report.num_unchanged:,} unchanged"
    means = f"The mean reward went from {number(report.mean_reward_before)} to {number(report.mean_reward_after)}"
    actions = counted(report.num_actions_per_state, "action")
    return [
        f"{means}: {number(report.improvement, signed=True)}{relative}. {bounds} ",
        f"Of {counted(len(report.states), 'state')}: {counts}. {actions} of each policy in each state.",
    ]


def _passes_of(report: ComparisonReport) -> Html:
    """avg@k and pass@k with intervals, and the curves of pass@k over k."""
    rows = []
    for name, at in [("avg", report.avg_at_k), *(("pass", at) for at in report.pass_at_k)]:
        cells = [
            f"{name}@{at.k}",
            *(_with_interval(*pair) for pair in ((at.before, at.before_interval), (at.after, at.after_interval))),
            _with_interval(at.difference, at.difference_interval, signed=True),
        ]
        rows.append(row_of(cells, classes=["", "number", "number", "number"]))
    table = table_of(["", "before", "after", "difference"], rows, ["", "number", "number", "number"])
    if len(report.pass_at_k) < 2 or not is_installed():
        return table
    counts = np.array([float(at.k) for at in report.pass_at_k])
    colours = {"before": "middle", "after": "reward"}
    lines = [
        Line(
            label=side,
            y=np.array([getattr(at, side) for at in report.pass_at_k]),
            colour=colour,
            band=_band([getattr(at, f"{side}_interval") for at in report.pass_at_k]),
            band_label=f"{percent(report.confidence)} interval",
            has_dots=True,
        )
        for side, colour in colours.items()
    ]
    chart = Chart(
        title="pass@k",
        note=f"The probability that one of k actions or more earns at least {number(report.pass_reward or 0.0)}. A gain at "
        "k = 1 that shrinks with k is a policy that does more often what it could do before.",
        y_label="probability",
        x=counts,
        lines=lines,
        from_zero=True,
        x_name="k",
    )
    return joined(table, line_chart(chart))


def _band(
    intervals: Sequence[tuple[float, float] | None],
) -> tuple[Float64[np.ndarray, " I"], Float64[np.ndarray, " I"]] | None:
    known = [interval for interval in intervals if interval is not None]
    low, high = np.array(known).reshape(-1, 2).T
    return (low, high) if len(known) == len(intervals) else None


def _with_interval(value: float, interval: tuple[float, float] | None, *, signed: bool = False) -> str:
    bounds = "" if interval is None else " ({} to {})".format(*(number(bound, signed=signed) for bound in interval))
    return f"{number(value, signed=signed)}{bounds}"


def _parts_of(report: ComparisonReport) -> Html:
    names = dict.fromkeys([*report.components_before, *report.components_after])
    if not names:
        return joined()
    rows = []
    for name in names:
        before, after = report.components_before.get(name), report.components_after.get(name)
        difference = None if before is None or after is None else after - before
        cells = [name, number(before), number(after), number(difference, signed=True)]
        rows.append(row_of(cells, classes=["", "number", "number", "number"]))
    return table_of(["part of the reward", "before", "after", "difference"], rows, ["", "number", "number", "number"])
