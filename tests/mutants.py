"""Planted faults: a correct suite fails on wrong code. `make mutants` runs this file.

Each mutant changes one piece of text in a copy of the tree and names a test that must then fail. A text that is not
there exactly once is an error: whoever changes the code moves the mutant along (tests/unit/test_mutants.py looks).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("megalite", "kernels", "tests", "tools", "pretrain_gpt.py", "pyproject.toml")
COST = {"unit": 1, "kernels": 2, "distributed": 2, "end_to_end": 8}
"""What a test takes, about, by the folder that it is in."""
TESTS_FAILED = 1  # pytest's exit code; anything else but 0 is a broken run, which proves nothing
SECONDS = 180


@dataclass(frozen=True)
class Mutant:
    fault: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Plant the fault in a tree. Raises ValueError where the text is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.fault}: the text to change occurs {count} times in {self.file}:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))


def _one_step(layout: str) -> str:
    return f"tests/distributed/test_layouts.py::test_one_step_is_the_oracles[{layout}]"


def _network(name: str) -> str:
    return f"tests/unit/test_parallel_model.py::test_loss_gradients_and_logits_are_the_oracles[whole-{name}]"


_STEPS = "tests/distributed/test_layouts_steps.py::test_parameters_after_steps_are_the_oracles"
_UNIT = "tests/unit/test_parallel_"
_KERNELS = "tests/kernels/test_norm.py::test_"
_LOSS_KERNELS = "tests/kernels/test_cross_entropy.py::test_"
_OUTPUT = "tests/distributed/test_output_layer.py::test_"
_ACTIVATION = "tests/kernels/test_activation.py::test_"
_ROTARY = "tests/kernels/test_rotary.py::test_"
_QUANTIZATION = "tests/kernels/test_quantization.py::test_"
_SELFTEST = "tests/kernels/test_selftest.py::test_"
_OPTIMIZER = "tests/kernels/test_optimizer.py::test_"
_PACKED = "tests/unit/test_optimizer_packed.py::test_"
_DEFERRED = "tests/distributed/test_deferred_gradients.py::test_"
_ENGINE = "tests/distributed/test_pipeline_engine.py::test_"
_TIME_LINE = "tests/end_to_end/test_pipeline.py::test_the_time_line_of_a_step_is_written_and_can_be_drawn_again"
_NOT_FINITE = "tests/distributed/test_nonfinite.py::test_"
_FIRST_MODULE = f"{_NOT_FINITE}the_first_module_is_told_and_the_training_goes_on_with_the_same_bits"
_GOES_ON = "tests/distributed/test_checkpoint_layouts.py::test_a_training_goes_on_under_any_layout"
_KILL = "tests/unit/test_checkpoint_kill.py::test_"
_STOP = "tests/end_to_end/test_stop.py::test_"
_FAULTS = "tests/end_to_end/test_faults.py::test_"
_WATCHDOG = "tests/unit/test_watchdog_"
_IN_PROPORTION = "verdict.py::test_stacks_are_looked_at_in_time_in_proportion_to_their_length"
_MEETING = "tests/end_to_end/test_meeting.py::test_"
_START = "tests/end_to_end/test_stop_at_start.py::test_"
_PROFILES = "tests/end_to_end/test_profiling.py::test_"
_HANG = "tests/distributed/test_hang.py::test_"
_HANG_REPORT = "tests/unit/test_hang_report.py::test_"
_FIGURES = "tests/end_to_end/test_evaluate.py::test_"
_LM_EVAL = "tests/end_to_end/test_lm_eval.py::test_"
_INFERENCE = "tests/distributed/test_inference.py::test_"
_CACHED = f"{_INFERENCE}tokens_see_those_before_them_in_the_cache[alone]"
_RATES = "tests/distributed/test_rates_megatron.py::test_whole_runs"
_MEGATRON = "tests/unit/test_conversion_megatron.py::test_"
_LEGACY = "tests/unit/test_conversion_megatron_legacy.py::test_any_layout_is_read"
_FAMILIES = "tests/unit/test_conversion_huggingface.py::test_"
_AS_THEIRS = f"{_FAMILIES}megalite_computes_what_transformers_does"
_PICKLE = "tests/unit/test_conversion_restricted_pickle.py::test_"
_DOCTOR = "tests/unit/test_doctor.py::test_"
_DOCTOR_OF_RANKS = "tests/end_to_end/test_doctor.py::test_"
_TRAINER = "tests/distributed/test_trainer.py::test_a_run_is_the_plain_loop"
_DRAWS = "tests/distributed/test_layouts_dropout.py::test_no_two_sites_draw_the_same"
_PRECISION = "tests/unit/test_precision.py::test_"
_REGIONS = "tests/distributed/test_parallel_regions.py::test_"
_DATA = "tests/unit/test_data_"
_APART = f"{_DATA}index_cache.py::test_"
_CHECKPOINT = "tests/unit/test_checkpoint.py::test_"
_NOT_OTHERS = "do_not_come_from_the_indices_of_others"

MUTANTS = (
    Mutant(
        "the row-parallel layer's sum over ranks is dropped",
        "megalite/parallel/linear.py",
        "if sequence_parallel else collectives.all_reduce_(term, group)",
        "if sequence_parallel else term",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "the column-parallel layer's input gradient is not summed",
        "megalite/parallel/linear.py",
        "reduction = collectives.all_reduce_async_(input_gradient, group)",
        "reduction = collectives.done(input_gradient)",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "under sequence parallelism, the input gradient is cut but not summed",
        "megalite/parallel/linear.py",
        "reduction = collectives.reduce_scatter_async(input_gradient, group)",
        "reduction = collectives.done(input_gradient.chunk(group.size)[group.rank])",
        _one_step("tp2-sp-dp1"),
    ),
    Mutant(
        "ids that another rank holds leave their gradient in row 0",
        "megalite/parallel/embedding.py",
        "gradient.masked_fill(self.outside.unsqueeze(-1), 0.0).reshape",
        "gradient.reshape",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "the loss is divided by the number of micro-batches",
        "megalite/pipeline/engine.py",
        "* self.factor).backward()",
        "* self.factor / len(self.micro_batches)).backward()",
        "tests/unit/test_pipeline_engine.py::test_the_sum_of_losses_is_differentiated_at_the_given_scale",
    ),
    Mutant(
        "gate and up are swapped",
        "kernels/megalite_kernels/activation.py",
        "return F.silu(gate).mul_(up)",
        "return F.silu(up).mul_(gate)",
        f"{_UNIT}model.py::test_loss_gradients_and_logits_are_the_oracles[whole-llama]",
    ),
    Mutant(
        "a network takes parts of sequences for whole ones",
        "megalite/model/gpt.py",
        'if mesh.size("cp") > 1:',
        'if mesh.size("cp") > 2:',
        "tests/unit/test_parallel_model.py::test_what_the_network_does_not_serve_it_refuses",
    ),
    Mutant(
        "of parallel residuals the feed-forward layer reads what attention has changed",
        "megalite/model/block.py",
        "if self.parallel_residual:",
        "if False:",
        _network("gpt-neox"),
    ),
    Mutant(
        "embeddings are not scaled",
        "megalite/model/embedding.py",
        "hidden = hidden * self.scale",
        "pass",
        _network("gpt2, scaled embeddings"),
    ),
    Mutant(
        "logits are not capped",
        "megalite/model/head.py",
        "return logits if self.evaluated.soft_cap is None else",
        "return logits if True else",
        _network("gpt2, capped logits"),
    ),
    Mutant(
        "a score is capped before it is scaled",
        "kernels/megalite_kernels/attention.py",
        "scores = soft_cap(scores, cap)",
        "scores = soft_cap(scores / scale, cap) * scale",
        _network("llama, capped scores"),
    ),
    Mutant(
        "the query scale is left out",
        "megalite/model/attention.py",
        "scale=self.score_scale,",
        "scale=None,",
        _network("llama, query scale"),
    ),
    Mutant(
        "a norm's weight around one is taken for the weight",
        "megalite/model/norm.py",
        "weight = 1.0 + weight",
        "weight = weight",
        _network("gpt2, norms around one"),
    ),
    Mutant(
        "a kernel divides by the columns of its tile, not of the row",
        "kernels/megalite_kernels/norm_kernels.py",
        "squares / WIDTH",
        "squares / COLUMNS",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a kernel counts rows beyond the last into the bias's gradient",
        "kernels/megalite_kernels/norm_kernels.py",
        "present = row < rows\n        inverse",
        "present = row < rows + 1\n        inverse",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "programs add up their weight gradients in one place",
        "kernels/megalite_kernels/norm_kernels.py",
        "place = program.to(tl.int64) * WIDTH + start + own_column",
        "place = start + own_column",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a kernel takes rows for contiguous",
        "kernels/megalite_kernels/norm.py",
        "inverses, rows, flat.stride(0),",
        "inverses, rows, width,",
        f"{_KERNELS}strides_change_no_bit",
    ),
    Mutant(
        "a kernel counts its rows in 32 bits",
        "kernels/megalite_kernels/norm_kernels.py",
        "tl.program_id(0).to(tl.int64) * ROWS",
        "tl.program_id(0) * ROWS",
        f"{_KERNELS}rows_lie_beyond_2_to_the_31_elements",
    ),
    Mutant(
        "the columns of a wide row have each other's weight gradients",
        "kernels/megalite_kernels/norm_kernels.py",
        "weight_sum[1:] + weight_part",
        "weight_part + weight_sum[1:]",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a fused norm has not the gradient of the sum",
        "kernels/megalite_kernels/norm_kernels.py",
        "if total_gradient is not None:",
        "if False:",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a fused norm is of the sum before it is rounded",
        "kernels/megalite_kernels/norm_kernels.py",
        "x = x.to(residual.dtype.element_ty).to(tl.float32)",
        "pass",
        f"{_KERNELS}the_fused_addition_changes_no_bit",
    ),
    Mutant(
        "a fused norm adds the sum's gradient before its own is rounded",
        "kernels/megalite_kernels/norm_kernels.py",
        "added = result.to(tl.float32) + ",
        "added = (scaled * inverse - normed * along_row) + ",
        f"{_KERNELS}the_fused_addition_changes_no_bit",
    ),
    Mutant(
        "programs that share a wide norm's columns all take the first",
        "kernels/megalite_kernels/norm_kernels.py",
        "column + tl.program_id(1) * PART if",
        "column if",
        f"{_KERNELS}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "where the sum alone has a gradient, the fused norm's input has none",
        "kernels/megalite_kernels/norm.py",
        "return total_gradient, total_gradient, None",
        "return None, total_gradient, None",
        f"{_KERNELS}one_output_alone_has_a_gradient",
    ),
    Mutant(
        "a kernel gives the up projection the slope of the gate",
        "kernels/megalite_kernels/activation_kernels.py",
        "up_gradient = g * value",
        "up_gradient = g * slope",
        f"{_ACTIVATION}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a kernel gives the up projection's bias the gradient of the gate's",
        "kernels/megalite_kernels/activation_kernels.py",
        "tl.sum(up_sum, 0)",
        "tl.sum(gate_sum, 0)",
        f"{_ACTIVATION}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "a relu's kernel hides what is no number",
        "kernels/megalite_kernels/activation_kernels.py",
        "tl.where(x < 0.0, 0.0, x)",
        "tl.where(x > 0.0, x, 0.0)",
        f"{_ACTIVATION}what_is_no_number_shows",
    ),
    Mutant(
        "an operation waits for the GPU before it launches its kernel",
        "kernels/megalite_kernels/activation.py",
        "        if rows:",
        "        if rows and input.any():",
        "tests/kernels/test_tracing.py::test_no_operation_breaks_a_graph",
    ),
    Mutant(
        "the feed-forward layer's first bias is added twice",
        "megalite/model/mlp.py",
        "adds_bias=False",
        "adds_bias=True",
        _network("gpt2"),
    ),
    Mutant(
        "what the last layer leaves to be added is lost",
        "megalite/model/gpt.py",
        "return hidden if branch is None else hidden + branch",
        "return hidden",
        _network("llama"),
    ),
    Mutant(
        "pairs of neighbours are not turned as such",
        "megalite/model/attention.py",
        "interleaved=self.rotary_interleaved",
        "interleaved=False",
        _network("llama, neighbours rotated"),
    ),
    Mutant(
        "the rotary kernel turns gradients the way it turned heads",
        "kernels/megalite_kernels/rotary.py",
        "    if BACKWARD:\n        s = -s\n",
        "",
        f"{_ROTARY}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "the rotary kernel takes the heads of keys to lie side by side",
        "kernels/megalite_kernels/rotary.py",
        "+ head * head_stride",
        "+ head * WIDTH",
        f"{_ROTARY}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "the rotary kernel has one table for the whole batch",
        "kernels/megalite_kernels/rotary.py",
        "(position * sine_stride + batch * sine_batch_stride)",
        "(position * sine_stride)",
        f"{_ROTARY}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "the rotary kernel leaves the channels behind the rotated ones out",
        "kernels/megalite_kernels/rotary.py",
        "tl.static_range(2 * PAIRS, WIDTH, COLUMNS)",
        "tl.static_range(COLUMNS, WIDTH, COLUMNS)",
        f"{_ROTARY}output_and_gradients_are_those_of_float64",
    ),
    Mutant(
        "the rotary kernel counts heads in 32 bits",
        "kernels/megalite_kernels/rotary.py",
        "program.to(tl.int64) * ROWS",
        "program * ROWS",
        f"{_ROTARY}heads_lie_beyond_2_to_the_31_elements",
    ),
    Mutant(
        "the reference of quantisation keeps all bits of a scale",
        "kernels/megalite_kernels/quantization.py",
        "scales = (quotients.view(torch.int32) & -128)",
        "scales = (quotients.view(torch.int32) & -1)",
        f"{_QUANTIZATION}what_was_quantized_keeps_its_codes_and_scales",
    ),
    Mutant(
        "the reference of quantisation has a scale for a block with an infinity",
        "kernels/megalite_kernels/quantization.py",
        'return kept, torch.where(finite, scales, float("nan"))',
        "return kept, scales",
        f"{_QUANTIZATION}blocks_of_no_numbers_of_zeros_and_of_next_to_nothing",
    ),
    Mutant(
        "random bits come by their place in the shard",
        "kernels/megalite_kernels/quantization.py",
        "quantized(x, seed, offset + row * BLOCK,",
        "quantized(x, seed, row * BLOCK,",
        f"{_QUANTIZATION}a_shard_draws_what_the_whole_draws",
    ),
    Mutant(
        "a kernel draws random words in another order",
        "kernels/megalite_kernels/quantization.py",
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(a, b), tl.join(c, d))",
        f"{_QUANTIZATION}kernels_are_the_reference",
    ),
    Mutant(
        "Philox has a round less",
        "kernels/megalite_kernels/quantization.py",
        "for _ in range(10):",
        "for _ in range(9):",
        f"{_QUANTIZATION}random_numbers_are_philoxs",
    ),
    Mutant(
        "stochastic rounding is up by half a step more",
        "kernels/megalite_kernels/quantization.py",
        "steps = (steps + (random >> 2)) >> 14",
        "steps = (steps + (random >> 2) + (1 << 13)) >> 14",
        f"{_QUANTIZATION}stochastic_rounding_is_to_a_neighbour_and_right_on_average",
    ),
    Mutant(
        "a kernel of another module stays a plain function",
        "kernels/megalite_kernels/implementation.py",
        "value in compiled}",
        "value in compiled and value.__globals__ is names}",
        f"{_QUANTIZATION}kernels_of_other_modules_call_these",
    ),
    Mutant(
        "float64 goes to kernels that compute in fp32",
        "kernels/megalite_kernels/implementation.py",
        'if _choice == "reference" or any(tensor.dtype == torch.float64 for tensor in tensors):',
        'if _choice == "reference":',
        "tests/kernels/test_implementation.py::test_float64_has_the_reference",
    ),
    Mutant(
        "the self-test does not compare two runs",
        "kernels/megalite_kernels/selftest.py",
        "if not torch.equal(ours, again):",
        "if ours.shape != again.shape:",
        f"{_SELFTEST}what_is_wrong_is_found[one of two runs]",
    ),
    Mutant(
        "the self-test compares outputs alone",
        "kernels/megalite_kernels/selftest.py",
        "return [*outputs, *torch.autograd.grad(",
        "return [*outputs] if arriving else [*torch.autograd.grad(",
        f"{_SELFTEST}what_is_wrong_is_found[gradient]",
    ),
    Mutant(
        "what backward reads again is no traffic",
        "kernels/megalite_kernels/measure.py",
        "inputs if case.keeps_inputs else ()",
        "()",
        f"{_SELFTEST}traffic_is_what_cannot_be_left_out",
    ),
    Mutant(
        "what packs the state is timed with the update",
        "kernels/megalite_kernels/optimizer_cases.py",
        "return partial(self._step, *self._packed(*inputs))",
        "return lambda: self._step(*self._packed(*inputs))",
        f"{_SELFTEST}an_update_is_timed_alone_and_moves_what_is_kept",
    ),
    Mutant(
        "parameters that are rounded from masters count as read",
        "kernels/megalite_kernels/optimizer_cases.py",
        "if self.kept == torch.float32 else 0",
        "if self.kept == torch.float64 else 0",
        f"{_SELFTEST}an_update_is_timed_alone_and_moves_what_is_kept",
    ),
    Mutant(
        "rotations are fused whatever a flag says",
        "megalite/config/kernels.py",
        '"rotary": self.rope_fusion',
        '"rotary": True',
        "tests/kernels/test_implementation.py::test_flags_leave_operations_to_the_reference[--no-rope-fusion-left5]",
    ),
    Mutant(
        "operations that there are not can be left to the reference",
        "kernels/megalite_kernels/implementation.py",
        "    if unknown:",
        "    if None in unknown:",
        "tests/kernels/test_implementation.py::test_an_unknown_operation_is_refused",
    ),
    Mutant(
        "compiled, a product is not written where it belongs",
        "kernels/megalite_kernels/products.py",
        "return place.copy_(first * second)",
        "return first * second",
        "tests/distributed/test_compiled.py::test_every_layout_is_the_oracles_with_what_one_has_compiled",
    ),
    Mutant(
        "the compiler draws the random numbers of dropout",
        "megalite/training/compiled.py",
        '    (randomness, "drop"),\n',
        "",
        "tests/distributed/test_compiled.py::test_dropout_is_that_of_layers_which_are_not_compiled",
    ),
    Mutant(
        "the gate of GeGLU has the gradient of the other GELU",
        "kernels/megalite_kernels/activation.py",
        "gate, approximate=ctx.approximate, grad_input",
        'gate, approximate="none", grad_input',
        _network("gpt2, geglu"),
    ),
    Mutant(
        "the exact GELU is the tanh form",
        "kernels/megalite_kernels/activation.py",
        '"exact_gelu", F.gelu, input',
        '"exact_gelu", _gelu, input',
        _network("gpt2, exact gelu"),
    ),
    Mutant(
        "a task of srun takes itself for the only one",
        "megalite/process/place.py",
        '    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),\n',
        "",
        "tests/unit/test_place.py::test_a_place_that_is_not_told_is_refused",
    ),
    Mutant(
        "the shell of an salloc is taken for one of several tasks",
        "megalite/process/place.py",
        " or int(step) >= _FIRST_SPECIAL_STEP",
        "",
        "tests/unit/test_place.py::test_a_place_is_what_the_launcher_says",
    ),
    Mutant(
        "--use-megatron-fsdp shards nothing",
        "megalite/config/parse.py",
        'parallel = replace(parallel, data_parallel_sharding_strategy="optim_grads_params")',
        "pass",
        "tests/unit/test_config_megatron_flags.py::test_megatron_fsdp_shards_all_unless_told_otherwise",
    ),
    Mutant(
        "a run with masked losses does not say how they are averaged",
        "megalite/config/cautions.py",
        "    if not masks or training",
        "    if masks or training",
        "tests/unit/test_config_megatron_flags.py::test_masked_losses_are_told_apart_from_megatrons",
    ),
    Mutant(
        "what muon leaves to adam is counted on one stage alone",
        "megalite/training/construction.py",
        'json.dumps(counts), mesh.group("pp"), mesh.device)',
        'json.dumps(counts), mesh.group("tp"), mesh.device)',
        "tests/distributed/test_summary_pipeline.py::test_the_screen_tells_what_muon_leaves_to_adam",
    ),
    Mutant(
        "a flag whose shell variable is not set is taken as it is",
        "megalite/config/parse.py",
        "            refuse_blank(flag, values)\n",
        "",
        "tests/unit/test_config_parse.py::test_a_blank_value_is_a_variable_that_is_not_set",
    ),
    Mutant(
        "a tool takes a blank value",
        "megalite/config/tool_arguments.py",
        "        refuse_blank(flag, values)\n",
        "        pass\n",
        "tests/unit/test_config_parse.py::test_a_tool_refuses_a_blank_value_but_for_a_prompt_of_spaces",
    ),
    Mutant(
        "lists in lists of a configuration are read without end",
        "megalite/config/yaml_file.py",
        "        if self._count > _MOST_NODES or self._depth > _MOST_LEVELS:",
        "        if False:",
        "tests/unit/test_config_yaml.py::test_nothing_makes_reading_long_or_a_message_large",
    ),
    Mutant(
        "sizes that no machine holds are tried",
        "megalite/config/validate.py",
        "    _raise(size_problems(config, world_size))",
        "",
        "tests/unit/test_config_validate.py::test_what_no_machine_holds_is_refused_by_arithmetic",
    ),
    Mutant(
        "a flag that is refused is suggested",
        "megalite/config/parse.py",
        ", '--', megatron_flags.refusal)",
        ", '--')",
        "tests/unit/test_config_parse.py::test_no_flag_that_is_refused_is_suggested",
    ),
    Mutant(
        "without fusion GELU stays in its tanh form",
        "megalite/config/parse.py",
        "model = replace(model, exact_gelu=True)",
        "pass",
        "tests/unit/test_config_megatron_flags.py::test_without_fusion_gelu_alone_is_exact",
    ),
    Mutant(
        "what the feed-forward layer puts out is not normalised",
        "megalite/model/block.py",
        "transformed = self.mlp_output_norm(transformed)",
        "pass",
        _network("gpt2, sandwich norms"),
    ),
    Mutant(
        "capped scores are recomputed with another dropout",
        "megalite/model/attention.py",
        "context.key.seed_site(self.site, query.device)",
        "context.key.seed_site(self.site, query.device) if self.soft_cap is None else None",
        "tests/unit/test_parallel_model.py::test_capped_scores_are_recomputed_with_the_same_dropout",
    ),
    Mutant(
        "a window is short of its last key",
        "megalite/model/batch.py",
        "(tokens - before).clamp",
        "(tokens - before + 1).clamp",
        _network("gpt2, windows"),
    ),
    Mutant(
        "a block of scores counts as seen whole where its first query sees all of it",
        "kernels/megalite_kernels/attention.py",
        "first[:, BLOCK - 1 :: BLOCK, None]",
        "first[:, ::BLOCK, None]",
        "tests/unit/test_attention.py::test_the_blocks_are_those_in_which_something_is_seen",
    ),
    Mutant(
        "in blocks scores are not scaled as they are to be",
        "kernels/megalite_kernels/attention.py",
        "block_mask=mask, scale=scale,",
        "block_mask=mask,",
        "tests/unit/test_attention.py::test_attention_in_blocks_is_the_dense_one",
    ),
    Mutant(
        "scores in blocks are computed twice",
        "kernels/megalite_kernels/attention.py",
        "cap is not None and not isinstance(mask, BlockMask)",
        "cap is not None",
        "tests/unit/test_attention.py::test_scores_in_blocks_are_not_computed_twice",
    ),
    Mutant(
        "the layers without a window are one too early",
        "megalite/config/attention_windows.py",
        "(layer + 1) % int",
        "layer % int",
        _network("gemma"),
    ),
    Mutant(
        "layers with a window turn as the others do",
        "megalite/model/attention.py",
        "context.windowed_rotary if self.windowed else context.rotary",
        "context.rotary",
        _network("gemma 3"),
    ),
    Mutant(
        "layers with a window and a base of their own are scaled as the others are",
        "megalite/model/rotary.py",
        "use_rope_scaling=False,",
        "",
        _network("llama 3.1, plain in windows"),
    ),
    Mutant(
        "linear scaling speeds the rotation up",
        "megalite/model/rotary.py",
        "else frequencies / factor",
        "else frequencies * factor",
        _network("llama, linear"),
    ),
    Mutant(
        "YaRN divides the frequencies that it is to keep",
        "megalite/model/rotary.py",
        "1.0 - scaled, config",
        "scaled, config",
        _network("llama, yarn"),
    ),
    Mutant(
        "YaRN sharpens no attention",
        "megalite/model/rotary.py",
        "(tables[0] * scale, tables[1] * scale)",
        "tables",
        _network("llama, yarn"),
    ),
    Mutant(
        "a norm's gradient is not summed over sequence-parallel ranks",
        "megalite/model/block.py",
        "summed=sequence_parallel, dtype=dtype)",
        "summed=False, dtype=dtype)",
        _one_step("tp2-sp-dp1"),
    ),
    Mutant(
        "a key norm's gradient is not summed over the ranks that hold different heads",
        "megalite/model/attention.py",
        'f"{name}.key_norm", width, summed=True',
        'f"{name}.key_norm", width, summed=False',
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "every shard draws what the first one draws",
        "megalite/parallel/initialization.py",
        "initial_values(piece.tensor, piece.box, seed)",
        "initial_values(piece.tensor, Box((0,) * len(piece.box.offset), piece.box.size), seed)",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "every block of rows draws the same numbers",
        "megalite/parallel/initialization.py",
        'f"{seed}/{tensor.name}/{block}"',
        'f"{seed}/{tensor.name}"',
        f"{_UNIT}initialization.py::test_rows_on_both_sides_of_a_blocks_edge",
    ),
    Mutant(
        "the gradient norm counts replicated parameters once a replica",
        "megalite/optim/places.py",
        "return self.replica == 0",
        "return True",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "the gradient norm, and so the decision to skip, is each rank's own",
        "megalite/optim/exact_sum.py",
        "collectives.all_reduce_(rows, mesh.world()).tolist()",
        "rows.tolist()",
        "tests/distributed/test_layouts_masks.py::test_an_infinity_on_one_rank_makes_all_skip[tp2-dp1-pp1]",
    ),
    Mutant(
        "the padding of the vocabulary takes part in the softmax",
        "kernels/megalite_kernels/cross_entropy.py",
        "min(max(vocab_size - rank * width, 0), width)",
        "width",
        "tests/distributed/test_parallel_regions.py::test_cross_entropy_over_a_split_vocabulary[padded-4]",
    ),
    Mutant(
        "the loss sees the log-sum-exp of each rank's own columns",
        "megalite/parallel/cross_entropy.py",
        "if group.size == 1:",
        "if group.size >= 1:",
        f"{_OUTPUT}losses_and_gradients_are_torchs[2-False-apart-training]",
    ),
    Mutant(
        "the loss shares the smoothed part of a label among this rank's columns",
        "kernels/megalite_kernels/cross_entropy.py",
        "gradient.sub_((scales[tokens] * (terms.label_smoothing / columns.vocab_size)).unsqueeze(1))",
        "gradient.sub_((scales[tokens] * (terms.label_smoothing / columns.valid)).unsqueeze(1))",
        f"{_OUTPUT}losses_and_gradients_are_torchs[2-False-apart-training]",
    ),
    Mutant(
        "the loss has its terms in evaluation too",
        "megalite/model/head.py",
        "self.trained if self.training else self.evaluated",
        "self.trained",
        f"{_UNIT}model.py::test_terms_of_the_loss_are_for_training_alone[apart]",
    ),
    Mutant(
        "the fused loss does not sum the gradient of its input over ranks",
        "megalite/parallel/linear_cross_entropy.py",
        "collectives.all_reduce_(hidden_gradient, ctx.group)",
        "pass",
        f"{_OUTPUT}losses_and_gradients_are_torchs[2-False-fused-training]",
    ),
    Mutant(
        "the fused loss keeps the weight gradient of its last chunk alone",
        "megalite/parallel/linear_cross_entropy.py",
        "overwrite=overwrite and tokens.start == 0)",
        "overwrite=overwrite)",
        f"{_OUTPUT}losses_and_gradients_are_torchs[1-False-fused-training]",
    ),
    Mutant(
        "the fused loss adds its chunks up in the weight's own precision",
        "megalite/parallel/linear_cross_entropy.py",
        "if target.dtype != dtype:",
        "if False:",
        f"{_OUTPUT}many_chunks_add_up_in_fp32[bfloat16]",
    ),
    Mutant(
        "the fused loss reads a weight that ZeRO 3 has freed",
        "megalite/parallel/linear_cross_entropy.py",
        "if weight.gradient_buffer.frees_parameters:",
        "if False:",
        f"{_DEFERRED}split_backward_changes_no_bit["
        "tp=2-dp=2-zero=3-overlap=reduce and gather-tied=False-fused_loss=True]",
    ),
    Mutant(
        "the fused loss makes all logits at once",
        "megalite/parallel/linear_cross_entropy.py",
        "step = min(max(elements // width, least), tokens)",
        "step = tokens",
        f"{_OUTPUT}logits_are_never_whole[fused]",
    ),
    Mutant(
        "the loss's kernel does not scale its sum when it meets a larger logit",
        "kernels/megalite_kernels/cross_entropy.py",
        "exponentials * _exp(largest - larger) +",
        "exponentials +",
        f"{_LOSS_KERNELS}losses_and_gradient_are_torchs",
    ),
    Mutant(
        "the loss's kernel gives padding a gradient",
        "kernels/megalite_kernels/cross_entropy.py",
        "gradient = tl.where(column < VALID, gradient, 0.0)",
        "pass",
        f"{_LOSS_KERNELS}losses_and_gradient_are_torchs",
    ),
    Mutant(
        "the loss's kernel leaves the cap out of the gradient",
        "kernels/megalite_kernels/cross_entropy.py",
        "gradient *= 1.0 - bent * bent",
        "pass",
        f"{_LOSS_KERNELS}losses_and_gradient_are_torchs",
    ),
    Mutant(
        "the loss's kernel counts its rows in 32 bits",
        "kernels/megalite_kernels/cross_entropy.py",
        "row = tl.program_id(0).to(tl.int64)\n    place",
        "row = tl.program_id(0)\n    place",
        f"{_LOSS_KERNELS}rows_lie_beyond_2_to_the_31_elements",
    ),
    Mutant(
        "the gradient of replicated keys and values is not summed over their replicas",
        "megalite/model/attention.py",
        "summed=len(copies) > 1",
        "summed=False",
        _one_step("tp4-dp1"),
    ),
    Mutant(
        "heads that share a group across ranks read another group",
        "megalite/model/attention.py",
        "runs.sort(key=lambda run: len(run[2]) > 1)",
        "runs.sort(key=lambda run: len(run[2]) <= 1)",
        _one_step("tp2-dp1"),
    ),
    Mutant(
        "a tied weight is counted as used once",
        "megalite/model/gpt.py",
        "replace(own.sharding, uses=2)",
        "replace(own.sharding, uses=1)",
        _one_step("tp1-dp1"),
    ),
    Mutant(
        "the dropout key forgets the shard",
        "megalite/parallel/randomness.py",
        "site.layer, site.shard)",
        "site.layer, 0)",
        f"{_UNIT}randomness.py::test_every_part_of_the_key_counts",
    ),
    Mutant(
        "the dropout key forgets the sample",
        "megalite/parallel/randomness.py",
        "self.seed, self.sample, site.layer",
        "self.seed, 0, site.layer",
        f"{_UNIT}model.py::test_dropout_differs_from_sample_to_sample[config0-hidden_dropout]",
    ),
    Mutant(
        "attention's dropout draws from a stream, which recomputation does not find again",
        "megalite/model/attention.py",
        "context.key.seed_site(self.site, query.device)",
        "pass",
        "tests/distributed/test_layouts_dropout.py::test_recomputation_changes_no_bit[tp1-dp1-pp1-gpt2]",
    ),
    Mutant(
        "gradients are not summed over data-parallel ranks",
        "megalite/optim/layout.py",
        'mesh.ranks("dp", "cp")',
        'mesh.ranks("cp")',
        _one_step("tp1-dp2"),
    ),
    Mutant(
        "a shard of the optimizer thinks that it starts one element later",
        "megalite/optim/shard.py",
        "self.start, self.stop = bucket.place.held",
        "self.start, self.stop = bucket.place.held[0] + sharded, bucket.place.held[1] + sharded",
        f"{_STEPS}[4]",
    ),
    Mutant(
        "ZeRO 3 frees a block's weights before its last use of them",
        "megalite/parallel/linear.py",
        "input_gradient = gradient @ ctx.weight  # first",
        "ctx.weight.gradient_buffer.free_parameters()\n        input_gradient = gradient @ ctx.weight  # first",
        "tests/distributed/test_layouts_steps.py::test_zero_2_and_3_give_the_same_bits[1-2-1-adam-float64]",
    ),
    Mutant(
        "ZeRO 2 forgets the micro-batches before the last",
        "megalite/optim/accumulator.py",
        "add_to(self.gradient_shard, overwrite=self._rounds == 1)",
        "add_to(self.gradient_shard, overwrite=True)",
        _one_step("tp1-dp2"),
    ),
    Mutant(
        "ZeRO 3 keeps a block's weights until its deferred gradients are added",
        "megalite/optim/buckets.py",
        "        self._handed_over[accumulator.chunk] += 1\n",
        "        self._handed_over[accumulator.chunk] += self.deferred is None\n",
        f"{_DEFERRED}split_backward_changes_no_bit[tp=1-dp=2-zero=3-family=llama-recompute=block]",
    ),
    Mutant(
        "deferred weight gradients keep a gathered input",
        "megalite/parallel/linear.py",
        "later = ctx.sequence_parallel and is_deferred(weights[0])",
        "later = False",
        f"{_DEFERRED}inputs_and_output_gradients_are_kept_and_no_more[2-True-False]",
    ),
    Mutant(
        "deferred weight gradients keep the graph",
        "megalite/parallel/linear.py",
        "ctx.saved_tensors[0].detach(), ctx.weights",
        "ctx.saved_tensors[0], ctx.weights",
        f"{_DEFERRED}inputs_and_output_gradients_are_kept_and_no_more[1-False-False]",
    ),
    Mutant(
        "a tied weight's use in another chunk is not added",
        "megalite/optim/buckets.py",
        "for other in self.accumulators[1:]:",
        "for other in ():",
        "tests/distributed/test_chunks.py::test_two_chunks_give_the_bits_of_one[none-True]",
    ),
    Mutant(
        "a tied weight's two uses are summed as they come",
        "megalite/optim/accumulator.py",
        "self.flats = {use: torch.zeros(layout.length, dtype=dtype, device=device) for use in uses}",
        "self.flats = dict.fromkeys(uses, torch.zeros(layout.length, dtype=dtype, device=device))",
        "tests/distributed/test_chunks.py::test_two_chunks_give_the_bits_of_one[none-True]",
    ),
    Mutant(
        "the instances of hybrid sharding are not summed",
        "megalite/optim/reduction.py",
        '("instances", self.instance_group), ',
        "",
        _one_step("tp1-dp4"),
    ),
    Mutant(
        "the norm counts every instance of hybrid sharding",
        "megalite/optim/places.py",
        "copies.index(rank) * instances + instance",
        "copies.index(rank) * instances",
        _one_step("tp1-dp4"),
    ),
    Mutant(
        "the loss scale is not taken out of the gradients",
        "megalite/optim/optimizer.py",
        "self._update(rates, self._clipping(result.gradient_norm) / loss_scale)",
        "self._update(rates, self._clipping(result.gradient_norm))",
        "tests/end_to_end/test_precision.py::test_the_loss_scale_leaves_no_trace",
    ),
    Mutant(
        "ZeRO 1 does not gather what the others have updated",
        "megalite/optim/optimizer.py",
        "        self.begin_parameter_gather()\n        if not",
        "        if not",
        _one_step("tp1-dp2"),
    ),
    Mutant(
        "a module does not wait for the parameters that are gathered for it",
        "megalite/optim/gathering.py",
        "    def wait(module: nn.Module, arguments: object) -> None:\n        for bucket in buckets:",
        "    def wait(module: nn.Module, arguments: object) -> None:\n        for bucket in ():",
        "tests/distributed/test_late_gathers.py::test_every_reader_waits[1]",
    ),
    Mutant(
        "a reader of weights forgets finish_parameter_gather()",
        "megalite/optim/optimizer.py",
        "        self.finish_parameter_gather()\n        try:",
        "        try:",
        "tests/distributed/test_late_gathers.py::test_every_reader_waits[3]",
    ),
    Mutant(
        "the gradient is not clipped",
        "megalite/optim/optimizer.py",
        "self._update(rates, self._clipping(result.gradient_norm) / loss_scale)",
        "self._update(rates, 1.0 / loss_scale)",
        f"{_STEPS}[3]",
    ),
    Mutant(
        "a start imports torch's compiler",
        "megalite/optim/elementwise.py",
        "            update(run.wide_gradients(factor)",
        "            torch.optim.SGD([run.master])\n            update(run.wide_gradients(factor)",
        "tests/end_to_end/test_start.py::test_a_run_says_what_starts_before_torch_and_imports_nothing_heavy",
    ),
    Mutant(
        "a start says nothing until torch is there",
        "pretrain_gpt.py",
        "    starting.announce(config)",
        "    import torch\n    starting.announce(config)",
        "tests/end_to_end/test_start.py::test_a_run_says_what_starts_before_torch_and_imports_nothing_heavy",
    ),
    Mutant(
        "every rank says what starts",
        "megalite/training/starting.py",
        "        if self._place.rank != 0:\n            return",
        "",
        "tests/unit/test_starting.py::test_the_layout_is_told_once",
    ),
    Mutant(
        "positions that begin anew keep attention within documents, too",
        "megalite/data/fields.py",
        "document_ids=documents if reset_attention_mask else None,",
        "document_ids=documents,",
        "tests/unit/test_data_fields.py::"
        "test_positions_count_from_the_start_of_the_document_and_attention_stays_in_it_each_where_asked",
    ),
    Mutant(
        "a blend keeps the stretches that began with a wrong guess",
        "megalite/data/blend.py",
        "if len(wrong) == 0:",
        "if len(wrong) < stretches:",
        "tests/unit/test_data_datasets.py::test_blend_index_is_that_of_the_plain_loop",
    ),
    Mutant(
        "a dataset that has given all is chosen again",
        "megalite/data/blend.py",
        "behind[counts >= self.limits] = -np.inf",
        "behind[counts > self.limits] = -np.inf",
        "tests/unit/test_data_datasets.py::test_blend_index_is_that_of_the_plain_loop[taken to the last sample-256]",
    ),
    Mutant(
        "a chat template may take as long as it likes",
        "megalite/data/chat_renderer.py",
        "signal.setitimer(signal.ITIMER_PROF, seconds)",
        "",
        "tests/unit/test_data_sft.py::test_a_template_without_end_costs_one_record_its_time",
    ),
    Mutant(
        "a chat template sees the secrets of the environment",
        "megalite/data/chat.py",
        ' if name.startswith(("PYTHON", "LD_"))}',
        "}",
        "tests/unit/test_data_sft.py::test_the_process_of_a_template_has_no_files_and_no_secrets",
    ),
    Mutant(
        "a vocabulary may have any id",
        "megalite/data/tokenizers/build.py",
        "tokenizer.vocab_size > LARGEST_VOCABULARY",
        "tokenizer.vocab_size > 2**40",
        "tests/unit/test_data_tokenizer_files.py::test_ids_are_bounded_and_another_for_each_token",
    ),
    Mutant(
        "an answer may begin before the one before it ends",
        "megalite/data/chat_renderer.py",
        " and len(before) >= at",
        "",
        "tests/unit/test_data_sft.py::test_answers_that_follow_each_other_are_told_apart",
    ),
    Mutant(
        "a token that only ends in an answer is not learned",
        "megalite/data/sft_dataset.py",
        "before[offsets[:, 1]] > before[offsets[:, 0]]",
        "np.append(of_answers, False)[offsets[:, 0]]",
        "tests/unit/test_data_sft.py::test_a_token_that_holds_any_of_an_answer_is_learned",
    ),
    Mutant(
        "the decoupled learning rate is everything's",
        "megalite/optim/learning_rate.py",
        "self.learning_rate.at(consumed_samples),",
        "self.token_tables.at(consumed_samples),",
        "tests/end_to_end/test_rates.py::test_a_decoupled_rate_of_zero_holds_the_token_tables_still[gpt2---tp 2]",
    ),
    Mutant(
        "a decoupled learning rate of 0 is taken for none",
        "megalite/optim/learning_rate.py",
        "if optimizer.decoupled_lr is not None:",
        "if optimizer.decoupled_lr:",
        "tests/unit/test_learning_rate.py::test_a_decoupled_rate_of_zero_is_zero",
    ),
    Mutant(
        "weight decay rises over the learning rate's decay and not over the run",
        "megalite/optim/learning_rate.py",
        "WeightDecaySchedule(start, end, run,",
        "WeightDecaySchedule(start, end, decay,",
        f"{_RATES}[linear-exponential-linear]",
    ),
    Mutant(
        "the learning rate of a step counts the step's own samples",
        "megalite/optim/learning_rate.py",
        "        if consumed_samples <= self.warmup_samples and",
        "        consumed_samples += self.step_samples\n        if consumed_samples <= self.warmup_samples and",
        f"{_RATES}[cosine-exponential-constant]",
    ),
    Mutant(
        "noam counts its steps from 0",
        "megalite/optim/learning_rate.py",
        "self._noam(consumed_samples + self.step_samples)",
        "self._noam(max(consumed_samples, 1))",
        "tests/unit/test_learning_rate.py::test_noam_is_the_papers_formula",
    ),
    Mutant(
        "norms decay",
        "megalite/model/norm.py",
        "Constant(value), weight_decay=False)",
        "Constant(value), weight_decay=True)",
        f"{_STEPS}[3]",
    ),
    Mutant(
        "a micro-batch's gradient replaces the one before",
        "megalite/optim/accumulator.py",
        "overwrite=self._arrived[key] == 0",
        "overwrite=True",
        f"{_UNIT}buckets.py::test_an_ordinary_gradient_comes_through_the_same_door",
    ),
    Mutant(
        "Muon orthogonalizes each tensor-parallel rank's part of a matrix",
        "megalite/optim/muon.py",
        "collectives.all_reduce_(whole, split.split_group)",
        "pass",
        f"{_STEPS}[4]",
    ),
    Mutant(
        "Muon counts every replica of keys and values",
        "megalite/optim/muon.py",
        "counted = split_group.ranks[split_group.rank] == first_holder",
        "counted = True",
        f"{_STEPS}[2]",
    ),
    Mutant(
        "Muon takes keys and values for one matrix",
        "megalite/model/attention.py",
        '"groups two width hidden -> two (groups width) hidden"',
        '"groups two width hidden -> 1 (groups two width) hidden"',
        "tests/unit/test_muon.py::test_one_process_in_fp32_gives_torchs_bits[False]",
    ),
    Mutant(
        "Muon's momentum is not kept from step to step",
        "megalite/optim/muon.py",
        "self.momentum.copy_(average.lerp_(gradients, 1 - momentum))",
        "self.momentum.copy_(average.zero_().lerp_(gradients, 1 - momentum))",
        "tests/unit/test_muon.py::test_one_process_in_fp32_gives_torchs_bits[False]",
    ),
    Mutant(
        "megalite's AdamW does not correct for moments that start at zero",
        "kernels/megalite_kernels/optimizer.py",
        "value=-by.rate / (1.0 - by.beta1**by.step)",
        "value=-by.rate",
        "tests/unit/test_optimizer_backends.py::test_torch_and_megalite_agree_to_rounding[adam]",
    ),
    Mutant(
        "AdamW's kernel takes one beta for the other",
        "kernels/megalite_kernels/optimizer.py",
        "m += (g - m) * tl.cast(new1, tl.float32)",
        "m += (g - m) * tl.cast(new2, tl.float32)",
        f"{_OPTIMIZER}adamw_is_torchs[64]",
    ),
    Mutant(
        "AdamW's kernel decays weights by the corrected rate",
        "kernels/megalite_kernels/optimizer.py",
        "numbers = (1.0 - by.rate * by.decay, rate,",
        "numbers = (1.0 - rate * by.decay, rate,",
        f"{_OPTIMIZER}adamw_is_torchs[64]",
    ),
    Mutant(
        "megalite's AdamW does not clip",
        "megalite/optim/elementwise.py",
        "config.adam_eps, step, factor, seed)",
        "config.adam_eps, step, 1.0, seed)",
        "tests/unit/test_optimizer_backends.py::test_torch_and_megalite_agree_to_rounding[adam]",
    ),
    Mutant(
        "a kernel cuts bf16 parameters off their masters",
        "kernels/megalite_kernels/master_weights.py",
        "upper = (bits + (1 << 15)) >> 16",
        "upper = bits >> 16",
        f"{_OPTIMIZER}remainders_change_no_bit",
    ),
    Mutant(
        "a master that is no number rounds to zero",
        "kernels/megalite_kernels/master_weights.py",
        "tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)",
        "value.to(tl.int32, bitcast=True)",
        f"{_OPTIMIZER}a_weight_that_is_no_number_stays_none[bf16, fp32 masters]",
    ),
    Mutant(
        "a small average of squares is rounded to zero",
        "kernels/megalite_kernels/moments.py",
        "0, tl.where((codes == 0) & (wide > 0.0) & there, 1, codes))",
        "0, codes)",
        f"{_OPTIMIZER}the_reference_has_the_kernels_codes",
    ),
    Mutant(
        "squares too small for their root to come back are kept",
        "kernels/megalite_kernels/moments.py",
        "scales.masked_fill_(scales < least_scale(self.codes.dtype), 0.0)",
        "scales.masked_fill_(scales < 0.0, 0.0)",
        f"{_OPTIMIZER}squares_in_8_bits_come_back_and_none_is_lost",
    ),
    Mutant(
        "moments in 8 bits are rounded by the same numbers in each step",
        "megalite/optim/elementwise.py",
        "<< 31 | step) * 2",
        "<< 31) * 2",
        f"{_PACKED}an_update_draws_by_step_and_place",
    ),
    Mutant(
        "each process rounds moments in 8 bits by numbers of its own",
        "megalite/optim/elementwise.py",
        "name = run.slots[0].parameter.sharding.pieces[0].tensor.name",
        "name = str(__import__('os').getpid())",
        "tests/distributed/test_layouts_steps.py::test_copies_are_rounded_alike_in_8_bits[1-2-2]",
    ),
    Mutant(
        "a load forgets what it has read of packed state",
        "megalite/optim/shard.py",
        "kept.write(run.unpacked[name])",
        "kept.tensors()",
        f"{_PACKED}moments_in_8_bits_go_on_to_the_bit_where_they_were_saved",
    ),
    Mutant(
        "copies of a gradient are summed in an order that follows the buckets' cuts",
        "megalite/optim/reduction.py",
        "collectives.all_reduce_in_rank_order_, gradients",
        "collectives.all_reduce_, gradients",
        "tests/distributed/test_chunks.py::test_stages_and_overlap_change_no_bit[4-1-1-in turn]",
    ),
    Mutant(
        "the gradient norm is that of the scaled loss",
        "megalite/optim/optimizer.py",
        "return StepResult({name: norm / loss_scale for name, norm in self._norms().run().items()})",
        "return StepResult(self._norms().run())",
        "tests/unit/test_optimizer_backends.py::test_a_loss_scale_leaves_norm_and_clipped_update_alone",
    ),
    Mutant(
        "the norm's sums are rounded on each rank",
        "megalite/optim/statistics.py",
        "torch.cat(sums) if",
        "torch.cat(sums).sum(0, keepdim=True) if",
        "tests/distributed/test_layouts_steps.py::test_zero_and_overlap_change_no_bit[1-3-adam-float64]",
    ),
    Mutant(
        "a norm's exact sum forgets the lower half of its numbers",
        "megalite/optim/exact_sum.py",
        "((high << HALF_BITS) + low) << place",
        "(high << HALF_BITS) << place",
        "tests/unit/test_exact_sum.py::test_a_sum_is_rounded_once",
    ),
    Mutant(
        "squares of large gradients overflow in the norm's kernel",
        "kernels/megalite_kernels/l2_norm.py",
        "largest > 2.0**40, 2.0**-90",
        "largest > 2.0**40, 1.0",
        "tests/kernels/test_l2_norm.py::test_no_square_overflows_or_vanishes[1e+20]",
    ),
    Mutant(
        "arithmetic is in the precision in which moments are kept",
        "kernels/megalite_kernels/optimizer.py",
        "values = [_read(moment, start, start + len(gradients)).to(wide) for moment in moments]",
        "values = [_read(moment, start, start + len(gradients)).clone() for moment in moments]",
        "tests/unit/test_optimizer_backends.py::test_lower_precision_rounds_what_is_kept_and_no_more",
    ),
    Mutant(
        "torch's AdamW corrects its moments as after one update more",
        "megalite/optim/elementwise.py",
        "steps.fill_(step - 1)",
        "steps.fill_(step)",
        "tests/unit/test_optimizer_backends.py::test_the_torch_back_end_is_torchs_optimizer_to_the_bit[adam]",
    ),
    Mutant(
        "apex's count of updates goes on over skipped steps",
        "megalite/optim/elementwise.py",
        "weight_decay=decay, step=step - 1)",
        'weight_decay=decay, step=group.get("step", 0) + 1)',
        "tests/unit/test_optimizer_backends.py::test_apex_is_given_what_it_needs[adam]",
    ),
    Mutant(
        "a checkpoint leaves the optimizer's state out",
        "megalite/optim/shard.py",
        "state = run.kept() | run.unpacked",
        'state = {"master": run.master} if self.has_master else {}',
        "tests/unit/test_checkpoint.py::test_weights_state_and_place_in_training_come_back_bit_for_bit",
    ),
    Mutant(
        "a load forgets how many updates were made",
        "megalite/checkpoint/loading.py",
        "optimizer.steps = manifest.training.optimizer_steps if state else 0",
        "optimizer.steps = 0",
        f"{_GOES_ON}[3]",
    ),
    Mutant(
        "a load leaves the padding of the optimizer's state as it was",
        "megalite/checkpoint/loading.py",
        "for values in (run.values, *run.tensors.values()):",
        "for values in (run.values,):",
        f"{_GOES_ON}[3]",
    ),
    Mutant(
        "an object store's tracker names a checkpoint before its manifest is there",
        "megalite/checkpoint/attempt.py",
        """        (self.path / manifest.NAME).put(manifest_text.encode())
        (self.directory / TRACKER).put(f"{self.iteration}\\n".encode())
