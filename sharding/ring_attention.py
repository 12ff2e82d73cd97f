"""Ring attention on paper: what it would move, hold and take in place of the gather of `context_parallel_layer`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .machine import Machine, RankLayer

BLOCK = 32
"""Runs that are compared one by one; between blocks whole counts are."""

GROUPS = 4096
"""Blocks whose counts are held at once: N·GROUPS numbers."""


class RingOnPaper(NamedTuple):
    """The same layers with keys passed from neighbour to neighbour; nothing here implements it."""

    seconds: float  # of a pass over all layers
    bytes_sent: int  # by the rank that sends most: as many as with the gather
    bytes_resident: int  # by the rank that holds most: two blocks of keys instead of all


def pairs_between_ranks(
    owner_T: Int[Tensor, " T"], visible_T: Int[Tensor, " T"], lengths: Sequence[int], num_ranks: int
) -> Float[Tensor, "N N1"]:
    """Count which rank's queries see how many of which rank's new tokens.

    Args:
        owner_T: rank of each token.
        visible_T: keys that each token sees.
        lengths: new tokens of each request.
        num_ranks: N.

    Returns:
        float64 [N, N + 1]: row r, column s counts pairs of a query of rank r and a key of rank s; the last column
        keys of the cache, which every rank has.

    Cost: a few vector operations on T tokens. Tokens of one rank that follow each other are one run; N² operations for
        every `BLOCK` runs, so that a layout of long runs costs nothing and a striped one is bearable.
    """
    length_B = torch.tensor(lengths, dtype=torch.int64)
    request_T = torch.arange(len(length_B)).repeat_interleave(length_B)
    real_T = visible_T > 0
    goes_on_T = torch.zeros_like(real_T)
    goes_on_T[1:] = (owner_T[1:] == owner_T[:-1]) & (request_T[1:] == request_T[:-1]) & (real_T[1:] == real_T[:-1])
    start_M = torch.nonzero(~goes_on_T)[:, 0]
    owner_M, request_M = owner_T[start_M], request_T[start_M]
    keys_M = torch.bincount((~goes_on_T).cumsum(0) - 1, minlength=len(start_M)).double()
    queries_M = torch.where(real_T[start_M], keys_M, 0)
    block_M = torch.arange(len(start_M)) // BLOCK

    # Every earlier run: those of earlier blocks, and of the same block; then without those of earlier requests.
    pairs = _across(block_M, owner_M, queries_M, keys_M, num_ranks)
    for lag in range(1, min(BLOCK, len(start_M))):
        weights = queries_M[lag:] * keys_M[:-lag] * (block_M[lag:] == block_M[:-lag])
        both = owner_M[lag:] * num_ranks + owner_M[:-lag]
        pairs += torch.bincount(both, weights=weights, minlength=num_ranks**2).view(num_ranks, num_ranks)
    pairs -= _across(request_M, owner_M, queries_M, keys_M, num_ranks)
    pairs += torch.bincount(owner_M, weights=queries_M * (keys_M + 1) / 2, minlength=num_ranks).diag()
    position_T = torch.arange(len(owner_T)) - (length_B.cumsum(0) - length_B)[request_T]
    cached_T = torch.where(real_T, visible_T - position_T - 1, 0)
    cached_N = torch.bincount(owner_T, weights=cached_T.double(), minlength=num_ranks)
    return torch.cat([pairs, cached_N[:, None]], 1)


def _across(group_M: Tensor, owner_M: Tensor, queries_M: Tensor, keys_M: Tensor, num_ranks: int) -> Tensor:
    """Count pairs whose key lies in a group before the query's, by rank; groups ascend. Some thousand at a time."""
    pairs = torch.zeros(num_ranks, num_ranks, dtype=torch.float64)
    before_N = torch.zeros(num_ranks, dtype=torch.float64)
    groups = int(group_M[-1]) + 1 if len(group_M) else 0
    for first in range(0, groups, GROUPS):
        count = min(GROUPS, groups - first)
        low, high = torch.searchsorted(group_M, torch.tensor([first, first + count])).tolist()
        place = (group_M[low:high] - first) * num_ranks + owner_M[low:high]
        queries_GN, keys_GN = (
            torch.bincount(place, weights=x_M[low:high], minlength=count * num_ranks).double().view(count, num_ranks)
            for x_M in (queries_M, keys_M)
        )
        through_GN = before_N + keys_GN.cumsum(0)
        pairs += queries_GN.T @ (through_GN - keys_GN)
        before_N = through_GN[-1]
    return pairs


def ring_layer_seconds(
    ranks: Sequence[RankLayer], pairs: Float[Tensor, "N N1"], block_bytes: tuple[int, int], machine: Machine
) -> float:
    """Return how long a layer takes with two rings: one of index keys, and, once the k best are known, one of latents.

    In hop h rank r works on the block of rank r - h while it passes it on; a hop ends when the slowest rank, or the
    link, is done. Selected keys are taken to be spread evenly over the visible ones, and weights to arrive behind the
    work, unless the link has no time for them.

    Args:
        ranks: every rank's part in the layer.
        pairs: from `pairs_between_ranks`.
        block_bytes: of a rank's index keys and of its latent keys.
        machine: rates.

    Returns:
        Seconds from start to end.

    Source: Liu et al., "Ring Attention" (2023); the second ring is needed because the selection is over all keys.
    """
    size = len(ranks)
    share = pairs / pairs.sum(1, keepdim=True).clamp(min=1)
    place = (torch.arange(size)[:, None] - torch.arange(size)) % size  # [r, h]: whose block
    share_NH = share.gather(1, place)
    share_NH[:, 0] += share[:, -1]  # cached keys are here from the start
    rates = (machine.scoring or machine.flops, machine.attention or machine.flops)
    parts = ([rank.flops.scoring for rank in ranks], [rank.flops.attention for rank in ranks])
    if not any(parts[0]):  # nothing is scored: one ring is enough
        block_bytes = (0, block_bytes[1])
    seconds = max(rank.flops.projections for rank in ranks) / machine.flops
    for work, rate, moved in zip(parts, rates, block_bytes, strict=True):
        hop_H = (share_NH * torch.tensor(work, dtype=torch.float64)[:, None]).amax(0) / rate
        link = machine.on_link(moved)
        seconds += float(torch.cat([hop_H[:-1].clamp(min=link), hop_H[-1:]]).sum())
    seconds += max(rank.flops.selection for rank in ranks) / (machine.selection or machine.flops)
    seconds += max(rank.flops.output for rank in ranks) / machine.flops
    rest = [i for i, moved in enumerate(ranks[0].traffic) if moved.what != "keys"]
    others = sum(machine.on_link(max(rank.traffic[i].bytes_received for rank in ranks)) for i in rest)
    return max(seconds, others + (size - 1) * sum(map(machine.on_link, block_bytes)))
