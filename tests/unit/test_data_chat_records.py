"""Records of conversations: every field is used as their own program uses it, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.data.chat import ChatTemplate, Span, conversation_reader, find_template
from megalite.data.sft_dataset import _read_conversations
from megalite.errors import DataError
from tests.harness.template_tokenizer import write_template_tokenizer
from tests.harness.tokenizers import named_tokenizer

TALK = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": "sunny"}]
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% if documents %}{{ documents[0]['text'] }}{% endif %}"
    "{% if brief %}briefly {% endif %}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ m['tool_calls'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = ChatTemplate(TEMPLATE, {"eos_token": "</s>"})


def spans(record: Mapping[str, Any], template: ChatTemplate | None = CHAT) -> list[Span]:
    with conversation_reader(template) as reader:
        return reader(dict(record))


def text(record: Mapping[str, Any], template: ChatTemplate | None = CHAT) -> str:
    return "".join(span.text for span in spans(record, template))


def test_a_template_gets_what_a_record_has_for_it() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": ["rain"]}
    for more, wanted in (
        ({"tools": [{"a": 1}], "id": 7, "prompt": "weather?"}, '[[{"a": 1}]]<|user|>weather?<|assistant|>sunny</s>'),
        ({"documents": [{"text": "FACTS "}], "tools": None}, "FACTS <|user|>weather?<|assistant|>sunny</s>"),
        ({"chat_template_kwargs": {"brief": True}}, "briefly <|user|>weather?<|assistant|>sunny</s>"),
        ({"messages": [TALK[0], call]}, "<|user|>weather?<|assistant|>['rain']</s>"),
    ):
        assert text({"messages": TALK} | more) == wanted
    both = ChatTemplate(TEMPLATE, {"eos_token": "</s>"}, "tools: {{ tools }}" + TEMPLATE)
    assert text({"messages": TALK, "tools": []}, both).startswith("tools: []<|user|>")
    assert text({"messages": TALK}, both).startswith("<|user|>")


def test_an_answer_without_weight_is_read_and_not_learned() -> None:
    messages = [TALK[0], {**TALK[1], "weight": 0}, {**TALK[0], "weight": 0}, {**TALK[1], "weight": 1}]
    for template, learned in ((CHAT, ["sunny</s>"]), (None, ["sunny"])):
        found = spans({"messages": messages}, template)
        assert [span.text for span in found if span.learned] == learned
        assert "".join(span.text for span in found) == text({"messages": [*TALK, *TALK]}, template)


REFUSED: list[tuple[Any, str]] = [
    ({"prompt": "x", "completion": "y", "system": "be brief"}, "the field 'system' beside \"prompt\""),
    ({"messages": TALK, "functions": []}, "the field 'functions' beside \"messages\""),
    ({"messages": TALK, "prompt": "another"}, "the field 'prompt' beside"),
    ({"messages": TALK, "weight": 0.5}, "the field 'weight'"),
    ({"messages": TALK, "tools": "x"}, "\"tools\" is 'x', not a list of objects"),
    ({"messages": TALK, "chat_template_kwargs": {"messages": []}}, '"chat_template_kwargs" is'),
    ({"messages": TALK, "chat_template_kwargs": {"thinking": True}}, "'thinking', which the chat template never"),
    ({"messages": [TALK[0] | {"name": "Ann"}, TALK[1]]}, "'name', which the chat template never"),
    ({"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}, '"weight" 0.5'),
    ({"messages": [TALK[0] | {"weight": 1}, TALK[1]]}, '"weight" 1'),
]


def test_what_would_be_dropped_is_refused_by_its_name() -> None:
    with conversation_reader(CHAT) as reader:
        for record, why in REFUSED:
            with pytest.raises(ValueError, match=why):
                reader(record)


def test_without_a_template_its_fields_are_refused() -> None:
    for record in ({"messages": TALK, "tools": []}, {"messages": [TALK[0], TALK[1] | {"tool_calls": []}]}):
        with pytest.raises(ValueError, match=r"'tool.*without a chat template"):
            spans(record, None)


def test_a_conversation_begins_as_documents_do_unless_a_template_writes_it(tmp_path: Path) -> None:
    tokenizer = named_tokenizer("HuggingFaceTokenizer", str(write_template_tokenizer(tmp_path)))
    path = tmp_path / "talks.jsonl"
    records: list[Any] = [{"prompt": " a", "completion": " b"}, {"prompt": "<s> a", "completion": " b"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"messages": TALK}]))
    plain = ChatTemplate("{% for m in messages %}a{{ ' b' if m.role == 'assistant' }}{% endfor %}", {})
    arrays = _read_conversations(str(path), tokenizer, plain)
    assert arrays["tokens"].tolist()[:8] == [0, 3, 4, 1, 0, 3, 4, 1]
    assert arrays["answers"].tolist()[:4] == [2, 4, 6, 8]
    assert arrays["ends"].tolist()[:2] == [4, 8]
    assert arrays["tokens"][8] != 0


def test_templates_name_every_token_of_the_folder_and_have_a_variant_for_tools(tmp_path: Path) -> None:
    config = {"chat_template": {"default": "D", "tool_use": "T"}, "extra_special_tokens": {"image": "<i>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "cls_token": {"content": "<c>"}}')
    names = {"image": "<i>", "eos_token": "</s>", "cls_token": "<c>"}
    assert find_template(str(tmp_path)) == ChatTemplate("D", names, "T")
    (tmp_path / "chat_template.jinja").write_text("B")
    assert find_template(str(tmp_path)) == ChatTemplate("B", names)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert find_template(str(tmp_path)) == ChatTemplate("B", names, "U")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="templates 'tool_use', none of them named"):
        find_template(str(tmp_path))
