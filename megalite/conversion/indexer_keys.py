"""Keys of config.json on sparse attention: its indexers, and the layers that have one."""

from __future__ import annotations

from typing import Any

from megalite.config import ModelConfig
from megalite.config.layer_specs import SPARSE_LETTER
from megalite.conversion.config_keys import Json, Keys, fixed, key, layers_of, value_of
from megalite.conversion.layer_keys import letters_of_kinds
from megalite.errors import CheckpointError
from megalite.small_files import shown

INDEXERS = {"experimental_attention_variant": "dsa", "dsa_indexer_k_norm_epsilon": 1e-6}
"""Fields of sparse attention that follow from no key."""
_LAYERS = dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), SPARSE_LETTER)
_CHOICES = {"full": "F", "shared": "S"}
_TYPES, _PATTERN = "indexer_types", "index_topk_pattern"
_EVERY, _OFFSET = "index_topk_freq", "index_skip_topk_offset"


def indexer(heads: int, *, interleaved: bool) -> tuple[Keys, ...]:
    """Return the entries for indexers. `heads`: their number if config.json lacks it."""
    return (
        key("index_n_heads", "dsa_indexer_n_heads", heads),
        key("index_head_dim", "dsa_indexer_head_dim", 128),
        key("index_topk", "dsa_indexer_topk", 2048),
        fixed("indexer_rope_interleave", interleaved, written=interleaved),
        _sparse_everywhere(),
    )


def _sparse_everywhere() -> Keys:
    """Return the entry for the kinds of attention of all layers, which must be sparse."""

    def read(config: Json) -> dict[str, Any]:
        kinds, layers = config.get("layer_types"), layers_of(config)
        if kinds is not None and len(letters_of_kinds("layer_types", kinds, _LAYERS)) != layers:
            raise CheckpointError(f"layer_types has {len(kinds)} entries for {layers} layers")
        return {}

    return Keys(("layer_types",), read, lambda _: {})


def choosing_layers() -> Keys:
    """Return the entry for the layers that have an indexer; the others attend to what the last one has chosen."""

    def read(config: Json) -> dict[str, Any]:
        layers, found = layers_of(config), set[str]()
        if (kinds := config.get(_TYPES)) is not None:
            found.add(letters_of_kinds(_TYPES, kinds, _CHOICES))
        if (pattern := config.get(_PATTERN)) is not None:
            as_text = isinstance(pattern, str)
            letters = {letter: letter for letter in _CHOICES.values()} if as_text else _CHOICES
            found.add(letters_of_kinds(_PATTERN, [*pattern] if as_text else pattern, letters))
        if not found or _EVERY in config or _OFFSET in config:
            found.add(_by_number(config, layers))
        if len(found) > 1:
            raise CheckpointError(f"{_TYPES}, {_PATTERN}, {_EVERY} and {_OFFSET} differ: give one of them")
        (choices,) = found
        if len(choices) != layers:
            raise CheckpointError(f"{_TYPES} or {_PATTERN} has {len(choices)} entries for {layers} layers")
        return _fields(choices)

    def write(model: ModelConfig) -> dict[str, Any]:
        if model.dsa_indexer_topk_freq == 1:
            return {}
        return {_EVERY: model.dsa_indexer_topk_freq, _OFFSET: max(model.dsa_indexer_skip_topk_offset, 1)}

    return Keys((_TYPES, _PATTERN, _EVERY, _OFFSET), read, write)


def _by_number(config: Json, layers: int) -> str:
    """Return the letter of each layer, F if it has an indexer: the first ones, and then every so many."""
    every, offset = value_of(config, _EVERY, 1), value_of(config, _OFFSET, 2)
    if type(every) is not int or type(offset) is not int or min(every, offset) < 0:
        raise CheckpointError(f"{_EVERY} is {shown(every)} and {_OFFSET} {shown(offset)}: give whole numbers")
    return "".join("S" if max(layer - offset + 1, 0) % max(every, 1) else "F" for layer in range(layers))


def _fields(choices: str) -> dict[str, Any]:
    """Return the fields for layers with these letters. Raises CheckpointError if no flags say the same."""
    if "S" not in choices:
        return {"dsa_indexer_topk_freq": 1}
    offset = choices.index("S")
    every = (choices[offset:].find("F") + 1) or len(choices)
    if offset == 0 or choices != _by_number({_EVERY: every, _OFFSET: offset}, len(choices)):
        kinds = [kind for letter in choices for kind, each in _CHOICES.items() if each == letter]
        raise CheckpointError(
            f"{_TYPES} is {shown(kinds)}, but only 'full' for the first layers and then for every so many is supported"
        )
    return {"dsa_indexer_topk_freq": every, "dsa_indexer_skip_topk_offset": offset}
