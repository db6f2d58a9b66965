"""Tools for timing an executor. They have their own module, so that workers import nothing else."""

import asyncio
import time


def nap(seconds: float) -> float:
    """Sleep."""
    time.sleep(seconds)
    return seconds


async def wait(seconds: float) -> float:
    """Wait for another machine that takes some time."""
    await asyncio.sleep(seconds)
    return seconds


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def add_elsewhere(a: int, b: int) -> int:
    """Ask another machine to add two numbers."""
    return a + b
