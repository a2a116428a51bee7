"""A GPT, or a pipeline stage of one: embedding, blocks, final norm, output layer and loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.batch import LayerContext, MicroBatch, first_visible
from megalite.model.block import Block, run_layers
from megalite.model.cache import StageCache
from megalite.model.embedding import Embedding, embedding_scale, token_table
from megalite.model.head import LM_LOSS, Head, LossConfig, OutputLayer, recorded_terms
from megalite.model.layer_kinds import LAYER_KINDS, make_norm
from megalite.model.moe import MoE
from megalite.model.prediction import Depth, Prediction, further_terms
from megalite.model.recompute import Recompute
from megalite.model.rotary import in_windows, rotary_tables
from megalite.model.sample_mask import SampleMask
from megalite.parallel.context import AXES, AttentionWay, ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.rounded_products import UNROUNDED, Roundings
from megalite.parallel.sharding import Sharding, Use
from megalite.parallel.stage import NO_SUMS, LossTerm, StageOutput, TensorSpec, TermSums, add_sums
from megalite.parallel.stage_module import Inside, StageModule, inside_forward
from megalite_kernels.attention import Mask, as_addend, block_mask, dense_mask, goes_in_blocks, takes_addend

HIDDEN_STATES = "hidden_states"
LOGITS = "logits"
"""Names of tensors in a `StageOutput`. The last stage returns logits if there are no labels."""


class GPT(StageModule):
    """A GPT-2- or Llama-style language model, selected by the configuration: the full model or one pipeline stage."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        *,
        stage_layers: StageLayers | None = None,
        tied_ranks: tuple[int, ...] | None = None,
        tied: Parameter | None = None,
        sequence_parallel: bool = False,
        recompute: Recompute | None = None,
        loss: LossConfig | None = None,
        dtype: torch.dtype = torch.float32,
        attention_ways: tuple[AttentionWay, ...] = (AttentionWay(),),
        roundings: Roundings = UNROUNDED,
    ) -> None:
        """Build this rank's part on the mesh's device. Parameter values are not set yet (see `initialize`).

        Args:
            stage_layers: the part of the model in this stage; None for the full model.
            tied_ranks: the ranks that hold the word embedding or an output layer tied to it; None for this rank alone.
            tied: the weight of the word embedding, if another stage on this rank has it.
            attention_ways: see `ParallelContext`.
            roundings: how layers and depths round the operands of their products.
        """
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("the model's vocabulary size is not set")
        stage_layers = stage_layers or StageLayers(0, config.num_layers, embedding=True, loss=True)
        split = sequence_parallel and mesh.size(*AXES["heads"]) > 1
        context = ParallelContext(mesh, split, dtype, attention_ways)
        self.main_terms: tuple[LossTerm, ...] = (LM_LOSS,)
        """The first terms of the loss: others for a loss of one's own."""
        self.config, self.mesh, self.dtype, self.recompute = config, mesh, dtype, recompute or Recompute()
        self.context, self.roundings = context, roundings
        self.stage_layers, self.vocab_size = stage_layers, config.vocab_size
        self.shard = context.shard, context.shards
        self.recomputed: Callable[..., tuple[Tensor, TermSums]] = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
        """Runs layers and saves only their input."""
        shape = self.vocab_size, config.hidden_size
        padded = config.padded_vocab_size(context.group("vocabulary").size)
        word = token_table(context, "embedding.word", shape, padded, config.init_method_std)
        copies = tied_ranks or (mesh.rank,)
        word = replace(word, replica_ranks=copies, grad_is_partial=len(copies) > 1)
        self.embedding = self._make_embedding(word) if stage_layers.embedding else None
        self.layers = nn.ModuleList(
            Block(config, replace(context, rounding=roundings.of_layer(layer)), layer, self.recompute)
            for layer in range(stage_layers.first_layer, stage_layers.first_layer + stage_layers.layers)
        )
        layers = config.layers[stage_layers.first_layer : stage_layers.first_layer + stage_layers.layers]
        layers += config.depth_layers if stage_layers.loss else ()
        masked = (layer for layer in layers if layer.attends and layer.mixer != "sparse_attention")
        self.windows = tuple(dict.fromkeys(layer.keys_before for layer in masked))
        self.head = self.prediction = None
        if stage_layers.loss:
            own = self.embedding.word.weight if self.embedding is not None else tied
            chunk, use = int(self.embedding is None and own is not None), 0
            if config.depths:
                if self.embedding is not None and own is not None:  # the depths look up what the embedding does
                    own.sharding = replace(own.sharding, uses=(Use(times=2),))
                elif own is not None:
                    own.sharding, use = replace(own.sharding, uses=(Use(), Use(chunk=chunk))), 1
                of_depths = replace(context, rounding=roundings.of_depths)
                self.prediction = Prediction(config, of_depths, word if own is None else own, use, self.recompute)
                own = self.prediction.embedding.word.weight
            if own is not None and not config.untie_embeddings_and_output_weights:
                lookups = [replace(each, late_sum=True) for each in own.sharding.uses]
                own.sharding = replace(own.sharding, uses=(*lookups, Use(chunk=chunk)))
            weight, use = (word, 0) if own is None else (own, len(own.sharding.uses) - 1)
            if config.untie_embeddings_and_output_weights:
                weight, use = token_table(context, "output", shape, padded, config.init_method_std), 0
            cap, norm = config.final_logit_softcapping, make_norm(config)(context, "final_norm", config.hidden_size)
            output = OutputLayer(context, weight, self.vocab_size, cap, loss or LossConfig(), use)
            # Depths that leave the output layer as it is would train what adapts it.
            output.can_have_adapters = config.untie_embeddings_and_output_weights and not config.mtp_detach_heads
            self.head = Head(norm, output, 1.0 / config.logits_scaling)
        if config.trains_indexers_alone:
            self.requires_grad_(False)
            for _, layer in self.numbered_layers():
                if (indexer := getattr(layer.attention, "indexer", None)) is not None:
                    indexer.requires_grad_(config.trains_indexers)

    def _make_embedding(self, word: Sharding) -> Embedding:
        """Make the embedding of tokens, with that of positions if they are learned."""
        config = self.config
        if config.position_embedding_type == "learned_absolute" and config.max_position_embeddings is None:
            raise ValueError("a learned position table needs max_position_embeddings")
        embedding = Embedding(
            self.context,
            word,
            config.hidden_size,
            positions=config.learned_positions,
            std=config.init_method_std,
            scale=embedding_scale(config, self.dtype),
            dropout=config.hidden_dropout,
        )
        embedding.word.can_have_adapters = not config.shares_embedding
        return embedding

    def blocks(self) -> list[nn.Module]:
        """Return the modules that forward runs in order. Together they own all parameters."""
        ends: tuple[nn.Module | None, ...] = (self.head,)
        if self.head is not None and (depths := self.prediction) is not None:
            ends = self.head.norm, depths.embedding, *depths.depths, self.head.output
        return [block for block in (self.embedding, *self.layers, *ends) if block is not None]

    def numbered_layers(self) -> list[tuple[int, Block]]:
        """Return the layers of the stage and of its depths, with their numbers among all those of the network."""
        depths = () if self.prediction is None else self.prediction.depths
        further = [layer for depth in cast(Iterable[Depth], depths) for layer in depth.layers]
        layers = [*enumerate(self.layers, self.stage_layers.first_layer), *enumerate(further, self.config.num_layers)]
        return cast(list[tuple[int, Block]], layers)

    def parts(self) -> list[tuple[str, nn.Module]]:
        first = self.stage_layers.first_layer
        found = [] if self.embedding is None else [("the embedding", cast(nn.Module, self.embedding))]
        found += [(f"layer {index}", layer) for index, layer in enumerate(self.layers, first)]
        if self.head is not None:
            found.append(("the final norm", self.head.norm))
            if self.prediction is not None:
                found.append(("the embedding of the depths", self.prediction.embedding))
                found += [(f"depth {number}", depth) for number, depth in enumerate(self.prediction.depths, start=1)]
            found.append(("the output layer and its loss", self.head.output))
        return found

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the full network. Each stage returns the sums of some of them."""
        kinds = dict.fromkeys(LAYER_KINDS[kind] for layer in self.config.all_layers for kind in layer.kinds)
        of_layers = (term for kind in kinds for term in kind.loss_terms(self.config, self.context))
        return (*self.main_terms, *further_terms(self.config), *of_layers)

    def inside(self, *, backward: bool) -> list[Inside]:
        """List the layers' `inside` collectives in the order of forward or of backward.

        In backward, the collectives of what is recomputed, layers or experts, run twice: in its forward, which runs
        again, and in its backward.
        """
        passes = [] if self.prediction is None else self.prediction.passes()
        if not backward:
            return inside_forward([*self.layers, *passes])
        found, spans = list[Inside](), self.recompute.spans(len(self.layers))
        runs = [(list(self.layers)[start:stop], recomputed) for start, stop, recomputed in spans]
        runs += [([depth], self.recompute.method is not None) for depth in passes]
        if self.recompute.moe:
            runs = [([module], False) for module in (*self.layers, *passes)]
        for modules, recomputed in reversed(runs):
            those = inside_forward(modules)
            alone = (each for module in modules for each in module.modules() if isinstance(each, MoE))
            again = those if recomputed else inside_forward(alone) if self.recompute.moe else []
            found += [*again, *(each for each in reversed(those) for _ in range(each.backward))]
        return found

    def forward(self, inputs: Mapping[str, Tensor], micro_batch: MicroBatch) -> StageOutput:
        """Run the stage on hidden states [sequence (/ size under sequence parallelism), batch, hidden].

        The first stage ignores `inputs`. The last stage returns the sum of the token losses times their mask and those
        of `recorded_terms`, or the sums of the micro-batch's own loss. Without labels, it returns logits [sequence,
        batch, padded vocabulary / tensor-parallel size].
        """
        context = self._context(micro_batch, None)
        hidden, terms = self._run_stage(inputs.get(HIDDEN_STATES), micro_batch, context)
        if self.head is None:
            if torch.is_grad_enabled() and not self.config.trains_indexers_alone:
                hidden.requires_grad_()  # as `messages` declares, also if all weights up to here are frozen
            return StageOutput({HIDDEN_STATES: hidden}, terms)
        labels, mask = micro_batch.labels, micro_batch.loss_mask
        if labels is not None and (own := micro_batch.token_loss) is not None:
            if micro_batch.logit_loss is not None:
                raise ValueError(f"a micro-batch with a loss of its own has no {micro_batch.logit_loss.name} beside it")
            losses, *entropies = self.head(hidden, labels.t(), plain=True, entropies=own.entropies)
            return StageOutput({}, {**terms, **own.sums(-losses.t(), entropies[0].t() if entropies else None)})
        if labels is None or mask is None:
            return StageOutput({LOGITS: self.head(hidden)}, terms)
        found: TermSums
        if (term := micro_batch.logit_loss) is not None:
            losses, values = self.head(hidden, labels.t(), further=term) * mask.t()
            found = {LM_LOSS.name: losses.sum(), term.name: values.sum()}
        elif self.prediction is not None and (further := micro_batch.further) is not None:
            every = further.with_first(labels, mask)
            losses, found = self.prediction.terms(self.head, hidden, every, context, self.recomputed)
        else:
            losses = self.head(hidden, labels.t()) * mask.t()
            found = {LM_LOSS.name: losses.sum()}
        return StageOutput({}, add_sums(terms, found), recorded_terms(micro_batch, losses.t()))

    def hidden_states(
        self, hidden: Tensor | None, micro_batch: MicroBatch, cache: StageCache | None = None
    ) -> tuple[Tensor, TermSums]:
        """Run `forward` up to the stage's last layer. With a cache, tokens also attend to the cached tokens."""
        return self._run_stage(hidden, micro_batch, self._context(micro_batch, cache))

    def _run_stage(
        self, hidden: Tensor | None, micro_batch: MicroBatch, context: LayerContext
    ) -> tuple[Tensor, TermSums]:
        """Run the embedding, if there is one, and the layers."""
        if (parts := len(micro_batch.layout.of_ranks)) != self.mesh.size("cp"):
            raise ValueError(
                f"the samples of a micro-batch are cut for {parts} ranks, and the network has {self.mesh.size('cp')} "
                "context-parallel ranks"
            )
        if parts > 1 and context.cache is not None:
            raise ValueError("a cache of keys and values needs whole samples, and context parallelism cuts them")
        if self.embedding is not None:
            rows = micro_batch.layout.part(*self.shard)
            hidden = self.embedding(micro_batch.tokens, micro_batch.positions, micro_batch.key, rows)
        if hidden is None:
            raise ValueError("a stage without the embedding needs hidden states")
        return self._run_layers(hidden, context)

    def _context(self, micro_batch: MicroBatch, cache: StageCache | None) -> LayerContext:
        """Return what all layers need of a micro-batch: rotary tables, a mask for each window, layout and key."""
        rotary = windowed_rotary = None
        if self.config.rotary and (len(self.layers) or self.prediction is not None):
            rotary = windowed_rotary = rotary_tables(self.config, micro_batch.positions, self.dtype)
            base = self.config.window_rotary_base
            if base is not None and any(window is not None for window in self.windows):
                windowed_rotary = rotary_tables(in_windows(self.config, base), micro_batch.positions, self.dtype)
        if cache is not None:
            cache.move_to(micro_batch.positions)
        see: Callable[[int | None], Mask | SampleMask]
        see = functools.partial(self._mask, micro_batch) if cache is None else cache.mask
        masks = {window: see(window) for window in self.windows}
        layout = micro_batch.layout
        shard, shards = self.shard

        def own_rows(values: Tensor | None) -> Tensor | None:
            """Return this rank's part, between layers, of the tokens of [batch, tokens, ...] values, tokens first."""
            if values is None:
                return None
            return values.split(values.shape[1] // shards, dim=1)[shard].transpose(0, 1)

        return LayerContext(
            rotary,
            windowed_rotary,
            masks,
            micro_batch.key,
            layout,
            layout.part(shard, shards),
            cache,
            padding=own_rows(micro_batch.padding),
            replayed=own_rows(micro_batch.replayed),
            choices=micro_batch.choices,
            first_keys=micro_batch.first_keys,
            lengths=self._lengths(micro_batch) if self.config.measures_logits else None,
        )

    @staticmethod
    def _lengths(micro_batch: MicroBatch) -> Tensor | None:
        padding, lengths = micro_batch.padding, micro_batch.lengths
        return lengths if padding is None or lengths is not None else (~padding).sum(1)

    def _mask(self, micro_batch: MicroBatch, window: int | None) -> Mask | SampleMask:
        """Make the attention mask of layers with this window: the keys of the sample that each token sees."""
        layout = micro_batch.layout
        if window is not None and window >= layout.length - 1:
            window = None
        if len(layout.of_ranks) == 1:
            return self._whole_mask(micro_batch, window)
        first, bounds = first_visible(micro_batch, window), replace(micro_batch.bounds, window=window)
        whole = functools.partial(self._whole_mask, micro_batch, window)
        in_blocks = self._goes_in_blocks(first.device, min(map(len, layout.runs)))
        return SampleMask(layout, first.expand(len(micro_batch.tokens), -1), bounds, whole, in_blocks)

    def _whole_mask(self, micro_batch: MicroBatch, window: int | None) -> Mask:
        """Make the mask for a rank that has all tokens of each sample."""
        if micro_batch.first_keys is None and window is None and self.config.attn_logit_softcapping is None:
            return None
        first = first_visible(micro_batch, window)
        if self._goes_in_blocks(first.device, micro_batch.layout.length):
            return block_mask(first.expand(len(micro_batch.tokens), -1))
        mask = dense_mask(first)
        plain = self.config.softmax_type == "vanilla"
        if plain and takes_addend(
            first.device, self.dtype, self.config.attn_logit_softcapping, self._attention_dropout
        ):
            return as_addend(mask, self.dtype)  # once for all layers
        return mask

    def _goes_in_blocks(self, device: torch.device, run: int) -> bool:
        return goes_in_blocks(device, self.dtype, run, self.config.score_width, self._attention_dropout)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

    def _run_layers(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        terms = NO_SUMS
        for start, stop, recomputed in self.recompute.spans(len(self.layers)):
            layers = list(self.layers)[start:stop]
            if recomputed and torch.is_grad_enabled():
                hidden, own = self.recomputed(run_layers, layers, hidden, context)
            else:
                hidden, own = run_layers(layers, hidden, context)
            terms = add_sums(terms, own)
        return hidden, terms


def messages(
    config: ModelConfig, stages: int, *, sequence: int, batch: int, dtype: torch.dtype
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Declare the tensors that each stage except the last sends to the next one, per micro-batch.

    Args:
        sequence: tokens per sample on a rank between layers. Under sequence parallelism this is its part of them.
        batch: samples per micro-batch.
    """
    shape, trained = (sequence, batch, config.hidden_size), not config.trains_indexers_alone
    return ((TensorSpec(HIDDEN_STATES, shape, dtype, gradient=trained),),) * (stages - 1)


class NetworkOptions(TypedDict, total=False):
    """Options of `GPT` that are the same for all stages of a network."""

    sequence_parallel: bool
    recompute: Recompute
    loss: LossConfig
    dtype: torch.dtype
    attention_ways: tuple[AttentionWay, ...]
    roundings: Roundings


def make_chunks(
    config: ModelConfig,
    mesh: ParallelMesh,
    parts: Sequence[StageLayers],
    tied_ranks: tuple[int, ...],
    **options: Unpack[NetworkOptions],
) -> list[GPT]:
    """Make the stages of one rank.

    `tied_ranks`: the ranks that have the first or the last stage, which share the weight if it is tied or the last
    stage has depths.
    """
    tied_ranks = tied_ranks if config.shares_embedding else (mesh.rank,)
    chunks: list[GPT] = []
    tied: Parameter | None = None
    for stage_layers in parts:
        chunk = GPT(config, mesh, stage_layers=stage_layers, tied_ranks=tied_ranks, tied=tied, **options)
        if chunk.embedding is not None:
            tied = chunk.embedding.word.weight
        chunks.append(chunk)
    return chunks
