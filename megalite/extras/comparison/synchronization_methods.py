"""Methods of synchronization that are compared, each as the flags that it adds to a training."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        flags: what it adds to the flags. {tenth} and {fifth} are these shares of the steps, {sgd_lr} a learning rate.
        delay: steps that run while its messages are under way.
        servers: ranks that it has besides those that train.
    """

    flags: str
    delay: int = 0
    servers: int = 0

    def words(self, steps: int, sgd_lr: float) -> list[str]:
        """Return the flags for this number of steps and this learning rate of sgd."""
        return self.flags.format(tenth=max(1, steps // 10), fifth=max(1, steps // 5), sgd_lr=sgd_lr).split()


_SGD = "--optimizer sgd --lr {sgd_lr}"
_STREAMED = "--local-update-fragments 2 --local-update-delay 2 --local-update-mixing 0.5 --ddp-bucket-size 100000"
METHODS = {
    PLAIN: Method(""),
    "fp16": Method("--gradient-compression fp16"),
    "bf16": Method("--gradient-compression bf16"),
    "int8": Method("--gradient-compression int8"),
    "fp8": Method("--gradient-compression fp8"),
    "topk": Method("--gradient-compression topk"),
    "threshold": Method("--gradient-compression threshold"),
    "randomk": Method("--gradient-compression randomk"),
    "count-sketch": Method("--gradient-compression count-sketch"),
    "signsgd": Method("--gradient-compression signsgd"),
    "powersgd": Method("--gradient-compression powersgd"),
    "onebit-adam": Method("--gradient-compression onebit-adam --compression-warmup-iters {fifth} --clip-grad 0"),
    "sgd": Method(_SGD),
    "dgc": Method(f"{_SGD} --gradient-compression dgc --compression-ratio 0.001 --compression-warmup-iters {{tenth}}"),
    "local-sgd": Method("--local-update local-sgd --local-update-period 10"),
    "post-local-sgd": Method(
        "--local-update post-local-sgd --local-update-period 10 --local-update-warmup-iters {fifth}"
    ),
    "fedavg": Method("--local-update fedavg --local-update-period 10"),
    "easgd": Method("--local-update easgd --local-update-period 10"),
    "diloco-10": Method("--local-update diloco --local-update-period 10"),
    "diloco-50": Method("--local-update diloco --local-update-period 50"),
    "streaming-diloco": Method(f"--local-update diloco --local-update-period 10 {_STREAMED}", delay=2),
    "parameter-server": Method("--asynchronous parameter-server --max-staleness 2", servers=1),
}
"""Methods by name. A row is all that a method takes here."""
