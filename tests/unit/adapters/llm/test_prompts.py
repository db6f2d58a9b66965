from collections import Counter
from typing import Any

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from adapters.llm.prompts.encoder import PromptEncoder
from adapters.llm.prompts.states import prompt_of
from grpo.errors import ContractError, GRPOWarning
from tests.support.agents import CHATML, chat_tokenizer
from tests.support.llm_models import CHARACTERS, END, VOCABULARY_SIZE, character_tokenizer

CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '.' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ prefix if prefix else '=' }}{% endif %}"
)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) + 2 for character in text]


def encoder(tokenizer: Any = None, **options: Any) -> PromptEncoder:
    size = options.pop("vocabulary_size", VOCABULARY_SIZE)
    return PromptEncoder(tokenizer or character_tokenizer(), size, options.pop("column", "prompt"), options)


def test_text_messages_and_rows_are_prompts() -> None:
    assert prompt_of("1+1") == "1+1"
    assert prompt_of(CHAT) is CHAT
    assert prompt_of({"prompt": "1+1", "answer": "2"}) == "1+1"
    assert prompt_of({"question": CHAT}, "question") is CHAT


def test_a_row_without_the_prompt_column_is_refused_with_its_columns() -> None:
    with pytest.raises(ContractError, match=r"prompt column 'prompt'; got the columns \['answer', 'question'\]"):
        prompt_of({"question": "1+1", "answer": "2"})


WRONG = [7, None, b"1+1", [], ["1+1"], [{"content": "1"}], [1, True], [1.0], {"prompt": 3}, {"prompt": None}]


def test_anything_but_text_and_messages_is_refused(subtests: pytest.Subtests) -> None:
    for wrong in WRONG:
        with subtests.test(wrong=wrong), pytest.raises(ContractError, match="must be text, a list of chat messages"):
            prompt_of(wrong)


def test_token_ids_are_used_as_they_are() -> None:
    assert encoder()([[5, 6], (7,), {"prompt": [8]}]) == [[5, 6], [7], [8]]


def test_prompts_are_encoded_in_order() -> None:
    assert encoder()(["1+1", {"prompt": "abc"}, "1+1"]) == [ids("1+1"), ids("abc"), ids("1+1")]


def test_equal_texts_and_repeated_rows_are_tokenized_once() -> None:
    calls: Counter[str] = Counter()
    tokenizer = character_tokenizer()

    class Counting:
        chat_template = eos_token_id = None

        def __call__(self, text: str) -> Any:
            calls[text] += 1
            return tokenizer(text)

    row = {"prompt": "abc"}
    encoder(Counting())([row, "1+1", row, row, "1+1"])
    assert calls == {"abc": 1, "1+1": 1}


def test_rows_of_a_dataset_are_not_confused() -> None:
    """A dataset creates each row on access, so a new row can have the id of a freed row."""
    texts = ["a" * (1 + i % 7) for i in range(60)]
    assert encoder()(Dataset.from_dict({"prompt": texts})) == [ids(text) for text in texts]


def test_a_row_of_a_dataset_has_no_arguments_of_other_rows() -> None:
    """Arrow gives each call the arguments of all calls, and each message the keys of all messages."""
    user: Any = {"role": "user", "content": "sum it"}
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "find", "arguments": {"of": {"b": "x"}, "c": [2]}}]
    chats = [[user, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, user] for call in calls]
    rows = [
        {"prompt": chats[0], "tools": [{"name": "add"}]},
        {"prompt": chats[1], "tools": [{"name": "find", "strict": True}]},
    ]
    tokenizer = chat_tokenizer()
    meant = PromptEncoder(tokenizer, len(tokenizer), "prompt", {})(rows)
    with pytest.warns(GRPOWarning, match="arguments of calls that are None were left out") as said:
        assert PromptEncoder(tokenizer, len(tokenizer), "prompt", {})(Dataset.from_list(rows)) == meant
    assert len(said) == 1
    assert '"strict"' not in tokenizer.decode(meant[0])


def test_chats_are_encoded_with_the_chat_template() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    # the template ends each message with <eos> (one token) and the prompt with "="
    expected = [*ids("system.add"), END, *ids("user.1+1"), END, *ids("=")]
    assert encoder(tokenizer)([CHAT]) == [expected]
    assert encoder(tokenizer, prefix="a.")([CHAT]) == [expected[:-1] + ids("a.")]


