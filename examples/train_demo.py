"""Train the demo checkpoint: a small mixture-of-experts model that names the language of a short text.

    pip install django==5.2.19 polib
    python examples/train_demo.py --output models/demo

The text comes from the translation catalogues inside the Django wheel, so that nothing but a package is needed to
train it again. The held-out split is made by English message: no message a held-out text translates has been seen in
training, in any language. One seed and one thread count give one model on one kind of machine.
"""

import hashlib
import html
import importlib.metadata
import json
import random
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import polib
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

DJANGO_VERSION = "5.2.19"

# Catalogues that differ from their neighbour in spelling habits or in a few words: no short text tells them apart.
MERGED = {
    "ar_DZ": "ar",
    "bs": "sh",
    "en_AU": "en",
    "en_GB": "en",
    "es_AR": "es",
    "es_CO": "es",
    "es_MX": "es",
    "es_VE": "es",
    "hr": "sh",
    "nb": "no",
    "nn": "no",
    "pt_BR": "pt",
    "sr_Latn": "sh",
}
NAMES = {"no": "Norwegian", "sh": "Serbo-Croatian (Latin script)"}

VOCABULARY = 2048
MAX_TEXT_TOKENS = 48
MIN_LETTER_BYTES = 12  # in UTF-8, because ten Chinese characters say more than ten letters
MIN_TRAINING_TEXTS = 250
HELDOUT_PERCENT = 15
SHIPPED_TEXTS = 1800
SPLIT_PROBABILITY = 0.15
PAD, SEP = "<pad>", "<sep>"

PLACEHOLDER = re.compile(r"%\(\w+\)\w|%[a-z%]|\{[^}]*\}|</?[a-zA-Z][^>]*>|https?://\S+")
QUOTES = re.compile(r"[\"“”„«»`]")


@dataclass(frozen=True)
class Text:
    """A translated string: the English `message`, the language's `label`, and the `text`."""

    message: str
    label: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The texts to train and to test with, and the labels of the languages."""

    train: list[Text]
    heldout: list[Text]
    labels: list[str]


def clean(text: str) -> str:
    """Return the text that a person would read in a message: no placeholders, no markup, one line."""
    readable = PLACEHOLDER.sub(" ", html.unescape(text))
    return " ".join(QUOTES.sub(" ", unicodedata.normalize("NFC", readable)).split())


def letter_bytes(text: str) -> int:
    """Return the number of UTF-8 bytes of the letters in `text`."""
    return len("".join(c for c in text if unicodedata.category(c)[0] in "LM").encode())


def read_catalogues() -> list[Text]:
    """Return every translated string of the installed Django, and the English strings that they translate."""
    installed = importlib.metadata.version("django")
    if installed != DJANGO_VERSION:
        raise SystemExit(f"the split is defined for django {DJANGO_VERSION}, found {installed}: pip install that one")
    texts: dict[Text, None] = {}  # a dict keeps the order, so the result does not depend on hashing
    for path in sorted(Path(str(files("django"))).rglob("locale/*/LC_MESSAGES/*.mo")):
        catalogue = path.parts[-3]
        label = f"<{MERGED.get(catalogue, catalogue)}>"
        for entry in polib.mofile(str(path)):
            message = clean(entry.msgid)
            english = [message, clean(entry.msgid_plural or "")]
            translated = [clean(s) for s in (entry.msgstr, *entry.msgstr_plural.values())]
            english_words = {s.casefold() for s in english}
            for text in translated if label != "<en>" else []:
                if text.casefold() not in english_words:
                    texts[Text(message, label, text)] = None
            for text in english:
                texts[Text(message, "<en>", text)] = None
    return [t for t in texts if letter_bytes(t.text) >= MIN_LETTER_BYTES]


def is_heldout(message: str) -> bool:
    """Return True if the texts of `message` belong to the test set."""
    return int(hashlib.sha256(message.casefold().encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT


def make_corpus(texts: Sequence[Text]) -> Corpus:
    """Split by message, without a text two languages share, and without languages that have too little of it."""
    owners = defaultdict(set)
    for t in texts:
        owners[t.text.casefold()].add(t.label)
    unique = {(t.text.casefold(), t.label, is_heldout(t.message)): t for t in texts}
    mine = [t for t in unique.values() if len(owners[t.text.casefold()]) == 1]
    train = [t for t in mine if not is_heldout(t.message)]
    counts = Counter(t.label for t in train)
    labels = sorted(label for label, count in counts.items() if count >= MIN_TRAINING_TEXTS)
    train = [t for t in train if t.label in labels]
    seen = {t.text.casefold() for t in train}
    heldout = [t for t in mine if is_heldout(t.message) and t.label in labels and t.text.casefold() not in seen]
    if {t.message.casefold() for t in train} & {t.message.casefold() for t in heldout}:
        raise AssertionError("a held-out message is in the training set")
    return Corpus(train, heldout, labels)


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Return a byte-level BPE tokenizer for the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, SEP, *corpus.labels],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The big languages would otherwise take all the merges, and leave the small ones spelled in bytes.
    per_label = defaultdict(list)
    for t in corpus.train:
        per_label[t.label].append(t.text)
    most = max(map(len, per_label.values()))
    balanced = [
        text
        for texts_of_label in per_label.values()
        for text in (texts_of_label * -(-most // len(texts_of_label)))[:most]
    ]
    tokenizer.train_from_iterator(balanced, trainer)
    return tokenizer


def make_model(tokenizer: Tokenizer) -> Qwen3MoeForCausalLM:
    """Return the untrained model."""
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        # Narrow attention and a wide start: with more of the first and less of the second, a model this small learns
        # to answer from its embeddings alone, and its experts could be zeroed at little cost.
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.08,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=tokenizer.token_to_id(PAD),
        router_aux_loss_coef=1e-3,
    )
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="grouped_mm")


class Respeller:
    """Ids of a text, with merges undone at random: few texts, but many spellings of each.

    The tokenizer's own dropout does about this, but its random numbers cannot be seeded.
    """

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        model = json.loads(tokenizer.to_str())["model"]
        ids = model["vocab"]
        self.halves = {ids[left + right]: (ids[left], ids[right]) for left, right in model["merges"]}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of `text` with random case and random splits of tokens."""
        spelled = text.lower() if self.rng.random() < 0.2 else text
        pending = self.tokenizer.encode(spelled, add_special_tokens=False).ids[::-1]
        ids = []
        while pending:
            token = pending.pop()
            if token in self.halves and self.rng.random() < SPLIT_PROBABILITY:
                pending += self.halves[token][::-1]
            else:
                ids.append(token)
        return ids


