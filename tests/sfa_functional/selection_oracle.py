"""Selection statistics as plain Python: one query, one head and one key after the other, in float64.

Nothing here calls the package, so that it can judge it. `plain_queries` gives each query's metrics, `plain_sums` adds
them up in the order of ``METRICS``.
"""

import math
from typing import NamedTuple

import torch

METRICS = ("mass", "best_mass", "recall", "kl", "kl_selected", "overlap", "entropy", "ties")


class Problem(NamedTuple):
    """Tensors of a selection to be measured; the last three may be None, ``index`` is (q_TJI, k_SI, w_TJ)."""

    q_THE: object
    kv_SE: object
    topk_TK: object
    start_T: object
    end_T: object
    index: object = None
    other_TM: object = None


def plain_queries(problem, *, scale, k):
    """Return a dict of metrics for every query that sees more than k keys, None for the others."""
    q, kv, topk, start, end = (x.double().tolist() if x.is_floating_point() else x.tolist() for x in problem[:5])
    index = None if problem.index is None else [x.double().tolist() for x in problem.index]
    other = None if problem.other_TM is None else problem.other_TM.tolist()
    found = []
    for t in range(len(q)):
        seen = list(range(max(start[t], 0), min(end[t], len(kv))))
        if len(seen) <= k:
            found.append(None)
            continue
        p = _mean_softmax(q[t], kv, seen, scale)
        best = set(sorted(seen, key=lambda s, p=p: (-p[s], s))[:k])
        chosen = [s for s in seen if s in topk[t]]
        metrics = {
            "mass": math.fsum(p[s] for s in chosen),
            "best_mass": math.fsum(p[s] for s in best),
            "recall": len(best & set(chosen)) / k,
            "entropy": -math.fsum(p[s] * math.log(p[s]) for s in seen if p[s] > 0),
        }
        if other is not None:
            theirs = [s for s in seen if s in other[t]]
            metrics["overlap"] = len(set(chosen) & set(theirs)) / len(theirs) if theirs else 1.0
        if index is not None:
            score = {s: _score(index[0][t], index[1][s], index[2][t]) for s in seen}
            ranked = sorted(score.values(), reverse=True)
            metrics["ties"] = float(ranked[k - 1] == ranked[k])
            metrics["kl"] = _divergence(p, score, seen)
            metrics["kl_selected"] = _divergence(_mean_softmax(q[t], kv, chosen, scale), score, chosen)
        found.append(metrics | {"distances": [seen[-1] - s for s in chosen]})
    return found


def plain_sums(problem, *, scale, k):
    """Return what the fields of the statistics should be, as numbers and lists, where every query is measured."""
    found = plain_queries(problem, scale=scale, k=k)
    measured = [x for x in found if x is not None]
    rows = problem.kv_SE.shape[0]
    lengths = [min(b, rows) - max(a, 0) for a, b in zip(problem.start_T.tolist(), problem.end_T.tolist(), strict=True)]
    defined = [any(name in x for x in measured) for name in METRICS]
    bins = [0] * 32
    for distance in (d for x in measured for d in x["distances"]):
        bins[distance.bit_length()] += 1
    return {
        "queries": len(measured),
        "measured": len(measured),
        "without_choice": sum(0 < n <= k for n in lengths),
        "population_M": [len(measured) * there for there in defined],
        "total_M": [math.fsum(x.get(name, 0.0) for x in measured) for name in METRICS],
        "variance_M": [0.0] * len(METRICS),
        "distance_N": bins,
    }


def assert_sums(stats, want, tolerance=1e-12):
    """Compare every field with numbers wanted, relative to 1 or the number, whichever is larger."""
    want = want if isinstance(want, dict) else vars(want)
    for name, got in vars(stats).items():
        expected = torch.as_tensor(want[name], dtype=torch.float64)
        assert got.dtype == torch.float64
        assert got.shape == expected.shape, name
        apart = (got - expected).abs() / expected.abs().clamp(min=1)
        assert bool((apart <= tolerance).all()), (name, got, expected)


def _mean_softmax(heads, kv, rows, scale):
    """Return the weight of every row, averaged over heads."""
    total = dict.fromkeys(rows, 0.0)
    for head in heads:
        logit = {s: scale * _dot(head, kv[s]) for s in rows}
        highest = max(logit.values(), default=0.0)
        mass = math.fsum(math.exp(z - highest) for z in logit.values())
        for s, z in logit.items():
            total[s] += math.exp(z - highest) / mass / len(heads)
    return total


def _score(heads, key, weights):
    return math.fsum(w * max(_dot(head, key), 0.0) for head, w in zip(heads, weights, strict=True))


def _divergence(p, score, rows):
    if len(rows) <= 1:
        return 0.0
    highest = max(score[s] for s in rows)
    log_total = highest + math.log(math.fsum(math.exp(score[s] - highest) for s in rows))
    return math.fsum(p[s] * (math.log(p[s]) - score[s] + log_total) for s in rows if p[s] > 0)


def _dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