""",
        """        (self.directory / TRACKER).put(f"{self.iteration}\\n".encode())
        (self.path / manifest.NAME).put(manifest_text.encode())
""",
        "tests/unit/test_checkpoint_object_store.py::test_whatever_the_moment_a_whole_checkpoint_is_the_latest",
    ),
    Mutant(
        "a save to an object store overwrites the files of the one before",
        "megalite/checkpoint/attempt.py",
        'return self.path / f"{stem}.{self.mark}.{suffix}"',
        "return self.path / name",
        "tests/unit/test_checkpoint_object_store.py::test_whatever_the_moment_a_whole_checkpoint_is_the_latest",
    ),
    Mutant(
        "a save in the background writes what training makes of the state meanwhile",
        "megalite/checkpoint/saving.py",
        "regions = self.staging.take(regions)",
        "self.staging.take(regions)",
        f"{_KILL}kills_at_random_moments[asynchronous]",
    ),
    Mutant(
        "the tracker is replaced before the new folder's name is on disk",
        "megalite/checkpoint/attempt.py",
        """            os.rename(self.folder, self.path)
            sync_directory(self.directory)
""",
        """            os.rename(self.folder, self.path)
""",
        f"{_KILL}whatever_the_moment_a_whole_checkpoint_is_found",
    ),
    Mutant(
        "the manifest is not synced before it is relied upon",
        "megalite/checkpoint/attempt.py",
        """        file.flush()
        os.fsync(file.fileno())
