"""Names of programs and pages as this installation has them. A wheel has commands, and neither scripts nor pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_OF_SCRIPTS = {
    "pretrain_gpt": "pretrain",
    "finetune_gpt": "finetune",
    "pretrain_mamba": "pretrain-hybrid",
    "preprocess_data": "preprocess",
    "inspect": "inspect-checkpoint",
    "merge": "merge-checkpoints",
}
_SAME = (
    "calibrate|chaos|check_export|compare_synchronization|convert|doctor|draw_schedule|evaluate|generate|hang_report|"
    "inspect_dataset|merge_datasets|plan|report|reshard|scaling|train_tokenizer|translate|verify"
)
_OF_TOOLS = rf"(?<!\S)tools/(?:checkpoint/)?({'|'.join(_OF_SCRIPTS)}|{_SAME})"
_SCRIPT = re.compile(rf"(?:python )?(?:{_OF_TOOLS}|(?<![\w/.-])(pretrain_(?:gpt|hybrid|mamba)|finetune_gpt))\.py\b")
_PAGE = re.compile(r"(?<![\w/])docs/\w+\.md(?! of megalite)")


def is_clone() -> bool:
    """Tell whether the scripts and the pages lie beside this package."""
    return (_ROOT / "pretrain_gpt.py").is_file()


def has_commands() -> bool:
    """Tell whether a person here starts programs as commands: in a wheel, or since this program was started so."""
    return Path(sys.argv[0]).name.startswith("megalite-") or not is_clone()


def as_installed(text: str) -> str:
    """Return a text for a person with the names that programs have here, and where pages are that are not here.

    A file that the command line names is the person's own.
    """
    if has_commands():
        text = _SCRIPT.sub(_command, text)
    return text if is_clone() else _PAGE.sub(_page, text)


def _is_given(path: str) -> bool:
    return any(path in word for word in sys.argv[1:])


def _page(found: re.Match[str]) -> str:
    return found[0] if _is_given(found[0]) else f"{found[0]} of megalite's source"


def _command(found: re.Match[str]) -> str:
    if _is_given(found[0]):
        return found[0]
    script = found[1] or found[2]
    name = "megalite-" + _OF_SCRIPTS.get(script, script.replace("_", "-"))
    line = found.string[found.string.rfind("\n", 0, found.start()) + 1 : found.start()]
    return f"--no-python {name}" if "torchrun" in line else name
