"""Steps of transformers, right and with planted mistakes, verified from files as a user has them."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.extras.verify import rounding, verification
from megalite.extras.verify.batches import from_trace
from megalite.extras.verify.checkpoints import open_weights
from megalite.extras.verify.command import read_command
from megalite.extras.verify.commands import verify as program
from megalite.extras.verify.compare import first_difference
from megalite.extras.verify.judgement import Judgement
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.rounding import Numerics
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict
from megalite.extras.verify.verification import verify
from megalite_trace import Recorder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra

NETWORK = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""
RUN = """--vocab-size 128 --tokenizer-type NullTokenizer --seq-length 32 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 1 --mock-data"""
Change = Callable[[nn.Module], None]


def command(dtype: torch.dtype) -> str:
    precision = {torch.bfloat16: "--bf16", torch.float32: ""}[dtype]
    return " ".join(f"pretrain_gpt.py {NETWORK} {RUN} {precision}".split())


def llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():  # so that norms are not all alike
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens_of(number: int) -> Tensor:
    return torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(number))


def mean_loss(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / count


def traced(
    folder: Path,
    dtype: torch.dtype,
    change: Change | None = None,
    loss: Callable[..., Tensor] = mean_loss,
    *,
    divisor: float = 1.0,
    **options: bool,
) -> Path:
    """Save the weights, change the model, and record a step of two micro-batches.

    `divisor`: number by which gradients are divided after backward.
    """
    model = llama(dtype)
    model.save_pretrained(folder / "weights")  # type: ignore[operator]
    if change is not None:
        change(model)
    recorder = Recorder(folder / "trace", model, steps={1}, **options)
    with recorder.step(1):
        total = 0.0
        for number in range(2):
            tokens = tokens_of(number)
            recorder.batch(tokens=tokens[:, :-1], labels=tokens[:, 1:])
            value = loss(model(tokens[:, :-1]).logits, tokens[:, 1:], 2)
            value.backward()
            total += value.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= divisor
        recorder.gradients()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        recorder.figures(loss=total / divisor, grad_norm=norm)
    return folder / "trace"


def verdict_on(folder: Path, dtype: torch.dtype) -> Verdict:
    return verify(
        read_command(command(dtype)), open_weights(str(folder / "weights")), read_trace(folder / "trace", None)
    )


@pytest.mark.parametrize("whole", [False, True], ids=["sketches", "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_right_step_is_not_accused_and_nearly_all_of_it_is_compared(
    tmp_path: Path, dtype: torch.dtype, whole: bool
) -> None:
    traced(tmp_path, dtype, whole=whole)
    found = verdict_on(tmp_path, dtype)
    assert found.exit_code == RIGHT, found.line
    assert len(found.judgements) > 230
    assert {figure.name for figure in found.figures} == {"loss", "grad_norm"}
    compared = {each.entry.name for each in found.judgements}
    assert {name for name, _ in llama(dtype).named_parameters()} <= compared
    ratios = sorted(each.ratio for each in found.judgements)
    # Rounding is told, not bounded: the median of what independent code rounds is near 1, on both sides.
    assert 0.5 < ratios[len(ratios) // 2] < 1.5


def epsilon(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3


def theta(model: nn.Module) -> None:
    rotary = model.model.rotary_emb  # type: ignore[union-attr]
    rotary.inv_freq = 1 / 500_000 ** (torch.arange(0, 16, 2) / 16)  # type: ignore[union-attr]


def unscaled(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.scaling = 1.0 / 16


def gelu(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.act_fn = nn.GELU()


def exchanged(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def norm_in_bf16(model: nn.Module) -> None:
    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        narrow = hidden.bfloat16()
        scale = torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight.bfloat16() * (narrow * scale)).float()  # type: ignore[operator]

    norm = model.model.layers[1].post_attention_layernorm  # type: ignore[union-attr,index]
    norm.forward = types.MethodType(forward, norm)  # type: ignore[method-assign,union-attr]


def twice(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return mean_loss(logits, labels, 1)


def another_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2.0)  # type: ignore[union-attr,index]


WRONG_STEPS = {
    "epsilon": (epsilon, mean_loss, "model.layers.0.input_layernorm", "output", "epsilon"),
    "theta": (theta, mean_loss, "model.layers.0.self_attn.o_proj", "input", "position"),
    "unscaled": (unscaled, mean_loss, "model.layers.0.self_attn.o_proj", "input", "scale"),
    "gelu": (gelu, mean_loss, "model.layers.0.mlp.down_proj", "input", "activation"),
    "exchanged": (exchanged, mean_loss, "model.layers.0.mlp.gate_proj.weight", "parameter", "shards"),
    "norm in bf16": (norm_in_bf16, mean_loss, "model.layers.1.post_attention_layernorm", "output", "precision"),
    "loss twice": (None, twice, "lm_head", "output_gradient", "factor"),
    "another weight": (another_weight, mean_loss, "model.layers.1.mlp.down_proj.weight", "parameter", "factor"),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_the_first_tensor_that_differs_is_named_with_its_cause(tmp_path: Path, case: str) -> None:
    change, loss, name, role, kind = WRONG_STEPS[case]
    traced(tmp_path, torch.float32, change, loss)
    found = verdict_on(tmp_path, torch.float32)
    assert found.exit_code == WRONG
    assert found.first is not None
    assert (found.first.entry.name, found.first.entry.role) == (name, role)
    best = found.hypotheses[0]
    assert (best.kind, best.explains) == (kind, True), [(each.kind, each.text, each.ratio) for each in found.hypotheses]


def test_a_small_error_in_bf16_is_found_and_its_cause_named(tmp_path: Path) -> None:
    traced(tmp_path, torch.bfloat16, epsilon)  # 5 % of the outputs of norms, whose rounding is 0.2 %
    found = verdict_on(tmp_path, torch.bfloat16)
    assert found.exit_code == WRONG
    assert found.first is not None
    assert found.first.entry.name == "model.layers.0.input_layernorm"
    assert found.hypotheses[0].text == "norms add 0.001 instead of 1e-05"


def test_a_marginal_accusation_is_judged_again_with_more_orders_of_summation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of the first walk is accused, as if few emulations had rounded too little by chance."""
    orders: list[int] = []

    def emulations(dtype: torch.dtype, size: int, more: int = 0) -> tuple[Numerics, ...]:
        orders.append(3 + more)
        return rounding.emulations(dtype, size, more)

    def unlucky(judgements: Sequence[Judgement]) -> Judgement | None:
        return judgements[-1] if orders == [3] else first_difference(judgements)

    traced(tmp_path, torch.bfloat16)
    monkeypatch.setattr(verification, "emulations", emulations)
    monkeypatch.setattr(verification, "first_difference", unlucky)
    found = verdict_on(tmp_path, torch.bfloat16)
    assert found.exit_code == RIGHT, found.line
    assert orders == [3, 15]
    assert any("judged again with more" in note for note in found.notes)


