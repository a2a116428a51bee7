"""Keys of config.json on attention over latents, and on layers of Kimi Linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.config import ModelConfig
from megalite.config.layer_specs import EXPERTS_LETTER, KIMI_LETTER, LATENT_LETTER, pattern_of
from megalite.conversion.config_keys import Json, Keys, expert_groups, key, layers_of, value_of
from megalite.conversion.layer_keys import letters_of_kinds, mixers_of, pattern_fields
from megalite.conversion.position_keys import rotary
from megalite.errors import CheckpointError
from megalite.small_files import shown

LATENT_NORMS = {"qk_layernorm": True, "latent_norm_epsilon": 1e-6}
"""Fields of the norms of latents, whose epsilon follows from no key."""


def latent_sizes(
    query_rank: int | None, heads: int | None, *, widths: tuple[int, int] = (128, 128), ranked: bool = False
) -> tuple[Keys, ...]:
    """Return the entries for the sizes of attention over latents.

    `query_rank`, `heads`, `widths`: the rank of queries, the number of key-value heads, and the widths of the part of a
    key without rotation and of a value, if config.json lacks them. `ranked`: the family always has a latent of queries.
    """
    rank, groups, (key_width, value_width) = "q_lora_rank", "num_key_value_heads", widths
    of_queries = Keys(
        (rank,), lambda config: {rank: config.get(rank, query_rank)}, lambda model: {rank: model.q_lora_rank}
    )

    def check_heads(config: Json) -> dict[str, Any]:
        if (found := config.get(groups, heads)) not in (None, config["num_attention_heads"]):
            raise CheckpointError(f"{groups} is {shown(found)}, but each head has its own keys: leave it out")
        return {}

    return (
        key(rank, rank, query_rank) if ranked else of_queries,
        key("kv_lora_rank", "kv_lora_rank", 512),
        key("qk_nope_head_dim", "qk_head_dim", key_width),
        key("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        key("v_head_dim", "v_head_dim", value_width),
        _sum_of("qk_head_dim", {"qk_nope_head_dim": key_width, "qk_rope_head_dim": 64}),
        Keys((groups,), check_heads, lambda model: {groups: model.num_attention_heads}),
    )


def _sum_of(name: str, parts: Mapping[str, int]) -> Keys:
    """Return the entry for a key that must be the sum of other keys, which have these defaults."""

    def read(config: Json) -> dict[str, Any]:
        total = sum(value_of(config, part, default) for part, default in parts.items())
        if (found := config.get(name, total)) != total:
            raise CheckpointError(f"{name} is {shown(found)}, but {' and '.join(parts)} make {shown(total)}")
        return {}

    return Keys((name,), read, lambda _: {})


def latent_rotary() -> tuple[Keys, ...]:
    """Return the entries for rotary embeddings of a part of each head, which YaRN's growth of scores goes with."""
    entry = rotary()

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if (growth := parameters.get("mscale_all_dim")) and not parameters.get("mscale"):
            raise CheckpointError(f"mscale_all_dim is {shown(growth)} without mscale: give both")
        return entry.read(config)

    return replace(entry, read=read), _sum_of("head_dim", {"qk_rope_head_dim": 64})


def choice_of_v2() -> Keys:
    """Return the entry for the choice of experts of DeepSeek-V2: of all, or of the groups with the best one."""
    method, limited = "topk_method", "group_limited_greedy"
    entry = expert_groups(scores=1)

    def read(config: Json) -> dict[str, Any]:
        if (found := value_of(config, method, "greedy")) not in ("greedy", limited):
            raise CheckpointError(f"{method} is {shown(found)}, but only 'greedy' and {limited!r} are supported")
        if found == "greedy":
            return entry.read({})
        if lacking := [name for name in entry.names if config.get(name) is None]:
            raise CheckpointError(f"{method} is {limited!r}, but there is no {' and no '.join(lacking)}")
        return entry.read(config)

    def write(model: ModelConfig) -> dict[str, Any]:
        return {method: limited if model.moe_router_num_groups else "greedy", **entry.write(model)}

    return Keys((method, *entry.names), read, write)


# ------------------------------------------------------------------------------------------------ Kimi Linear

_MIXERS = {"linear_attention": KIMI_LETTER, "full_attention": LATENT_LETTER}
_FEED_FORWARDS = {"dense": "-", "sparse": EXPERTS_LETTER}
_LISTS = {"kda_layers": KIMI_LETTER, "full_attn_layers": LATENT_LETTER}
_SIZES = {
    "num_heads": ("linear_num_heads", "kda_num_heads", 32),
    "head_dim": ("linear_head_dim", "kda_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", "kda_conv_kernel_dim", 4),
}
"""Keys of linear_attn_config, each with its other name beside that, its field, and its default."""
_OWN, _TYPES, _DENSE = "linear_attn_config", "mlp_layer_types", "first_k_dense_replace"


