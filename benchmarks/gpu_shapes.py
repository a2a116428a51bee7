"""The networks whose training is timed on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama, and how many samples of it train at once."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    micro_batch: int
    batch: int
    """Samples of a step on one GPU."""
    tied: bool = False
    sequence: int = 8192
    vocabulary: int = 128256
    steps: int = 40

    def flags(self, gpus: int) -> str:
        """Return the flags of pretrain_gpt.py."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--group-query-attention --num-query-groups {self.groups} --ffn-hidden-size {self.ffn} "
            f"--seq-length {self.sequence} --max-position-embeddings {self.sequence} --vocab-size {self.vocabulary} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.batch * gpus} --train-iters {self.steps} "
            f"{'' if self.tied else '--untie-embeddings-and-output-weights '}"
            "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16 --lr 1e-4 "
            "--tokenizer-type NullTokenizer --mock-data --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
            "--log-interval 10 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        )


LLAMA_1B = Shape(layers=16, hidden=2048, heads=32, groups=8, ffn=8192, micro_batch=2, batch=4, tied=True)
"""Llama-3.2-1B."""
LAYERS_OF_8B = tuple(
    Shape(layers=layers, hidden=4096, heads=32, groups=8, ffn=14336, micro_batch=1, batch=4) for layers in (8, 4)
)
"""Eight and four layers of Llama 3 8B."""
STACK = Shape(layers=4, hidden=4096, heads=32, groups=8, ffn=14336, micro_batch=1, batch=1, vocabulary=1024)
"""Four layers of Llama 3 8B over 8,192 tokens, with little beside them."""
SMALL = Shape(
    layers=2, hidden=64, heads=4, groups=2, ffn=128, micro_batch=1, batch=2, sequence=64, vocabulary=255, steps=8
)
"""Shape that a CPU trains instead, to try the programs."""
