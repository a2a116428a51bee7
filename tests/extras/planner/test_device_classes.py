"""Plans, splits and shares for devices that are not alike, and the files that describe them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import stages_of_letters
from megalite.config.yaml_file import dump
from megalite.errors import ConfigurationError
from megalite.extras.planner import device_classes
from megalite.extras.planner.commands import plan as command
from megalite.extras.planner.device_classes import (
    classes_of,
    data_parallel_speeds,
    of_rank,
    require_valid_classes,
    with_device_classes,
)
from megalite.extras.planner.device_plan import MixedPlanner, device_lines
from megalite.extras.planner.plan import Planner
from megalite.extras.planner.stage_layout import with_stages
from megalite.parallel.mesh import UnconnectedMesh
from megalite.training.unequal_shares import make_unequal_shares
from tests.end_to_end.runs import words

RUN = words(
    "--num-layers 12 --hidden-size 4096 --num-attention-heads 32 --vocab-size 128 --tokenizer-type NullTokenizer "
    "--mock-data --seq-length 512 --position-embedding-type rope --micro-batch-size 1 --global-batch-size 32 --bf16 "
    "--train-iters 1 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)
FIGURES = "memory_gib = 80\ntflops = {}\nmemory_gb_per_s = {}\nnode_gb_per_s = 300\nnetwork_gb_per_s = 50\n"
PLACES = "nodes = {}\ngpus_per_node = {}\n"
FAST, SLOW = FIGURES.format(800, 4000), FIGURES.format(400, 2000)


def halves(nodes: tuple[int, int] = (1, 1), gpus: int = 1, fast: str = "", slow: str = "") -> str:
    """Return a file whose second class has half the speed of the first one in all that it computes."""
    one, two = (PLACES.format(number, gpus) for number in nodes)
    return f"[fast]\n{one}{FAST}{fast}\n[slow]\n{two}{SLOW}{slow}\n"


def run_config(text: str, flags: str, world_size: int, tmp_path: Path) -> RunConfig:
    (tmp_path / "classes.toml").write_text(text)
    config = parse_arguments([*RUN, *words(flags), "--device-classes", str(tmp_path / "classes.toml")]).config
    return with_device_classes(config, world_size)


def layers(config: RunConfig, world_size: int) -> list[int]:
    text = with_stages(config, world_size)[0].parallel.pipeline_model_parallel_layout
    assert text is not None
    return [stage.count("t") for stage in stages_of_letters(text)]


AUTO = "--pipeline-model-parallel-layout auto"


def test_half_the_speed_gets_half_the_layers(tmp_path: Path) -> None:
    """Twelve layers, of which a rank of half the speed gets four: what else stages have is next to nothing."""
    assert layers(run_config(halves(), f"--pp 2 {AUTO}", 2, tmp_path), 2) == [8, 4]
    assert layers(run_config(halves((2, 1)), f"--pp 3 {AUTO}", 3, tmp_path), 3) == [5, 5, 2]
    chunks = f"--pp 2 --num-virtual-stages-per-pipeline-rank 2 {AUTO}"
    assert layers(run_config(halves(), chunks, 2, tmp_path), 2) == [4, 2, 4, 2]
    # A stage takes as long as on its slowest replica: the border is within the first pipeline rank.
    assert layers(run_config(halves((1, 3)), f"--pp 2 {AUTO}", 4, tmp_path), 4) == [6, 6]


def test_recomputation_of_a_class_counts_in_the_split(tmp_path: Path) -> None:
    """A class that runs each forward twice takes four thirds of the time for a layer."""
    full = 'flags = { recompute_granularity = "full", recompute_method = "uniform", recompute_num_layers = 1 }'
    alike = halves(slow=full).replace(SLOW, FAST)
    assert layers(run_config(alike, f"--pp 2 {AUTO}", 2, tmp_path), 2) == [7, 5]


def test_shares_are_the_speeds_of_replicas(tmp_path: Path) -> None:
    def shares(nodes: tuple[int, int], flags: str, world_size: int) -> tuple[float, ...]:
        config = run_config(halves(nodes), flags, world_size, tmp_path)
        return data_parallel_speeds(config.parallel)

    assert shares((2, 2), "", 4) == (1.0, 1.0, 0.5, 0.5)
    assert shares((2, 2), "--tp 2", 4) == (1.0, 0.5)
    assert shares((2, 2), "--pp 2", 4) == (1.0, 1.0)  # both replicas have a slow stage
    assert shares((1, 3), "--pp 2 --allow-mixed-groups", 4) == (1.0, 1.0)
    assert shares((3, 1), "--pp 2", 4) == (1.0, 0.5)
    assert shares((1, 3), "--tp 2 --allow-mixed-groups", 4) == (1.0, 1.0)


def test_measured_shares_begin_with_the_speeds_of_classes(tmp_path: Path) -> None:
    config = run_config(halves((1, 1)), "--data-parallel-shares auto", 2, tmp_path)
    begun = make_unequal_shares(config, UnconnectedMesh(rank=1, world_size=2))
    assert begun.counts(32) == [22, 10]
    assert len(begun.deal(32).numbers) == 10
    alike = replace(config, parallel=replace(config.parallel, device_classes=None))
    assert make_unequal_shares(alike, UnconnectedMesh(rank=1, world_size=2)).counts(32) == [16, 16]


def test_a_step_takes_what_its_slowest_path_takes(tmp_path: Path) -> None:
    """Two replicas, one of which is slow: the step of the slow class alone. A pipeline: between both."""
    config = run_config(halves(), "", 2, tmp_path)
    planner = MixedPlanner(config)
    alone = planner.alone(config)
    assert planner.plan(config).step.seconds == alone["slow"].seconds
    assert alone["slow"].seconds > 1.45 * alone["fast"].seconds

    config = run_config(halves(), "--pp 2", 2, tmp_path)
    planner = MixedPlanner(config)
    alone = planner.alone(config)
    even = planner.plan(config).step.seconds
    assert alone["fast"].seconds < even <= alone["slow"].seconds
    automatic = with_stages(
        replace(config, parallel=replace(config.parallel, pipeline_model_parallel_layout="auto")), 2
    )
    assert MixedPlanner(automatic[0]).plan(automatic[0]).step.seconds < 0.81 * even
    equal = run_config(halves().replace(SLOW, FAST), "--pp 2", 2, tmp_path)
    one = classes_of(equal.parallel).classes[0]
    assert MixedPlanner(equal).plan(equal).step == Planner(equal, one.cluster, 2).plan(equal).step


def test_the_smallest_device_of_a_stage_must_hold_it_to_the_byte(tmp_path: Path) -> None:
    config = run_config(halves((1, 1)), "", 2, tmp_path)
    (needs,) = MixedPlanner(config).plan(config).memory
    exact = needs.total / 2**30  # of a device; division by a power of two is exact

    def missing(of_fast: float, of_slow: float) -> float:
        text = halves((1, 1))
        first, _, second = text.partition("[slow]")
        sized = (
            each.replace("memory_gib = 80", f"memory_gib = {size!r}")
            for each, size in ((first, of_fast), (second, of_slow))
        )
        config = run_config("[slow]".join(sized), "", 2, tmp_path)
        return MixedPlanner(config).plan(config).missing

    assert missing(exact, exact) == 0
    assert missing(80.0, exact) == 0
    assert missing(80.0, exact - 2**-30) == 1
    assert missing(exact - 2**-30, 80.0) == 1


def test_flags_of_a_class_count_in_its_memory(tmp_path: Path) -> None:
    """The first stage's devices recompute, so it holds less than it would."""
    full = 'flags = { recompute_granularity = "full", recompute_method = "uniform", recompute_num_layers = 1 }'
    plain, recomputed = (run_config(halves(fast=flags), "--pp 2", 2, tmp_path) for flags in ("", full))
    before, after = (MixedPlanner(config).plan(config).memory for config in (plain, recomputed))
    assert after[0].activations < 0.5 * before[0].activations
    assert after[1] == before[1]
    assert of_rank(recomputed, 0) != recomputed
    assert of_rank(recomputed, 1) == recomputed