""",
        """        file.flush()
""",
        f"{_KILL}whatever_the_moment_a_whole_checkpoint_is_found",
    ),
    Mutant(
        "a block is not compared with its checksum",
        "megalite/checkpoint/box_file.py",
        "!= block.checksum",
        "is None",
        "tests/unit/test_checkpoint_fetching.py::test_damage_elsewhere_does_not_matter_and_here_it_does",
    ),
    Mutant(
        "each rank reads for itself what others of its node read, too",
        "megalite/checkpoint/fetching.py",
        "if len(ranks) > 1)",
        "if len(ranks) > 99)",
        "tests/distributed/test_checkpoint.py::test_each_byte_is_read_once_a_node[dp=2]",
    ),
    Mutant(
        "what a rank reads for the others it does not put into its own place",
        "megalite/checkpoint/fetching.py",
        "        for blocks, row in zip(now, received, strict=True):",
        "        for blocks, row in zip(now[1:], received[1:], strict=True):",
        f"{_GOES_ON}[8]",
    ),
    Mutant(
        "the first of the copies saves all of them",
        "megalite/optim/places.py",
        "share(end - begin, self.replicas, self.replica)",
        "(0, end - begin if self.replica == 0 else 0)",
        "tests/distributed/test_checkpoint.py::test_the_copies_of_a_tied_weight_share_in_writing_it",
    ),
    Mutant(
        "sequence-parallel ranks take the first rank's positions",
        "megalite/model/embedding.py",
        "local.chunk(self.group.size)[self.group.rank]",
        "local.chunk(self.group.size)[0]",
        _one_step("tp2-sp-dp1"),
    ),
    Mutant(
        "tokens see other documents",
        "megalite/model/batch.py",
        "(tokens * begins)",
        "(tokens * begins * 0)",
        f"{_UNIT}model.py::test_no_token_sees_another_document_or_the_future[llama]",
    ),
    Mutant(
        "the index of the old tokens stays while new ones take their name",
        "megalite/data/indexed_writer.py",
        "            index.unlink(missing_ok=True)",
        "            pass",
        "tests/unit/test_data_indexed_dataset.py::test_no_moment_shows_the_index_of_other_tokens",
    ),
    Mutant(
        "pipeline: a rank in ZB-V goes through its two last backwards in the other order",
        "megalite/pipeline/schedules.py",
        """        take("I", 0)
        take("I", 1)
