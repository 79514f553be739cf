"""Reading of checkpoint folders: config, model, tokenizer and prompt. Files are checked before a library reads them.

Only safetensors are read, never a pickle. No code of a checkpoint runs, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from moepass.models.checkpoint.model_classes import (
    check_config,
    check_model_type,
    check_raw_config,
    class_options,
    model_class_of,
)
from moepass.models.checkpoint.weight_files import WEIGHTS_FILE, one_line, read_json
from moepass.models.errors import CheckpointError
from moepass.models.limits import MOST_TOKENIZER_BYTES, check_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo"
CONFIG_FILE = "config.json"
PROMPT_FILE = "prompt.json"
SENTENCE_TRANSFORMERS_FILE = "config_sentence_transformers.json"
_ADAPTER_FILE = "adapter_config.json"
# Vocabularies that transformers reads besides the files that a tokenizer class names.
_FURTHER_VOCABULARY_FILES = ("tekken.json", "*.tiktoken")
_TEXT_MARK = "{text}"
_PAIR_MARKS = re.compile(r"\{(query|document|instruction)\}")
_INSTRUCTION_MARK = "{instruction}"
# [Empirical] transformers allocates missing weights before it reports them. More missing ones are refused.
_MADE_UP_NUMBERS = 1 << 26


class KnownAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question about the text `input`, whose answer the model must know if its prompt is right."""

    input: str
    answers: tuple[str, ...]
    expected: str
    question: str = ""


class _SentenceTransformersConfig(msgspec.Struct, frozen=True):
    """The part of a config_sentence_transformers.json that the server uses."""

    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt of a checkpoint: the contents of `prompt.json`, all of whose keys are optional.

    Attributes:
        template: prompt with `{text}` exactly once
        max_text_tokens: number of tokens to which `{text}` is truncated
        pair_template: question about the relevance of a document, with `{query}` and `{document}` once each, and at
            most one `{instruction}`
        pair_instruction: the instruction of requests without one
        prompts: texts that are put before a text to embed, by names that requests choose
        default_prompt_name: name of the prompt for requests that choose none
        vector: how a text is embedded: by its last token, or by the mean of its tokens
        probe: question that is asked when a server starts, so that a wrong prompt shows before it yields bad scores
    """

    template: str = _TEXT_MARK
    labels: tuple[str, ...] = ()
    label_names: dict[str, str] = {}
    max_text_tokens: int | None = None
    pair_template: str | None = None
    pair_labels: tuple[str, str] = ("yes", "no")
    pair_instruction: str = ""
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    vector: Literal["last", "mean"] = "last"
    probe: KnownAnswer | None = None

    def render(self, text: str) -> str:
        """Return `template` with `text` in it."""
        return self.template.replace(_TEXT_MARK, text)

    @property
    def takes_instruction(self) -> bool:
        """True if `pair_template` has a place for an instruction."""
        return _INSTRUCTION_MARK in (self.pair_template or "")

    def render_pair(self, query: str, document: str, instruction: str | None = None) -> str:
        """Return `pair_template` with the texts filled in. The template must be set."""
        assert self.pair_template is not None
        texts = {
            "query": query,
            "document": document,
            "instruction": self.pair_instruction if instruction is None else instruction,
        }
        # A single substitution, because the query may contain `{document}`.
        return _PAIR_MARKS.sub(lambda match: texts[match[1]], self.pair_template)


def resolve_model(name_or_path: str | Path, *, config_alone: bool = False) -> Path:
    """Return the checkpoint folder: the embedded one for "demo", else an existing folder with a config.json.

    With `config_alone` a config file is accepted too. Raises CheckpointError, also for a folder with an adapter.
    """
    if str(name_or_path) == DEMO:
        from moepass.models.demo import demo_folder

        return demo_folder()
    path = Path(name_or_path)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError for a null byte
        raise CheckpointError(
            f"{path} does not exist; give the folder of a checkpoint, or {DEMO} for the embedded one", path=path
        ) from None
    except OSError as error:
        raise CheckpointError(f"{str(path)[:200]} is not a readable folder: {error.strerror}", path=path) from error
    if path.is_file() and config_alone:
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}", path=path
        )
    if (path / _ADAPTER_FILE).is_file():
        # transformers would load the model that the file names, or silently ignore the adapter.
        raise CheckpointError(
            f"{path} holds an adapter ({_ADAPTER_FILE}); merge it into its model and save the result as a checkpoint "
            "(in peft: model.merge_and_unload().save_pretrained(...))",
            path=path,
        )
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG_FILE}", path=path)
    return path


def load_config(path: Path) -> PreTrainedConfig:
    """Return the configuration in `path`, a checkpoint folder or a config file.

    The model must be a causal language model, a sequence classifier, or a backbone without head.

    Raises CheckpointError if the configuration is malformed, or the installed transformers does not know its model
    type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = path / CONFIG_FILE if path.is_dir() else path
    values = read_json(file, dict)
    check_raw_config(values, str(file))
    model_type = check_model_type(file, values)
    try:
        with quiet_transformers():
            config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # a family's checks of these values may raise any exception
        text = f"{file} does not fit model_type {model_type!r}: {one_line(error)}"
        raise CheckpointError(text, path=file, name="model_type", value=model_type) from error
    check_config(config, str(file))
    _switch_cache_off(config)
    return config


