"""Who keeps which layer's weights."""

from sfa_functional.precision import require


def layer_owners(num_layers: int, num_ranks: int, *, start_layer: int = 0) -> tuple[int, ...]:
    """Deal layers out to ranks by their global number.

    ``owner(layer) = layer mod N``. Any run of consecutive layers is then dealt out so that loads differ by at most
    one, also where a pipeline stage starts in the middle.

    Args:
        num_layers: how many layers, >= 0.
        num_ranks: N, >= 1.
        start_layer: global number of the first one, >= 0.

    Returns:
        One rank per layer, in order.

    Raises:
        ValueError: a count out of range.

    Source: the layer-sharded linear weights of vllm-project/vllm-ascend.
    """
    counts = (("num_layers", num_layers, 0), ("num_ranks", num_ranks, 1), ("start_layer", start_layer, 0))
    for name, value, least in counts:
        whole = type(value) is int and value >= least
        require(whole, "layer_owners", f"{name} must be an integer >= {least}", repr(value))
    return tuple(layer % num_ranks for layer in range(start_layer, start_layer + num_layers))