def kimi_letters(config: Json) -> str:
    """Return the pattern of a Kimi Linear model."""
    layers, mixers = layers_of(config), set[str]()
    if (kinds := config.get("layer_types")) is not None:
        mixers.add(letters_of_kinds("layer_types", kinds, _MIXERS))
    if any(name in (own := config.get(_OWN) or {}) for name in _LISTS):
        numbers = {number: letter for name, letter in _LISTS.items() for number in own[name]}
        if numbers.keys() != {*range(1, layers + 1)} or len(numbers) != sum(len(own[name]) for name in _LISTS):
            raise CheckpointError(f"{' and '.join(_LISTS)} do not have each number from 1 to {layers} once")
        mixers.add("".join(numbers[number + 1] for number in range(layers)))
    if len(mixers) != 1:
        raise CheckpointError(f"layer_types and {_OWN} differ" if mixers else f"it has no {_OWN} and no layer_types")
    (letters,), feed_forwards = mixers, _feed_forwards(config, layers, 1)
    if not len(letters) == len(feed_forwards) == layers:
        raise CheckpointError(f"layer_types or {_TYPES} have another number of entries than there are layers, {layers}")
    return "".join(letter for pair in zip(letters, feed_forwards, strict=True) for letter in pair)


def _feed_forwards(config: Json, layers: int, otherwise: int) -> str:
    """Return the letters of the feed-forward layers: the first ones are dense, or a list says which are.

    `otherwise`: how many if config.json says neither.
    """
    kinds = config.get(_TYPES)
    listed = None if kinds is None else letters_of_kinds(_TYPES, kinds, _FEED_FORWARDS)
    if listed is not None and _DENSE not in config:
        return listed
    dense = value_of(config, _DENSE, otherwise)
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"{_DENSE} is {shown(dense)}, it must be a whole number")
    found = "-" * min(dense, layers) + EXPERTS_LETTER * (layers - dense)
    if listed not in (None, found):
        raise CheckpointError(f"{_TYPES} and {_DENSE} {dense} differ")
    return found


def _written_feed_forwards(letters: str) -> dict[str, Any]:
    """Return the key for feed-forward layers with these letters: for the number of dense ones, or for a list of all."""
    dense = [*letters, EXPERTS_LETTER].index(EXPERTS_LETTER)
    if "-" not in letters[dense:]:
        return {_DENSE: dense}
    kinds = {letter: kind for kind, letter in _FEED_FORWARDS.items()}
    return {_TYPES: [kinds[letter] for letter in letters]}


def listed_dense_layers(otherwise: int) -> Keys:
    """Return the entry for the layers without experts: those in a list of all, or else the first ones.

    `otherwise`: how many if config.json says neither.
    """

    def read(config: Json) -> dict[str, Any]:
        # transformers writes the number beside the list, whatever it is, and reads the list.
        name = _DENSE if config.get(_TYPES) is None else _TYPES
        said = {name: config[name]} if name in config else {}
        letters = _feed_forwards(said, layers := layers_of(config), otherwise)
        if len(letters) != layers or EXPERTS_LETTER not in letters:
            raise CheckpointError(f"{_TYPES} or {_DENSE} does not fit {layers} layers, some of them with experts")
        return {"moe_layer_freq": str([int(each == EXPERTS_LETTER) for each in letters]) if "-" in letters else None}

    def write(model: ModelConfig) -> dict[str, Any]:
        letters = pattern_of(model.layers)
        return _written_feed_forwards("".join(each for each in letters if each in _FEED_FORWARDS.values()))

    return Keys((_TYPES, _DENSE), read, write)


def kimi_layers() -> Keys:
    """Return the entry for the layers of Kimi Linear, and for the sizes of its delta attention."""

    def read(config: Json) -> dict[str, Any]:
        letters, own = kimi_letters(config), config.get(_OWN) or {}
        sizes = {}
        for name, (other, field, default) in _SIZES.items():
            sizes[field] = value_of(own, name) if name in own else value_of(config, other, default)
            if config.get(other, sizes[field]) != sizes[field]:
                raise CheckpointError(f"{other} is {shown(config[other])}, and {name} of {_OWN} is another")
        if unknown := sorted(own.keys() - _LISTS.keys() - _SIZES.keys()):
            raise CheckpointError(f"{', '.join(unknown)[:200]} of {_OWN} is unknown")
        return pattern_fields(letters) | (sizes if KIMI_LETTER in letters else {})

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers, letters = mixers_of(model), pattern_of(model.layers)
        feed_forwards = "".join(letter for letter in letters if letter in _FEED_FORWARDS.values())
        own: dict[str, Any] = {
            name: [place + 1 for place, each in enumerate(mixers) if each == letter] for name, letter in _LISTS.items()
        }
        own |= {name: getattr(model, field) for name, (_, field, _) in _SIZES.items()}
        return {"num_hidden_layers": len(mixers), _OWN: own, **_written_feed_forwards(feed_forwards)}

    others = (other for other, _, _ in _SIZES.values())
    return Keys(("num_hidden_layers", "layer_types", _OWN, _TYPES, _DENSE, *others), read, write)


def with_names(entry: Keys, names: Mapping[str, str]) -> Keys:
    """Return an entry whose keys have other names in the family's files. `names`: the family's, by the entry's.

    The entry's names are read, too, as transformers does, if both are the same.
    """

    def read(config: Json) -> dict[str, Any]:
        found = dict(config)
        for ours, theirs in names.items():
            if ours in entry.names and theirs in config and config.get(ours, config[theirs]) != config[theirs]:
                raise CheckpointError(f"{ours} and {theirs} differ")
            found |= {ours: config[theirs]} if theirs in config else {}
        return entry.read(found)

    def write(model: ModelConfig) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in entry.write(model).items()}

    further = tuple(names[name] for name in entry.names if name in names)
    return replace(entry, names=(*entry.names, *further), read=read, write=write)