""",
        """        take("I", 1)
        take("I", 0)
""",
        "tests/unit/test_pipeline_schedules.py::test_orders_are_torchs",
    ),
    Mutant(
        "pipeline: ZB-H1 puts weight gradients off by one micro-batch more",
        "megalite/pipeline/schedules.py",
        """[Action("W", m - rank)] * (m >= rank))
    put_off = [Action("W", m) for m in range(max(micro_batches - rank, 0), micro_batches)]""",
        """[Action("W", m - rank - 1)] * (m > rank))
    put_off = [Action("W", m) for m in range(max(micro_batches - rank - 1, 0), micro_batches)]""",
        "tests/unit/test_pipeline_simulator.py::test_activations_in_flight",
    ),
    Mutant(
        "pipeline: receives are posted right before their message is needed",
        "megalite/pipeline/lowering.py",
        "min(latest, index - 1, bisect_left(ends, sent_at))",
        "min(latest, index)",
        "tests/unit/test_pipeline_checker.py::test_every_schedule_passes",
    ),
    Mutant(
        "pipeline: a chunk is reduced before its last weight gradients",
        "megalite/pipeline/lowering.py",
        """if action.kind in ("B", "W")}""",
        """if action.kind in ("B", "I")}""",
        "tests/unit/test_pipeline_checker.py::test_every_schedule_passes",
    ),
    Mutant(
        "pipeline: the checker lets reductions come early",
        "megalite/pipeline/checker.py",
        """if ("W", m, chunk) not in self._done:""",
        """if ("F", m, chunk) not in self._done:""",
        "tests/unit/test_pipeline_checker.py::test_faults_are_refused",
    ),
    Mutant(
        "pipeline: the checker takes sends to be buffered",
        "megalite/pipeline/rendezvous.py",
        "(rendezvous or not event.rendezvous) and",
        "not event.rendezvous and",
        "tests/unit/test_pipeline_checker.py::test_two_that_send_before_they_receive_end_only_where_sends_do_not_wait",
    ),
    Mutant(
        "pipeline: the checker lets ranks do different things together",
        "megalite/pipeline/rendezvous.py",
        "if mine is None or theirs is None or mine.operation != theirs.operation:",
        "if mine is None or theirs is None:",
        "tests/unit/test_pipeline_checker.py::test_copies_that_reduce_in_different_order",
    ),
    Mutant(
        "engine: an output is freed before its send has completed",
        "megalite/pipeline/engine.py",
        "contiguous(), action.peer), tensor\n",
        """contiguous(), action.peer), tensor
        if not self.engine.chunks[action.chunk].backward_reads(tensor):
            tensor.untyped_storage().resize_(0)