def test_special_tokens_are_added_to_text_and_not_to_the_output_of_the_template() -> None:
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", END)])
    tokenizer.chat_template = TEMPLATE
    assert encoder(tokenizer)(["1+1"]) == [[END, *ids("1+1")]]
    assert encoder(tokenizer)([CHAT])[0][: len("system")] == ids("system")


def test_a_chat_needs_a_chat_template() -> None:
    with pytest.raises(ContractError, match=r"state 1 is a chat, and the tokenizer has none\. Set"):
        encoder()(["1+1", CHAT])


def test_an_empty_prompt_is_refused_with_its_number() -> None:
    with pytest.raises(ContractError, match=r"prompt of state 2 has none\. Remove"):
        encoder()(["1+1", "a", ""])


def test_a_chat_with_a_part_that_is_not_text_is_refused(subtests: pytest.Subtests) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'][0]['text'] }}"
    text = {"type": "text", "text": "1+1"}
    assert encoder(tokenizer)([[{"role": "user", "content": [text]}]]) == [ids("1+1")]
    for part, kind in [
        ({"type": "image", "image": "cat.png"}, "'image'"),
        ({"type": "image_url"}, "'image_url'"),
        ("1", "'str'"),
    ]:
        with (
            subtests.test(part=part),
            pytest.raises(ContractError, match=rf"must hold text only, .* part of type {kind}"),
        ):
            encoder(tokenizer)([[{"role": "user", "content": [text, part]}]])


def test_a_chat_that_ends_with_the_assistant_is_refused_unless_the_options_continue_it() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = [*CHAT, {"role": "assistant", "content": "2"}]
    with pytest.raises(
        ContractError, match=r"chat of state 1 ends with the assistant\. .*'continue_final_message': True"
    ):
        encoder(tokenizer)([CHAT, chat])
    [token_ids] = encoder(tokenizer, continue_final_message=True, add_generation_prompt=False)([chat])
    assert token_ids[-len("assistant.2") :] == ids("assistant.2")  # without the end token and the generation prompt


def test_an_error_of_the_chat_template_names_the_state() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ContractError, match=r"chat of state 0, the template says: roles must alternate"):
        encoder(tokenizer)([CHAT])


def test_a_prompt_that_ends_in_the_end_token_is_warned_of_once() -> None:
    encode = encoder()
    with pytest.warns(GRPOWarning, match=r"prompt of state 1 ends in the end-of-sequence token '<eos>'") as caught:
        assert encode(["1+1", "1<eos>", "2<eos>"])[1] == [*ids("1"), END]
    assert len(caught) == 1
    assert encoder()(["<eos>", "<eos>1"]) == [[END], [END, *ids("1")]]  # GPT-2 begins texts with its end token


def test_a_rendered_chat_has_one_bos_and_a_plain_text_gets_one() -> None:
    """The tokenizer puts a BOS before each text, as that of Llama does."""
    with_bos = "{{ bos_token }}" + CHATML
    for template in (with_bos, CHATML):
        tokenizer = chat_tokenizer(template)
        bos = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        rendered = tokenizer.apply_chat_template([CHAT[1]], tokenize=False, add_generation_prompt=True)
        from_text, from_chat, plain = PromptEncoder(tokenizer, len(tokenizer), "prompt", {})(
            [rendered, [CHAT[1]], "sum"]
        )
        assert from_text == from_chat
        assert from_text.count(bos) == (template == with_bos)
        assert (plain[0], plain.count(bos)) == (bos, 1)


def test_a_padding_token_that_is_the_end_token_is_kept() -> None:
    """As in many tokenizers: `pad_token = eos_token`. Nobody knows which of the two a token at the end is, so it is said."""
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    encoder = PromptEncoder(tokenizer, len(tokenizer), "prompt", {})
    with pytest.warns(UserWarning, match="ends in the end-of-sequence token"):
        assert encoder([[5, 6, end]]) == [[5, 6, end]]
    assert encoder([[end, 5, 6]]) == [[end, 5, 6]]
    with pytest.warns(UserWarning, match="have padding tokens"):
        encoder([[end, end, 5]])
