"""Terms of the report with one sentence each, which readers see when they hover. docs/architecture.md has the same."""

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

GLOSSARY = {
    "accuracy": "fraction of test records whose class is predicted correctly",
    "adjacency": "the difference between two data sets that ε hides: one record added or removed, or one replaced",
    "agent": "a participant in training: it has records, a model and neighbours",
    "attacker": "an agent that misbehaves in an experiment: label-flip, gaussian, free-rider, or a poisoned model",
    "AUC": "area under the ROC curve: the chance that a positive record gets a higher score than a negative one",
    "balanced accuracy": "mean recall over classes: rare classes count as much as frequent ones",
    "contribution": "a party's average gain when it joins a group of the others; all of them add up to the gain of the"
    " run",
    "confusion matrix": "number of test records by true class (row) and predicted class (column)",
    "consensus distance": "mean distance of the agents' models from their mean",
    "δ": "the probability that is left out of the guarantee of ε",
    "ε": "the privacy loss; a total covers all rounds, and smaller is more private",
    "equal share": "the weight of a message if all messages that an agent gets had the same weight",
    "loss": "the quantity that training minimises, as the mean over test records; smaller is better",
    "macro F1": "mean over classes of F1, the harmonic mean of precision and recall",
    "MAE": "mean absolute error of predictions, in the units of the target; smaller is better",
    "mean model": "the mean of the agents' models, which `model.safetensors` has",
    "message": "a noisy clipped gradient that an agent sends, or keeps for itself",
    "mixing matrix W": "symmetric weights ω_ij of the graph's edges; each row sums to 1",
    "neighbour": "an agent that shares an edge; the neighbourhood includes the agent itself, and its agents are its"
    " members",
    "Poisson sampling": "each record is in a batch independently, with probability q",
    "public set Q": "records that everyone may see; messages are valued on it",
    "R²": "fraction of the target's variance that the model explains; 0 is predicting the mean, 1 is exact",
    "recall": "fraction of a class's test records that are predicted as this class",
    "residual": "prediction minus target",
    "RMSE": "root mean squared error of predictions, in the units of the target; smaller is better",
    "seeded, system": "noise from the config's seed (a simulation, not private), or from the operating system's"
    " entropy",
    "Shapley value φ": "a message's average marginal value over all coalitions",
    "σ": "standard deviation of the noise on a message",
    "spectral gap": "1 minus the second largest absolute eigenvalue of W; larger means faster consensus",
}
# Forms of a term in texts, where they are not the term itself.
FORMS = {
    "agent": ("agents", "agent"),
    "attacker": ("attackers", "attacker"),
    "contribution": ("contributions", "contribution"),
    "message": ("messages", "message"),
    "mixing matrix W": ("mixing weight ω", "mixing weight"),
    "neighbour": ("neighbours", "neighbour", "members"),
    "Poisson sampling": ("Poisson rate", "Poisson"),
    "public set Q": ("public set",),
    "residual": ("residuals", "residual"),
    "seeded, system": ("seeded noise",),
    "Shapley value φ": ("Shapley values", "Shapley value", "φ"),
}


def _forms() -> Iterator[tuple[str, str]]:
    for term in GLOSSARY:
        for form in FORMS.get(term, (term,)):
            yield form.lower(), term


TERM_OF = dict(_forms())
PATTERN = re.compile(
    r"(?<![\w&#])(" + "|".join(re.escape(form) for form in sorted(TERM_OF, key=len, reverse=True)) + r")(?!\w)",
    re.IGNORECASE,
)


def explain(text: str) -> Markup:
    """Escape a text and mark the first occurrence of each term with its sentence."""
    seen: set[str] = set()

    def mark(found: re.Match[str]) -> str:
        term = TERM_OF[found[0].lower()]
        if term in seen:
            return found[0]
        seen.add(term)
        return define(found[0], GLOSSARY[term])

    return Markup(PATTERN.sub(mark, str(escape(text))))


def define(label: str, sentence: str) -> Markup:
    """A label with a sentence that readers see when they hover."""
    sentence = sentence.replace("`", "")
    return Markup('<abbr title="{}">{}</abbr>').format(sentence, Markup(escape(label)))