""",
        f"{_ENGINE}a_stage_may_end_in_any_operation[sum]",
    ),
    Mutant(
        "engine: no output is freed",
        "megalite/pipeline/engine.py",
        "tensor.untyped_storage().resize_(0)",
        "pass",
        f"{_ENGINE}a_stage_may_end_in_any_operation[sum]",
    ),
    Mutant(
        "engine: outputs that backward reads are freed",
        "megalite/pipeline/engine.py",
        "return self._output_is_kept[kind]",
        "return False",
        f"{_ENGINE}a_stage_may_end_in_any_operation[tanh]",
    ),
    Mutant(
        "engine: functions in Python keep their output where torch's do",
        "megalite/pipeline/engine.py",
        " or isinstance(node, BackwardCFunction)",
        "",
        f"{_ENGINE}a_stage_may_end_in_any_operation[custom function that keeps its output]",
    ),
    Mutant(
        "engine: what backward has saved is looked at behind it",
        "megalite/pipeline/engine.py",
        "and to_go_backward and",
        "and",
        f"{_ENGINE}a_send_may_be_waited_for_behind_the_outputs_backward",
    ),
    Mutant(
        "engine: a send is not waited for",
        "megalite/pipeline/engine.py",
        """pending.wait(f"stage {chunk.stage}, {action}: waited until it had arrived")""",
        """vars(self.engine.links).setdefault("on_their_way", []).append(pending)""",
        f"{_ENGINE}a_stage_may_end_in_any_operation[tanh]",
    ),
    Mutant(
        "engine: weight gradients are put off and never added",
        "megalite/pipeline/engine.py",
        "self._deferred.pop((action.chunk, action.micro_batch)).add()",
        "self._deferred.pop((action.chunk, action.micro_batch))",
        f"{_ENGINE}weight_gradients_that_are_put_off_are_added_once",
    ),
    Mutant(
        "engine: deferred gradients are kept until the step's end",
        "megalite/pipeline/engine.py",
        "self._deferred.pop((action.chunk, action.micro_batch)).add()",
        "self._deferred[action.chunk, action.micro_batch].add()",
        f"{_ENGINE}activations_are_as_many_as_the_checker_says[zb-h1-1]",
    ),
    Mutant(
        "engine: an input is kept behind its backward",
        "megalite/pipeline/engine.py",
        "self._inputs.pop(key, None)",
        "self._inputs.get(key)",
        f"{_ENGINE}inputs_live_until_their_backward",
    ),
    Mutant(
        "pipeline: a message is sent to another neighbour",
        "megalite/pipeline/lowering.py",
        "yield Action(_SEND[way], action.micro_batch, action.chunk, peer)",
        "yield Action(_SEND[way], action.micro_batch, action.chunk, (peer + 1) % stages.ranks)",
        "tests/unit/test_pipeline_checker.py::test_every_schedule_passes",
    ),
    Mutant(
        "pipeline: receives are posted in another order than sends",
        "megalite/pipeline/lowering.py",
        "receives[latest].insert(0, Action(",
        "receives[latest].append(Action(",
        "tests/unit/test_pipeline_checker.py::test_every_schedule_passes",
    ),
    Mutant(
        "gradients that are deferred are added at once, too",
        "megalite/optim/buckets.py",
        "        else:\n            accumulator.add(parameter, gradient, use)",
        "        accumulator.add(parameter, gradient, use)",
        f"{_DEFERRED}split_backward_changes_no_bit[tp=2-dp=1-family=gpt2]",
    ),
    Mutant(
        "--no-rope-fusion leaves the activation to the reference",
        "megalite/config/kernels.py",
        '"rotary": self.rope_fusion',
        '"rotary": self.bias_swiglu_fusion',
        "tests/unit/test_config_kernels.py::test_a_fusion_that_is_off_leaves_its_operations_to_the_reference",
    ),
    Mutant(
        "the first stage and the last do not sum the gradients of a tied weight",
        "megalite/model/embedding.py",
        "copies=copies, summed=len(copies) > 1",
        "copies=copies, summed=False",
        "tests/distributed/test_layouts_pipeline.py::test_all_schedules_give_the_same_bits[pp3-recomputeuniform-fused_lossTrue]",
    ),
    Mutant(
        "the head's use of a tied weight is given to the embedding's",
        "megalite/model/head.py",
        "use = 1 if isinstance(weight, Parameter) else 0",
        "use = 0",
        "tests/distributed/test_chunks.py::test_two_chunks_give_the_bits_of_one[none-True]",
    ),
    Mutant(
        "a tied weight's use in another chunk is added twice",
        "megalite/optim/buckets.py",
        "partial(self.gradient_shard.add_, other.gradient_shard)",
        "partial(self.gradient_shard.add_, other.gradient_shard, alpha=2)",
        "tests/distributed/test_chunks.py::test_two_chunks_give_the_bits_of_one[none-True]",
    ),
    Mutant(
        "the ranks of a pipeline do not learn the loss of its last stage",
        "megalite/training/trainer.py",
        """return collectives.all_reduce_(over_data, self.mesh.group("pp"))""",
        "return over_data",
        f"{_TIME_LINE}[interleaved]",
    ),
    Mutant(
        "a cached key lies a slot too early",
        "megalite/model/cache.py",
        "part[rows, :, self._positions] =",
        "part[rows, :, (self._positions - 1).clamp(min=0)] =",
        _CACHED,
    ),
    Mutant(
        "tokens see the cached slot behind their own, where padding lies",
        "megalite/model/cache.py",
        "visible = back >= 0 if before is None",
        "visible = back >= -1 if before is None",
        _CACHED,
    ),
    Mutant(
        "windows are ignored in the cache",
        "megalite/model/gpt.py",
        "cache.mask(self.window)",
        "cache.mask()",
        _CACHED,
    ),
    Mutant(
        "where there is a window in the cache, padding is seen through it",
        "megalite/model/cache.py",
        "(back >= 0) & (back <= before)",
        "back <= before",
        _CACHED,
    ),
    Mutant(
        "tokens after the prompt are rotated as if they were the first",
        "megalite/model/gpt.py",
        "rotary = windowed_rotary = rotary_tables(self.config, micro_batch.positions, self.dtype)",
        "rotary = windowed_rotary = rotary_tables("
        "self.config, micro_batch.positions - micro_batch.positions[:, :1], self.dtype)",
        _CACHED,
    ),
    Mutant(
        "when a sequence ends, the next ones go on with its cache",
        "megalite/model/cache.py",
        "= kept[:, rows]",
        "= kept[:, : len(rows)]",
        _CACHED,
    ),
    Mutant(
        "the token after a padded prompt is chosen behind its padding",
        "megalite/inference/generation.py",
        "[len(row) - 1 for row in tokens]",
        "[longest - 1 for row in tokens]",
        _CACHED,
    ),
    Mutant(
        "the vocabulary's padding can be sampled",
        "megalite/inference/generation.py",
        """network.mesh.group("tp"))[:, : network.vocab_size]""",
        """network.mesh.group("tp"))""",
        _CACHED,
    ),
    Mutant(
        "tokens that the tokenizer lacks can be sampled",
        "megalite/inference/generation.py",
        "zip(logits[:, : self.vocab_size], ",
        "zip(logits, ",
        "tests/end_to_end/test_generation.py::test_a_hugging_face_folder_is_as_good",
    ),
    Mutant(
        "all prompts draw the same random numbers",
        "megalite/inference/generation.py",
        """f"{seed}/{index}".encode()""",
        """f"{seed}".encode()""",
        f"{_INFERENCE}sampled_text_depends_on_the_seed_and_the_number_of_the_prompt_alone[alone]",
    ),
    Mutant(
        "the stages of a pipeline wait for each batch's tokens in turn",
        "megalite/inference/generation.py",
        """ahead = stages - network.mesh.coordinate("pp")""",
        "ahead = 1",
        f"{_INFERENCE}each_stage_works_on_a_batch_of_its_own",
    ),
    Mutant(
        "scores stay on the last stage",
        "megalite/inference/network.py",
        'return collectives.all_reduce_(values.contiguous(), self.mesh.group("pp"))',
        """return (collectives.all_reduce_(values.clone(), self.mesh.group("pp")), values)[1]""",
        f"{_INFERENCE}logits_and_scores_are_the_oracles[pp2]",
    ),
    Mutant(
        "whole hidden states are expected between sequence-parallel stages",
        "megalite/training/construction.py",
        """(mesh.size("tp") if config.parallel.sequence_parallel else 1)""",
        "1",
        f"{_TIME_LINE}[sequence parallel]",
    ),
    Mutant(
        "each window counts what it shares with the one before",
        "megalite/inference/windows.py",
        "yield Window(tokens, end - predicted)",
        "yield Window(tokens, len(tokens) - 1)",
        f"{_FIGURES}the_figures_are_the_oracles_whatever_the_windows[16-5]",
    ),
    Mutant(
        "later windows read one token less than they can",
        "megalite/inference/windows.py",
        "start = end - length - 1",
        "start = end - length - (0 if predicted else 1)",
        f"{_FIGURES}the_figures_are_the_oracles_whatever_the_windows[16-5]",
    ),
    Mutant(
        "the end of a document is predicted",
        "megalite/inference/documents.py",
        "            bare[-1] = bare[-1][: others[-1] + 1]\n",
        "",
        f"{_FIGURES}token_files_give_what_their_text_gives",
    ),
    Mutant(
        "bits per byte are given of tokens whose text is not known",
        "megalite/inference/documents.py",
        "            if not same:",
        "            if False:",
        "tests/unit/test_evaluation.py::test_where_the_text_cannot_be_told_there_are_no_bits_per_byte",
    ),
    Mutant(
        "the bytes of token files are those of one sequence of each document",
        "megalite/inference/documents.py",
        "        for sequence in sequences:\n            tokens",
        "        for sequence in sequences[:1]:\n            tokens",
        "tests/unit/test_evaluation.py::test_bytes_of_token_files_are_those_of_their_text",
    ),
    Mutant(
        "bits per byte are nats",
        "megalite/inference/perplexity.py",
        "self.loss * self.tokens / math.log(2) / self.text_bytes",
        "self.loss * self.tokens / self.text_bytes",
        f"{_FIGURES}the_figures_are_the_oracles_whatever_the_windows[16-5]",
    ),
    Mutant(
        "what fills up a batch is scored",
        "megalite/inference/scoring.py",
        "(columns >= lengths.unsqueeze(1)) | (columns <",
        "(columns <",
        f"{_FIGURES}batches_change_nothing",
    ),
    Mutant(
        "copies of the model each score all windows, and their scores are added",
        "megalite/inference/scoring.py",
        'if number % mesh.size("dp") == mesh.coordinate("dp"):',
        "if True:",
        f"{_FIGURES}every_layout_finds_the_same[dp2]",
    ),
    Mutant(
        "of a request that is too long the end is cut off",
        "megalite/inference/lm_eval_adapter.py",
        "tokens[-self.max_length - 1 :]",
        "tokens[: self.max_length + 1]",
        f"{_LM_EVAL}choices[alone]",
    ),
    Mutant(
        "a task's text begins without what the tokenizer's template puts there",
        "megalite/inference/lm_eval_adapter.py",
        "return tokens if begins else [*self._beginning, *tokens]",
        "return tokens",
        f"{_LM_EVAL}texts_begin_as_the_tokenizers_template_says",
    ),
    Mutant(
        "what ends a text is kept in it",
        "megalite/inference/lm_eval_adapter.py",
        "text[: min(ends)] if ends else text",
        "text",
        f"{_LM_EVAL}what_is_written[alone]",
    ),
    Mutant(
        "texts that copies of the model have written come back in the copies' order",
        "megalite/inference/lm_eval_adapter.py",
        "return [every[number % copies][number // copies] for number in range(len(contexts))]",
        "return [text for share in every for text in share]",
        f"{_LM_EVAL}what_is_written[dp2]",
    ),
    Mutant(
        "ranks that were asked different things go on",
        "megalite/inference/lm_eval_adapter.py",
        "if digest != digests[0]",
        "if False",
        f"{_LM_EVAL}what_cannot_be_asked_is_refused[disagreement]",
    ),
    Mutant(
        "an export in fp32 takes rounded weights, and not the optimizer's masters",
        "megalite/conversion/native.py",
        "dtype.itemsize > reader.tensors",
        "dtype.itemsize < reader.tensors",
        "tests/unit/test_conversion_huggingface.py::"
        "test_weights_wanted_finer_than_they_are_saved_come_from_their_masters",
    ),
    Mutant(
        "in Megatron-LM's files, queries stand in the groups of others",
        "megalite/conversion/megatron_names.py",
        "(group * heads,))",
        "((model.kv_groups - 1 - group) * heads,))",
        f"{_MEGATRON}megatron_core_loads_what_is_written[llama]",
    ),
    Mutant(
        "a gate and what it gates are swapped where each has a tensor of its own",
        "megalite/conversion/megatron_torch_dist.py",
        """gate, up = of_name.get("w", []), of_name.get("v", [])""",
        """up, gate = of_name.get("w", []), of_name.get("v", [])""",
        f"{_MEGATRON}what_megatron_core_saves_is_read[per layer-llama]",
    ),
    Mutant(
        "a gate and what it gates are swapped in the files of ranks",
        "megalite/conversion/megatron_legacy.py",
        """            yield chunk(rank * rows, 0, half, lambda: stored.read()[:rows])
            yield chunk((ranks + rank) * rows, 0, half, lambda: stored.read()[rows:])""",
        """            yield chunk(rank * rows, 0, half, lambda: stored.read()[rows:])
            yield chunk((ranks + rank) * rows, 0, half, lambda: stored.read()[:rows])""",
        _LEGACY,
    ),
    Mutant(
        "the norms of a layer are swapped in names without Transformer Engine",
        "megalite/conversion/megatron_names.py",
        """norm\\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\\.(pre_mlp_layernorm|post_attention_(layer)?norm)\\.", ".mlp.linear_fc1.layer_norm_"),""",
        """norm\\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\\.(pre_mlp_layernorm|post_attention_(layer)?norm)\\.", ".self_attention.linear_qkv.layer_norm_"),""",
        _LEGACY,
    ),
    Mutant(
        "every layer is written from the first",
        "megalite/conversion/megatron.py",
        "enumerate(values, start=box.offset[0])",
        "enumerate(values)",
        f"{_MEGATRON}megatron_core_loads_what_is_written[llama]",
    ),
    Mutant(
        "layers that stand in one chunk are read in reverse",
        "megalite/conversion/megatron_torch_dist.py",
        "self._last.values[layer]",
        "self._last.values[-1 - layer]",
        f"{_MEGATRON}a_stacked_tensor_saved_in_one_chunk_is_read_by_layers",
    ),
    Mutant(
        "columns of tensor-parallel ranks are put together in reverse",
        "megalite/conversion/megatron_legacy.py",
        "yield chunk(rank * size[1], 1, size",
        "yield chunk((ranks - 1 - rank) * size[1], 1, size",
        _LEGACY,
    ),
    Mutant(
        "the models of a rank follow each other before those of the next rank do",
        "megalite/conversion/megatron_legacy.py",
        "key=lambda stage: stage[:2]",
        "key=lambda stage: stage[1::-1]",
        _LEGACY,
    ),
    Mutant(
        "rows that pad Megatron-LM's vocabulary hold something",
        "megalite/conversion/megatron.py",
        "values.zero_()",
        "values.fill_(1)",
        f"{_MEGATRON}rows_that_pad_the_vocabulary_are_zeros_there_and_nowhere_here",
    ),
    Mutant(
        "rows that pad Megatron-LM's vocabulary become tokens",
        "megalite/conversion/megatron.py",
        "true_vocab_size or vocabulary_of(arguments) or rows",
        "true_vocab_size or rows",
        f"{_MEGATRON}rows_that_pad_the_vocabulary_are_zeros_there_and_nowhere_here",
    ),
    Mutant(
        "what a network has beyond its arguments is left out in silence",
        "megalite/conversion/megatron.py",
        "    if others:",
        "    if False:",
        "tests/unit/test_conversion_megatron_arguments.py::test_tensors_that_the_network_has_not_are_refused_and_the_"
        "optimizers_left_aside",
    ),
    Mutant(
        "a network that Megatron-LM has not is written",
        "megalite/conversion/megatron_arguments.py",
        "    if different:",
        "    if False:",
        "tests/unit/test_conversion_megatron_arguments.py::test_a_network_that_megatron_has_not_is_refused",
    ),
    Mutant(
        "a pickle's functions are imported and called",
        "megalite/conversion/restricted_pickle.py",
        """        if name not in self._records:
            if len""",
        """        if True:
            return super().find_class(module_name, global_name)
            if len""",
        f"{_PICKLE}a_hostile_file_of_torch_runs_nothing",
    ),
    Mutant(
        "a pickle changes a tensor that has been checked",
        "megalite/conversion/restricted_pickle.py",
        "pickle.BUILD[0]: _set_state",
        "pickle.BUILD[0]: _BASE[pickle.BUILD[0]]",
        f"{_PICKLE}a_tensor_lies_within_its_storage",
    ),
    Mutant(
        "a model is made whatever its files can hold",
        "megalite/conversion/opened.py",
        "    if parameters + _NAMES * model.num_layers > max(there, _SMALL):",
        "    if False:",
        "tests/unit/test_conversion_megatron_damage.py::test_a_model_that_is_too_large_for_its_files_is_not_made",
    ),
    Mutant(
        "a manifest's training state is taken as it is",
        "megalite/checkpoint/manifest.py",
        """_training_from_json(fields["training"])""",
        """TrainingState(**fields["training"])""",
        "tests/unit/test_checkpoint_manifest.py::test_a_training_state_is_one",
    ),
    Mutant(
        "a program in the place of weights is run",
        "megalite/conversion/torch_archive.py",
        "return _read_archive(content) if",
        "return torch.load(path, weights_only=False) if",
        f"{_PICKLE}a_program_in_the_place_of_weights_is_not_run",
    ),
    Mutant(
        "a stranger's tensor reaches beyond its bytes",
        "megalite/conversion/restricted_pickle.py",
        "if elements > storage.length or",
        "if",
        f"{_PICKLE}a_tensor_lies_within_its_storage",
    ),
    Mutant(
        "gate and up are taken for each other",
        "megalite/conversion/families.py",
        """*_linear(f"{mlp}.gate_proj", *gate_up, Piece("mlp.gate_up", offset=(0,))),
        *_linear(f"{mlp}.up_proj",""",
        """*_linear(f"{mlp}.up_proj", *gate_up, Piece("mlp.gate_up", offset=(0,))),
        *_linear(f"{mlp}.gate_proj",""",
        f"{_AS_THEIRS}[llama]",
    ),
    Mutant(
        "keys and values are taken for each other",
        "megalite/conversion/families.py",
        """*_linear(f"{attention}.k_proj", *key_value, Piece("attention.key_value", offset=(0, 0))),
        *_linear(f"{attention}.v_proj",""",
        """*_linear(f"{attention}.v_proj", *key_value, Piece("attention.key_value", offset=(0, 0))),
        *_linear(f"{attention}.k_proj",""",
        f"{_AS_THEIRS}[qwen3]",
    ),
    Mutant(
        "Gemma 2's norm behind attention is its norm before the feed-forward layer",
        "megalite/conversion/families.py",
        """post_attention_layernorm", "attention_output_norm"),
    *_norm("model.layers.{layer}.pre_feedforward_layernorm", """,
        """pre_feedforward_layernorm", "attention_output_norm"),
    *_norm("model.layers.{layer}.post_attention_layernorm", """,
        f"{_AS_THEIRS}[gemma2]",
    ),
    Mutant(
        "the base of rotary embeddings is the default",
        "megalite/conversion/rotary_keys.py",
        'parameters.get("rope_theta", config.get(theta, 10000.0))',
        "config.get(theta, 10000.0)",
        f"{_AS_THEIRS}[llama]",
    ),
    Mutant(
        "a window counts one key too many",
        "megalite/conversion/window_keys.py",
        'f"{size - 1},0"',
        'f"{size},0"',
        f"{_AS_THEIRS}[mistral]",
    ),
    Mutant(
        "the original length of a scaling is the model's own",
        "megalite/conversion/rotary_keys.py",
        'given.setdefault("original_max_position_embeddings", max_positions)',
        'given["original_max_position_embeddings"] = max_positions',
        f"{_AS_THEIRS}[llama-scaled]",
    ),
    Mutant(
        "YaRN's rounding is not read where it is off",
        "megalite/conversion/rotary_keys.py",
        "for name in known if parameters.get(name) is not None}",
        "for name in known if parameters.get(name)}",
        f"{_AS_THEIRS}[qwen3]",
    ),
    Mutant(
        "a small model's Gemma 3 has one base",
        "megalite/conversion/rotary_keys.py",
        '"window_rotary_base": float(local)',
        '"window_rotary_base": None',
        f"{_AS_THEIRS}[gemma3]",
    ),
    Mutant(
        "Llama rotates a part of each head where its config says so",
        "megalite/conversion/rotary_keys.py",
        "if share is None and part != 1.0:",
        "if False:",
        f"{_FAMILIES}what_megalite_does_not_compute_is_refused[a part of a head]",
    ),
    Mutant(
        "YaRN's factor is left out where it is the default",
        "megalite/conversion/rotary_keys.py",
        'if name == "factor" or name not in left_out',
        "if name not in left_out",
        f"{_FAMILIES}networks_that_no_family_has_are_refused_by_their_flags",
    ),
    Mutant(
        "a window that is left out is none",
        "megalite/conversion/window_keys.py",
        'config.get("sliding_window", default), [True]',
        'config.get("sliding_window"), [True]',
        f"{_FAMILIES}what_published_files_say_is_read_as_transformers_reads_it[Mistral, whose window is by default]",
    ),
    Mutant(
        "unknown keys are passed over",
        "megalite/conversion/family.py",
        "for name in config if name not in known]",
        "for name in () if name not in known]",
        f"{_FAMILIES}what_megalite_does_not_compute_is_refused[a key]",
    ),
    Mutant(
        "a config is not read again",
        "megalite/conversion/family.py",
        "if ours[name] != theirs[name]]",
        "if False]",
        f"{_FAMILIES}networks_that_no_family_has_are_refused_by_their_flags",
    ),
    Mutant(
        "tensors of a safetensors file may overlap",
        "megalite/conversion/huggingface_files.py",
        "        if entry.start != end:",
        "        if False:",
        "tests/unit/test_conversion_safetensors.py::test_what_the_format_forbids_is_refused[overlap]",
    ),
    Mutant(
        "sizes beyond 64 bits times nothing are nothing",
        "megalite/conversion/huggingface_files.py",
        "math.prod(size or 1 for size in shape)",
        "math.prod(shape)",
        "tests/unit/test_conversion_safetensors.py::test_what_the_format_forbids_is_refused[huge times nothing]",
    ),
    Mutant(
        "weights that are NaN are converted without a word",
        "megalite/conversion/not_finite.py",
        "            self._found.add(name)",
        "            pass",
        f"{_FAMILIES}weights_that_are_no_numbers_are_told",
    ),
    Mutant(
        "tensors that are left over are passed over",
        "megalite/conversion/huggingface_files.py",
        "elif not family.is_buffer(name):",
        "elif False:",
        f"{_FAMILIES}files_must_have_each_tensor_and_no_other",
    ),
    Mutant(
        "a tied model's own head is passed over",
        "megalite/conversion/huggingface.py",
        "if family.head in files.tensors and not torch.equal(",
        "if False and not torch.equal(",
        f"{_FAMILIES}two_heads_of_a_tied_model_are_refused",
    ),
    Mutant(
        "runs of a file's elements begin one too late",
        "megalite/conversion/mapping.py",
        "flat = values.view(-1)",
        "flat = values.view(-1).roll(1)",
        f"{_FAMILIES}there_and_back_is_the_same_bit_for_bit[llama]",
    ),
    Mutant(
        "a hang: what has ended on gloo is taken for under way",
        "megalite/watchdog/flight_recorder.py",
        'return COMPLETED if ended_on_gloo else str(entry["state"])',
        'return str(entry["state"])',
        "tests/unit/test_flight_recorder.py::test_what_gloo_retires_has_ended",
    ),
    Mutant(
        "a hang: a rank that is busy is taken for one that waits",
        "megalite/watchdog/flight_recorder.py",
        "return file == collectives.__file__ or Path(file).is_relative_to(Path(dist.__file__).parent)",
        "return bool(file)",
        f"{_HANG}collectives_under_way_are_counted_from_the_first_that_lacks_a_rank",
    ),
    Mutant(
        "a hang: messages on gloo are not counted",
        "megalite/watchdog/flight_recorder.py",
        "messages=count if link else 0",
        "messages=0",
        f"{_HANG}a_missing_stage_is_found_by_the_messages_that_wait_for_it",
    ),
    Mutant(
        "a hang: who waits for others is blamed as well",
        "megalite/watchdog/hang_analysis.py",
        "causes = {rank for wait in waits for rank in wait.absent} - waiting - stuck",
        "causes = {rank for wait in waits for rank in wait.absent} - stuck",
        "tests/unit/test_hang_analysis.py::test_the_rank_that_stopped_is_the_one_to_blame",
    ),
    Mutant(
        "a hang: operations are compared by their names alone",
        "megalite/watchdog/hang_analysis.py",
        "    return operation.name, operation.dtype, sum(math.prod(shape) for shape in operation.shapes)",
        "    return (operation.name,)",
        f"{_HANG}a_rank_with_another_size_is_named_even_where_the_backend_let_it_pass",
    ),
    Mutant(
        "a hang: whether a rank waits is lost on the way",
        "megalite/watchdog/flight_record.py",
        "return cls(waiting, tuple(",
        "return cls(None, tuple(",
        f"{_HANG_REPORT}a_dump_is_read_as_it_was_written",
    ),
    Mutant(
        "a hang: a rank without a file is not missed",
        "megalite/watchdog/hang_dump.py",
        "tuple(sorted(world - known))",
        "()",
        f"{_HANG_REPORT}a_missing_file_is_told",
    ),
    Mutant(
        "a hang: a damaged file ends the report",
        "megalite/watchdog/hang_dump.py",
        "except Exception as error:",
        "except KeyError as error:",
        f"{_HANG_REPORT}a_damaged_file_is_told_and_the_rest_used",
    ),
    Mutant(
        "a hang: rank 0 stands apart, by the thread of its monitor",
        "megalite/watchdog/hang_report.py",
        "if not other.startswith(_OWN_THREADS) and not _idles(other)",
        "if not _idles(other)",
        f"{_HANG_REPORT}the_report_names_the_rank_and_sets_the_outlier_apart",
    ),
    Mutant(
        "a STOP from before the run stops it",
        "megalite/training/control_files.py",
        "found = [name for name in names if has_file(self._directory / name)]",
        "found: list[str] = []",
        f"{_STOP}a_file_stops_the_run_and_one_from_before_does_not",
    ),
    Mutant(
        "a SAVE asks for a checkpoint after every step",
        "megalite/training/control_files.py",
        "        self._asked.discard(name)\n",
        "",
        f"{_STOP}a_file_saves_the_run_once_and_it_goes_on",
    ),
    Mutant(
        "an evaluation that was broken off is not made up for",
        "megalite/training/loop.py",
        "trainer.evaluation_left = loss is None",
        "trainer.evaluation_left = False",
        f"{_STOP}a_stop_breaks_an_evaluation_off_and_the_next_start_makes_up_for_it[file]",
    ),
    Mutant(
        "an evaluation that is left is forgotten where the run turns out to end there",
        "megalite/training/loop.py",
        "trainer.iteration < trainer.iterations or trainer.evaluation_left:",
        "trainer.iteration < trainer.iterations:",
        f"{_STOP}an_evaluation_that_is_left_when_the_run_turns_out_to_end_there_is_made_up_for",
    ),
    Mutant(
        "a run that was killed in its last evaluation is taken for finished",
        "megalite/training/pretrain.py",
        "(not left or over(path, last))",
        "True",
        f"{_STOP}a_run_killed_before_its_last_evaluation_is_over_finishes_it",
    ),
    Mutant(
        "the recorded end of a run counts for nothing without DONE",
        "megalite/training/pretrain.py",
        " or (metrics is not None and has_test_loss(metrics, last))",
        "",
        f"{_STOP}a_run_killed_before_its_last_evaluation_is_over_finishes_it",
    ),
    Mutant(
        "lost metrics are not told of",
        "megalite/training/trainer.py",
        "self._recorded(described) if path.parent == self.directory else None",
        "None",
        f"{_STOP}a_run_that_goes_on_says_what_its_metrics_have_lost",
    ),
    Mutant(
        "a damaged line of the metrics is left out in silence",
        "megalite/training/metrics.py",
        "                    damaged += 1\n",
        "",
        "tests/unit/test_metrics.py::test_a_damaged_line_is_left_out_and_told",
    ),
    Mutant(
        "the exit code of an error is not left in the file",
        "megalite/training/failure.py",
        "    leave_code(code)\n    where",
        "    where",
        "tests/distributed/test_failure.py::test_the_code_that_launchers_hide_is_left_in_a_file",
    ),
    Mutant(
        "a watchdog's limit has no least",
        "megalite/watchdog/limits.py",
        "learnt = max(self.least, FACTOR * longest[name])",
        "learnt = FACTOR * longest[name]",
        f"{_WATCHDOG}sections.py::test_a_limit_is_a_multiple_of_the_longest_and_never_below_the_least",
    ),
    Mutant(
        "a watchdog's section counts while the process stands still",
        "megalite/watchdog/sections.py",
        "return self._clock() - self._stopped",
        "return self._clock()",
        f"{_WATCHDOG}sections.py::test_a_time_in_which_the_process_stood_still_does_not_count",
    ),
    Mutant(
        "a watchdog's link forgets half a message",
        "megalite/watchdog/link.py",
        "            del self._buffer[: end + 1]\n",
        "            self._buffer.clear()\n",
        f"{_WATCHDOG}link.py::test_objects_arrive_however_the_bytes_are_cut",
    ),
    Mutant(
        "a watchdog's monitor dies of a senseless word",
        "megalite/watchdog/monitor.py",
        "except Exception:  # what cannot",
        "except LinkLost:  # what cannot",
        f"{_WATCHDOG}monitor.py::test_ranks_that_make_no_sense_are_as_good_as_dead",
    ),
    Mutant(
        "a rank does not start where its watchdog's monitor makes no sense",
        "megalite/watchdog/watchdog.py",
        "except Exception as error:  # what makes",
        "except LinkLost as error:  # what makes",
        f"{_WATCHDOG}monitor.py::test_a_rank_starts_though_the_monitor_makes_no_sense[{{'first': 7}}]",
    ),
    Mutant(
        "a watchdog ends a rank with a number that is no exit code",
        "megalite/watchdog/verdict.py",
        "return whole(value, 255)",
        "return value",
        f"{_WATCHDOG}monitor.py::"
        "test_a_monitor_that_makes_no_sense_does_not_end_a_ranks_thread_but_is_lost_to_it[{'first_fails': 256}]",
    ),
    Mutant(
        "a watchdog writes where its monitor says, wherever that is",
        "megalite/watchdog/verdict.py",
        " or not _FOLDER.fullmatch(value):",
        ":",
        f"{_WATCHDOG}monitor.py::"
        "test_a_monitor_that_makes_no_sense_does_not_end_a_ranks_thread_but_is_lost_to_it[{'dump': '../../outside'}]",
    ),
    Mutant(
        "a line to a watchdog fills the memory when it is parsed",
        "megalite/watchdog/link.py",
        "_LARGEST = 2**24",
        "_LARGEST = 2**26",
        f"{_WATCHDOG}link.py::test_a_line_is_not_so_long_that_it_fills_the_memory_when_it_is_parsed",
    ),
    Mutant(
        "a hang of many ranks is told in as many lines",
        "megalite/watchdog/verdict.py",
        "return [*found[:_MOST],",
        "return [*found,",
        f"{_WATCHDOG}verdict.py::test_a_hang_of_many_ranks_is_told_in_some_lines",
    ),
    Mutant(
        "a death of many ranks is told with all their processes",
        "megalite/watchdog/verdict.py",
        "for peer, _ in lost[:_NAMED])",
        "for peer, _ in lost)",
        f"{_WATCHDOG}verdict.py::test_a_death_of_many_ranks_names_all_in_a_line",
    ),
    Mutant(
        "a rank makes a line of a hang's message as long as it likes",
        "megalite/watchdog/verdict.py",
        "lines = list(map(_line, lines))",
        "pass",
        f"{_WATCHDOG}verdict.py::test_a_rank_makes_no_line_long",
    ),
    Mutant(
        "a rank draws on the terminal by its name for a section",
        "megalite/watchdog/verdict.py",
        " or not value.isprintable():",
        ":",
        f"{_WATCHDOG}monitor.py::test_ranks_that_make_no_sense_are_as_good_as_dead",
    ),
    Mutant(
        "a rank draws on the terminal by what it has lost",
        "megalite/watchdog/verdict.py",
        'one if one.isprintable() else "?"',
        "one",
        f"{_WATCHDOG}verdict.py::test_what_a_rank_says_draws_nothing_on_the_terminal",
    ),
    Mutant(
        "a hang: stacks with empty lines are looked at from each of them",
        "megalite/watchdog/hang_report.py",
        '_NEXT_THREAD = re.compile(r"(?<!\\n)',
        '_NEXT_THREAD = re.compile(r"',
        f"{_WATCHDOG}{_IN_PROPORTION}[empty lines-main thread]",
    ),
    Mutant(
        "a hang: a line of another thread's stack is looked at from each of its places",
        "megalite/watchdog/hang_report.py",
        """_FILE = re.compile(r'^  File "(.*)", line', re.MULTILINE)""",
        """_FILE = re.compile(r'  File "(?:.*/)?(.*)", line')""",
        f"{_WATCHDOG}{_IN_PROPORTION}[folders-another]",
    ),
    Mutant(
        "a hang: a line of the main thread's stack is looked at from each of its places",
        "megalite/watchdog/verdict.py",
        """_FRAME = re.compile(r'^  File""",
        """_FRAME = re.compile(r'  File""",
        f"{_WATCHDOG}{_IN_PROPORTION}[files-main thread]",
    ),
    Mutant(
        "a watchdog takes the word of who knows no secret",
        "megalite/watchdog/link.py",
        "if not hmac.compare_digest(code, seal.code(data)):",
        "if len(code) != len(seal.code(data)):",
        f"{_WATCHDOG}link.py::test_who_knows_another_secret_is_a_stranger",
    ),
    Mutant(
        "a watchdog's own lines can be sent back to it",
        "megalite/watchdog/link.py",
        'b" ".join((sender, its_digits, other_digits))',
        'b" ".join((b"both", *sorted((its_digits, other_digits))))',
        f"{_WATCHDOG}link.py::test_an_end_does_not_take_its_own_lines_for_another_ends",
    ),
    Mutant(
        "a watchdog's line can be said twice",
        "megalite/watchdog/link.py",
        "        self._number += 1\n",
        "",
        f"{_WATCHDOG}link.py::test_a_line_cannot_be_forged_by_who_stands_between[the same again]",
    ),
    Mutant(
        "a stranger may send a watchdog what it likes without a line's end",
        "megalite/watchdog/link.py",
        "_LARGEST if self.proved else _LARGEST_FIRST",
        "_LARGEST",
        f"{_WATCHDOG}link.py::test_a_line_without_end_ends_the_connection[False]",
    ),
    Mutant(
        "a watchdog looks at a long message again with each piece of it",
        "megalite/watchdog/link.py",
        "messages, searched = [], len(self._buffer)\n        self._buffer += data",
        "messages, searched = [], 0\n        self._buffer = bytearray(bytes(self._buffer) + data)",
        f"{_WATCHDOG}link.py::test_a_long_message_takes_time_in_proportion_to_its_length",
    ),
    Mutant(
        "strangers take all places of a watchdog's monitor",
        "megalite/watchdog/monitor.py",
        "if len(self._strangers) > _MOST_STRANGERS + len(self._missing):",
        "if len(self._strangers) > 1000:",
        f"{_WATCHDOG}monitor.py::test_of_many_strangers_the_first_have_to_go_and_ranks_still_come",
    ),
    Mutant(
        "a stranger may say nothing for ever",
        "megalite/watchdog/monitor.py",
        "now - self._strangers[0].heard > _GREETING_SECONDS",
        "now - self._strangers[0].heard > 1e9",
        f"{_WATCHDOG}monitor.py::test_who_does_not_say_who_it_is_has_seconds_for_it",
    ),
    Mutant(
        "a rank's place with the watchdog is taken by another",
        "megalite/watchdog/monitor.py",
        "if peer.rank not in self._world or peer.rank in self._ranks:",
        "if peer.rank not in self._world:",
        f"{_WATCHDOG}monitor.py::test_who_is_no_rank_or_one_that_is_there_is_refused[{{'rank': 1}}]",
    ),
    Mutant(
        "a secret may be in a file of another user",
        "megalite/watchdog/secret.py",
        " and status.st_uid == os.geteuid()",
        "",
        f"{_WATCHDOG}secret.py::test_what_another_could_have_written_or_can_read_is_no_secret[of another user]",
    ),
    Mutant(
        "a secret may be read by others",
        "megalite/watchdog/secret.py",
        "os.O_EXCL | os.O_CLOEXEC, 0o600)",
        "os.O_EXCL | os.O_CLOEXEC, 0o644)",
        f"{_WATCHDOG}secret.py::test_it_goes_by_a_file_that_nobody_else_can_read_and_that_is_removed",
    ),
    Mutant(
        "a process is killed that only has the number of a rank",
        "megalite/process/siblings.py",
        "_Process(os.getuid(), os.getppid(), start)",
        "_Process(os.getuid(), os.getppid(), seen.start)",
        "tests/unit/test_siblings.py::test_a_sibling_of_this_run_is_killed_though_it_is_stopped[True]",
    ),
    Mutant(
        "a process is killed that another launcher has started",
        "megalite/process/siblings.py",
        "_Process(os.getuid(), os.getppid(), start)",
        "_Process(os.getuid(), seen.parent, start)",
        "tests/unit/test_siblings.py::test_nobody_else_is",
    ),
    Mutant(
        "a rank kills itself",
        "megalite/process/siblings.py",
        "if process == os.getpid():",
        "if process == 1:",
        "tests/unit/test_siblings.py::test_it_never_is_the_process_itself",
    ),
    Mutant(
        "rank 0 listens on all interfaces",
        "megalite/process/listening.py",
        "socket.create_server((address[0], port, *address[2:])",
        'socket.create_server(("", port, *address[2:])',
        "tests/unit/test_listening.py::test_one_machine_talks_to_itself[127.0.0.1]",
    ),
    Mutant(
        "a rank listens where only its own machine finds it",
        "megalite/process/listening.py",
        "if alone or not _is_loopback(str(address[0]))]",
        "]",
        "tests/unit/test_listening.py::"
        "test_the_address_of_this_machine_is_taken_and_else_a_warning_says_that_it_is_all[addresses1-False-expected1]",
    ),
    Mutant(
        "a watchdog has a process of another machine killed",
        "megalite/watchdog/monitor.py",
        " and peer.space == peers[rank].space]",
        "]",
        f"{_WATCHDOG}monitor.py::test_nobody_is_asked_to_kill_a_process_of_another_machine",
    ),
    Mutant(
        "a watchdog does not know ranks that never came",
        "megalite/watchdog/monitor.py",
        "silence, folder, sorted(self._missing))",
        "silence, folder)",
        f"{_WATCHDOG}monitor.py::test_a_lost_connection_leads_to_the_rank_that_never_came",
    ),
    Mutant(
        "a watchdog takes any word of a rank for one of its place",
        "megalite/watchdog/monitor.py",
        "self._lost[connected.peer.rank] - connected.placed",
        "self._lost[connected.peer.rank] - connected.heard",
        f"{_WATCHDOG}monitor.py::test_a_death_is_told_with_the_age_of_what_is_known",
    ),
    Mutant(
        "a watchdog names the step of the last heartbeat in an alarm",
        "megalite/watchdog/monitor.py",
        """        if "fails" in message:
            connected""",
        """        elif "fails" in message:
            connected""",
        f"{_WATCHDOG}monitor.py::test_an_alarm_is_told_with_the_place_that_came_with_it",
    ),
    Mutant(
        "a watchdog lets two ranks speak where rank 0 is lost",
        "megalite/watchdog/monitor.py",
        "[connected, *displaced]",
        "[connected]",
        f"{_WATCHDOG}monitor.py::test_who_comes_later_and_is_lower_is_to_speak_at_once",
    ),
    Mutant(
        "a watchdog lets a rank that comes late wait for those that have ended",
        "megalite/watchdog/monitor.py",
        "            connected.link.send(**self._verdict)\n",
        "            pass\n",
        f"{_WATCHDOG}monitor.py::test_who_comes_when_the_run_is_ending_ends_too",
    ),
    Mutant(
        "a watchdog misses ranks that may yet come",
        "megalite/watchdog/monitor.py",
        "first.peer.section == MEETING",
        "False",
        f"{_WATCHDOG}monitor.py::test_who_has_not_come_is_not_missed_while_the_ranks_meet",
    ),
    Mutant(
        "a rank that fails before it comes tells nobody on other machines",
        "megalite/training/failure.py",
        "    elif place.world_size > 1 and not _ended_by_launcher() and code != EXIT_RESUMABLE:",
        "    elif place.world_size < 1:",
        f"{_MEETING}ranks_that_fail_before_they_come_leave_none_waiting_on_other_machines",
    ),
    Mutant(
        "rank 0 goes on without those who have failed before they came",
        "megalite/training/meeting.py",
        'store.get(_FAILED).decode(errors="replace") if store.check([_FAILED]) else ""',
        '""',
        f"{_MEETING}ranks_that_fail_before_they_come_leave_none_waiting_on_other_machines",
    ),
    Mutant(
        "the ranks that wait for rank 0 are not told that it has failed",
        "megalite/training/meeting.py",
        "        store.set(_ALL, first)\n",
        "",
        f"{_MEETING}ranks_that_fail_before_they_come_leave_none_waiting_on_other_machines",
    ),
    Mutant(
        "a tool starts as many workers as somebody types",
        "megalite/config/tool_arguments.py",
        '_AT_MOST = dict.fromkeys(("workers", "num_threads"), 1024)',
        '_AT_MOST = dict.fromkeys(("workers",), 1024)',
        "tests/unit/test_config_parse.py::test_a_tool_takes_no_number_beyond_all_bounds",
    ),
    Mutant(
        "a rank that is killed while the ranks meet is not noticed",
        "megalite/training/meeting.py",
        "partial(store.check, [_ALL])) or watch()\n",
        "partial(store.check, [_ALL]))\n",
        f"{_MEETING}a_rank_that_is_killed_before_the_run_is_together_is_named_and_ends_the_others[meeting-2-True]",
    ),
    Mutant(
        "a rank that may open too few files leaves the others waiting",
        "megalite/training/meeting.py",
        "    require_open_files(_FILES",
        "    (lambda count: None)(_FILES",
        f"{_MEETING}ranks_that_may_open_too_few_files_all_say_so_and_none_waits_for_another",
    ),
    Mutant(
        "a rank waits for a rank 0 that came and is dead",
        "megalite/training/meeting.py",
        "if silence > SILENCE:",
        "if False:",
        f"{_MEETING}who_comes_when_rank_0_is_dead_says_so",
    ),
    Mutant(
        "ranks that do not come are taken for a hang",
        "megalite/watchdog/watchdog.py",
        " and not isinstance(error, MeetingError):",
        ":",
        f"{_MEETING}the_ranks_that_do_not_come_are_named[store of rank 0]",
    ),
    Mutant(
        "a watchdog lets a launcher end a rank before the verdict",
        "megalite/watchdog/watchdog.py",
        "        ignore_stop_signals()\n",
        "",
        f"{_FAULTS}a_rank_that_dies_is_named_though_the_launcher_ends_the_others",
    ),
    Mutant(
        "a watchdog without a monitor ends nothing",
        "megalite/watchdog/watchdog.py",
        "if self._link is None or now - since > patience:",
        "if now - since > 1e9:",
        f"{_FAULTS}one_process_alone_that_hangs_is_ended",
    ),
    Mutant(
        "a failed post is a defect",
        "megalite/parallel/collectives.py",
        'isinstance(error, dist.DistError) or "gloo/" in str(error)',
        "isinstance(error, dist.DistError)",
        "tests/unit/test_parallel_collectives.py::test_an_operation_that_finds_a_rank_gone_before_it_begins_says_so[gloo]",
    ),
    Mutant(
        "a call that does not come back is waited for",
        "megalite/process/bounded.py",
        "return aside(call).result(seconds)",
        "return aside(call).result()",
        "tests/unit/test_bounded.py::test_a_call_that_does_not_come_back_is_left_alone",
    ),
    Mutant(
        "messages of two threads mix on one connection",
        "megalite/watchdog/link.py",
        "        with self._sending:\n",
        "        if True:\n",
        f"{_WATCHDOG}link.py::test_messages_of_several_threads_do_not_mix",
    ),
    Mutant(
        "something follows half a message",
        "megalite/watchdog/link.py",
        "self._torn = True",
        "pass",
        f"{_WATCHDOG}link.py::test_nothing_follows_a_message_that_could_not_be_sent_whole",
    ),
    Mutant(
        "a full disk under the output takes the exit code along",
        "megalite/process/output.py",
        "    except OSError as error:\n        os.dup2(",
        "    except ZeroDivisionError as error:\n        os.dup2(",
        "tests/distributed/test_failure.py::test_an_output_that_cannot_be_written_hides_no_other_error",
    ),
    Mutant(
        "a STOP that comes while old ones are looked for is removed",
        "megalite/training/control_files.py",
        "old_stop is not None and identity",
        "identity",
        "tests/unit/test_control_files.py::test_a_stop_that_comes_while_old_ones_are_looked_for_stays",
    ),
    Mutant(
        "who has come is named with who has not",
        "megalite/training/meeting.py",
        "if not store.check(",
        "if store.check(",
        f"{_MEETING}the_ranks_that_do_not_come_are_named[store of rank 0]",
    ),
    Mutant(
        "a rank waits without a limit for a store that stands still",
        "megalite/training/meeting.py",
        "return within(patience, call)",
        "return call()",
        f"{_MEETING}where_rank_0_does_not_come_another_rank_says_so[store of the launcher]",
    ),
    Mutant(
        "a start does not see that STOP is touched",
        "megalite/training/starting.py",
        "return status.st_mtime_ns, status.st_ino",
        "return status.st_ino",
        f"{_START}while_a_rank_does_not_come",
    ),
    Mutant(
        "a signal waits for the library that the main thread is in",
        "megalite/process/signals.py",
        "    os._exit(EXIT_RESUMABLE)\n",
        "    sys.exit()\n",
        f"{_START}while_a_checkpoint_is_loaded",
    ),
    Mutant(
        "a job ends in the middle of the last save",
        "megalite/training/deadline.py",
        "+ SAVES * save",
        "+ save",
        "tests/unit/test_deadline.py::test_the_reason_has_its_figures",
    ),
    Mutant(
        "a trace begins a step late",
        "megalite/training/profiling.py",
        "self._plan(config.profile_step_start + 1,",
        "self._plan(config.profile_step_start + 2,",
        f"{_PROFILES}chosen_steps_of_chosen_ranks_are_traced_by_flags[--save]",
    ),
    Mutant(
        "actions of the pipeline have no name in a trace",
        "megalite/pipeline/engine.py",
        "with named(str(action)) if naming",
        "with nullcontext() if naming",
        f"{_PROFILES}chosen_steps_of_chosen_ranks_are_traced_by_flags[--save]",
    ),
    Mutant(
        "a snapshot of memory is of any rank",
        "megalite/training/memory_history.py",
        "if rank in config.profile_ranks:",
        "if True:",
        "tests/unit/test_profiling.py::test_snapshots_of_memory_are_of_chosen_ranks_and_of_one_that_has_too_little",
    ),
    Mutant(
        "the doctor takes rank 0 for right",
        "megalite/doctor/alike.py",
        "common = statistics.mode(values.values())",
        "common = values[0]",
        f"{_DOCTOR_OF_RANKS}where_rank_0_is_the_odd_one_it_is_told_of",
    ),
    Mutant(
        "the doctor lets one pair of neighbours out",
        "megalite/doctor/bandwidth.py",
        "pairs[1::2], odd_one)",
        "pairs[1::2])",
        f"{_DOCTOR}neighbours_in_a_ring_talk_to_one_at_a_time_and_each_pair_does_once",
    ),
    Mutant(
        "the doctor looks at the beginning of data alone",
        "megalite/doctor/data_files.py",
        "for start in (0, max(size - _END, 0)):",
        "for start in (0,):",
        f"{_DOCTOR}data_that_differ_near_their_end_are_other_data",
    ),
    Mutant(
        "the doctor leaves its probe behind",
        "megalite/doctor/examination.py",
        "        stack.enter_context(probe)\n",
        "",
        f"{_DOCTOR_OF_RANKS}two_nodes_that_are_well",
    ),
    Mutant(
        "the doctor fits absolute errors",
        "megalite/doctor/figures.py",
        "weights = {size: 1 / seconds for size, seconds in points.items()}",
        "weights = dict.fromkeys(points, 1.0)",
        f"{_DOCTOR}a_small_message_counts_as_much_as_a_large_one",
    ),
    Mutant(
        "the doctor blames a slow node's neighbours",
        "megalite/doctor/figures.py",
        "found[node] = min(found[node], seconds)",
        "found[node] = seconds",
        f"{_DOCTOR}a_slow_node_is_named_and_its_neighbours_are_not",
    ),
    Mutant(
        "the doctor calls what is wrong well",
        "megalite/doctor/findings.py",
        'return EXIT_CONFIGURATION if self._of("wrong") else EXIT_FINISHED',
        "return EXIT_FINISHED",
        f"{_DOCTOR}the_verdict_says_what_to_do",
    ),
    Mutant(
        "the doctor takes no answer for a good one",
        "megalite/doctor/gpus.py",
        'return _Answer(None, "")',
        'return _Answer(0, "")',
        f"{_DOCTOR}a_driver_that_hangs_is_not_waited_for",
    ),
    Mutant(
        "the doctor passes over links that are down",
        "megalite/doctor/gpus.py",
        "if 0 < count < most:",
        "if False:",
        f"{_DOCTOR}what_is_wrong_with_a_gpu_is_told[link]",
    ),
    Mutant(
        "the doctor times messages where nodes do not reach each other",
        "megalite/doctor/judgement.py",
        "complete and not apart and not unready",
        "complete and not unready",
        f"{_DOCTOR_OF_RANKS}ports_that_cannot_be_reached_are_told_before_anything_waits_for_them",
    ),
    Mutant(
        "the doctor takes one clock for the other",
        "megalite/doctor/network.py",
        "_TIME.unpack(answer)[0] - (sent + taken / 2)",
        "sent + taken / 2 - _TIME.unpack(answer)[0]",
        f"{_DOCTOR}a_clock_that_is_ahead_is_found_and_told_of",
    ),
    Mutant(
        "the doctor drops both ends of a broken pair",
        "megalite/doctor/network.py",
        "if count > 1 and 2 * len(parted[node]) > count]",
        "if parted[node]]",
        f"{_DOCTOR}a_node_that_none_reaches_is_to_be_dropped_and_a_broken_pair_is_not",
    ),
    Mutant(
        "the doctor takes the limit that might be for the one that is",
        "megalite/doctor/node.py",
        "limit < needed:",
        "most < needed:",
        f"{_DOCTOR}a_node_is_looked_at_without_torch_and_its_limit_of_open_files_too",
    ),
    Mutant(
        "the doctor does not say what hangs",
        "megalite/doctor/reports.py",
        "self.doing = doing",
        'self.doing = ""',
        f"{_DOCTOR_OF_RANKS}a_rank_that_stands_still_and_a_file_system_that_hangs_are_told_apart",
    ),
    Mutant(
        "the doctor shows the algorithm's bandwidth as the bus's",
        "megalite/doctor/presentation.py",
        "if bus else 1\n",
        "if not bus else 1\n",
        f"{_DOCTOR}the_table_has_what_was_fitted_and_no_bandwidth_that_is_noise[1048576-bandwidths0]",
    ),
    Mutant(
        "the doctor waits without a limit for a store that stands still",
        "megalite/doctor/roll_call.py",
        "within(seconds + STORE_HANGS, call)",
        "call()",
        f"{_DOCTOR_OF_RANKS}where_rank_0_has_the_store_and_stands_still_the_others_end",
    ),
    Mutant(
        "the doctor waits on though its launcher wants it to end",
        "megalite/doctor/roll_call.py",
        "if self.stopping():",
        "if False:",
        f"{_DOCTOR_OF_RANKS}a_rank_that_dies_while_messages_are_timed_is_named_though_its_launcher_ends_all",
    ),
    Mutant(
        "the doctor looks for room where there is most",
        "megalite/doctor/run_directory.py",
        "and min(free) < checkpoints",
        "and max(free) < checkpoints",
        f"{_DOCTOR}there_must_be_room_on_the_node_that_has_least_and_leave_to_write",
    ),
    Mutant(
        "the doctor counts a checkpoint without the optimizer's state",
        "megalite/doctor/run_directory.py",
        "if with_state or part.name",
        "if part.name",
        f"{_DOCTOR_OF_RANKS}a_checkpoint_takes_what_the_doctor_says_and_there_must_be_room",
    ),
    Mutant(
        "of two findings the later one is told",
        "megalite/training/nonfinite_search.py",
        "if self.first is None or finding.order < self.first.order:",
        "if self.first is None or finding.order >= self.first.order:",
        f"{_FIRST_MODULE}[alone]",
    ),
    Mutant(
        "the stages are told in the order of forward, backward too",
        "megalite/training/nonfinite_search.py",
        "stage = stage if phase == 0 else self._stages.count - 1 - stage",
        "stage = stage",
        f"{_FIRST_MODULE}[pp 2, zb-v]",
    ),
    Mutant(
        "the gradient buffers stay watched",
        "megalite/training/nonfinite_search.py",
        "            for parameter, buffer in zip(parameters, buffers, strict=True):\n"
        "                parameter.gradient_buffer = buffer\n",
        "",
        f"{_FIRST_MODULE}[alone]",
    ),
    Mutant(
        "a gradient is not told from the sum that it is added to",
        "megalite/training/nonfinite_search.py",
        "own = target if overwrite else torch.empty_like(target)\n        self.gradient.add_to(own, overwrite=True)",
        "own = target\n        self.gradient.add_to(own, overwrite=overwrite)",
        f"{_NOT_FINITE}sums_that_overflow_are_told_from_what_they_are_made_of[0]",
    ),
    Mutant(
        "a sum that was not finite before makes every micro-batch after it an affected one",
        "megalite/training/nonfinite_search.py",
        "finite = finite and not_finite(target) is None",
        "finite = True",
        f"{_FIRST_MODULE}[alone]",
    ),
    Mutant(
        "the ranks that saw the first finding are not told from those that saw a later one",
        "megalite/training/nonfinite.py",
        "if (other.order, other.place) == (finding.order, finding.place)]",
        "if other.place == finding.place or other.order > finding.order]",
        f"{_FIRST_MODULE}[tp 2]",
    ),
    Mutant(
        "what is left of a first run is looked at after the second",
        "megalite/training/nonfinite.py",
        "_of_runs(first, second, result, hosts",
        "_of_runs([_FirstRun(**report) for report in _gather(_first_run(step, optimizer), mesh)], second, result, "
        "hosts",
        f"{_NOT_FINITE}a_fault_that_does_not_come_again_makes_a_device_suspect[0]",
    ),
    Mutant(
        "every search for a loss scale is looked into",
        "megalite/training/trainer.py",
        "if update.skipped and not searches else 0",
        "if update.skipped else 0",
        "tests/end_to_end/test_nonfinite.py::test_the_search_for_a_loss_scale_is_not_looked_into",
    ),
    Mutant(
        "a loss that is not finite is one rank's alone",
        "megalite/training/nonfinite.py",
        'return collectives.all_reduce_(flag, mesh.world(), "max").item() == 0.0',
        "return flag.item() == 0.0",
        "tests/end_to_end/test_nonfinite.py::test_a_loss_that_is_not_finite_on_one_rank_alone_is_every_ranks",
    ),
    Mutant(
        "a dynamic loss scale shrinks under a loss that is not finite",
        "megalite/training/trainer.py",
        "self.loss_scale.can_shrink and is_finite_everywhere(loss, self.mesh)",
        "self.loss_scale.can_shrink",
        "tests/end_to_end/test_nonfinite.py::test_a_run_that_has_diverged_tells_where_it_last_did",
    ),
    Mutant(
        "two random sites of a layer draw the same",
        "megalite/model/block.py",
        'Site(layer, "mlp output", shard)',
        'Site(layer, "attention output", shard)',
        f"{_DRAWS}[1-False-gpt2]",
    ),
    Mutant(
        "two layers draw the same",
        "megalite/model/block.py",
        'Site(layer, "attention output", shard)',
        'Site(0, "attention output", shard)',
        f"{_DRAWS}[1-False-gpt2]",
    ),
    Mutant(
        "the heads of all ranks draw the same",
        "megalite/model/attention.py",
        'Site(layer, "attention", mesh.coordinate("tp"))',
        'Site(layer, "attention")',
        f"{_DRAWS}[2-False-gpt2]",
    ),
    Mutant(
        "all parts of a sequence draw the same",
        "megalite/model/block.py",
        'shard = mesh.coordinate("tp") if sequence_parallel else 0',
        "shard = 0",
        f"{_DRAWS}[2-True-gpt2]",
    ),
    Mutant(
        "the reference of RMSNorm computes in the input's precision",
        "kernels/megalite_kernels/norm.py",
        """wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean_square""",
        """wide = input
        mean_square""",
        f"{_PRECISION}norms[wide-RMSNorm-bfloat16]",
    ),
    Mutant(
        "the reference of LayerNorm computes in the input's precision",
        "kernels/megalite_kernels/norm.py",
        "wide = torch.promote_types(first.dtype, torch.float32)",
        "wide = first.dtype",
        f"{_PRECISION}norms[wide-LayerNorm-bfloat16]",
    ),
    Mutant(
        "rotary angles are computed in the model's precision",
        "megalite/model/rotary.py",
        "positions.t().unsqueeze(-1).to(wide)",
        "positions.t().unsqueeze(-1).to(dtype).to(wide)",
        f"{_PRECISION}rotary_angles[yarn-bfloat16]",
    ),
    Mutant(
        "the model rounds its rotary tables",
        "megalite/model/rotary.py",
        "tables = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)",
        "tables = angles.cos().unsqueeze(2).to(dtype).to(wide), angles.sin().unsqueeze(2)",
        f"{_PRECISION}a_model_turns_by_the_exact_angles[bfloat16]",
    ),
    Mutant(
        "heads are rotated in their own precision",
        "kernels/megalite_kernels/rotary.py",
        """wide = input.to(cosine.dtype)
""",
        """wide, cosine, sine = input, cosine.to(input.dtype), sine.to(input.dtype)
""",
        f"{_PRECISION}rotations[halves-bfloat16]",
    ),
    Mutant(
        "scores are capped in their own precision",
        "kernels/megalite_kernels/attention.py",
        ".to(torch.promote_types(query.dtype, torch.float32)) * scale",
        " * scale",
        f"{_PRECISION}softmax_of_attention[capped-bfloat16]",
    ),
    Mutant(
        "logits are capped in their own precision",
        "kernels/megalite_kernels/cross_entropy.py",
        "valid = _capped(logits[tokens, : columns.valid].to(dtype), terms)",
        "valid = _capped(logits[tokens, : columns.valid], terms).to(dtype)",
        f"{_PRECISION}losses_of_tokens[all terms-bfloat16]",
    ),
    Mutant(
        "the gradient of the loss is computed in the logits' precision",
        "kernels/megalite_kernels/cross_entropy.py",
        "gradient = chunk if own else chunk.to(log_sums.dtype)",
        "gradient = chunk",
        f"{_PRECISION}losses_of_tokens[plain-bfloat16]",
    ),
    Mutant(
        "losses of micro-batches are summed in fp32",
        "megalite/pipeline/engine.py",
        "loss = output.detach().double()",
        "loss = output.detach().float()",
        f"{_PRECISION}losses_of_micro_batches_are_summed_exactly",
    ),
    Mutant(
        "tokens are counted in fp32",
        "megalite/training/batches.py",
        "loss_mask.sum(dtype=torch.float64)",
        "loss_mask.sum()",
        f"{_PRECISION}the_tokens_that_count_are_counted_exactly",
    ),
    Mutant(
        "the loss mask is rounded to the model's precision",
        "megalite/training/batches.py",
        "torch.promote_types(dtype, torch.float32)",
        "dtype",
        f"{_PRECISION}the_tokens_that_count_are_counted_exactly",
    ),
    Mutant(
        "gradients are added up in the model's precision",
        "megalite/training/construction.py",
        "torch.promote_types(dtype, torch.float32),",
        "dtype,",
        f"{_PRECISION}gradients_of_many_micro_batches_are_added_up_in_fp32[dense]",
    ),
    Mutant(
        "squares of a norm are added up in fp32",
        "kernels/megalite_kernels/l2_norm.py",
        "wide = chunk.double()",
        "wide = chunk.float()",
        f"{_PRECISION}squares_of_a_norm_are_added_up_in_float64[float32]",
    ),
    Mutant(
        "masters have the model's precision",
        "megalite/optim/shard.py",
        "return narrow.get(chosen) or torch.promote_types(parameters, torch.float32)",
        "return narrow.get(chosen) or parameters",
        f"{_PRECISION}updates_are_computed_and_kept_in_fp32[float32-adam]",
    ),
    Mutant(
        "gradients are clipped before they are widened",
        "megalite/optim/shard.py",
        """        wide = self.gradients.to(self.master.dtype)
        return wide if factor == 1.0 else wide.mul_(factor)""",
        "        return (self.gradients if factor == 1.0 else self.gradients * factor).to(self.master.dtype)",
        f"{_PRECISION}updates_are_computed_and_kept_in_fp32[bfloat16-adam]",
    ),
    Mutant(
        "the scale of embeddings is exact",
        "megalite/model/embedding.py",
        "torch.tensor(math.sqrt(config.hidden_size), dtype=dtype).item()",
        "math.sqrt(config.hidden_size)",
        f"{_PRECISION}the_scale_of_embeddings_is_rounded_to_the_weights[bfloat16]",
    ),
    Mutant(
        "between two ranks the largest is the sum",
        "megalite/parallel/collectives.py",
        'if group.size == 2 and op == "sum" and _is_gloo(group):',
        "if group.size == 2 and _is_gloo(group):",
        f"{_REGIONS}collectives_give_what_their_names_say[2]",
    ),
    Mutant(
        "a sum over ranks ends with the second",
        "megalite/parallel/collectives.py",
        "for other in slices[2:]:",
        "for other in slices[3:]:",
        f"{_REGIONS}collectives_give_what_their_names_say[3]",
    ),
    Mutant(
        "ranks' sums of exponentials are merged as they are",
        "kernels/megalite_kernels/cross_entropy.py",
        "torch.logsumexp(statistics[:, :1], dim=0)",
        "statistics[:, :1].exp().sum(dim=0).log()",
        f"{_REGIONS}statistics_of_large_logits_are_merged_and_overflow_nothing[2]",
    ),
    Mutant(
        "a middle never reaches the end of a text",
        "megalite/data/fill_in_the_middle.py",
        "random.randint(0, len(text) + 1, size=2)",
        "random.randint(0, len(text), size=2)",
        f"{_DATA}fill_in_the_middle.py::test_cuts_fall_anywhere_between_both_ends",
    ),
    Mutant(
        "a token as large as the vocabulary is loaded",
        "megalite/data/loader.py",
        ">= self.vocab_size:",
        "> self.vocab_size:",
        f"{_DATA}loader.py::test_the_vocabulary_ends_before_its_size[first input]",
    ),
    Mutant(
        "a token as large as the vocabulary is evaluated",
        "megalite/inference/documents.py",
        "int(tokens.max()) < tokenizer.vocab_size",
        "int(tokens.max()) <= tokenizer.vocab_size",
        "tests/unit/test_evaluation.py::test_data_that_cannot_be_predicted_are_refused",
    ),
    Mutant(
        "a token as large as the vocabulary is written",
        "megalite/data/encoding.py",
        "int(tokens.max()) < tokenizer.vocab_size",
        "int(tokens.max()) <= tokenizer.vocab_size",
        f"{_DATA}preprocess.py::test_a_tokenizer_that_goes_beyond_its_vocabulary_is_refused[257-True]",
    ),
    Mutant(
        "pointers of an index are believed",
        "megalite/data/indexed_dataset.py",
        "        self._check_pointers(advance)\n",
        "",
        f"{_DATA}indexed_dataset.py::test_damage_is_told_with_the_path_and_what_to_do[all pointers]",
    ),
    Mutant(
        "document boundaries are compared by differences that overflow",
        "megalite/data/indexed_dataset.py",
        "backwards = block[1:] < block[:-1]",
        "backwards = np.diff(block) < 0",
        f"{_DATA}indexed_dataset.py::test_damage_is_told_with_the_path_and_what_to_do[boundaries round 64 bits]",
    ),
    Mutant(
        "a token file with another checksum than recorded is taken",
        "megalite/data/verification.py",
        "if found != recorded:",
        "if False:",
        f"{_DATA}verification.py::test_a_flipped_bit_is_refused[bin]",
    ),
    Mutant(
        "damage that is found while a run goes on does not end it",
        "megalite/data/loader.py",
        "            self.verification.raise_damage()",
        "            pass",
        f"{_DATA}verification.py::test_a_run_does_not_wait_for_what_is_large_and_ends_when_damage_is_found",
    ),
    Mutant(
        "a writer that goes on leaves what was there out of the checksums",
        "megalite/data/indexed_writer.py",
        "                self._add(piece)",
        "                pass",
        f"{_DATA}verification.py::test_checksums_are_of_the_files_also_where_a_writer_went_on",
    ),
    Mutant(
        "a token as large as the vocabulary passes inspection",
        "megalite/data/inspection.py",
        "largest >= vocab_size):",
        "largest > vocab_size):",
        f"{_DATA}tools.py::test_a_token_as_large_as_the_recorded_vocabulary_is_damage",
    ),
    Mutant(
        "a prompt may have a token as large as the vocabulary",
        "megalite/inference/generation.py",
        "max(prompt) < config.vocab_size",
        "max(prompt) <= config.vocab_size",
        "tests/unit/test_sampling.py::test_a_prompt_has_tokens_of_the_models_vocabulary",
    ),
    Mutant(
        "weights are drawn in blocks of half the size",
        "megalite/parallel/initialization.py",
        "BLOCK_ELEMENTS = 1 << 16",
        "BLOCK_ELEMENTS = 1 << 15",
        f"{_UNIT}initialization.py::test_values_are_those_of_the_documented_rule[(9, 16384)]",
    ),
    Mutant(
        "output layers start as wide as the others",
        "megalite/model/mlp.py",
        "Normal(config.init_method_std / math.sqrt(2 * config.num_layers))",
        "Normal(config.init_method_std)",
        _one_step("tp1-dp1"),
    ),
    Mutant(
        "an index of samples is another sequence length's",
        "megalite/data/gpt_dataset.py",
        """            "sequence_length": sequence_length,
""",
        "",
        f"{_APART}samples_of_tokens_{_NOT_OTHERS}",
    ),
    Mutant(
        "an index of samples is another split's",
        "megalite/data/gpt_dataset.py",
        """            "sequences": [sequences.start, sequences.stop],
""",
        "",
        f"{_APART}samples_of_tokens_{_NOT_OTHERS}",
    ),
    Mutant(
        "an index of a blend has other weights",
        "megalite/data/blend.py",
        '"weights": shares, "size"',
        '"size"',
        f"{_APART}blends_{_NOT_OTHERS}",
    ),
    Mutant(
        "conversations are another tokenizer's",
        "megalite/data/sft_dataset.py",
        """            "tokenizer": tokenizer.identity(),
""",
        "",
        f"{_APART}conversations_{_NOT_OTHERS}",
    ),
    Mutant(
        "packed conversations are in another seed's order",
        "megalite/data/sft_dataset.py",
        """            "seed": self.seed,
""",
        "",
        f"{_APART}conversations_{_NOT_OTHERS}",
    ),
    Mutant(
        "a run divides its loss by its own copy's tokens",
        "megalite/training/trainer.py",
        "count = collectives.all_reduce_(valid_tokens(micro_batches, self.mesh.device), data_parallel).item()",
        "count = valid_tokens(micro_batches, self.mesh.device).item() * data_parallel.size",
        f"{_TRAINER}[copies]",
    ),
    Mutant(
        "a run's rates are those of the next step",
        "megalite/training/trainer.py",
        "rates = self.rates.at(self.consumed_samples)",
        "rates = self.rates.at(self.consumed_samples + batch_size)",
        f"{_TRAINER}[alone]",
    ),
    Mutant(
        "an evaluation reads its first batch each time",
        "megalite/training/trainer.py",
        "loader.micro_batches(batch * batch_size, num_micro_batches)",
        "loader.micro_batches(0, num_micro_batches)",
        f"{_TRAINER}[alone]",
    ),
    Mutant(
        "clipping makes small gradients larger",
        "megalite/optim/optimizer.py",
        "min(1.0, self.config.clip_grad / (norm + 1e-6))",
        "self.config.clip_grad / (norm + 1e-6)",
        "tests/unit/test_optimizer_backends.py::test_gradients_are_clipped_by_their_norm_and_only_down[4.0-torch]",
    ),
    Mutant(
        "a skipped step counts as an update",
        "megalite/optim/optimizer.py",
        """        if result.skipped:
            return result
""",
        """        if result.skipped:
            self.steps += 1
            return result
""",
        "tests/unit/test_optimizer_backends.py::test_gradients_are_clipped_by_their_norm_and_only_down[0.0-torch]",
    ),
    Mutant(
        "a loss scale forgets overflows when it is restored",
        "megalite/optim/loss_scale.py",
        'overflows_left=int(state["overflows_left"]),',
        "overflows_left=self.overflows_left,",
        "tests/unit/test_loss_scale.py::test_it_goes_on_from_its_state",
    ),
    Mutant(
        "a run has no samples for its last evaluation",
        "megalite/data/datasets.py",
        "(train_iters // eval_interval + 1) * evaluation",
        "-(-train_iters // eval_interval) * evaluation",
        f"{_DATA}datasets.py::test_each_evaluation_of_a_run_has_samples_of_its_own[9-4]",
    ),
    Mutant(
        "top-p keeps a token more where p is reached",
        "megalite/inference/sampling.py",
        "before >= sampling.top_p",
        "before > sampling.top_p",
        "tests/unit/test_sampling.py::test_top_p_stops_where_p_is_reached",
    ),
    Mutant(
        "training goes on as in evaluation",
        "megalite/training/trainer.py",
        """        self.network.train()
""",
        "",
        "tests/distributed/test_trainer.py::test_evaluations_drop_nothing_and_leave_no_trace",
    ),
    Mutant(
        "all micro-batches of a run draw the same",
        "megalite/training/batches.py",
        'key=RandomKey(seed, fields["sample_id"])',
        "key=RandomKey(seed, 0)",
        f"{_PRECISION}the_tokens_that_count_are_counted_exactly",
    ),
    Mutant(
        "scores are rounded to the model's precision",
        "megalite/inference/network.py",
        "torch.zeros(shape, dtype=torch.promote_types(stage.dtype, torch.float32), device=device)",
        "torch.zeros(shape, dtype=stage.dtype, device=device)",
        f"{_PRECISION}scores_of_tokens[bfloat16]",
    ),
    Mutant(
        "a new optimizer goes on from other masters",
        "megalite/checkpoint/loading.py",
        "if optimizer is not None and not state and not casts:",
        "if False:",
        f"{_CHECKPOINT}a_new_optimizer_begins_from_the_weights_that_were_loaded[masters]",
    ),
    Mutant(
        "a new optimizer goes on with the updates of the old one",
        "megalite/checkpoint/loading.py",
        "manifest.training.optimizer_steps if state else 0",
        "manifest.training.optimizer_steps",
        f"{_CHECKPOINT}a_new_optimizer_begins_from_the_weights_that_were_loaded[masters]",
    ),
    Mutant(
        "weights of more bits are read from those of less",
        "megalite/checkpoint/loading.py",
        "return part.name if alike or master not in manifest.tensors else master",
        "return part.name",
        f"{_CHECKPOINT}weights_of_another_precision_come_from_the_finest_there_are",
    ),
    Mutant(
        "weights of others leave the masters as they are",
        "megalite/checkpoint/loading.py",
        "r.part.name.startswith((MODEL, MASTER))]",
        "r.part.name.startswith(MODEL)]",
        f"{_CHECKPOINT}weights_of_others_are_rounded_and_their_masters_are_not[masters]",
    ),
    Mutant(
        "links between stages wait for torch's own half hour",
        "megalite/parallel/mesh.py",
        '_new_process_group(self.rank, key, self._timeout, label="link")',
        '_new_process_group(self.rank, key, None, label="link")',
        "tests/distributed/test_parallel_mesh.py::test_waiting_for_a_neighbour_is_added_up_and_has_the_same_limit",
    ),
    Mutant(
        "only the last wait for others counts",
        "megalite/parallel/collectives.py",
        "self.waits.seconds += time.perf_counter() - began",
        "self.waits.seconds = time.perf_counter() - began",
        "tests/distributed/test_parallel_mesh.py::test_waiting_for_a_neighbour_is_added_up_and_has_the_same_limit",
    ),
    Mutant(
        "the peak of memory is told in thousands",
        "megalite/parallel/device.py",
        'unit = 1 if sys.platform == "darwin" else 1024',
        'unit = 1 if sys.platform == "darwin" else 1000',
        "tests/unit/test_parallel_device.py::test_the_peak_of_memory_is_in_bytes",
    ),
    Mutant(
        "what ranks do together behind their lists is left out of the proof",
        "megalite/pipeline/steps.py",
        "check(self.stages, lists, micro_batches, self._reductions, behind=self._behind)",
        "check(self.stages, lists, micro_batches, self._reductions)",
        "tests/unit/test_pipeline_engine.py::test_what_ranks_do_together_behind_their_lists_is_part_of_the_proof",
    ),
    Mutant(
        "waiting for a neighbour's message counts as own work",
        "megalite/pipeline/point_to_point.py",
        "group_src=0), lambda: tensor, group.waits)",
        "group_src=0), lambda: tensor)",
        "tests/distributed/test_parallel_mesh.py::test_waiting_for_a_neighbour_is_added_up_and_has_the_same_limit",
    ),
    Mutant(
        "a recorded action takes as long as its message is waited for",
        "megalite/pipeline/engine.py",
        "        step.wait_for_message(action)\n        synchronize(self._device)\n        start = ",
        "        start = time.perf_counter() - self._origin\n        step.wait_for_message(action)\n        _ = ",
        "tests/unit/test_pipeline_engine.py::test_a_recorded_action_begins_when_its_message_is_there",
    ),
    Mutant(
        "a stage has the windows of the first layers",
        "megalite/model/gpt.py",
        "windows = config.keys_before[part.first_layer : part.first_layer + part.layers]",
        "windows = config.keys_before[: part.layers]",
        "tests/unit/test_parallel_model.py::test_a_stage_has_the_windows_of_its_own_layers",
    ),
    Mutant(
        "shards of a bucket round moments in 8 bits alike",
        "megalite/optim/elementwise.py",
        "flat = Flat(run.parameters, run.gradients, run.master if run.has_master else None, run.start)",
        "flat = Flat(run.parameters, run.gradients, run.master if run.has_master else None)",
        "tests/unit/test_optimizer_packed.py::test_an_update_draws_by_step_and_place",
    ),
    Mutant(
        "replicas of copies and instances share a number",
        "megalite/optim/places.py",
        "replica = copies.index(rank) * instances + instance",
        "replica = copies.index(rank) + instance",
        "tests/unit/test_parallel_buckets.py::test_replicas_of_copies_and_instances_share_what_is_saved",
    ),
    Mutant(
        "damage on the lowest rank hides what is not damage",
        "megalite/checkpoint/agreement.py",
        "failed = sorted((report for report in reports if report is not None), key=lambda report: report[0])",
        "failed = [report for report in reports if report is not None]",
        "tests/distributed/test_checkpoint.py::test_what_is_not_damage_is_told_before_damage",
    ),
    Mutant(
        "conversations are another template's special tokens",
        "megalite/data/sft_dataset.py",
        '"template": None if template is None else [template.source, dict(template.special_tokens)],',
        '"template": None if template is None else template.source,',
        "tests/unit/test_data_index_cache.py::test_conversations_do_not_come_from_the_indices_of_others",
    ),
    Mutant(
        "the pointers of a further block begin behind those of all blocks before",
        "megalite/data/indexed_writer.py",
        "position = int(ends[-1])",
        "position += int(ends[-1])",
        "tests/unit/test_data_indexed_dataset.py::test_an_index_of_several_blocks_is_one",
    ),
    Mutant(
        "a run goes on that does not end documents as the stopped one did",
        "megalite/data/preprocess.py",
        '        "json_keys": encoding.json_keys,\n        "append_eod": encoding.append_eod,\n',
        '        "json_keys": encoding.json_keys,\n',
        "tests/unit/test_data_resume.py::test_a_run_that_writes_other_tokens_is_a_different_one",
    ),
    Mutant(
        "windows of Qwen begin a layer late",
        "megalite/conversion/window_keys.py",
        'lambda layer: layer >= config.get("max_window_layers", 28)',
        'lambda layer: layer > config.get("max_window_layers", 28)',
        "tests/unit/test_conversion_huggingface.py::test_what_is_said_otherwise_or_not_at_all[windows from a layer on]",
    ),
    Mutant(
        "a cap that is off is the default",
        "megalite/conversion/config_keys.py",
        "lambda config: {name: config.get(name, default)}",
        "lambda config: {name: config.get(name) or default}",
        "tests/unit/test_conversion_huggingface.py::test_what_is_said_otherwise_or_not_at_all[caps that are off]",
    ),
    Mutant(
        "a tensor made of several has the dtype of the last",
        "megalite/conversion/mapping.py",
        "dtypes[name] = torch.promote_types(dtypes.get(name, kind.dtype), kind.dtype)",
        "dtypes[name] = kind.dtype",
        "tests/unit/test_conversion_huggingface.py::test_what_is_made_of_several_tensors_has_the_widest_dtype",
    ),
    Mutant(
        "a chunk of layers is taken for another stage's",
        "megalite/conversion/megatron_torch_dist.py",
        'if getattr(self._last, "saved", None) != saved:',
        'if getattr(getattr(self._last, "saved", None), "key", None) != saved.key:',
        "tests/unit/test_conversion_megatron.py::test_each_stage_may_have_saved_several_layers_in_one_chunk",
    ),
    Mutant(
        "what a killed process left of a file stays for ever",
        "megalite/files.py",
        "if folder else left.unlink()",
        "if folder else None",
        "tests/unit/test_files.py::test_what_a_killed_process_left_goes_with_the_next_write",
    ),
    Mutant(
        "a start has no more room for files than its process began with",
        "megalite/process/host.py",
        "    raise_open_file_limit()\n",
        "",
        "tests/unit/test_host.py::test_a_limit_that_can_be_raised_is_no_obstacle",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose fault contains one of these")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="only so many, others in each commit")
    arguments = parser.parse_args()
    words = arguments.words
    chosen = [m for m in MUTANTS if not words or any(word in m.fault for word in words)]
    if arguments.sample is not None:
        chosen = sample(chosen, arguments.sample, version())
    tests = sorted({mutant.test for mutant in chosen})
    with _copy() as tree:
        if _pytest(tree, *tests).returncode != 0:
            sys.exit("the named tests do not pass on the tree as it is")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        verdicts = []
        for mutant, verdict in zip(chosen, workers.map(_verdict, chosen), strict=True):
            print(f"{verdict or 'caught':8}  {mutant.fault}  ({mutant.test})", flush=True)
            verdicts.append(verdict)
    if any(verdicts):
        sys.exit(f"{sum(map(bool, verdicts))} of {len(chosen)} mutants were not caught")
    print(f"all {len(chosen)} mutants were caught")


def sample(mutants: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """Some of the mutants, the same for the same seed; those whose test is cheap come more often."""

    def drawn(mutant: Mutant) -> float:
        digest = hashlib.sha256(f"{seed}/{mutant.fault}".encode()).digest()
        return int.from_bytes(digest) * COST[mutant.test.split("/")[1]]

    return sorted(mutants, key=drawn)[:count]


def version() -> str:
    """The commit; where there is no git, a digest of the files that the mutants change."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0:
        return git.stdout.strip()
    files = sorted({mutant.file for mutant in MUTANTS})
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()


def _verdict(mutant: Mutant) -> str:
    """Empty where the named test fails on the mutant, else what happened."""
    with _copy() as tree:
        mutant.apply(tree)
        try:
            result = _pytest(tree, mutant.test)
        except subprocess.TimeoutExpired:
            return "HUNG"
    if result.returncode in (0, TESTS_FAILED):
        return "" if result.returncode else "SURVIVED"
    print(result.stdout, file=sys.stderr)
    return "BROKEN"


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutant_") as directory:
        for name in COPIED:
            source, target = ROOT / name, Path(directory) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, target)
        yield Path(directory)


def _pytest(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of `tree`; what it prints is shown where they are expected to pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=tree, env=environment, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


if __name__ == "__main__":
    main()