def meta_model(path: Path) -> PreTrainedModel:
    """Return the model of the config in `path` on the meta device: shapes without weights.

    Raises the CheckpointErrors of `load_config`, and one if no model can be made from the config's numbers.
    """
    return meta_model_of(load_config(path), str(path))


def meta_model_of(config: PreTrainedConfig, name: str, experts_implementation: str = "grouped_mm") -> PreTrainedModel:
    """Return the model of `config` on the meta device; errors call it `name`."""
    import torch

    model_class = model_class_of(config)
    build: Any = model_class._from_config
    try:
        with quiet_transformers(), torch.device("meta"):
            dtype = config.dtype or torch.float32
            if dtype.itemsize == 1:
                dtype = torch.bfloat16  # the compute dtype of fp8 weights; torch cannot construct fp8 models
            model: PreTrainedModel = build(config, dtype=dtype, **class_options(model_class, experts_implementation))
    except Exception as error:  # the family's constructor may raise any exception for the config's numbers
        raise CheckpointError(
            f"{model_class.__name__} cannot be built from {name}: {one_line(error)}", path=name
        ) from error
    model.requires_grad_(False)
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder. Raises CheckpointError if it is missing or cannot be read.

    Call `load_config` first: transformers reads the config too, with fewer checks.
    """
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    if file.is_file():
        advice = "give the tokenizer that the model was trained with"
        check_limit(f"the size of {file}", file.stat().st_size, MOST_TOKENIZER_BYTES, advice)
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # the kind of exception depends on which file is broken
        if not file.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json, which is required", path=folder) from error
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {one_line(error)}", path=folder) from error
    # Without any file, transformers returns the tokenizer of the model's family with an empty vocabulary.
    names = sorted({*tokenizer.vocab_files_names.values(), *_FURTHER_VOCABULARY_FILES})
    if not any(list(folder.glob(name)) for name in names):
        text = f"{folder} has no tokenizer: it lacks {', '.join(names)}; copy its files from the original checkpoint"
        raise CheckpointError(text, path=folder)
    if not tokenizer.is_fast:
        raise CheckpointError(f"{folder} has a tokenizer in Python only; a tokenizer.json is needed", path=folder)
    return tokenizer


def load_prompt(folder: Path) -> Prompt:
    """Return the checkpoint's prompt, or the default one, which is only the text. Raises CheckpointError.

    Without `prompts` of its own, it has those of sentence-transformers' config, and its default.
    """
    file, further_file = folder / PROMPT_FILE, folder / SENTENCE_TRANSFORMERS_FILE
    prompt = read_prompt(file) if file.is_file() else Prompt()
    if prompt.prompts or not further_file.is_file():
        return prompt
    further: _SentenceTransformersConfig = read_json(further_file, _SentenceTransformersConfig)
    prompts, default = further.prompts or {}, further.default_prompt_name
    _check_default_prompt(further_file, prompts, default)
    return msgspec.structs.replace(prompt, prompts=prompts, default_prompt_name=default)


def _check_default_prompt(file: Path, prompts: Mapping[str, str], name: str | None) -> None:
    if name is not None and name not in prompts:
        expected = f"one of its prompts: {', '.join(prompts)}" if prompts else "null, because there are no prompts"
        text = f"{file}: default_prompt_name is {name!r}; it must be {expected}"
        raise CheckpointError(text, path=file, name="default_prompt_name", value=name, expected=tuple(prompts))


def read_prompt(file: Path) -> Prompt:
    """Read a prompt file. Raises CheckpointError."""
    prompt: Prompt = read_json(file, Prompt)

    def check(is_right: bool, name: str, must: str, expected: str) -> None:
        if not is_right:
            value = getattr(prompt, name)
            text = f"{file}: {name} is {value!r}; it must {must}"
            raise CheckpointError(text, path=file, name=name, value=value, expected=expected)

    pair, most, probe = prompt.pair_template, prompt.max_text_tokens, prompt.probe
    check(prompt.template.count(_TEXT_MARK) == 1, "template", f"hold {_TEXT_MARK} exactly once", _TEXT_MARK)
    is_pair = pair is None or sorted(_PAIR_MARKS.findall(pair)) in (
        ["document", "query"],
        ["document", "instruction", "query"],
    )
    marks = "{query} and {document} once each, and {instruction} at most once"
    check(is_pair, "pair_template", f"hold {marks}", marks)
    check(most is None or most >= 1, "max_text_tokens", "be 1 or more", "1 or more")
    _check_default_prompt(file, prompt.prompts, prompt.default_prompt_name)
    if probe and not (probe.expected in probe.answers and 1 < len(probe.answers) == len({*probe.answers})):
        text = (
            f"{file}: the probe's answers are {list(probe.answers)}, {probe.expected!r} is expected; there must be two "
            "or more different answers, including the expected one"
        )
        expected = "2 or more, with the expected one"
        raise CheckpointError(text, path=file, name="probe", value=probe.answers, expected=expected)
    return prompt


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable warnings and progress bars of transformers in the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _switch_cache_off(config: PreTrainedConfig) -> None:
    config.use_cache = False
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            _switch_cache_off(inner)


def check_numbers(folder: Path, held: int) -> None:
    """Raise CheckpointError if the `held` elements lack many weights, for which transformers would make up values."""
    asked = sum(value.numel() for value in meta_model(folder).parameters())
    if held + _MADE_UP_NUMBERS < asked:
        text = (
            f"{folder} lacks weights that the config asks for: its files hold {held} numbers, but the model has {asked}"
        )
        raise CheckpointError(text, value=held, expected=asked, path=folder)
