"""Trust in neighbours from the Shapley values of many rounds, and the resulting shares."""

import numpy as np

from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import Values

# Rounds are not independent, because data and public set stay the same: honest agents sometimes reach three standard
# errors below zero by chance. Flipped labels and reversed gradients mostly exceed five.
FULL_TRUST_Z = 3.0  # a mean effect at most this many standard errors below zero: full trust
NO_TRUST_Z = 4.5  # a mean effect at least this many standard errors below zero: no trust
MAX_CHANCE_HARM = 2.0  # mean harm in units of the mean |effect|; larger harm counts as proportionally more certain
MAX_RELATIVE_HARM = 0.1  # harm alone, relative to the worst member's, of a member that is trusted if no other is
MIN_ROUNDS = 3  # rounds before a member can lose trust
MIN_EFFECTIVE_ROUNDS = 2.0  # effective sample size before a member can lose trust
MAX_ROUND_WEIGHT = 10.0  # weight of a round, in units of the mean weight
EVIDENCE_FIELDS = 6  # columns of the evidence, see `update_evidence`
MIN_SIGNAL = 0.1  # of an average party; a sender of less is a free rider
NO_TRUST_SIGNAL_Z = 1.0  # a signal at least this many standard errors below MIN_SIGNAL: no trust
MIN_VARIANCE = 1e-3  # of effects in units of their mean size, so that constant effects are not infinitely certain


def shares(
    phi: Values,
    settings: ShapleySettings,
    evidence: Values | None = None,
    signals: tuple[Values, Values] | None = None,
) -> Values:
    """Each member's share of the aggregate: φ̂/Σφ̂ of equation (20), at least λ/k with a floor λ.

    The sum is 1. If there is evidence that every member does harm, only the floor is left, and the sum is λ.

    `minmax` is equation (19): the member with the smallest φ gets 0, however small the differences. `evidence`: all
    members get the same share, except those whose messages did harm in the rounds so far. `contribution`: and except
    free riders, whose messages say nothing about records; `signals` are those of `masses.estimate_signals`. If a
    member has lost all trust by harm, the others are weighted as with `minmax`, because that was more accurate next to
    label flippers (docs/results.md, "Free riders").
    """
    k = len(phi)
    uniform: Values = np.full(k, 1 / k)
    if settings.weighting == "uniform":
        return uniform
    if settings.weighting == "minmax":
        phi_hat = normalise(phi)
    else:
        assert evidence is not None
        informative = np.ones(k) if signals is None else signal_trust(*signals)
        harmless = trust(evidence)
        phi_hat = harmless * informative
        if not phi_hat.any():
            phi_hat = fallback_trust(evidence) * informative
        if settings.weighting == "contribution" and harmless.min() == 0 and (phi_hat * normalise(phi)).any():
            phi_hat = phi_hat * normalise(phi)
        if not phi_hat.any():
            return settings.floor * uniform  # take no step along harmful messages
    if not phi_hat.any():
        return uniform  # all values are equal; equations (19) and (20) would be 0/0
    floored: Values = (1 - settings.floor) * phi_hat / phi_hat.sum() + settings.floor * uniform
    return floored


def normalise(phi: Values) -> Values:
    """Equation (19): (φ − min φ)/(max φ − min φ); 0 if all values are equal."""
    above: Values = phi - phi.min()
    return above / above.max() if above.any() else above