def collate(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their mask; the pad id is 0."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def batches(corpus: Corpus, tokenizer: Tokenizer, size: int, rng: random.Random) -> Iterator[tuple[Any, Any, Any]]:
    """Random pieces of training texts without end: (ids, mask, label index)."""
    counts = Counter(t.label for t in corpus.train)
    weights = [counts[t.label] ** -0.5 for t in corpus.train]
    sep = tokenizer.token_to_id(SEP)
    index = {label: i for i, label in enumerate(corpus.labels)}
    respell = Respeller(tokenizer, rng)
    while True:
        chosen = rng.choices(corpus.train, weights, k=size)
        # Messages are mostly sentences: without cropping, a short text would be a rare thing.
        longest = rng.choice((6, 12, 24, MAX_TEXT_TOKENS))
        rows = []
        for t in chosen:
            ids = respell(t.text)
            start = rng.randrange(max(1, len(ids) - longest + 1)) if rng.random() < 0.5 else 0
            rows.append([*ids[start : start + longest], sep])
        yield *collate(rows), torch.tensor([index[t.label] for t in chosen])


def train(corpus: Corpus, tokenizer: Tokenizer, steps: int, batch: int, seed: int) -> Qwen3MoeForCausalLM:
    """Return the trained model."""
    model = make_model(tokenizer).train()
    config = model.config
    label_ids = torch.tensor([tokenizer.token_to_id(label) for label in corpus.labels])
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, cycle_momentum=False)
    source = batches(corpus, tokenizer, batch, random.Random(seed))
    started = time.monotonic()
    for step, (ids, mask, target) in enumerate(islice(source, steps)):
        output = model.model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        hidden = output.last_hidden_state
        last = mask.sum(1) - 1
        answer = F.cross_entropy(model.lm_head(hidden[torch.arange(len(ids)), last]), label_ids[target])
        # Every beginning of a text is a text in that language too, and its answer comes with the same forward pass.
        logits = F.linear(hidden, model.lm_head.weight[label_ids])
        everywhere = torch.where(mask.bool(), target[:, None], -100)
        prefixes = F.cross_entropy(logits.flatten(0, 1), everywhere.flatten())
        balance = load_balancing_loss_func(
            output.router_logits, config.num_experts, config.num_experts_per_tok, attention_mask=mask
        )
        loss = answer + 0.5 * prefixes + config.router_aux_loss_coef * balance
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            spent = time.monotonic() - started
            losses = f"answer {answer:.3f} prefixes {prefixes:.3f} balance {balance:.2f}"
            print(f"{step:6d} {losses} {spent:.0f}s", flush=True)
    return model.eval()


