"""Loss functions of one's own, micro-batches of rollouts, and figures on their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megalite
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.post_training.log_probabilities import LOSS, TokenOutputs, log_probabilities, with_loss
from megalite.extras.post_training.rollout import (
    Rollout,
    TrainedNetwork,
    generate,
    log_probability_difference,
    to_micro_batches,
)
from megalite.inference.sampling import Sampling
from megalite.model.batch import MicroBatch
from megalite.parallel.cross_entropy import vocab_parallel_entropy
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.distributed.layout_cell import Cell
from tests.distributed.post_training_run import Policy
from tests.harness.close import assert_number_close

TOKENS = torch.tensor([[1, 2, 3, 4]])
PLAIN = MicroBatch(TOKENS, TOKENS, None, TOKENS, torch.ones(1, 4), RandomKey(0, (0,)))


def no_loss(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    return outputs.log_probabilities.sum()


def test_a_loss_function_needs_whole_samples_with_labels() -> None:
    cut = replace(PLAIN, layout=SequenceLayout.cut(8, zigzag(2), 0))
    with pytest.raises(ConfigurationError, match="cut for 2 context-parallel ranks: train with"):
        with_loss([cut], no_loss)
    with pytest.raises(ConfigurationError, match="no labels"):
        with_loss([replace(PLAIN, labels=None)], no_loss)


@pytest.mark.parametrize("found", [{"other": torch.zeros(())}, 1.0, {}, None])
def test_a_loss_function_returns_a_loss(found: object) -> None:
    (micro_batch,) = with_loss([PLAIN], lambda outputs, batch: found)  # type: ignore[arg-type, return-value]
    assert micro_batch.token_loss is not None
    with pytest.raises(MegaliteError, match=r'the loss function returned .* with "loss" among them'):
        micro_batch.token_loss.sums(torch.zeros(1, 4), None)


def test_a_sum_that_needs_a_gradient_is_a_term_of_the_loss_or_refused() -> None:
    def sums(outputs: TokenOutputs, batch: str) -> Mapping[str, Tensor]:
        assert batch == "mine"
        return {
            LOSS: outputs.log_probabilities.sum(),
            "other": outputs.log_probabilities.exp().sum(),
            "items": torch.tensor(4),
        }

    (micro_batch,) = with_loss([PLAIN], sums, ["mine"], terms=[LOSS, "other"])
    assert micro_batch.token_loss is not None
    found = micro_batch.token_loss.sums(torch.zeros(1, 4, requires_grad=True), None)
    assert [name for name, value in found.items() if value.requires_grad] == [LOSS, "other"]
    assert found["items"].dtype == torch.float32  # the engine adds up nothing narrower, and no whole numbers
    (micro_batch,) = with_loss([PLAIN], sums, ["mine"])
    assert micro_batch.token_loss is not None
    with pytest.raises(MegaliteError, match='returned "other" with a gradient, and count returns no number'):
        micro_batch.token_loss.sums(torch.zeros(1, 4, requires_grad=True), None)


def test_the_entropys_gradient_is_that_of_torch() -> None:
    logits = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: vocab_parallel_entropy(values, Group((0,), 0), 5), logits)
    expected = torch.distributions.Categorical(logits=logits[..., :5]).entropy()
    torch.testing.assert_close(vocab_parallel_entropy(logits, Group((0,), 0), 5), expected)


ROLLOUTS = [
    Rollout((5, 6), (7, 8, 9), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-0.1, -0.2, -0.3]), "length"),
    Rollout((1,), (2,), torch.tensor([-4.0]), torch.tensor([-0.4]), "stop"),
]
SHAPE = {"sequence_length": 6, "dtype": torch.float32, "device": torch.device("cpu")}


def test_rollouts_become_padded_micro_batches() -> None:
    batches = to_micro_batches(ROLLOUTS, micro_batch_size=1, micro_batches=3, **SHAPE)
    assert len(batches) == 3
    first, second, empty = (batch.micro_batch for batch in batches)
    assert first.labels is not None
    assert first.loss_mask is not None
    assert first.padding is not None
    assert empty.padding is not None
    assert first.tokens.tolist() == [[5, 6, 7, 8, 0, 0]]
    assert first.labels.tolist() == [[6, 7, 8, 9, 0, 0]]
    assert first.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0]]
    assert first.padding.tolist() == [[False] * 4 + [True] * 2]
    assert batches[0].log_probabilities.tolist() == [[0, -1, -2, -3, 0, 0]]
    assert batches[1].sampling_log_probabilities[0, 0] == torch.tensor(-0.4)
    assert second.key.samples == (1,)
    assert empty.padding.all()
    with pytest.raises(ConfigurationError, match="rollout 0 has 5 tokens, but a sample has 4"):
        to_micro_batches(ROLLOUTS, micro_batch_size=1, **{**SHAPE, "sequence_length": 3})
    with pytest.raises(ConfigurationError, match="2 rollouts do not fit into 1 micro-batches of 1"):
        to_micro_batches(ROLLOUTS, micro_batch_size=1, micro_batches=1, **SHAPE)


def test_the_difference_of_log_probabilities_has_three_figures() -> None:
    before, mask = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    after = TokenOutputs(torch.tensor([[-1.5, -1.75, 9.0]]))
    figures = log_probability_difference([before, before], [after, before], [mask, mask], ParallelMesh())
    kl = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.25) - 1 - 0.25) / 4
    assert figures == pytest.approx(
        {
            "log_probability_difference_max": 0.5,
            "log_probability_difference_mean": 0.75 / 4,
            "log_probability_kl": kl,
        }
    )


def test_scores_of_sampled_tokens_are_those_of_their_distributions() -> None:
    policy = Policy.of(Cell("llama", tied=False))
    options = {"max_new_tokens": 4, "eod": -1}
    prompts = [[3, 1, 4], [1, 5]]
    (greedy, _) = generate(policy.chunks, policy.engine, policy.optimizer, prompts, sampling=Sampling(0.0), **options)
    assert not greedy.sampling_log_probabilities.any()
    plain = generate(policy.chunks, policy.engine, policy.optimizer, prompts, sampling=Sampling(), **options)
    hot = generate(
        policy.chunks, policy.engine, policy.optimizer, prompts, sampling=Sampling(temperature=2.0, top_k=3), **options
    )
    assert all(torch.equal(each.log_probabilities, each.sampling_log_probabilities) for each in plain)
    assert all(len(each.tokens) == 4 for each in hot)
    shape = {"sequence_length": 12, "dtype": torch.float64, "device": torch.device("cpu")}
    batches = to_micro_batches(hot, micro_batch_size=2, **shape)
    actions = policy.schedules.evaluation(4)
    scored = [batch.micro_batch for batch in batches] * 4
    (outputs, *_) = log_probabilities(policy.chunks, policy.engine, actions, scored)
    mask = batches[0].micro_batch.loss_mask
    assert mask is not None
    torch.testing.assert_close(outputs.log_probabilities * mask, batches[0].log_probabilities, rtol=1e-12, atol=1e-12)
    for rollout in hot:  # of the three most likely tokens, renormalized at temperature 2
        assert (rollout.sampling_log_probabilities > rollout.log_probabilities).all()
        assert (rollout.sampling_log_probabilities > math.log(0.05)).all()


def test_prompts_differ_by_their_numbers() -> None:
    policy = Policy.of(Cell("llama", tied=False))
    options = {"max_new_tokens": 6, "eod": -1, "sampling": Sampling(temperature=3.0)}
    parts = policy.chunks, policy.engine, policy.optimizer
    both = generate(*parts, [[3, 1], [3, 1]], **options)
    assert both[0].tokens != both[1].tokens
    (second,) = generate(*parts, [[3, 1]], numbers=[1], **options)
    assert second.tokens == both[1].tokens


def test_each_step_of_a_run_samples_other_tokens_and_scores_them_as_training_does() -> None:
    config = megalite.GPTConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=32, position_embedding_type="rope"
    )
    still = megalite.SGD(lr=0.0)
    with megalite.Trainer(
        config, seq_length=8, micro_batch_size=2, optimizer=still, precision="fp64", quiet=True
    ) as run:
        generated = []
        for _ in range(2):
            rollouts = run.generate([[3, 1], [4]], max_new_tokens=6, temperature=0.5)
            generated.append([each.tokens for each in rollouts])
            batch = run.rollout_batch(rollouts)
            assert run.compare_logprobs(batch)["log_probability_difference_max"] < 1e-12
            run.forward_backward(batch, lambda outputs, fields: outputs.log_probabilities.sum())
            run.optimizer_step()
    assert generated[0] != generated[1]


def test_depths_are_refused() -> None:
    config = megalite.GPTConfig(1, 8, 2, vocab_size=32, position_embedding_type="rope", mtp_num_layers=1)
    with pytest.raises(ConfigurationError, match="mtp_num_layers=1: a GPT on samples of one's own predicts the next"):
        megalite.Trainer(config, seq_length=8, micro_batch_size=2, optimizer=megalite.SGD(lr=0.0), quiet=True)


def test_experts_keep_their_balancing_losses_beside_a_loss_of_ones_own() -> None:
    """The step is that of the same loss as the GPT's own."""
    config = megalite.GPTConfig(
        *(1, 8, 2), vocab_size=32, position_embedding_type="rope", init_method_std=0.3, hidden_dropout=0.0,
        attention_dropout=0.0, num_experts=4, moe_router_topk=2, moe_aux_loss_coeff=(0.5,), moe_z_loss_coeff=0.1,
    )  # fmt: skip
    tokens = torch.arange(32).view(4, 8) % 7
    batch = {"tokens": tokens, "labels": tokens.roll(1, 1), "loss_mask": torch.ones(4, 8)}
    dataset = [{name: values[number] for name, values in batch.items()} for number in range(4)]

    def trainer() -> megalite.Trainer:
        batches = {"seq_length": 8, "micro_batch_size": 2, "global_batch_size": 4}
        still = megalite.SGD(lr=0.0)
        return megalite.Trainer(config, dataset=dataset, optimizer=still, precision="fp64", quiet=True, **batches)

    with trainer() as run:
        run.forward_backward(batch, lambda outputs, fields: -outputs.log_probabilities.sum())
        found = run.optimizer_step()
    with trainer() as run:
        expected = run.step(next(run.batches(steps=1)))
    for name in ("grad_norm", "load_balancing_loss", "moe_z_loss"):
        assert_number_close(found[name], expected[name], name)
    assert_number_close(found["loss"], expected["lm_loss"])


def test_generation_refuses_experts_on_other_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.of(Cell("mixtral"))
    axes = {("ep", "etp"): (0, 1), ("tp",): (0,)}
    monkeypatch.setattr(policy.mesh, "ranks", lambda *names: axes[names])
    with pytest.raises(ConfigurationError, match="generation needs each data-parallel rank to have all experts"):
        TrainedNetwork(policy.chunks, policy.engine)
    monkeypatch.setattr(policy.mesh, "size", lambda *names: 2 if names == ("cp",) else 1)
    with pytest.raises(ConfigurationError, match="generation needs whole samples"):
        TrainedNetwork(policy.chunks, policy.engine)
