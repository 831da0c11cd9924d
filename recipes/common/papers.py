"""The published methods: what each paper says of itself, in our words, and how recipes/reproduce.py measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import paper_measures as by
from . import paper_settings as at


@dataclass(frozen=True)
class Unit:
    """How a figure is printed, and the least figure of ours that reproduces the paper's."""

    form: str
    factor: float
    enough: Callable[[float], float]


UNITS = {
    # the share of bytes saved, and the factor by which they shrink: within a tenth of the claim
    "less": Unit("-{:.1f}%", 100, lambda claimed: 0.9 * claimed),
    "times": Unit("{:.2f}x", 1, lambda claimed: 0.9 * claimed),
}


@dataclass(frozen=True)
class Claim:
    """One figure of a paper.

    Attributes:
        text: The claim, in our words.
        source: Where the paper says it: the abstract, a table, the README of the authors' code.
        figure: The claimed number; more is better.
        unit: A row of UNITS.
        setting: Our setting, at the scale "default".
        measure: Measures our number at a scale; with "exact" as a further argument, that of the preset `exact` alone.
        method_alone: Nothing but the method is patched, so that `exact` has no share in our number; or ours is `exact`.
        incomparable: Why the two numbers do not measure the same thing; empty if they do.
        reason: What a reader has to know beside the verdict: where our setting differs, and why our number does.
    """

    text: str
    source: str
    figure: float
    unit: str
    setting: str
    measure: Callable[..., float]
    method_alone: bool = False
    incomparable: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Paper:
    """A method, the preset that implements it (empty if it has none of its own), and its claims."""

    title: str
    arxiv: str
    preset: str
    claims: tuple[Claim, ...]


