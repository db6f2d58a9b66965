"""The style of a page. One colour has one meaning: blue is the reward in training, and green is the reward in evaluations."""

LIGHT = {
    "page": "#fafaf8", "card": "#ffffff", "ink": "#1d2430", "soft": "#5b6675", "faint": "#e6e8eb",
    "middle": "#9aa4b1", "reward": "#2563c9", "evaluation": "#12805c", "plain": "#55606f", "good": "#12805c",
    "problem": "#b3361b", "note": "#8a6100", "part0": "#7a3fb0", "part1": "#b85c00", "part2": "#0b7285",
    "part3": "#b0307a", "part4": "#6b7300", "part5": "#55606f",
}  # fmt: skip
"""The colours of light screens, by name. Charts are drawn in them."""
DARK = {
    "page": "#14171c", "card": "#1c2027", "ink": "#e8ebef", "soft": "#a3adba", "faint": "#323943",
    "middle": "#7f8a98", "reward": "#74a9ff", "evaluation": "#4fc79a", "plain": "#b4bdc9", "good": "#4fc79a",
    "problem": "#ff8f73", "note": "#e3b341", "part0": "#c79bf2", "part1": "#ffae5c", "part2": "#58c4d6",
    "part3": "#f58ac5", "part4": "#c6cf5a", "part5": "#b4bdc9",
}  # fmt: skip
"""The colours of dark screens."""


def _variables(colours: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in colours.items()) + " }"


COLOURS = f"""
:root {{ color-scheme: light dark; }}
{_variables(LIGHT)}
@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}
"""

PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 90ch; overflow-wrap: anywhere; }
.lead { font-size: 17px; }
.small, figcaption, footer { color: var(--soft); font-size: 13px; }
footer { margin-top: 40px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 22px 0 8px; }
.tile, figure, .finding { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-bottom: 16px; }
@media (max-width: 860px) { .grid { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0 0 16px; min-width: 0; }
.grid figure { margin: 0; }
.finding { margin: 0 0 10px; border-left: 4px solid var(--note); }
.finding p { margin: 2px 0 0; max-width: none; }
.finding.good { border-left-color: var(--good); }
.finding.problem { border-left-color: var(--problem); }
details { margin: 0 0 10px; }
summary { cursor: pointer; color: var(--soft); padding: 4px 0; }
"""

TABLES = """
.scroll { overflow-x: auto; margin: 6px 0 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--faint); }
td { overflow-wrap: anywhere; unicode-bidi: isolate; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 130px; }
td img { display: block; max-width: 320px; margin-top: 5px; }
table.answers { table-layout: fixed; }
table.answers th { width: 29%; }
table.answers th:last-child { width: 13%; }
td.improved { color: var(--good); }
td.worse { color: var(--problem); }
.answer { white-space: pre-wrap; max-height: 13em; overflow-y: auto; font: 13px/1.45 ui-monospace, Consolas, monospace; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin: 0 5px 0 8px; }
.dot.before { background: var(--middle); }
.dot.after { background: var(--reward); }
"""

CHARTS = """
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
svg text { font-family: system-ui, "Segoe UI", sans-serif; }
svg .point { stroke: transparent; stroke-width: 10; pointer-events: all; }
svg .hidden { opacity: 0; }
svg .point:hover { opacity: 1; }
"""

STYLE = COLOURS + PAGE + TABLES + CHARTS
"""CSS of the page, for light and dark screens. A point of a line without dots appears under the pointer."""
