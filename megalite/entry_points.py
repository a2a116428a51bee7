"""Entry points of the extras: all that the core knows of them. Each is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

_ENTRY_POINTS = {
    "synchronization": "megalite.extras.synchronization.from_flags:synchronization",
    "alarms": "megalite.extras.alarms.alarms:Alarms",
    "corruption_watch": "megalite.extras.corruption.watch:CorruptionWatch",
    "monitors": "megalite.extras.monitors.from_flags:monitors",
    "largest_tensors": "megalite.extras.monitors.largest:largest_tensors",
    "step_traces": "megalite.extras.verify.own_run:StepTraces",
    "memory_copies": "megalite.extras.recovery.copies:memory_copies",
    "survivors": "megalite.extras.recovery.survivors:Survivors",
    "run_single_rank": "megalite.extras.planner.single_rank:run_single_rank",
    "with_written_layout": "megalite.extras.planner.written_layout:with_written_layout",
    "config_of_rank": "megalite.extras.planner.device_classes:of_rank",
    "data_parallel_speeds": "megalite.extras.planner.device_classes:data_parallel_speeds",
    "device_lines": "megalite.extras.planner.device_plan:device_lines",
    "run_warm": "megalite.extras.recovery.launched:run_warm",
    "run_program_warm": "megalite.extras.recovery.launched:run_program_warm",
    "generation": "megalite.extras.recovery.generation:generation",
    "sinks": "megalite.extras.sinks.from_flags:sinks",
    "require_libraries": "megalite.extras.sinks.libraries:require_libraries",
    "report_at_end": "megalite.extras.report.at_end:report_at_end",
    "text_sampler": "megalite.extras.post_training.text_sampler:TextSampler",
    "check_teacher": "megalite.extras.post_training.distillation:check_teacher",
    "teacher": "megalite.extras.post_training.distillation:Teacher",
    "distilled_terms": "megalite.extras.post_training.distillation:distilled_terms",
    "preference_datasets": "megalite.extras.post_training.pairs:build_pair_datasets",
    "preference_task": "megalite.extras.post_training.preference_task:PreferenceTask",
    "scheduled_mix": "megalite.extras.mixes.from_flags:ScheduledMix",
    "blend_change_notes": "megalite.extras.mixes.blend_changes:blend_change_notes",
    "unit_notes": "megalite.extras.mixes.units:unit_notes",
    "ledger_lines": "megalite.extras.mixes.ledger:ledger_lines",
    "mixed_prefixes": "megalite.extras.mixes.schedule:mixed_prefixes",
    "replan": "megalite.extras.planner.replan:replan",
}


def entry_point(name: str) -> Any:
    """Import and return what an extra gives to the core."""
    module, _, attribute = _ENTRY_POINTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