def update_evidence(evidence: Values, phi: Values, alone: Values, memory: float) -> Values:
    """Add one round's φ [k] to the evidence on each member [k, EVIDENCE_FIELDS], after decaying it by `memory`.

    Evidence is about the individual effects u of the messages. A round has weight w = mean |u|, because late in
    training the effects of honest agents are small and cancel. The columns are the number of rounds, Σw, Σw², Σwx and
    Σwx², where x = u / mean |u|, and Σy, where y is the value of the message `alone` over the mean size of all.
    The weight of a round is capped at MAX_ROUND_WEIGHT mean weights, because senders choose the size of their messages.
    """
    u = individual_effect(phi)
    unit = np.abs(u).mean()
    w = np.minimum(unit, _cap_round_weight(evidence, memory))
    part = w / (unit or 1)
    y = np.nan_to_num(alone)  # 0 if it was not evaluated
    y = y / (np.abs(y).mean() or 1)
    new = np.stack([np.ones(len(u)), w, w**2, part * u, part * u**2 / (unit or 1), y], axis=1)
    updated: Values = evidence * [1, memory, memory**2, memory, memory, memory] + new
    return updated


def _cap_round_weight(evidence: Values, memory: float) -> Values:
    """Largest weight of a new round, for each member."""
    rounds, w = evidence[:, 0], evidence[:, 1]
    mean = w * (1 - memory) / np.maximum(1 - memory**rounds, 1 - memory)
    return np.where((rounds >= MIN_ROUNDS) & (mean > 0), MAX_ROUND_WEIGHT * mean, np.inf)


def individual_effect(phi: Values) -> Values:
    """Individual effect u of each message, recovered from φ to first order.

    v(S) is the value of a mean, so a joining member also dilutes the others: next to a very harmful member, a slightly
    harmful one has a positive φ. If v(S) is the mean of its members' effects u, then Σφ is the mean of all u, and
    φ_j = (u_j·H_k − (mean of the other u)·(H_k − 1))/k with H_k = 1 + 1/2 + … + 1/k. This is solved for u.
    """
    k = len(phi)
    if k == 1:
        return phi
    harmonic = float((1 / np.arange(1, k + 1)).sum())
    u: Values = (phi + (harmonic - 1) / (k - 1) * phi.sum()) * (k - 1) / (harmonic - 1 / k)
    return u


def trust(evidence: Values) -> Values:
    """Trust in each member: 1 if its mean effect is not significantly below zero, 0 if it clearly is, linear between.

    The standard error is that of a mean of (Σw)²/Σw² rounds, the effective sample size. Harm of several times the mean
    effect of the members is not due to chance, so fewer standard errors suffice for it.
    """
    rounds, w, w2, wx, wx2, _ = evidence.T
    w, w2 = np.where(w2 > 0, w, 1), np.where(w2 > 0, w2, 1)
    mean, n = wx / w, w**2 / w2
    error = np.sqrt(np.maximum(wx2 / w - mean**2, MIN_VARIANCE) / np.maximum(n - 1, 1))
    size = np.maximum(1, -mean / MAX_CHANCE_HARM)
    z = np.where((rounds >= MIN_ROUNDS) & (n >= MIN_EFFECTIVE_ROUNDS), -mean / error * size, 0)
    return np.clip((NO_TRUST_Z - z) / (NO_TRUST_Z - FULL_TRUST_Z), 0, 1)


def signal_trust(signals: Values, errors: Values) -> Values:
    """Trust in each member from its signal: 1 from MIN_SIGNAL on, 0 if it is clearly below, linear between."""
    z = (MIN_SIGNAL - signals) / np.maximum(errors, np.finfo(np.float64).tiny)
    return np.clip(1 - z / NO_TRUST_SIGNAL_Z, 0, 1)


def model_trust(evidence: Values) -> Values:
    """Trust in each member's model: that in its gradients, or the fallback if no member is trusted."""
    trusted = trust(evidence)
    return trusted if trusted.any() else fallback_trust(evidence)


def fallback_trust(evidence: Values) -> Values:
    """Trust if no member is trusted: 1 for members whose messages do little harm alone, 0 for the others.

    If some messages ruin every coalition they are in, φ says nothing about the others. Their values alone do.
    """
    alone = evidence[:, 5]
    trusted: Values = (alone >= MAX_RELATIVE_HARM * alone.min()).astype(np.float64)
    return trusted
