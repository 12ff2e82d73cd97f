"""Where tokens, caches and weights live, and how many ranks compute as one. The public names, in reading order.

Three questions, kept apart: what is the plan (`token_ranges`, `cache_ranges`, `layer_owners`: index arithmetic, the
same on every rank), what is the local maths (`sfa_functional`, which knows of no ranks), which collectives join them
(`context_parallel`).
"""

from .mesh import MeshShape, P, SimulatedMesh, Transfer, simulated_mesh
from .rules import LARGE_FIELDS, Rules, param_specs
from .costs import FlopParts, LayerFlops, layer_flops, token_flops, visible_keys
from .token_ranges import TokenSplit, local_lengths, split_tokens, token_ranges
from .cache_ranges import CacheSplit, compact_block_table, gathered_block_table, replicated_block_table
from .layer_owners import layer_owners
from .collectives import Collectives, Pending, gather_rows_start, pack_rows, unpack_rows
from .processes import DistributedMesh, distributed_collectives, distributed_mesh
from .shard_map import shard_map
from .tensor_parallel import heads_of_rank, tensor_parallel_layer, with_all_heads
from .context_parallel import context_parallel_layer, shard_flat
from .machine import EXAMPLE_MACHINE, Machine
from .traffic import Traffic, WeightStrategy
from .estimate import Estimate, LayerEstimate, RankEstimate, Resident, estimate
from .ring_attention import RingOnPaper
from .measure import Measured, Miniature, measure_ranks, miniature
from .show import SplitPicture, fastest, show_estimates, show_ranks, show_split
from .plot import plot_estimates, plot_splits

__all__ = [
    "MeshShape",
    "P",
    "SimulatedMesh",
    "Transfer",
    "simulated_mesh",
    "LARGE_FIELDS",
    "Rules",
    "param_specs",
    "FlopParts",
    "LayerFlops",
    "layer_flops",
    "token_flops",
    "visible_keys",
    "TokenSplit",
    "local_lengths",
    "split_tokens",
    "token_ranges",
    "CacheSplit",
    "compact_block_table",
    "gathered_block_table",
    "replicated_block_table",
    "layer_owners",
    "Collectives",
    "Pending",
    "gather_rows_start",
    "pack_rows",
    "unpack_rows",
    "DistributedMesh",
    "distributed_collectives",
    "distributed_mesh",
    "shard_map",
    "heads_of_rank",
    "tensor_parallel_layer",
    "with_all_heads",
    "context_parallel_layer",
    "shard_flat",
    "EXAMPLE_MACHINE",
    "Machine",
    "Traffic",
    "WeightStrategy",
    "Estimate",
    "LayerEstimate",
    "RankEstimate",
    "Resident",
    "estimate",
    "RingOnPaper",
    "Measured",
    "Miniature",
    "measure_ranks",
    "miniature",
    "SplitPicture",
    "fastest",
    "show_estimates",
    "show_ranks",
    "show_split",
    "plot_estimates",
    "plot_splits",
]