PAPERS = {
    "tempo": Paper("Tempo", "2210.10246", "tempo", (
        Claim(
            "up to twice the batch for BERT-large", "abstract", 2.0, "times",
            "kept bytes of a BERT-large layer, 512 tokens, fp32, eager attention, dropout 0.1: their ratio is that of "
            "the batches that fit into what weights leave", by.tempo,
            reason="counted, not tried on a card; embeddings and the head, which Tempo does not touch, are left out. "
            "Since fused attention, which keeps no probabilities, its attention part has nothing left to save",
        ),
    )),
    "inverted": Paper("Inverted Activations", "2407.15545", "inverted", (
        Claim(
            "23.1% less for activations of BERT-base at 16 x 512 tokens in fp32", "README of the authors' code", 0.231,
            "less", "kept bytes of a BERT-base layer, 2 x 512 tokens, fp32; the GELUs alone are patched",
            by.inverted_bert, method_alone=True,
            reason="theirs is what a forward of the whole model leaves allocated, ours a layer without dropout of "
            "attention's probabilities",
        ),
        Claim(
            "15.7% less for activations of Mistral-7B in 4-bit weights at 1 x 4096 tokens, GELU in place of SiLU",
            "README of the authors' code", 0.157, "less",
            "kept bytes of a layer with Mistral's proportions, 512 wide, linear layers frozen, 512 tokens, fp32; the "
            "activations alone are patched", by.inverted_mistral, method_alone=True,
            reason="theirs is what a forward of the whole model leaves allocated, ours a layer alone. An unchanged "
            "Mistral gains nothing over `exact`, which keeps gate and up and makes SiLU's output again",
        ),
    )),
    "fewbit": Paper("few-bit backward", "2202.00441", "fewbit", (
        Claim(
            "RoBERTa-base on MRPC, batch 128, 3-bit GELU: peak 9.75 instead of 11.30 GiB", "README of the authors' "
            "code", 0.137, "less", "a BERT of RoBERTa-base's size, 2 x 97 tokens (as many as the paper's saving "
            "implies), kept bytes scaled to 128 rows, with AdamW's states; the GELUs alone are patched", by.fewbit,
            method_alone=True,
            incomparable="their sequences' length is not stated; ours is the one that the claimed saving implies, so "
            "that the two figures cannot differ much",
        ),
    )),
    "forward-ad": Paper("nested forward differentiation", "2209.10778", "forward_ad", (
        Claim(
            "memory of activations up to 1.97x smaller", "abstract", 1.97, "times",
            "kept bytes of a GPT-2 layer, 2 x 512 tokens, fp32, no dropout; the GELUs, which are eight operations, are "
            "patched alone", by.forward_ad, method_alone=True,
            reason="the abstract says neither of which model nor of which activation 1.97 is. Of GPT-2's GELU stock "
            "keeps four tensors of 4 h, with the method one; the other 12 h of the layer stay",
        ),
    )),
    "dropit": Paper("DropIT", "2202.13808", "dropit", (
        Claim(
            "ViT-B/16 at 224 pixels, dropping 90%: cache of 16,052 instead of 20,290 MB", "README of the authors' code",
            0.209, "less", "kept bytes of ViT-B/16, one image of 224 pixels, fp32, eager attention",
            by.images(at.vit_base, 1, "dropit", at.kept),
            reason="the preset does not keep outputs of norms and activations either, as `exact` does not, so not all "
            "of the saving is DropIT's; `exact` alone, which stores no part of what it can rebuild, saves more",
        ),
    )),
    "blocksparse": Paper("block-sparse activations", "2311.16883", "blocksparse", (
        Claim(
            "up to 32% less training memory for ResMLP", "abstract", 0.32, "less",
            "peak of ResMLP-S12, four images of 224 pixels, 30% of the tiles of 32 x 32 kept",
            by.images(at.resmlp_s12, 4, "blocksparse", at.peak),
            reason="the abstract does not say how many tiles are kept. Linear inputs are 6 of the 14 tensors of h that "
            "a layer keeps: with 30% of them the most is -30.0%, and of the peak backward's working memory is another "
            "part (recipes/image_peaks.py)",
        ),
    )),
    "pooled": Paper("pooled activations", "2409.11902", "pooled", (
        Claim(
            "29% lower peak for ResNet", "abstract", 0.29, "less",
            "peak of ResNet-50, four images of 224 pixels, squares of 2 x 2 pixels",
            by.images(lambda scale: at.resnet(scale, 50), 4, "pooled", at.peak),
            reason="the abstract says neither which ResNet nor how large the pools are. The preset does not keep what "
            "BatchNorms return either, as `exact` does not, so not all of the saving is pooling's",
        ),
        Claim(
            "29% lower peak for ResNet", "abstract", 0.29, "less",
            "peak of ResNet-18, four images of 224 pixels, squares of 2 x 2 pixels",
            by.images(lambda scale: at.resnet(scale, 18), 4, "pooled", at.peak),
            reason="the abstract does not say which ResNet. In a ResNet-18 the stem, four times as large as any other "
            "map, is over a third of the bytes, and pooling finds one input of a convolution there: the pixels. What "
            "stock's max pooling keeps stays; without that layer the claim holds (recipes/image_peaks.py). `exact` "
            "alone saves more",
        ),
    )),
    "wtacrs": Paper("WTA-CRS", "2305.15265", "wtacrs", (
        Claim(
            "T5-base, 30% of the rows: peak of 8.44 instead of 17.66 GB", "README of the authors' code", 2.1, "times",
            "kept bytes of a T5-base encoder layer, 8 x 128 tokens, fp32", by.wtacrs,
            incomparable="theirs is the peak of a training with weights and optimizer, ours of a layer's activations. "
            "Their code also samples attention's products, and has a norm in place and masks of one bit; our preset "
            "samples the inputs of linear layers, and keeps no outputs of norms and activations, as `exact`",
        ),
    )),
    "actnn": Paper("ActNN", "2104.14129", "actnn", (
        Claim(
            "activations 12x smaller at 2 bits", "abstract", 12.0, "times",
            "kept bytes of ResNet-50, one image of 224 pixels", by.actnn,
            reason="one image has 2 bits, a batch 2 on average, by sample; the paper also moves bits between layers. "
            "The abstract does not say of which network 12 is",
        ),
    )),
    "mesa": Paper("Mesa", "2111.11124", "mesa", (
        Claim(
            "DeiT-B, batch 128 at 224 pixels: 8,616 instead of 17,691 MB", "README of the authors' code", 0.513, "less",
            "ViT-B/16 with eager attention, one image of 224 pixels, fp32, kept bytes scaled to 128 images, AdamW's "
            "states", by.mesa,
            reason="far more than claimed, because the preset stores in 8 bits only what `exact` keeps, and the paper "
            "what every operation keeps; theirs is measured on a card, ours counted",
        ),
    )),
    "gact": Paper("GACT", "2206.11357", "gact", (
        Claim(
            "activations up to 8.1x smaller", "abstract", 8.1, "times",
            "kept bytes of a BERT-large layer, 4 x 128 tokens, fp32, hidden dropout 0.1, 4 bits on average", by.gact,
            reason="attention stays at 8 bits here, because its 4-bit queries and keys do not fit the logsumexp; what "
            "`exact` makes again is not kept at all. The abstract does not say of which model 8.1 is",
        ),
    )),
    "tokentune": Paper("TokenTune", "2501.18824", "", (
        Claim(
            "Llama-2-7B, 30% of the tokens: activations are cached for these alone", "authors' code and recipe", 0.70,
            "less", "kept bytes of a layer with Llama 2's proportions, 512 wide, 2 x 512 tokens, bf16; "
            "CompressionConfig(tokens=0.3)", by.tokens(0.3),
            reason="the figure is the share of tokens that are not chosen, which no table of the paper states. Keys "
            "and values of all tokens are kept; `exact` keeps less of the chosen ones",
        ),
    )),
    "tokenseek": Paper("TokenSeek", "2601.19739", "", (
        Claim(
            "14.8% of the memory of fine-tuning Llama 3.2 1B", "abstract", 0.852, "less",
            "kept bytes of a layer with Llama 2's proportions, 512 wide, 2 x 512 tokens, bf16; "
            "CompressionConfig(tokens=0.1), which keeps the same bytes whichever tokens it chooses", by.tokens(0.1),
            incomparable="theirs is all memory of a training, ours a layer's activations. The abstract says neither "
            "how many tokens are chosen nor what else saves; 10% is our choice. Ours keeps all keys and values",
        ),
    )),
    "tokendrop": Paper("TokenDrop", "", "", (
        Claim(
            "up to 42.9% less memory for fine-tuning", "abstract, ICML 2026", 0.429, "less",
            "kept bytes of a layer with Llama 2's proportions, 512 wide, 2 x 512 tokens, bf16; "
            "CompressionConfig(tokens=0.5)", by.tokens(0.5),
            incomparable="theirs chooses tokens layer by layer, by the size of what a layer adds to them; `tokens` has "
            "one choice for all layers, made before the first one, so that ours is TokenTune's. Theirs is the memory "
            "of a fine-tuning; the abstract names neither the model nor the share of tokens, and 50% is our choice",
        ),
    )),
}  # fmt: skip

# papers whose figures stand in no row, because no preset is their method, and why
WITHOUT_ROW = {
    "HyC-LoRA (MLSys 2025)": "ranges are calibrated in the first steps and then stay, and keys are taken before the "
    "rotation; `int4_attention` has ranges of each tensor's own, and keys after it",
    "COAT (arXiv 2410.19313)": "it computes in fp8 and stores what `fp8` and `int8` make again",
    "In-Place ABN (arXiv 1712.02616)": "it inverts the activation; `exact` makes the BatchNorm's output again, in as "
    "many bytes",
}
