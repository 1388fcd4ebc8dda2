"""Errors of the mean model on the test set: the confusion matrix of classes, the residuals of numbers."""

from collections.abc import Sequence
from itertools import pairwise

from pdsl.report.heat_map import column_label, depth_colour
from pdsl.report.names import ClassNames
from pdsl.report.run_schema import Residuals
from pdsl.report.svg import Picture, element, join, text
from pdsl.utils.format import percent, plain, ticks_in, ticks_to

WIDTH = 520
LETTER = 8.6  # width of a letter on a narrow screen, where text is largest
NAME_LETTERS = 12  # of a class
MAX_CLASSES = 40  # drawn as a matrix
MAX_WRITTEN = 12  # classes up to which each cell has its number
MAX_SIDE = 80.0  # of a cell
DEPTHS = (0.02, 0.1, 0.3, 0.6)  # fractions of a true class at which the next colour starts
MIN_LEFT = 52.0

BAR_LEFT, BAR_RIGHT, BAR_TOP, BAR_BOTTOM, BAR_HEIGHT = 56, 510, 12, 212, 250


def confusion_matrix(confusion: Sequence[Sequence[int]], classes: ClassNames) -> Picture | None:
    """Rows are true classes, columns predicted ones; colours are fractions of a row. None with too many classes."""
    count = len(confusion)
    if count > MAX_CLASSES:
        return None
    room = LETTER * max(len(classes.label(k, NAME_LETTERS)) for k in range(count))
    left = max(MIN_LEFT, 12 + room)
    upright = room <= 2.2 * LETTER
    top = 30 + (16 if upright else room)
    side = min(MAX_SIDE, (WIDTH - left) / count)
    rows, texts = [], []
    for i, counts in enumerate(confusion):
        total, cells = sum(counts), []
        y = top + side * (i + 0.5)
        for j, n in enumerate(counts):
            x, part = left + side * j, n / total if total else 0.0
            depth = sum(part >= bound for bound in DEPTHS) if n else 0
            colour = depth_colour(depth) if i == j or not depth else f"n{depth}"
            truth = f"true: {classes.name(i)}\npredicted: {classes.name(j)}"
            tip = f"{truth}\n{plain(n)} of {plain(total)} ({percent(part)})"
            cells.append(element("path", d=f"M{x + 0.5:.1f} {y:.1f}h{side - 1:.1f}", class_=colour, data_tip=tip))
            if count <= MAX_WRITTEN:
                tone = "middle deep" if depth >= 3 else "middle"
                texts.append(text(plain(n), x + side / 2, y + 4, class_=tone))
        rows.append(element("g", *cells, class_="heat", stroke_width=side - 1))
        if count <= 20 or i % 2 == 0:
            label = classes.label(i, NAME_LETTERS)
            texts.append(text(label, left - 8, y + 4, class_="end small"))
            texts.append(column_label(label, left + side * (i + 0.5), top - 8, upright))
    texts.append(text("predicted →", left, 14, class_="soft"))
    texts.append(text("true ↓", 0, 14, class_="soft"))
    label = f"confusion matrix of {count} classes"
    return Picture(WIDTH, top + side * count + 2, label, join(rows + texts))


def describe_confusion(confusion: Sequence[Sequence[int]], classes: ClassNames) -> str:
    """The most frequent error, as a fraction of its true class."""
    wrong = [(n, i, j) for i, row in enumerate(confusion) for j, n in enumerate(row) if i != j and n]
    if not wrong:
        return "No test record is in a wrong class."
    n, i, j = max(wrong, key=lambda error: error[0] / sum(confusion[error[1]]))
    taken = f"{plain(n)} of {plain(sum(confusion[i]))} records of {classes.full(i)} were taken for {classes.full(j)}"
    return f"Most often confused: {taken}."


def residual_histogram(residuals: Residuals) -> Picture:
    """Bars of the number of test records by prediction minus target, with a line at 0."""
    bins, counts = residuals.bins, residuals.counts
    across, up = ticks_in(bins[0], bins[-1]), ticks_to(max(1, *counts))

    def x(value: float) -> float:
        return BAR_LEFT + (BAR_RIGHT - BAR_LEFT) * (value - across[0]) / (across[-1] - across[0])

    def y(value: float) -> float:
        return BAR_BOTTOM - (BAR_BOTTOM - BAR_TOP) * value / up[-1]

    grid = "".join(f"M{BAR_LEFT} {y(tick):.1f}H{BAR_RIGHT}" for tick in up)
    marks = [element("path", d=grid, class_="grid")]
    marks += [text(plain(tick), BAR_LEFT - 8, y(tick) + 4, class_="end") for tick in up]
    for (low, high), n in zip(pairwise(bins), counts, strict=True):
        box = {"x": x(low) + 0.5, "y": y(n), "width": max(x(high) - x(low) - 1, 0.5), "height": BAR_BOTTOM - y(n)}
        tip = f"error {plain(low)} to {plain(high)}\n{plain(n)} record{'s' * (n != 1)}"
        marks.append(element("rect", **box, class_="bar", data_tip=tip))
    if across[0] <= 0 <= across[-1]:
        marks.append(element("path", d=f"M{x(0):.1f} {BAR_TOP}V{BAR_BOTTOM}", class_="even-share"))
    marks += [text(plain(tick), x(tick), BAR_BOTTOM + 18, class_="middle") for tick in across]
    marks.append(text("prediction − target", (BAR_LEFT + BAR_RIGHT) / 2, BAR_HEIGHT - 3, class_="middle soft"))
    return Picture(WIDTH, BAR_HEIGHT, "histogram of residuals", join(marks), axis="test records")


def describe_residuals(residuals: Residuals) -> str:
    """Where the errors lie: their mean, and the interval around 0 with half of them, both from the histogram."""
    middles = [(low + high) / 2 for low, high in pairwise(residuals.bins)]
    total = sum(residuals.counts)
    if not total:
        return "There are no test records."
    mean = sum(n * middle for n, middle in zip(residuals.counts, middles, strict=True)) / total
    reach, seen = 0.0, 0
    for (low, high), n in sorted(
        zip(pairwise(residuals.bins), residuals.counts, strict=True), key=lambda bin_: max(map(abs, bin_[0]))
    ):
        seen, reach = seen + n, max(abs(low), abs(high))
        if 2 * seen >= total:
            break
    side = "too high" if mean > 0 else "too low"
    half = f"Half of them are within ±{plain(reach)} of the target."
    return f"On average, predictions are about {plain(abs(mean))} {side}. {half}"