def test_the_start_names_the_slowest_class(tmp_path: Path) -> None:
    config = run_config(halves(), "--pp 2", 2, tmp_path)
    assert device_lines(config, of_gpu=False) == {
        "classes": "1 x fast, 1 x slow; slow is the slowest, with 0.50 x the FLOP/s of fast"
    }
    lines = device_lines(config, of_gpu=True)
    assert lines["classes"] == "1 x fast, 1 x slow"
    assert "slow is the slowest: all of them fast, a step would take " in str(lines["  slowest"])
    small = run_config(halves().replace("memory_gib = 80", "memory_gib = 8"), "--pp 2", 2, tmp_path)
    assert "does not fit, as predicted: stage " in str(device_lines(small, of_gpu=True)["  memory"])


def test_the_classes_stand_in_the_configuration(tmp_path: Path) -> None:
    config = run_config(halves(), "", 2, tmp_path)
    (tmp_path / "config.yaml").write_text(dump(config))
    (tmp_path / "classes.toml").unlink()
    again = parse_arguments(["--config", str(tmp_path / "config.yaml")]).config
    assert with_device_classes(again, 2).parallel == config.parallel
    with pytest.raises(ConfigurationError, match=r"as it was saved\): nodes x gpus_per_node of its classes is 1 fast"):
        with_device_classes(again, 3)


