"""Options of data parallelism that communicates less: each relation that does not hold has its line."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite.config import RunConfig, resolve
from megalite.config.synchronization import SynchronizationConfig
from megalite.config.validate_synchronization import with_sites
from megalite.errors import ConfigurationError
from megalite.extras.synchronization.from_flags import LessCommunication
from megalite.extras.synchronization.local_update import LocalUpdate
from megalite.extras.synchronization.local_update_trainer import exchange_notes
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.run.run import RunSynchronization, make_synchronization
from tests.unit.test_config_validate import config_of, problems

COMPRESSION = "--gradient-compression"
DGC, ONEBIT = f"{COMPRESSION} dgc", f"{COMPRESSION} onebit-adam"
LOCAL, DILOCO = "--local-update local-sgd", "--local-update diloco"
ONEBIT_NEEDS = (
    f"{ONEBIT} needs --compression-warmup-iters, at whose end Adam's second moment is frozen, and error feedback"
)
SPARSE = f"{COMPRESSION} topk, randomk, threshold, dgc or count-sketch"
NO_MEAN = "a step has not one set of weights there; drop one of them (megalite-merge-checkpoints averages checkpoints)"
AVERAGES = "--local-update local-sgd, post-local-sgd, fedavg or diloco"
FP32 = "what it leaves out is kept in fp32; drop --grad-reduce-in-bf16 and --main-grads-dtype"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ONE_SUM = (
    f"{COMPRESSION} int8 under {ZERO2}: gradients are reduced after every micro-batch there; optim, or no_shard, "
    "reduces those of a step at once"
)
EXPERTS = "--num-experts 4 --expert-model-parallel-size 4 --moe-layer-freq 1"
OF_EXPERTS = "--num-experts 4 --moe-layer-freq 1"
ONE = {
    # compression
    f"{COMPRESSION} int8 fp8 fp16": (
        f"{COMPRESSION}: give one value, or two: within sites or replicas, and between them"
    ),
    f"{COMPRESSION} int8 fp8": f"{COMPRESSION}: two values need --sites or --local-update",
    f"{COMPRESSION} int8 --compression-ratio 0.1": f"--compression-ratio needs {SPARSE}",
    f"{COMPRESSION} int8 --compression-rank 2": f"--compression-rank needs {COMPRESSION} powersgd",
    "--compression-warmup-iters 2": f"--compression-warmup-iters needs {COMPRESSION}",
    "--no-error-feedback": f"--no-error-feedback needs {COMPRESSION}",
    f"{COMPRESSION} int8 --bf16 --grad-reduce-in-bf16": f"{COMPRESSION} int8: {FP32}",
    f"{COMPRESSION} int8 --use-distributed-optimizer --num-distributed-optimizer-instances 2": (
        f"{COMPRESSION} int8: give --sites instead of --num-distributed-optimizer-instances"
    ),
    f"{COMPRESSION} int8 {ZERO2}": ONE_SUM,
    f"{COMPRESSION} powersgd --sites 2": (
        f"{COMPRESSION} powersgd: between sites or replicas, give another compression than powersgd"
    ),
    f"{COMPRESSION} int8 none {LOCAL} --local-update-warmup-iters 2 --sites 2": (
        f"{COMPRESSION} int8 none within replicas: drop --local-update-warmup-iters, whose steps sum over all replicas"
    ),
    f"{COMPRESSION} powersgd int8 --sites 2": (
        f"{COMPRESSION} powersgd int8: powersgd sums over all ranks at once; within --sites, give another compression"
    ),
    DGC: f"{DGC} corrects the momentum of --optimizer sgd, not of adam",
    f"{DGC} --optimizer sgd --no-error-feedback": f"{DGC}: drop --no-error-feedback, without which it is topk",
    f"{ONEBIT} --compression-warmup-iters 2 --clip-grad 0 --use-distributed-optimizer": (
        f"{ONEBIT} compresses the momentum of --optimizer adam that is not sharded"
    ),
    f"{ONEBIT} --compression-warmup-iters 2": f"{ONEBIT} needs --clip-grad 0: it has no gradient to clip",
    f"{ONEBIT} --clip-grad 0": ONEBIT_NEEDS,
    f"{COMPRESSION} int8 --train-iters 9 --compression-warmup-iters 9": (
        "--compression-warmup-iters 9: the run ends after step 9"
    ),
    # local updates
    f"{DILOCO} --train-iters 10 --local-update-period 9 --local-update-delay 2": (
        "--local-update-period 9: the first exchange ends after step 11, the run after step 10"
    ),
    "--local-update-period 2": "--local-update-period needs --local-update",
    "--outer-lr 0.5": "--outer-lr needs --local-update",
    "--elastic-rate 0.5": "--elastic-rate needs --local-update",
    "--local-update easgd --outer-lr 0.5": f"--outer-lr needs {AVERAGES}",
    f"{LOCAL} --elastic-rate 0.5": "--elastic-rate needs --local-update easgd",
    f"{LOCAL} --local-update-period 2 --local-update-delay 1": "--local-update-delay needs --local-update diloco",
    f"{LOCAL} --outer-momentum 0.5": "--outer-momentum needs --outer-optimizer nesterov",
    f"{DILOCO} --outer-optimizer sgd --outer-momentum 0.5": "--outer-momentum needs --outer-optimizer nesterov",
    "--local-update post-local-sgd": (
        "--local-update post-local-sgd needs --local-update-warmup-iters, its steps of plain data parallelism"
    ),
    f"{DILOCO} --local-update-fragments 2": "--local-update-fragments 2 is more than --local-update-period 1",
    f"{DILOCO} --local-update-delay 1": "--local-update-delay 1 must be less than --local-update-period 1",
    f"{LOCAL} --use-distributed-optimizer --num-distributed-optimizer-instances 2": (
        "--local-update: give the number of replicas by --sites, not --num-distributed-optimizer-instances"
    ),
    f"{LOCAL} --bf16 --store-param-remainders --use-precision-aware-optimizer --use-distributed-optimizer": (
        "--local-update local-sgd needs whole master weights: drop --store-param-remainders"
    ),
    f"{LOCAL} --ema-decay 0.9": f"--ema-decay 0.9 with {LOCAL}: {NO_MEAN}",
    f"{LOCAL} --save d --no-save-optim": (
        "--no-save-optim with --local-update would lose what replicas have not exchanged: save the state, too"
    ),
    f"{LOCAL} --moe-router-load-balancing-type quantile_balancing {OF_EXPERTS}": (
        "--moe-router-load-balancing-type quantile_balancing: replicas do not exchange offsets: drop --local-update"
    ),
    f"{LOCAL} --moe-router-enable-expert-bias --moe-router-score-function sigmoid {OF_EXPERTS}": (
        "--moe-router-enable-expert-bias: replicas do not exchange biases: drop --local-update"
    ),
    f"{LOCAL} --local-update-warmup-iters 1 --moe-router-load-balancing-type global_aux_loss {OF_EXPERTS} "
    "--moe-aux-loss-coeff 0.01": (
        "--local-update-warmup-iters: global_aux_loss is of a replica, not of all data: give another loss"
    ),
    # peers
    f"{COMPRESSION} int8 none {LOCAL}": (
        f"{COMPRESSION} int8 none: int8 changes nothing, since a replica has one data-parallel rank"
    ),
    f"{COMPRESSION} int8 none --sites 4": (
        f"{COMPRESSION} int8 none: int8 changes nothing, since a site has one data-parallel rank"
    ),
    f"{COMPRESSION} int8 --tp 4": f"{COMPRESSION} int8: int8 changes nothing, since a run has one data-parallel rank",
    f"{DGC} --optimizer sgd --expert-model-parallel-size 4 {OF_EXPERTS}": (
        f"{DGC}: dgc needs several ranks with the same experts: lower --expert-model-parallel-size"
    ),
    f"{COMPRESSION} powersgd --compression-rank 99999": ("--compression-rank 99999 is more than --hidden-size 48"),
    f"{ONEBIT} --compression-warmup-iters 2 --clip-grad 0 --exp-avg-dtype fp8 --use-precision-aware-optimizer --bf16": (
        f"{ONEBIT} keeps its moments in fp32: drop --exp-avg-dtype"
    ),
    f"{ONEBIT} none --compression-warmup-iters 2 --clip-grad 0 --sites 2": (
        f"{ONEBIT} sums momenta over all ranks at once: drop --sites"
    ),
    f"{LOCAL} --moe-record-routing d --num-experts 4 --sequence-parallel": (
        "--moe-record-routing needs replicas with the same weights: drop --local-update"
    ),
    # sites
    f"{LOCAL} --tp 4": "--local-update local-sgd needs two data-parallel ranks: 4 ranks have one",
    "--sites 3": "--sites 3 does not divide 4 data-parallel ranks",
    f"--sites 4 {EXPERTS}": "--sites 4 does not divide 1 data-parallel ranks of experts",
    f"{LOCAL} {EXPERTS}": "--local-update with 4 replicas does not divide 1 data-parallel ranks of experts",
    "--sites 2 --use-distributed-optimizer --num-distributed-optimizer-instances 2": (
        "--sites are instances of hybrid sharding: drop --num-distributed-optimizer-instances"
    ),
    "--sites 4 --use-distributed-optimizer": "--sites 4: with one rank in each nothing is sharded",
    # algorithms
    f"--all-reduce-algorithm hierarchical --sites 2 {LOCAL}": (
        "--all-reduce-algorithm hierarchical sums over sites in each step, --local-update local-sgd does not: drop one"
    ),
    "--all-reduce-algorithm hierarchical": (
        "--all-reduce-algorithm hierarchical needs --sites: the launcher does not tell the nodes"
    ),
    f"--all-reduce-algorithm ring {COMPRESSION} int8": (
        f"--all-reduce-algorithm ring sums gradients as they are: drop {COMPRESSION} int8"
    ),
    "--all-reduce-algorithm tree --sites 2": "--all-reduce-algorithm tree: --sites 2 needs hierarchical",
    f"--all-reduce-algorithm ring --sites 2 {LOCAL} --local-update-warmup-iters 2": (
        "--all-reduce-algorithm ring sums within replicas: drop --local-update-warmup-iters, whose steps sum over all "
        "replicas"
    ),
    f"--all-reduce-algorithm tree {ZERO2}": (
        f"--all-reduce-algorithm tree gives all ranks the whole sum: not under {ZERO2}"
    ),
}
"""Lines on 4 ranks by the flags that are the only fault."""


@pytest.mark.parametrize("flags", ONE)
def test_a_relation_that_does_not_hold_has_one_line(flags: str) -> None:
    assert problems(flags, 4) == [ONE[flags]]


def test_sites_imply_the_hierarchical_algorithm() -> None:
    for flags in ("--sites 2", "--sites 2 --all-reduce-algorithm hierarchical"):
        chosen = resolve(config_of(flags), 4).synchronization
        assert chosen.is_hierarchical
        assert chosen.instances(of_optimizer=1) == 2
    chosen = resolve(config_of(f"--sites 2 {LOCAL}"), 4).synchronization
    assert not chosen.is_hierarchical
    assert chosen.instances(of_optimizer=1) == 1


@pytest.mark.parametrize(
    ("flags", "world_size", "node_ranks", "sites"),
    [
        ("", 16, 8, 2),
        ("", 8, 8, 1),
        ("", 1, None, 1),
        ("--tp 4", 16, 4, 4),
        ("--pp 2", 16, 4, 2),  # a stage has two nodes
        ("--pp 2", 16, 8, 1),  # and here one
        ("--pp 4", 16, 8, 1),  # or half of one
        ("--sites 4", 16, 8, 4),
    ],
)
def test_a_node_is_a_site(flags: str, world_size: int, node_ranks: int | None, sites: int) -> None:
    config = config_of(f"--all-reduce-algorithm hierarchical {flags}")
    chosen = resolve(config, world_size, node_ranks).synchronization
    assert chosen.sites == sites
    assert chosen.all_reduce_algorithm == ("hierarchical" if sites > 1 else "backend")


@pytest.mark.parametrize(
    ("flags", "world_size", "node_ranks"), [("", 6, 4), ("--tp 4", 16, 2), ("--tp 3", 24, 4), ("--pp 2", 12, 4)]
)
def test_uneven_nodes_are_refused(flags: str, world_size: int, node_ranks: int) -> None:
    with pytest.raises(ConfigurationError) as raised:
        with_sites(config_of(f"--all-reduce-algorithm hierarchical {flags}"), world_size, node_ranks)
    assert str(raised.value) == (
        f"--all-reduce-algorithm hierarchical: {world_size} ranks in nodes of {node_ranks} do not have equal numbers "
        "of data-parallel ranks: give --sites"
    )


def test_others_have_no_sites_of_their_nodes() -> None:
    for flags in ("", "--all-reduce-algorithm ring", LOCAL):
        assert resolve(config_of(flags), 4, 2).synchronization.sites == 1


SERVER = "--asynchronous parameter-server"
SERVERS = {
    "--num-servers 4": "--num-servers 4 of 4 ranks leaves no worker",
    "--backup-workers 3": "--backup-workers 3 of 3 workers leaves none whose gradients are applied",
    "--backup-workers 1 --max-staleness 1": (
        "--backup-workers and --drop-stragglers-after leave late gradients out of a step: drop --max-staleness"
    ),
    "--drop-stragglers-after 2 --max-staleness 1": (
        "--backup-workers and --drop-stragglers-after leave late gradients out of a step: drop --max-staleness"
    ),
    "--tp 2 --num-servers 2": f"{SERVER}: a worker is one rank: drop --tp, --pp, --cp and --ep",
    "--global-batch-size 8": "--global-batch-size 8 is not a multiple of --micro-batch-size 2 x 3 data-parallel ranks",
    f"{COMPRESSION} int8": f"{SERVER}: drop {COMPRESSION}",
    LOCAL: f"{SERVER}: drop --local-update",
    "--sites 2": f"{SERVER}: drop --sites",
    "--all-reduce-algorithm ring": f"{SERVER}: drop --all-reduce-algorithm",
    "--use-distributed-optimizer": (
        f"{SERVER}: drop --use-distributed-optimizer or --data-parallel-sharding-strategy: servers shard the optimizer"
    ),
    "--overlap-grad-reduce": f"{SERVER}: drop --overlap-grad-reduce: a worker sends its gradients at once",
    "--save d --async-save": f"{SERVER}: drop --async-save",
    "--ema-decay 0.9": f"--ema-decay 0.9 with {SERVER}: {NO_MEAN}",
    "--fp16": f"{SERVER}: drop --fp16: all workers would share its loss scale",
    "--log-params-norm": f"{SERVER}: drop --log-params-norm: no rank has all masters",
    "--log-num-zeros-in-grad": f"{SERVER}: drop --log-num-zeros-in-grad: no rank has all gradients",
    "--save d --profile-pipeline 3": f"{SERVER}: drop --profile-pipeline",
}


@pytest.mark.parametrize("flags", SERVERS)
def test_what_servers_do_not_do_is_refused(flags: str) -> None:
    assert problems(f"{SERVER} {flags}", 4) == [SERVERS[flags]]


@pytest.mark.parametrize("flag", ["num-servers 2", "max-staleness 1", "backup-workers 1"])
def test_options_of_servers_need_them(flag: str) -> None:
    assert problems(f"--{flag}", 4) == [f"--{flag.split()[0]} needs {SERVER}"]


LATE = "--drop-stragglers-after 2"
LATES = {
    "--tp 4": f"{LATE}.0 needs two data-parallel ranks, of which one may be late: 4 ranks have one",
    "--data-parallel-sharding-strategy optim_grads": (
        f"{LATE}.0: --data-parallel-sharding-strategy optim_grads makes all ranks meet in every micro-batch, so "
        "nobody is late alone: give optim or no_shard"
    ),
    "--num-experts 4 --ep 2": (
        f"{LATE}.0: the 2 ranks of --expert-model-parallel-size x --expert-tensor-parallel-size make data-parallel "
        "ranks meet in every layer with experts, so nobody is late alone: let them divide the 1 of --tp x --cp"
    ),
    "--num-experts 4 --expert-tensor-parallel-size 2": (
        f"{LATE}.0: the 2 ranks of --expert-model-parallel-size x --expert-tensor-parallel-size make data-parallel "
        "ranks meet in every layer with experts, so nobody is late alone: let them divide the 1 of --tp x --cp"
    ),
    f"{COMPRESSION} int8": f"{LATE}.0: drop {COMPRESSION}",
    LOCAL: f"{LATE}.0: drop --local-update",
    "--sites 2": f"{LATE}.0: drop --sites",
    "--all-reduce-algorithm ring": f"{LATE}.0: drop --all-reduce-algorithm",
}


@pytest.mark.parametrize("flags", LATES)
def test_what_late_ranks_do_not_do_is_refused(flags: str) -> None:
    assert problems(f"{LATE} {flags}", 4) == [LATES[flags]]


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2",
        "--cp 2",
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
        "--num-experts 4 --tp 2 --sequence-parallel --ep 2 --etp 1",
    ],
)
def test_what_late_ranks_do_is_not_refused(flags: str) -> None:
    chosen = resolve(config_of(f"{LATE} {flags}"), 4).synchronization
    assert chosen.leaves_out
    assert not chosen.is_plain


def test_a_batch_is_that_of_the_workers() -> None:
    assert resolve(config_of(f"{SERVER} --num-servers 2"), 5).training.global_batch_size == 6


@st.composite
def valid_flags(draw: st.DrawFn) -> str:
    """Draw a combination that the documentation allows."""
    compression = draw(st.sampled_from(["none", "fp16", "int8", "topk", "randomk", "signsgd", "count-sketch"]))
    ratio = " --compression-ratio 0.5" if compression in ("topk", "randomk", "count-sketch") else ""
    compressed = f"{COMPRESSION} {{}}{compression}{ratio}"
    way = draw(st.sampled_from(["plain", "messages", "sites", "local"]))
    sharded = draw(st.sampled_from(["", "--use-distributed-optimizer"]))
    overlap = draw(st.sampled_from(["", "--overlap-grad-reduce"]))
    if way == "messages":
        return f"--all-reduce-algorithm {draw(st.sampled_from(['ring', 'tree']))} {sharded} {overlap}"
    flags = compressed.format("")
    if way != "plain":
        within = draw(st.sampled_from(["", "none ", "bf16 "]))
        flags = f"{compressed.format(within)} --sites 2"
    if way == "local":
        method = draw(st.sampled_from(["local-sgd", "fedavg", "diloco", "easgd"]))
        algorithm = draw(st.sampled_from(["backend", "ring", "tree"]))
        period = draw(st.integers(2, 9))
        flags += f" --local-update {method} --local-update-period {period}"
        flags += f" --all-reduce-algorithm {algorithm}" if "bf16" not in flags else ""
        flags += " --local-update-delay 1 --local-update-fragments 2" if method == "diloco" else ""
    return f"{flags} {sharded} {overlap}"


@settings(max_examples=60, deadline=None)
@given(flags=valid_flags())
def test_valid_combinations_resolve(flags: str) -> None:
    config = resolve(config_of(flags), 4)
    assert isinstance(config, RunConfig)
    assert dataclasses.replace(config.synchronization) == config.synchronization
    assert resolve(config, 4) == config


@given(
    period=st.integers(1, 6), fragments=st.integers(1, 6), delay=st.integers(0, 5), warmup=st.integers(0, 3),
    periods=st.integers(2, 4), more=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_what_no_exchange_takes_is_told(
    period: int, fragments: int, delay: int, warmup: int, periods: int, more: int
) -> None:
    assume(fragments <= period and delay < period)
    steps = warmup + periods * period + more
    flags = f"--local-update-period {period} --local-update-fragments {fragments} --local-update-delay {delay}"
    config = config_of(f"{DILOCO} {flags} --local-update-warmup-iters {warmup} --train-iters {steps}")
    exchange = LocalUpdate.__new__(LocalUpdate)
    exchange.config, exchange._fragments = config.synchronization, list(range(fragments))
    begun = {number: step for step in range(steps - warmup - delay + 1) for number in exchange._due(step)}
    lost = steps - warmup - min(begun.values())
    (told,) = exchange_notes(config.synchronization, steps) or ("for 0 step",)
    assert f"for {lost} step" in told


def test_what_is_plain_is_built_without_this_room() -> None:
    plain = make_synchronization(config_of("--num-distributed-optimizer-instances 2"), ParallelMesh())
    assert type(plain) is RunSynchronization


@pytest.mark.parametrize(
    "flags", [f"{COMPRESSION} int8", "--sites 2", "--all-reduce-algorithm ring", f"{LOCAL} --local-update-period 2"]
)
def test_each_method_is_found(flags: str) -> None:
    mesh = UnconnectedMesh(rank=1, world_size=2)
    assert type(make_synchronization(config_of(flags), mesh)) is LessCommunication


def test_parameter_servers_are_not_for_a_rank_without_others() -> None:
    with pytest.raises(ConfigurationError, match="needs a run, not --dry-run or --as-rank"):
        make_synchronization(config_of("--asynchronous parameter-server"), UnconnectedMesh(rank=0, world_size=2))


def test_without_its_flags_nothing_is_checked() -> None:
    assert resolve(config_of(""), 3).synchronization == SynchronizationConfig()
