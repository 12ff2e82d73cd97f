"""Ring attention on paper: what it would move, hold and take in place of the gather of `context_parallel_layer`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .machine import Machine, RankLayer


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

    Cost: N·T integers.
    """
    pairs = torch.zeros(num_ranks, num_ranks + 1, dtype=torch.float64)
    length_B = torch.tensor(lengths, dtype=torch.int64)
    first_T = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
    real_T = visible_T > 0
    seen_T = torch.zeros_like(visible_T)
    for s in range(num_ranks):
        held_T1 = torch.nn.functional.pad((owner_T == s).cumsum(0), (1, 0))
        mine_T = torch.where(real_T, held_T1[1:] - held_T1[first_T], 0)
        pairs[:, s] = torch.bincount(owner_T, weights=mine_T.double(), minlength=num_ranks)
        seen_T += mine_T
    pairs[:, -1] = torch.bincount(owner_T, weights=(visible_T - seen_T).double(), minlength=num_ranks)
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
