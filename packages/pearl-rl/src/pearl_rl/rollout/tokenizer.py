"""Text to tokens and back for agents: any Hugging Face `tokenizer.json`, and word-level ones built from scratch.

No torch and no transformers: the `tokenizers` library does the words, jinja2 the chat template.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pearl_rl.rollout.environments.protocol import Message, Observation

PAD: Final = "<pad>"
UNKNOWN: Final = "<unk>"
BEGIN: Final = "<bos>"
END: Final = "<end>"
ROLE_TOKENS: Final[Mapping[str, str]] = {
    "system": "<system>",
    "user": "<user>",
    "tool": "<tool>",
    "assistant": "<agent>",
}
"""What opens a message of each role in a word-level tokenizer's template."""

WORD_TEMPLATE: Final = (
    "{% for message in messages %}{{ roles[message.role] }} {{ message.content }} "
    "{% if message.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


class TokenizerError(ValueError):
    """A tokenizer cannot be built, read or used with these files."""


class AgentTokenizer(Protocol):
    """What an agent needs of a tokenizer. Contexts only ever grow by what `prompt` and the model give."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response; the response holds the one that ended it."""
        ...

    def prompt(self, observation: Observation, *, previous: Sequence[int] | None) -> list[int]:
        """New context tokens for an observation, up to where the next response begins.

        `previous` is the response before it, None for the first observation. Where the response was cut off without
        a stop token, the tokens that end a message come first.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        ...


class TextTokenizer:
    """An `AgentTokenizer` over a folder with `tokenizer.json`.

    Reads `tokenizer_config.json` (special tokens, `chat_template`), `chat_template.jinja` and `generation_config.json`
    (`eos_token_id`) where they are there. Without a chat template observations are plain text. Names of special
    tokens inside message contents are broken up, so that no tool output and no user can forge the end of a message.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer = _load(path / "tokenizer.json")
        self._config = _read_json(path / "tokenizer_config.json")
        self._stop = self._find_stop_ids()
        self._special = self._find_special()
        template = self._read_template()
        self._template = _ChatTemplate(template, self._token_texts()) if template else None
        self._turn_end = self._message_end() if self._template else ""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response; the first is the tokenizer's own end token."""
        return self._stop

    @property
    def pad_token_id(self) -> int:
        """The padding token, or the end token where there is none."""
        token = self._token_texts().get("pad_token")
        found = self._tokenizer.token_to_id(token) if token else None
        return self._stop[0] if found is None else int(found)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is: special tokens in it count, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def response(self, text: str) -> list[int]:
        """Tokens of a response with its end token: what a demonstration trains on."""
        return [*self.encode(text), self._stop[0]]

    def prompt(self, observation: Observation, *, previous: Sequence[int] | None) -> list[int]:
        """New context tokens for an observation, as `AgentTokenizer.prompt` says."""
        messages = tuple(Message(message.role, self._harmless(message.content)) for message in observation.messages)
        cut = previous is not None and (not previous or previous[-1] not in self._stop)
        if self._template is None:
            lead = [self._stop[0]] if cut else []
            return lead + self.encode("\n".join(message.content for message in messages))
        if previous is None:
            return self.encode(self._template.render(messages, generate=True))
        lead = [self._stop[0]] if cut else []
        return lead + self.encode(self._template.after_response(messages, self._turn_end))

    def _harmless(self, content: str) -> str:
        for token in self._special:
            if token in content:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        return content

    def _message_end(self) -> str:
        assert self._template is not None
        end = self._tokenizer.id_to_token(self._stop[0])
        if end not in self._template.render(_PAIR, generate=False):
            raise TokenizerError(f"{self._path}: the chat template never writes the end token {end!r} after a response")
        return str(end)

    def _find_stop_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        end = self._token_texts().get("eos_token")
        if end is not None and (found := self._tokenizer.token_to_id(end)) is not None:
            ids.append(int(found))
        generation = _read_json(self._path / "generation_config.json").get("eos_token_id", [])
        ids.extend([generation] if isinstance(generation, int) else generation)
        if not ids:
            raise TokenizerError(f"{self._path}: no end token; name `eos_token` in tokenizer_config.json")
        return tuple(dict.fromkeys(ids))

    def _find_special(self) -> tuple[str, ...]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and len(token.content) > 1)

    def _token_texts(self) -> dict[str, str]:
        texts = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text:
                texts[name] = str(text)
        return texts

    def _read_template(self) -> str:
        file = self._path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template") or ""
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", "")
        return str(template)


_PAIR: Final = (Message("user", "a"), Message("assistant", "b"))
"""A shortest conversation: what the template writes for a message after a response does not depend on its words."""


class _ChatTemplate:
    """A chat template as transformers renders it: sandboxed, blocks trimmed, with the helpers that templates call."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as missing:
            raise TokenizerError("chat templates need jinja2; install pearl-rl[train]") from missing

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals.update(raise_exception=refuse)
        self._render = environment.from_string(source).render
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """The whole conversation; `generate` adds what opens a response."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return str(
            self._render(messages=plain, add_generation_prompt=generate, roles=ROLE_TOKENS, tools=None, **self._tokens)
        )

    def after_response(self, messages: Sequence[Message], end: str) -> str:
        """What follows the end token of a response: the rest of its message, then `messages`."""
        before = self.render(_PAIR, generate=False)
        whole = self.render((*_PAIR, *messages), generate=True)
        cut = before.rindex(end) + len(end)
        if whole[:cut] != before[:cut]:
            raise TokenizerError("the chat template rewrites earlier messages, so a context cannot only grow")
        return whole[cut:]


def build_word_tokenizer(words: Sequence[str], path: Path) -> TextTokenizer:
    """Write a word-level tokenizer over `words` into the folder `path`, as transformers' AutoTokenizer loads it.

    Words are what blanks separate. Where all ten digits are words and no longer word holds one, numbers are read
    digit by digit. Raises `TokenizerError` for a word that the tokenizer would split, or that is a special token.
    """
    tokenizers = _tokenizers()
    special = [PAD, UNKNOWN, BEGIN, END, *ROLE_TOKENS.values()]
    split_digits = set("0123456789") <= set(words) and not any(len(word) > 1 and _has_digit(word) for word in words)
    for word in words:
        if word in special or word.split() != [word]:
            raise TokenizerError(f"word {word!r} cannot be a token of its own; use one word without blanks")
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*special, *words]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    splitters = [tokenizers.pre_tokenizers.WhitespaceSplit()]
    if split_digits:
        splitters.append(tokenizers.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(splitters)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _word_template(),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return TextTokenizer(path)


def _word_template() -> str:
    """The template with the role tokens written into it, so that it stands alone."""
    return f"{{% set roles = {json.dumps(dict(ROLE_TOKENS))} %}}{WORD_TEMPLATE}"


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as missing:
        raise TokenizerError("text agents need the tokenizers library; install pearl-rl[train]") from missing
    return tokenizers


def _load(file: Path) -> Any:
    if not file.is_file():
        raise TokenizerError(f"{file} is missing; give the folder of a model with a tokenizer.json")
    try:
        return _tokenizers().Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises bare Exception for a malformed file.
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return value