def summed_loss(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def test_gradients_may_be_divided_before_backward_or_after_it(tmp_path: Path) -> None:
    traced(tmp_path, torch.float32, loss=summed_loss, divisor=2 * 2 * 32)
    found = verdict_on(tmp_path, torch.float32)
    assert found.exit_code == RIGHT, found.line


def test_gradients_that_are_divided_by_another_number_are_wrong(tmp_path: Path) -> None:
    traced(tmp_path, torch.float32, loss=summed_loss, divisor=2 * 32)
    found = verdict_on(tmp_path, torch.float32)
    assert found.first is not None
    assert found.first.entry.role == "main_gradient"
    assert (found.hypotheses[0].kind, found.hypotheses[0].factor) == ("factor", 2.0)


def test_a_program_of_another_precision_than_the_flags_say_is_found(tmp_path: Path) -> None:
    traced(tmp_path, torch.bfloat16)
    found = verdict_on(tmp_path, torch.float32)
    assert found.exit_code == WRONG
    assert found.hypotheses[0].kind == "precision"


def test_other_weights_are_said_and_the_comparison_goes_on(tmp_path: Path) -> None:
    traced(tmp_path, torch.float32)
    torch.manual_seed(1)
    other = llama(torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    found = verdict_on(tmp_path, torch.float32)
    assert found.exit_code == WRONG
    assert any("other weights" in note for note in found.notes)
    assert len(found.judgements) > 230


def test_the_program_prints_the_verdict_and_writes_json_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path, torch.float32, epsilon)
    flags = ["--command", command(torch.float32), "--checkpoint", str(tmp_path / "weights")]
    flags += ["--trace", str(tmp_path / "trace"), "--bisect", "--json", str(tmp_path / "out.json")]
    flags += ["--page", str(tmp_path / "out.html")]
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == WRONG
    printed = capsys.readouterr().out
    assert "norms add 0.001 instead of 1e-05" in printed
    assert "next: " in printed
    (found,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert found["verdict"] == "wrong"
    assert found["first"]["name"] == "model.layers.0.input_layernorm"
    assert "<svg" in (tmp_path / "out.html").read_text()


def test_the_batch_of_a_trace_is_whole_samples_in_order(tmp_path: Path) -> None:
    trace = read_trace(traced(tmp_path, torch.float32), 1)
    found = from_trace(trace)
    assert found is not None
    assert found.whole
    assert [each["tokens"].tolist() for each in found.arrays] == [tokens_of(n)[:, :-1].tolist() for n in range(2)]


def test_of_two_traces_of_a_step_the_wrong_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    traces = [traced(right, torch.float32), traced(wrong, torch.float32, epsilon)]
    flags = ["--command", command(torch.float32), "--checkpoint", str(right / "weights")]
    flags += ["--trace", str(traces[0]), "--against", str(traces[1]), "--json", "-"]
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == WRONG
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("\n{") :])
    assert [each["verdict"] for each in found.values()] == ["right", "wrong"]
    assert [title.removeprefix("trace ") for title in found] == [str(trace) for trace in traces]
