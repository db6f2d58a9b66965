"""Numbers, times and counts as people read them."""

import math


def number(value: float | None, *, signed: bool = False) -> str:
    """A number with about three digits: 0.124, 12.3, 123.5, 1,235 or 1.2e-07. "-" if there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    sign = "+" if signed and value else ""
    size = abs(value)
    if size and (size < 1e-4 or size >= 1e7):
        return f"{value:{sign}.2g}"
    decimals = 0 if size >= 1000 else 1 if size >= 10 else 2 - math.floor(math.log10(size)) if size else 0
    text = f"{value:{sign},.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(fraction: float) -> str:
    """A fraction in percent: 12 %. Between 0 and 1 percent, and between 99 and 100, with more digits."""
    scaled = 100 * fraction
    near_an_end = 0 < scaled < 1 or 99 < scaled < 100
    return f"{scaled:.1f} %" if near_an_end else f"{scaled:.0f} %"


def duration(seconds: float) -> str:
    """A time: 3.2 ms, 4.1 s, 2 min 5 s, 3 h 20 min or 2 d 4 h."""
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for name, size, smaller, part in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86400, "h", 3600)):
        if round(seconds / part) * part < {"min": 3600, "h": 86400}.get(name, math.inf):
            whole, rest = divmod(round(seconds / part), size // part)
            return f"{whole} {name} {rest} {smaller}" if rest else f"{whole} {name}"
    raise AssertionError("unreachable: days have no upper bound")


def counted(count: int, noun: str) -> str:
    """A count and its noun: 1 iteration, 1,200 iterations."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