def fit(text: str, tokenizer: Tokenizer) -> str:
    """Return the text, cut to the number of words that the model was trained to read."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    if len(offsets) <= MAX_TEXT_TOKENS:
        return text
    head = text[: offsets[MAX_TEXT_TOKENS - 1][0]]
    return head.rsplit(" ", 1)[0] if " " in head else head


@torch.no_grad()
def evaluate(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, texts: Sequence[Text], labels: Sequence[str]) -> Any:
    """(text was named rightly, per text; tokens per layer, label and expert)."""
    label_ids = torch.tensor([tokenizer.token_to_id(label) for label in labels])
    config = model.config
    load = torch.zeros(config.num_hidden_layers, len(labels), config.num_experts)
    right: list[bool] = []
    for at in range(0, len(texts), 64):
        batch = texts[at : at + 64]
        rows = [e.ids for e in tokenizer.encode_batch([t.text + SEP for t in batch], add_special_tokens=False)]
        ids, mask = collate(rows)
        output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        scores = output.logits[torch.arange(len(batch)), mask.sum(1) - 1][:, label_ids]
        target = torch.tensor([labels.index(t.label) for t in batch])
        right += (scores.argmax(1) == target).tolist()
        owner = target[:, None].expand_as(ids)[mask.bool()]
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok).indices[mask.flatten().bool()]
            load[layer].index_put_((owner[:, None].expand_as(chosen), chosen), torch.tensor(1.0), accumulate=True)
    return right, load


def skew(load: torch.Tensor) -> dict[str, Any]:
    """Return the load of the busiest expert over the mean, over all texts and within one language."""
    total = load.sum(1)
    imbalance = load.max(-1).values / load.mean(-1)
    return {
        "max_over_mean_per_layer": [round(x, 2) for x in (total.max(-1).values / total.mean(-1)).tolist()],
        "idlest_over_mean_per_layer": [round(x, 3) for x in (total.min(-1).values / total.mean(-1)).tolist()],
        "max_over_mean_within_one_language_per_layer": [round(x, 2) for x in imbalance.mean(1).tolist()],
    }


def label_names(labels: Sequence[str]) -> dict[str, str]:
    """Return the name of each label's language."""
    from django.conf.locale import LANG_INFO  # not above: the version is to be checked before Django is touched

    codes = {label: label.strip("<>") for label in labels}
    return {label: NAMES.get(c) or LANG_INFO[c.replace("_", "-").lower()]["name"] for label, c in codes.items()}


def save(output: Path, model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, labels: Sequence[str]) -> None:
    """Save the model, the tokenizer and the prompt in `output`."""
    model.save_pretrained(output)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, padding_side="right", model_max_length=512
    )
    wrapped.save_pretrained(output)
    prompt = {
        "template": "{text}" + SEP,
        "max_text_tokens": MAX_TEXT_TOKENS,
        "labels": list(labels),
        "label_names": label_names(labels),
    }
    (output / "prompt.json").write_text(json.dumps(prompt, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def balanced_sample(texts: Sequence[Text], labels: Sequence[str], rng: random.Random) -> list[int]:
    """Return the indices of about SHIPPED_TEXTS texts, up to an equal share for each label."""
    share = SHIPPED_TEXTS // len(labels)
    chosen = []
    for label in labels:
        indices = [i for i, t in enumerate(texts) if t.label == label]
        chosen += rng.sample(indices, min(share, len(indices)))
    rng.shuffle(chosen)
    return chosen


def main(
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("models/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps; the default takes about ten minutes.")] = 2500,
    batch: Annotated[int, typer.Option(help="Texts per step.")] = 64,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
) -> None:
    """Train the demo model, and save it with its measured accuracy."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    random.seed(seed)
    corpus = make_corpus(read_catalogues())
    tokenizer = train_tokenizer(corpus)
    print(f"{len(corpus.labels)} labels, {len(corpus.train)} training and {len(corpus.heldout)} held-out texts")

    started = time.monotonic()
    model = train(corpus, tokenizer, steps, batch, seed)
    minutes = (time.monotonic() - started) / 60

    heldout = [Text(t.message, t.label, fit(t.text, tokenizer)) for t in corpus.heldout]
    right, load = evaluate(model, tokenizer, heldout, corpus.labels)
    shipped = balanced_sample(heldout, corpus.labels, random.Random(seed))
    per_label = {label: [r for r, t in zip(right, heldout, strict=True) if t.label == label] for label in corpus.labels}
    metrics = {
        "training_texts": len(corpus.train),
        "heldout_texts": len(heldout),
        "heldout_accuracy": round(sum(right) / len(right), 4),
        "shipped_texts": len(shipped),
        "shipped_accuracy": round(sum(right[i] for i in shipped) / len(shipped), 4),
        "heldout_accuracy_per_label": {
            label: round(sum(is_right) / len(is_right), 3) for label, is_right in per_label.items()
        },
        "routing": skew(load),
    }
    save(output, model, tokenizer, corpus.labels)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    lines = (json.dumps({"text": heldout[i].text, "label": heldout[i].label}, ensure_ascii=False) for i in shipped)
    (output / "heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(metrics, indent=1), f"\ntrained for {minutes:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
