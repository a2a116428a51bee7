"""Tasks for lm_eval that need no network: a choice, a text to predict, a text to generate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHOICES: Sequence[Mapping[str, Any]] = (
    {"question": "Which is a fruit?", "choices": ["apple", "a stone", "née"], "answer": 0},
    {"question": "What barks?", "choices": ["the moon", "a dog"], "answer": 1},
    {"question": "A question that is far longer than the model can read at once?", "choices": ["x", "yy"], "answer": 0},
    {"question": "Two?", "choices": ["1 + 1", "1 + 2", "2 + 2", "3"], "answer": 0},
    {"question": "Which is first?", "choices": ["b", "a"], "answer": 1},
)
TEXTS: Sequence[Mapping[str, Any]] = (
    {"text": "A text of several windows, naïvely long: one, two, three, four, five, six, seven."},
    {"text": "A short one."},
)
PROMPTS: Sequence[Mapping[str, Any]] = (
    {"prompt": "def main(", "answer": ""},
    {"prompt": "one, two, three", "answer": ""},
    {"prompt": "from a to z, from one to many", "answer": ""},
    {"prompt": "# Title", "answer": ""},
)
STOP = "e"
MAX_NEW_TOKENS = 12

_TASKS: Mapping[str, tuple[Sequence[Mapping[str, Any]], str]] = {
    "local_choices": (
        CHOICES,
        """\
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    ),
    "local_texts": (
        TEXTS,
        """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    ),
    "local_prompts": (
        PROMPTS,
        f"""\
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
target_delimiter: ""
generation_kwargs: {{until: ["{STOP}"], max_gen_toks: {MAX_NEW_TOKENS}, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
""",
    ),
}
NAMES = tuple(_TASKS)
BROKEN = "broken"
"""Task whose data do not exist."""


def write_tasks(folder: Path) -> Path:
    """Create the folder for lm_eval's `include_path` and return it. It is complete before ranks start, which only
    read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (records, description) in _TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{description}metadata: {{version: 1}}\n")
    nowhere = "dataset_path: json\ndataset_kwargs: {data_files: {test: nowhere}}\n"
    (folder / f"{BROKEN}.yaml").write_text(f"task: {BROKEN}\n{nowhere}")
    return folder