@pytest.mark.wide
def test_a_plan_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "classes.toml").write_text(halves((1, 1), 2))
    flags = [*RUN, "--device-classes", str(tmp_path / "classes.toml"), "--gpus", "4"]
    monkeypatch.setattr("sys.argv", ["plan.py", *flags, *words(f"--pp 2 {AUTO} --keep layout")])
    command.main()
    assert "a dry run of rank " in capsys.readouterr().out
    for more, message in (
        ("", "--device-classes: layouts are searched for devices that are alike"),
        ("--keep layout --cluster A100-SXM-80GB", "--cluster A100-SXM-80GB: the classes of --device-classes"),
        ("--keep layout --explain", "--explain and --scaling compare layouts on devices that are alike"),
        ("--keep layout --gpus 3", "is 2 fast \\+ 2 slow = 4 devices, but the run has 3 ranks"),
    ):
        monkeypatch.setattr("sys.argv", ["plan.py", *flags, *words(more)])
        with pytest.raises(ConfigurationError, match=message):
            command.main()


RECOMPUTE = 'flags = { recompute_granularity = "full", recompute_method = "uniform" }'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no class: give a table for each"),
        ("fast = 1", r"'fast' is 1: give a table for each class"),
        ("[fast", r"is not TOML: "),
        (halves(fast="speed = 3"), r"'fast': 'speed' is unknown: keys are gpu, nodes, "),
        (halves((1, 2)), r"1 fast \+ 2 slow = 3 devices, but the run has 2 ranks"),
        (halves((0, 2)), r"'fast': nodes is 0: give a whole number, 1 or more"),
        (halves().replace("nodes = 1\n", ""), r"nodes is missing"),
        (halves().replace("tflops = 400", "tflops = 0"), r"'slow': tflops is 0: give a number above 0"),
        (halves().replace("tflops = 400", "tflops = nan"), r"tflops is nan: give a number above 0"),
        (halves().replace("tflops = 400", "tflops = true"), r"tflops is True: give a number above 0"),
        (halves().replace("tflops = 400\n", ""), r"'slow': without gpu, tflops must be given"),
        (halves(fast='gpu = "H999"'), r"gpu is 'H999': give one of selene, "),
        (halves(fast="gpu = [1]"), r"gpu is \[1\]: give one of selene, "),
        (halves(fast="flags = 3"), r"flags is 3: give a table, by the names of flags"),
        (halves(fast="flags = { lr = 3 }"), r"flags cannot have 'lr': classes may differ in recompute_granularity, "),
        (
            halves(fast='flags = { recompute_granularity = "half" }'),
            r"is 'half': give a value of --recompute-granularity",
        ),
        (
            halves(fast="flags = { optimizer_offload_fraction = 2.0 }"),
            r"flags of fast: --optimizer-offload-fraction 2\.0",
        ),
        (
            halves(fast="flags = { optimizer_offload_fraction = 0.5 }"),
            r"flags of fast: .* needs? --optimizer-cpu-offload",
        ),
    ],
)
def test_files_with_mistakes_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        require_valid_classes(run_config(text, "", 2, tmp_path), 2)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("--device-classes")


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            halves((1, 3)),
            "--tp 2",
            r"ranks 0 to 1 share each layer \(TP 2 x CP 1\), .* a multiple of 2, or --allow-mixed",
        ),
        (halves((2, 2)), "--cp 4", r"ranks 0 to 3 share each layer \(TP 1 x CP 4\)"),
        (halves((2, 2)), "--num-experts 4 --ep 4", r"share each layer \(EP 4 x ETP 1\)"),
        (halves((2, 2), slow=RECOMPUTE), "--cp 4 --allow-mixed-groups", r"must have the same flags: their collectives"),
        (
            halves((2, 2), slow=RECOMPUTE),
            "--data-parallel-sharding-strategy optim_grads_params",
            r"differ in --recompute-granularity, --recompute-method: gathers of ZeRO 3 are repeated",
        ),
        (halves((2, 2), slow=RECOMPUTE), "--num-experts 4 --ep 2", r"exchanges of experts are repeated"),
        (
            halves((2, 2), slow="flags = { optimizer_offload_fraction = 0.5 }"),
            "OFF",
            r"with other rounding. Give ZeRO 1 or more",
        ),
        (
            halves((2, 2), slow="flags = { optimizer_offload_fraction = 0.5 }"),
            "OFF --use-distributed-optimizer --optimizer muon",
            r"--optimizer muon updates tensors together",
        ),
        (
            halves((2, 2), slow="flags = { optimizer_offload_fraction = 0.5 }"),
            "OFF --use-distributed-optimizer --num-distributed-optimizer-instances 2",
            r"leave out --num-distributed-optimizer-instances",
        ),
        (
            halves((2, 2), slow="flags = { optimizer_offload_fraction = 0.5 }"),
            "OFF --pp 2 --no-untie-embeddings-and-output-weights",
            r"the first stage \(fast\) and the last \(slow\) differ in --optimizer-offload-fraction",
        ),
        (
            halves((2, 2), slow=RECOMPUTE),
            "--gradient-compression int8",
            r"flags of classes need data parallelism that sums all gradients",
        ),
    ],
)
def test_groups_that_cannot_have_several_classes_are_refused(
    text: str, flags: str, message: str, tmp_path: Path
) -> None:
    flags = flags.replace("OFF", "--optimizer-cpu-offload --optimizer-offload-fraction 1")
    with pytest.raises(ConfigurationError, match=message) as raised:
        run_config(text, flags, 4, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_file_is_read_within_limits(tmp_path: Path) -> None:
    config = run_config(halves(), "", 2, tmp_path)
    for path, message in ((tmp_path, "directory"), (tmp_path / "none", "No such file"), (Path("/dev/zero"), "regular")):
        other = replace(config, parallel=replace(config.parallel, device_classes=str(path)))
        with pytest.raises(ConfigurationError, match=rf"--device-classes {path} cannot be read: .*{message}"):
            with_device_classes(other, 2)
    assert device_classes.OVERRIDES


def test_a_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    """Only what a run has saved is the text itself."""
    folder = tmp_path / "lr=1e-4"
    folder.mkdir()
    config = run_config(halves(), "", 2, folder)
    assert with_device_classes(config, 2) == config
    one_line = "a = {{ gpu = 'H100-SXM', nodes = 1, gpus_per_node = 2{} }}"
    config = run_config(one_line.format(""), "", 2, folder)
    assert with_device_classes(config, 2) == config
    with pytest.raises(ConfigurationError, match=r"tflops is 1000.*: give a number above 0"):
        run_config(one_line.format(f", tflops = 1{'0' * 400}"), "", 2, folder)
