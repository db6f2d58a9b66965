"""A small catalogue that its users did not write: 30 functions of NumPy, described by the beginning of their own docstrings.

The docstrings are read from the installed NumPy. The 150 requests, five per function, were written for this benchmark before
any policy had seen them, in the words of somebody who has a task and does not look for the name of a function.
"""

import functools
import inspect
import random
from operator import attrgetter

import numpy as np

from adapters.tools import Tool, ToolCatalogue, ToolTask

REQUESTS = {
    "median": (
        "Which salary has half of the employees above it and half below?",
        "give me the middle value of these house prices",
        "A few of the response times are enormous. What is a typical one that these do not distort?",
        "the 50/50 point of my sorted marks",
        "I want the central number of the list, not the average",
    ),
    "std": (
        "How much do the daily temperatures vary around their average?",
        "the spread of the weights in this batch, in grams",
        "Are the scores of class A more scattered than those of class B?",
        "I need sigma of these measurements",
        "tell me how noisy the sensor readings are",
    ),
    "percentile": (
        "Below which waiting time are nine out of ten customers?",
        "What is the upper quartile of our order values?",
        "the latency that only 1 in 100 calls exceeds",
        "cut off for the top 5 % of the students",
        "where does the lowest tenth of the incomes end",
    ),
    "histogram": (
        "How many customers fall into each age bracket?",
        "count my measurements in ten bins of the same width",
        "I would like to see how the prices are distributed, in steps of 50 euros",
        "tally the delays into under 5, 5 to 10 and over 10 minutes",
        "number of photos per hour of the day",
    ),
    "corrcoef": (
        "Do taller people also weigh more? Give me a number between -1 and 1.",
        "how strongly are ice cream sales and temperature related",
        "Is there a linear connection between hours of study and marks?",
        "Pearson's r of these two columns",
        "check whether the two stocks rise and fall together, whatever their scale",
    ),
    "cumsum": (
        "What is my account balance after each of these payments?",
        "running total of the rain over the year",
        "How many kilometres had I cycled by the end of each day?",
        "add the monthly sales up as the year goes on",
        "turn new infections per day into all infections so far",
    ),
    "diff": (
        "By how much did the meter reading change from one day to the next?",
        "time that passed between consecutive visits",
        "I have positions at every second and want the steps between them",
        "subtract each entry from the one that follows it",
        "gain or loss compared with the month before",
    ),
    "gradient": (
        "How steep is the path at each point, given the heights along it?",
        "estimate the speed of the car from its recorded positions",
        "slope of this sampled curve everywhere, at the ends too",
        "numerical derivative of my signal",
        "in which direction does the terrain rise fastest on this grid of elevations",
    ),
    "interp": (
        "I know the temperature at 8 and at 10 o'clock. What was it at 9?",
        "read a value off a curve that I have only as a few points",
        "fill in the missing years between two censuses along a straight line",
        "look up the density at 23 degrees in a table that goes in steps of 5",
        "estimate the dose for a weight that lies between two rows of the chart",
    ),
    "convolve": (
        "smooth this noisy curve with a moving average of five days",
        "apply an echo with this impulse response to the recording",
        "slide a small kernel along the signal and sum up the products",
        "distribution of the sum of two dice, from the chances of each",
        "blur one line of pixels",
    ),
    "polyfit": (
        "draw the best straight line through these points",
        "find the parabola that describes the flight of the ball",
        "Fit a trend to the sales of ten years, please.",
        "coefficients of a cubic curve that follows my data as closely as possible",
        "which slope and intercept match the calibration measurements best",
    ),
    "roots": (
        "For which x is x^3 - 6x + 2 equal to zero?",
        "solve the quadratic equation with coefficients 1, -3 and 2",
        "where does this polynomial cross the axis",
        "all complex solutions of z to the fifth plus one",
        "when does the ball hit the ground, if its height is -5 t^2 + 20 t + 1",
    ),
    "trapezoid": (
        "area under this measured curve",
        "energy that was used, from the power readings every minute",
        "How much water flowed by, if I have the flow rate at certain times?",
        "integrate my samples numerically",
        "distance covered, from a list of speeds and times",
    ),
    "argmax": (
        "On which day was the most rain?",
        "position of the largest entry",
        "which candidate got the most votes",
        "find the row where the loss peaks",
        "the class to which the model gives the highest score",
    ),
    "argsort": (
        "In which order do I read the rows so that the prices go up?",
        "rank the runners by their times and tell me their numbers",
        "indices of the players from the worst to the best",
        "I want to put the names into the order of their ages",
        "permutation that would arrange this array",
    ),
    "unique": (
        "Which countries occur in this column, each named once?",
        "remove the duplicates from my list of ids",
        "how many different words are there",
        "distinct values and how often each of them appears",
        "names of all customers who ordered, without repeats",
    ),
    "where": (
        "Write 'adult' for everybody of 18 and over, and 'child' for the others.",
        "take the first price if the item is on sale, else the second",
        "replace every negative entry with zero and keep the rest, depending on a condition",
        "choose between two arrays element by element",
        "put n/a wherever the mask is false",
    ),
    "clip": (
        "no value may be above 255 or below 0",
        "limit the speeds to between 30 and 120",
        "cap the bonus at 5000",
        "squeeze the outliers back to the edge of the allowed range",
        "keep the pixel intensities within bounds",
    ),
    "round": (
        "show the prices with two decimals",
        "drop everything behind the comma, to the nearest whole number",
        "give the distances to the nearest ten metres",
        "fewer digits, please: 3.14159 should become 3.14",
        "make these averages whole numbers",
    ),
    "concatenate": (
        "put the January and the February lists one behind the other",
        "join three arrays into a long one",
        "append the new measurements to the old ones",
        "glue these two tables together, one below the other",
        "merge the training and the test samples into a single array",
    ),
    "reshape": (
        "make a grid of 3 rows and 4 columns from these 12 numbers",
        "flatten the image to a single line",
        "arrange a year of hourly values as days by hours",
        "I have 100 values in a row and need a square",
        "change the dimensions without touching the data",
    ),
    "transpose": (
        "swap rows and columns of the table",
        "the colour channel should be the first axis, not the last",
        "flip the matrix over its diagonal",
        "I want students across and exams down, it is the other way round now",
        "turn a tall matrix into a wide one",
    ),
    "tile": (
        "repeat the weekly pattern for the whole year",
        "cover the wall with copies of this little image",
        "I need the sequence 1 2 3 ten times in a row",
        "make a chessboard out of a 2 by 2 block",
        "duplicate this row downwards until there are 50 of them",
    ),
    "linspace": (
        "50 points between 0 and 1, all the same distance apart",
        "divide the interval from -5 to 5 into 200 steps for a plot",
        "an axis from 10 to 20 with 11 marks, both ends included",
        "equally spaced times over one period",
        "give me seven thresholds spread evenly from low to high",
    ),
    "meshgrid": (
        "all pairs of these x and y coordinates, to plot a surface",
        "I want to evaluate f(x, y) on a rectangular raster",
        "coordinates of every node of a map from the two axes",
        "combine every learning rate with every batch size, as two matrices",
        "build the x and the y matrix for a contour plot",
    ),
    "isnan": (
        "Which of the readings are missing?",
        "find the entries that are not a number",
        "flag the gaps in my sensor data",
        "did the computation produce any undefined results",
        "mark the invalid cells of the table",
    ),
    "searchsorted": (
        "Where would 42 have to go so that the list stays in order?",
        "find the tax bracket for each income from the sorted limits",
        "position of a new time stamp in a chronological log",
        "which step of the scale does each value belong to, by binary search",
        "insertion point for these keys",
    ),
    "linalg.inv": (
        "undo this linear transformation",
        "the matrix that gives the identity when multiplied with mine",
        "reverse the rotation and scaling matrix of the camera",
        "A to the power of minus one",
        "I need the reciprocal of a square matrix",
    ),
    "linalg.solve": (
        "two equations with two unknowns: 3x + y = 9 and x + 2y = 8",
        "Find x such that A x = b.",
        "currents in this circuit, from Kirchhoff's laws as a matrix and a vector",
        "how many coins of each kind, if I know the number and the total, all linear",
        "unknown amounts of three ingredients from three mass balances",
    ),
    "linalg.eigh": (
        "principal axes of this symmetric tensor",
        "natural frequencies and modes from a symmetric stiffness matrix",
        "eigenvalues and eigenvectors of a covariance matrix",
        "energy levels of this Hermitian Hamiltonian",
        "diagonalise my symmetric matrix",
    ),
}  # fmt: skip
"""Requests by the function that is right for each."""

NUM_REQUESTS = 5
"""Number of requests per function."""


@functools.cache
def catalogue() -> ToolCatalogue:
    """The functions as tools that are never called: their names and docstrings, up to the list of their parameters."""
    return ToolCatalogue(
        Tool(
            name=name,
            description=(inspect.getdoc(attrgetter(name)(np)) or "").split("\nParameters\n")[0].strip(),
            function=attrgetter(name)(np),
            parameters={"type": "object"},
        )
        for name in REQUESTS
    )


def tasks() -> list[ToolTask]:
    """All requests with their functions."""
    return [ToolTask(text=text, tool=name) for name, texts in REQUESTS.items() for text in texts]


def split(num_per_tool: int, seed: int) -> tuple[list[ToolTask], list[ToolTask]]:
    """`num_per_tool` training requests of each function, and its other requests, which are held out."""
    training, held_out = [], []
    for name, texts in REQUESTS.items():
        order = random.Random(f"{seed} {name}").sample(texts, NUM_REQUESTS)
        training += [ToolTask(text=text, tool=name) for text in order[:num_per_tool]]
        held_out += [ToolTask(text=text, tool=name) for text in order[num_per_tool:]]
    return training, held_out
