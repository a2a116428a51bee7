"""Sites of a run, if each node is one: groups of data-parallel ranks with a slow network between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from megalite.config.run import TaskConfig
from megalite.config.synchronization import Algorithm
from megalite.errors import ConfigurationError

AnyConfig = TypeVar("AnyConfig", bound=TaskConfig)


def with_sites(config: AnyConfig, world_size: int, node_ranks: int | None) -> AnyConfig:
    """Return the configuration with a site per node, if it asks for sums within nodes, then between them.

    If all data-parallel ranks are on one node, there is nothing between nodes, and the backend sums.

    Args:
        config: the configuration.
        world_size: the number of ranks.
        node_ranks: the number of ranks on this rank's node; None: it is not known.

    Raises:
        ConfigurationError: the nodes do not have equal numbers of data-parallel ranks.
    """
    chosen, parallel = config.synchronization, config.parallel
    by_node = chosen.all_reduce_algorithm == "hierarchical" and chosen.sites == 1 and not chosen.has_replicas
    of_stage, uneven = divmod(world_size, parallel.pipeline_model_parallel_size)
    node_ranks = 1 if world_size == 1 else node_ranks
    if not by_node or uneven or node_ranks is None:  # the validation tells why not
        return config
    widths = (parallel.model_parallel_size, parallel.expert_tensor_model_pipeline_parallel_size)
    if node_ranks % of_stage == 0:
        sites = 1
    elif of_stage % node_ranks == 0 and all(world_size // width % (of_stage // node_ranks) == 0 for width in widths):
        sites = of_stage // node_ranks
    else:
        raise ConfigurationError(
            f"--all-reduce-algorithm hierarchical: {world_size} ranks in nodes of {node_ranks} do not have equal "
            "numbers of data-parallel ranks: give --sites"
        )
    algorithm: Algorithm = "hierarchical" if sites > 1 else "backend"
    return replace(config, synchronization=replace(chosen, sites=sites, all_reduce_algorithm=algorithm))
