"""The tokenizer: the model's own, or a byte-level BPE trained on the corpus and kept in the cache."""

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .data import Corpus

Kind = Literal["causal", "masked"]
SPECIAL_TOKENS: dict[Kind, dict[str, str]] = {
    "causal": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "masked": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
}


def train_tokenizer(texts: list[str], vocab_size: int, kind: Kind) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens that GPT-2-like or BERT-like models expect."""
    special = list(dict.fromkeys(SPECIAL_TOKENS[kind].values()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "masked":
        ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS[kind])


def _cached_tokenizer(args: argparse.Namespace, corpus: Corpus, kind: Kind) -> PreTrainedTokenizerBase:
    smallest = 256 + len(SPECIAL_TOKENS[kind])
    if args.vocab_size < smallest:
        raise SystemExit(f"--vocab-size {args.vocab_size}: a byte-level vocabulary needs at least {smallest}")
    key = f"tokenizer-{kind}-{args.vocab_size}-{corpus.fingerprint()}-{version('tokenizers')}"
    folder: Path = args.cache_dir / key
    if not folder.is_dir():
        unfinished = folder.with_name(f"{key}.{os.getpid()}")
        train_tokenizer(corpus.train, args.vocab_size, kind).save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first, and its tokenizer is in the folder
            if not folder.is_dir():
                raise
    return PreTrainedTokenizerFast.from_pretrained(folder)


def get_tokenizer(args: argparse.Namespace, corpus: Corpus, kind: Kind) -> PreTrainedTokenizerBase:
    """The tokenizer of --model, or one trained on the corpus for --config."""
    if not args.model:
        return _cached_tokenizer(args, corpus, kind)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {args.model}: its tokenizer cannot be loaded. {error}") from error
    if kind == "masked" and tokenizer.mask_token_id is None:
        raise SystemExit(f"--model {args.model}: its tokenizer has no mask token, so it is not a BERT-like model")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
