"""What is proved of simulated ranks holds on processes that gloo joins: the same tests, no line changed but the mesh.

Each process runs a whole test and compares for itself. A sample of those that ask for 2 or 4 ranks; ``SFA_ALL=1`` runs
them all.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.sharding import (
    test_collectives,
    test_context_parallel,
    test_shard_map,
    test_sharded_cache,
    test_tensor_parallel,
)
from tests.sharding.processes import plain_tests, run_on_real_ranks
from tests.weights import test_recompute

pytestmark = pytest.mark.usefixtures("unchecked")

PLACES = {
    "collectives": (test_collectives, 5, 60, ["test_sums_of_half_precision_are_rounded_once"]),  # gloo rounds each sum
    "shard_map": (
        test_shard_map,
        1,
        4,
        [  # these look at all ranks' threads from outside, or at a difference that processes do not tell each other
            "test_specs_are_prefixes_of_the_arguments",
            "test_parameters_are_trees_and_so_are_their_specs",
            "test_what_ranks_keep_for_backward_is_free_when_the_result_is",
            "test_a_result_is_compared_on_the_ranks_that_hold_the_same_part",
            "test_compiling_is_refused_with_the_reason",
            "test_what_breaks_out_of_a_compiled_function_gives_the_same_values_and_gradients",
            "test_a_process_that_compiles_nothing_does_not_import_the_compiler",
            "test_a_body_may_call_what_is_compiled",
        ],
    ),
    "context_parallel": (test_context_parallel, 1, 40, ["test_a_callable_replaces_sparse_attention_on_each_rank"]),
    "tensor_parallel": (test_tensor_parallel, 1, 40, []),
    "sharded_cache": (
        test_sharded_cache,
        1,
        20,
        ["test_a_selector_gets_every_index_key_and_no_latent_keys", "test_implementations_may_be_named_or_given"],
    ),
    "rings": (
        test_recompute.TestRanks(),
        3,
        8,
        [
            "test_the_owner_gets_the_sum_over_ranks_and_the_others_nothing",
            "test_weights_that_learn_without_checkpoint_layer_raise_though_their_slots_are_whole",
            "test_the_next_fetch_starts_behind_the_key_gather_and_in_front_of_its_wait",
        ],
    ),
}
"""Where tests are; of how many that name a number of ranks one is run; of how many others; which are about threads."""

SEEN = ("layout", "weights", "exchange", "fields", "name")
"""Arguments of which every value counts, in every test that names a number of ranks."""


def _asked(arguments: dict[str, object]) -> set[object]:
    """Return the numbers of ranks that a test asks for, as far as its arguments say."""
    case = arguments.get("case", arguments)
    told = [case[name] for name in ("ranks", "size", "num_ranks", "shape") if name in case]
    return {getattr(value, "size", value) for value in told}


def sample(place: str, size: int, *, all_of_them: bool = False) -> list[tuple[Callable[..., None], dict[str, Any]]]:
    """List tests that may ask for so many ranks."""
    where, named_step, other_step, without = PLACES[place]
    tests = [
        (test, arguments | ({"donate": False} if "donate" in arguments else {}))  # a process sees its own pool only
        for test, arguments in plain_tests(where, without=without)
    ]
    named = [x for x in tests if _asked(x[1]) == {size}]
    others = [x for x in tests if not _asked(x[1])]
    if all_of_them:
        return [*named, *others]
    met: set[object] = set()
    chosen = []
    for test, arguments in named:
        case = arguments.get("case", arguments)
        new = {(test.__name__, key, str(case.get(key))) for key in SEEN} - met
        if new:
            chosen.append((test, arguments))
            met |= new
    return [*chosen[::named_step], *others[::other_step]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_tests_of_simulated_ranks_pass_on_processes(place, size):
    ran = run_on_real_ranks(size, sample(place, size, all_of_them=os.environ.get("SFA_ALL") == "1"))
    assert ran
    print(f"{len(ran)} tests of {place} on {size} processes: {', '.join(ran)}", file=sys.stderr)
