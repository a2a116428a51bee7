"""Options of recovery: what a run does when a rank fails, without its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.checkpoint import CheckpointConfig, is_url
from megalite.config.fields import NonNegativeInt, PositiveInt, needs
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class RecoveryConfig:
    """Options of recovery from the failure of a rank."""

    warm_restart: bool = False
    """Start all ranks again when one fails, within the same job, from processes that have imported everything."""
    memory_checkpoint_interval: NonNegativeInt | None = None
    """Steps between copies of a rank's state in the host's memory, its own and that of a partner on another node; 0:
    no copies. By default, so many that copies take less than 3% of a step's time, as measured."""
    memory_checkpoint_partner: PositiveInt = 1
    """Number of nodes from a rank to its partner, which keeps a second copy of its state."""
    spare_nodes: NonNegativeInt = 0
    """Number of the nodes, the last ones that the launcher starts, that train only in place of one that is lost, on
    which ranks fail twice in a row, or whose numbers were wrong (sick_nodes.jsonl)."""
    elastic: bool = False
    """Go on with fewer nodes where no spare one is left, in whole replicas of the model, and with more once they are
    back. The micro-batches of a step are then divided as equally as its ranks allow."""
    elastic_replan: bool = False
    """Go on where elastic would end: if the nodes that are left hold no whole replica, the planner chooses another
    layout (TP, PP, CP, EP, DP) for them, until enough of the others are back."""
    survivors_finish_step: bool = False
    """Let the replicas without a rank that fails finish their micro-batches of the step, and keep the gradients in
    memory; the ranks that start again divide those that are left."""

    @property
    def goes_on_without_nodes(self) -> bool:
        """Tell whether the agents go on when a node is lost."""
        return self.elastic or self.spare_nodes > 0

    def ranks_that_train(self, world_size: int, node_ranks: int | None) -> int:
        """Return how many ranks train, of `world_size` that the launcher starts.

        `node_ranks`: the number of ranks on each node; None if the launcher does not tell.

        Raises ConfigurationError if the launcher starts too few nodes, or nodes of unequal numbers of ranks.
        """
        if not self.goes_on_without_nodes:
            return world_size
        flag = f"--spare-nodes {self.spare_nodes}" if self.spare_nodes else "--elastic"
        if node_ranks is None:
            raise ConfigurationError(
                f"{flag} needs the number of ranks on each node, which this launcher does not tell: set "
                "LOCAL_WORLD_SIZE on every rank"
            )
        left = world_size - self.spare_nodes * node_ranks
        if left <= 0 or world_size % node_ranks:
            raise ConfigurationError(
                f"{flag}: the launcher has started {world_size} ranks, {node_ranks} on this node: start at least "
                f"{self.spare_nodes + 1} nodes, the spare ones among them, with equal numbers of ranks"
            )
        return left


def recovery_problems(recovery: RecoveryConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    if not recovery.warm_restart:
        names = "memory_checkpoint_interval memory_checkpoint_partner spare_nodes elastic elastic_replan"
        yield from needs(recovery, f"{names} survivors_finish_step", "--warm-restart")
        return
    if not recovery.elastic:
        yield from needs(recovery, "elastic_replan", "--elastic")
    if checkpoint.save is None:
        yield "--warm-restart needs --save, the run directory from which ranks that start again continue"
    elif is_url(checkpoint.save):
        yield f"--warm-restart needs a --save that is a folder, not {checkpoint.save}"
    if checkpoint.resume != "auto":
        yield "--warm-restart needs --resume auto: ranks that start again continue from the latest checkpoint"
