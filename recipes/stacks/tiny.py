"""What the examples of this folder share: their options, and the tiny models and texts that they use by default."""

import argparse
import importlib
import runpy
import tempfile
import textwrap
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# from here on a missing package is named with the command that installs it
runpy.run_path(str(Path(__file__).parents[1] / "common" / "missing.py"))
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>"]
PROSE = """
A training step keeps activations between the forward and the backward pass. Their size grows with the batch and with
the length of its sequences. The weights keep their size. A norm keeps its input in fp32. A linear layer keeps its
input for the gradient of its weight. An activation function keeps its input for its derivative. Attention keeps the
queries, the keys, the values and its output. Dropout keeps a mask. What is cheap to compute is computed again in the
backward pass. Then only its input has to be kept. The gradients are those of the stock model. A codec stores a tensor
in fewer bits. Its gradients are close to those of the stock model. Adapters train few weights, and the activations of
the whole model are kept for them all the same. Gradient checkpointing keeps the input of each layer and computes the
layer a second time. It combines with all of this.
"""
SENTENCES = [f"{sentence.strip(' .')}." for sentence in " ".join(PROSE.split()).split(". ")]


def at_least_one(text: str) -> int:
    """An argparse type."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return int(text)


def parse(doc: str, argv: list[str] | None, default: str = "llama") -> argparse.Namespace:
    """The options of an example. Without --model, `model` is the folder of a tiny model with random weights."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name on the Hugging Face hub, or a folder; by default a tiny model")
    parser.add_argument("--preset", default="exact")
    parser.add_argument("--stock", action="store_true", help="leave the model as it is, to compare")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--batch-size", type=at_least_one, default=4)
    parser.add_argument("--seq-len", type=at_least_one, default=64)
    parser.add_argument("--output-dir", type=Path, help="by default a new temporary folder")
    args = parser.parse_args(argv)
    args.output_dir = args.output_dir or Path(tempfile.mkdtemp(prefix="actcompress-"))
    args.model = args.model or tiny_model(args.output_dir / f"tiny-{default}", default)
    return args


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the text above."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", **names)


def tiny_model(folder: Path, kind: str) -> str:
    """Saves a Llama or a BERT of two layers, and its tokenizer, as a download from the hub would be. Their folder."""
    if kind in ("flux", "smolvlm"):
        return importlib.import_module(f"tiny_{kind}").save(folder)
    words = tokenizer()
    sizes = {"vocab_size": len(words), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if kind == "llama":
        ids = {"pad_token_id": 0, "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=192, **ids))
    else:
        model = BertModel(BertConfig(**sizes, intermediate_size=256, max_position_embeddings=128))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def report(losses: list[float], kept: int) -> None:
    """What an example prints: its losses, and what one of its batches keeps between forward and backward."""
    line = f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps; a batch keeps {kept:,} bytes"
    print(textwrap.fill(line, 120))
