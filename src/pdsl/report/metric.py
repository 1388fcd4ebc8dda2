"""The headline metric of a task: its name for readers, its limits, and how its values are written."""

from dataclasses import dataclass
from math import inf

from pdsl.report.line_chart import Scale
from pdsl.utils.format import axis_percent, exact_percent, percent, plain

# By name: label, smallest and largest possible value. A fraction of 1 is shown in percent.
KNOWN: dict[str, tuple[str, float, float]] = {
    "accuracy": ("accuracy", 0.0, 1.0),
    "balanced_accuracy": ("balanced accuracy", 0.0, 1.0),
    "macro_f1": ("macro F1", 0.0, 1.0),
    "auc": ("AUC", 0.0, 1.0),
    "recall": ("recall", 0.0, 1.0),
    "rmse": ("RMSE", 0.0, inf),
    "mae": ("MAE", 0.0, inf),
    "r2": ("R²", -inf, 1.0),
}
TOLERANCE = 1e-6  # of a limit, for rounding errors


@dataclass(frozen=True)
class Metric:
    name: str
    higher_is_better: bool = True
    low: float = -inf  # limits of possible values
    high: float = inf

    @classmethod
    def of(cls, name: str, kind: str = "multiclass", higher_is_better: bool = True) -> "Metric":
        """A metric of a kind of task. A loss is not negative, unless it is the user's own."""
        if name in KNOWN:
            return cls(name, higher_is_better, *KNOWN[name][1:])
        return cls(name, higher_is_better, 0.0 if name == "loss" and kind != "custom" else -inf)

    @property
    def label(self) -> str:
        return KNOWN[self.name][0] if self.name in KNOWN else self.name.replace("_", " ")

    @property
    def title(self) -> str:
        return f"{self.label[:1].upper()}{self.label[1:]}"

    @property
    def is_fraction(self) -> bool:
        return (self.low, self.high) == (0.0, 1.0)

    @property
    def scale(self) -> Scale:
        """The axis of its charts: the range of the values, without those of the first rounds that are far worse."""
        cut = "below" if self.higher_is_better else "above"
        if self.is_fraction:
            return Scale(axis_percent, exact_percent, "percent", None, self.low, self.high, cut)
        return Scale(plain, lowest=None, low=self.low, high=self.high, cut=cut)

    def form(self, value: float | None) -> str:
        return percent(value) if self.is_fraction else plain(value)

    def check(self, value: float | None, name: str = "") -> None:
        """Raise ValueError if a value is not possible."""
        if value is not None and not self.low - TOLERANCE <= value <= self.high + TOLERANCE:
            raise ValueError(f"{name or self.name} cannot be {value:g}")
