"""What to keep and how to store it: data only. `PRESETS` is the one table of names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from .codecs import Offload
from .codecs.table import CODECS
from .config_checks import CODEC_FIELDS, check, name_of, names_of_blocks, sampling
from .config_file import ConfigFile
from .errors import UnknownOptionError


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressionConfig(ConfigFile):
    """How the kept tensors of each field are stored, and which modules are patched. The default is the preset "exact".

    Codecs are names of `CODECS`. A codec object is also accepted: the config holds its name, or else its `repr`.

    Args:
        linear: Codec of linear inputs that have to be kept (most are derived and cost nothing).
        norm: Codec of the norms' inputs.
        mlp: Codec of activation inputs and of gate and up.
        attention: Codec of q, k, v and the output; with another codec than "identity" every attention call goes through
            our op. Codecs along tokens, such as "int5_channels", need ``attention_variant="recomputed"``. Where scores
            are not scaled (T5), "int10" stands in for "int8".
        other: Codec of the large activations that are saved by code for which there is no rule (see `net`). It never
            stores tensors computed from weights alone, nor masks, statistics, indices or losses.
        derive_linear: Rebuild a linear's input in backward where that is possible, at no cost in bytes. False: each
            linear input is stored through the codec `linear`, as in the papers on sparse activations.
        activation_variant: What a pointwise activation keeps: its "input" (exact), its "output" and a bit (Tempo,
            Inverted Activations), its "derivative" (nested forward differentiation), a derivative replaced by a step
            function of 1 to 4 bits ("steps3": few-bit backward), or the derivative's value in 2 to 8 bits ("values8").
            Gated MLPs keep gate and up exactly under every variant.
        norm_variant: What a norm keeps: its "input" (exact) or its "output" (Tempo).
        attention_variant: "statistics": keep the logsumexp of the exact q and k; with q and k in 8 bits its error grows
            with the scores, and those of several hundreds overflow. "recomputed": run attention again in backward on
            the stored tensors, which large scores and q and k in 4 bits require. "tempo": as "statistics", and eager
            attention keeps its probabilities once.
        loss_head: Patch the language-modelling head so that nothing of vocabulary size is kept for backward.
        overrides: Codecs of single layers, as (dotted part of a module's name, field, codec): ``("layers.3", "mlp",
            "int4")`` holds for every module below a "layers.3". A later one replaces an earlier one.
            `checkpoint_attention` may be set in the same way. `calibrate` and `plan` write them.
        logits: Return ``outputs.logits`` whole, as stock does. False: ``outputs.logits`` computes its values when
            something reads them (``argmax`` over the vocabulary a few rows at a time), before or after backward, until
            the weights change; then an error says so. A forward that computes a loss, in training or under ``no_grad``
            with labels, holds at most 512 MiB of logits (a chunk, or what it keeps). A compiled graph returns all.
        targets: The largest share of a batch's positions whose label counts (is not -100): 0.25 suits a masked language
            model that masks 15%. The head computes no gradient for the others. On a GPU it cannot count these labels
            without waiting for the device, so it computes all positions, or this share. If more positions of a batch
            count, training stops there with torch's error for a label outside the vocabulary. Leave it at 1 where the
            model itself selects the positions (ModernBERT's `sparse_prediction`).
        drop_padding: Keep nothing of the rows where the model's ``attention_mask`` [B, S] is 0, wherever they are: of
            hidden states, MLP tensors, q, k, v and what attention keeps, through any codec (a codec that pools averages
            real tokens only). Exact if no gradient reaches padding (labels of -100 there, a CLS token, pooling with the
            mask); if one does, backward raises PaddingError. Encoder-decoder models keep all rows. So do layers that
            combine tokens in another way than by attention with that mask (a convolution, a scan), as far as they are
            not made of patched modules.
        share_prompts: Where several sequences of a batch begin with the same tokens, such as the prompt of a group of
            completions (GRPO) or of two answers (DPO), keep the rows of these tokens once: of hidden states, MLP
            tensors, q, k, v and what attention keeps, through any codec that takes rows. For causal models without
            dropout (adapters' included): with dropout or attention in both directions the forward raises
            SharedRowsError. Backward raises it, too, if it compares some features and finds that shared rows differ for
            another reason. Exact: equal rows differ by rounding at most. All rows are computed. Finding equal rows
            waits for the device. Nothing is shared where a forward gets more than `input_ids`, masks [B, S], positions
            and labels, or a filled cache. Kept whole: statistics of norms, what gradient checkpointing and unpatched
            modules keep, and all in compiled graphs. Estimates do not take it into account. Not with `drop_padding`,
            `tokens`, encoder-decoders, or context parallelism.
        checkpoint: Layers whose insides are not kept but recomputed in backward (gradient checkpointing), as dotted
            parts of their names: ``("layers.3",)``. "every:2" is every second layer, from the first on, as transformers
            counts them ("every:1": all); "but_last:1" all but the last one, which backward needs first: computing it
            again saves no memory while the rest is kept. Layers that are checkpointed anyway stay so. `plan` writes
            names.
        checkpoint_attention: What a checkpointed layer keeps of attention, however checkpointing was switched on.
            "recomputed": nothing. "kept": attention's output and statistics, so that its kernel does not run again in
            backward. The kernel still runs again with dropout, in a model's own attention code, in compiled graphs, and
            on a GPU where the call is not causal and has no mask. Exact; `checkpoint_input` must be lossless, because
            statistics of the exact q and k do not fit those of a rounded input.
        checkpoint_input: Codec of the one tensor that a checkpointed layer keeps, its input, however checkpointing was
            switched on (`checkpoint`, `model.gradient_checkpointing_enable`, Trainer). Through a lossy one the layer is
            recomputed from what was stored.
        gradient_norms: For a codec of `linear` that samples tokens: how many samples to remember; 0 is off. A token is
            then weighted by the norm of x times the norm that its gradient had when the same sample came last
            (WTA-CRS), which helps from the second epoch on. A sample is recognised by a hash of its `input_ids` (or
            what the model's main input is), so nothing has to be numbered; where each epoch cuts, masks or augments
            anew, no sample is recognised. Takes 4 bytes per sample, token and linear layer on the host, and a copy of
            the ids to the host per forward. Not in compiled graphs, which sample by x alone.
        refresh_bits: For codecs whose bits are measured (GACT): before the tenth training forward, and then before each
            forward whose number is a multiple of this value, measure how much each layer's rounding changes the
            gradient, and set the bits anew. It takes a forward and backward per layer and role, and two copies of the
            gradient. Nothing is measured where the forward returns no loss, under reentrant checkpointing, where
            parameters are sharded, or in compiled graphs. If layers are checkpointed, call backward for one forward
            before the next one: after the bits change, a recomputation packs other tensors than its forward did. 0 is
            off: the bits stay equal.
        net: Also handle the tensors that code without a rule saves: do not keep those that can be recomputed bit by
            bit, and keep the masks of `torch.nn.functional.dropout` as bits. Off inside of checkpointed layers and
            where `derive_linear` is off. A model that calls `torch.func.grad` in its forward needs False.
        selective: Recompute products of activations in backward: state-space scans, and eager attention with its
            probabilities (module by module, too, with `net`). Products with weights are not computed twice.
        tiled_mlp: Rows (tokens) of a tile in which MLPs are computed, forward and backward, so that the working memory
            of an MLP is that of a tile; "auto" is half of the hidden size, 256 at least; 0 is off. "checkpointed": only
            in checkpointed layers that get 16,384 rows or more, in tiles of 8,192 rows or more, which fill a device as
            well as all rows do, and only MLPs without dropout. An MLP in tiles keeps its input alone, which costs
            nothing where it is a norm's output, and is computed twice, also in a checkpointed layer (with
            ``use_reentrant=True`` three times there). Exact, with the weights' gradients summed over tiles in fp32;
            what an MLP draws (LoRA's dropout) is drawn for each tile. Codecs and variants have no effect inside.
            Evaluation under ``no_grad`` goes in tiles, too. Not computed in tiles: MLPs with hooks on their layers,
            sharded ones (ZeRO-3), compiled ones, and experts. Where torch's code computes gated delta nets (Qwen3-Next,
            Qwen3.5), their backward takes about as many tokens at a time (512 for "auto").
        plans: Run layers and blocks by plans: one autograd Function per layer, whose code is derived from the joint
            graph of the layer's forward and backward. The gradients are those that autograd computes, in less of the
            host's time than module by module. This holds for transformers' layers, for blocks of any list (diffusion
            transformers, `torch.nn.TransformerEncoder`), and for other modules with children (embeddings). A layer
            checkpointed by torch's default function is one Function, too, which keeps its input. LoRA, autocast,
            dropout, frozen weights, empty caches, and codecs that round to nearest are supported. Calls with hooks
            inside or a filled cache run module by module, as do layers without a plan (the report says why).
        compile: Let torch's compiler, Inductor, make the code of layers' plans: once per kind of layer, and once more
            when sizes change; it is cached on disk. There are no graph breaks, and no guards in each call. Exact up to
            rounding (dropout draws other numbers), with the same bytes. A backward that adds to gradients holds those
            of a whole layer at once. A layer that cannot be compiled runs as without it, which is said once. No effect
            inside of `torch.compile(model)`.
        blocks: Further modules that run by plans, each by a part of its name in the model ("transformer_blocks" is a
            list and names the modules in it), by its class, or by the name of that.
        tokens: The share of each sequence's tokens that get gradients, above 0 and up to 1 (TokenTune, arXiv
            2501.18824). The loss is that of all tokens. In every layer the hidden states of the other tokens are
            constants: nothing is kept of them but their keys and values, and backward computes nothing for them; a
            layer's forward runs twice, on all tokens and on the chosen ones. The gradient of that is exact; it is not
            the gradient of all tokens. Layers run module by module; attention must be "sdpa". Not with `drop_padding`,
            for encoder-decoders, or in compiled graphs.
        token_choice: "random" (drawn anew in each forward), "last", "loss" (those that predict worst, found by a
            forward without gradients; TokenSeek's idea), or a function: it gets the arguments of the model's forward as
            a dictionary and returns scores [B, S], of which the largest are chosen. Padding is chosen last; models that
            predict one thing for a sequence choose its first and last token in any case.

    Raises:
        UnknownOptionError: A codec that is not in ``CODECS``, one that only suits linear inputs in another field, a
            block that is neither a name nor a class of modules, `gradient_norms` with one that samples no tokens,
            `refresh_bits` where no field's bits are measured, a variant that is not in ``VARIANTS``, rows of a tile
            that are no number, or `tokens` that are no share.
    """

    linear: str = "identity"
    norm: str = "identity"
    mlp: str = "identity"
    attention: str = "identity"
    other: str = "identity"
    derive_linear: bool = True
    activation_variant: str = "input"
    norm_variant: str = "input"
    attention_variant: str = "statistics"
    loss_head: bool = True
    logits: bool = False
    targets: float = 1.0
    overrides: tuple[tuple[str, str, str], ...] = ()
    drop_padding: bool = False
    share_prompts: bool = False
    checkpoint: tuple[str, ...] | str = ()
    checkpoint_attention: str = "recomputed"
    checkpoint_input: str = "identity"
    gradient_norms: int = 0
    refresh_bits: int = 0
    net: bool = True
    selective: bool = True
    tiled_mlp: int | str = "checkpointed"
    plans: bool = True
    compile: bool = False
    blocks: tuple[Any, ...] = ()
    tokens: float = 1.0
    token_choice: Any = "random"

    def __post_init__(self) -> None:
        for field in (*CODEC_FIELDS, "other"):
            object.__setattr__(self, field, name_of(getattr(self, field)))
        named = tuple((part, field, name_of(value)) for part, field, value in self.overrides)
        object.__setattr__(self, "overrides", named)
        object.__setattr__(self, "blocks", names_of_blocks(self.blocks))
        check(self)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> CompressionConfig:
        """The preset of that name, with some of its fields replaced. Raises UnknownOptionError."""
        if name not in PRESETS:
            raise UnknownOptionError("preset", name, PRESETS)
        return cls.from_dict({**vars(PRESETS[name]), **overrides})

    def at(self, module: str) -> CompressionConfig:
        """The config of the module of that name: this one, with the overrides that hold there."""
        found = {field: value for part, field, value in self.overrides if f".{part}." in f".{module}."}
        if not found:
            return self
        norms = self.gradient_norms if found.get("linear", self.linear) in sampling() else 0
        return replace(self, **found, gradient_norms=norms, refresh_bits=0, overrides=())  # type: ignore[arg-type]

    @property
    def always_in_tiles(self) -> bool:
        """Whether MLPs are computed in tiles in every call."""
        return self.tiled_mlp not in (0, "checkpointed")

    @property
    def lossless(self) -> bool:
        """Whether every gradient stays exact."""
        exact = self.activation_variant == "input" and self.norm_variant == "input"
        return exact and self.tokens == 1 and all(CODECS[name].lossless for name in self.codecs)

    @property
    def offloads(self) -> bool:
        """Whether something is kept in host memory."""
        return any(isinstance(CODECS[name], Offload) for name in self.codecs)

    @property
    def codecs(self) -> set[str]:
        """The codecs of all fields, those of single layers included."""
        single = (value for _, field, value in self.overrides if field in CODEC_FIELDS)
        return {self.other, *(getattr(self, field) for field in CODEC_FIELDS), *single}


# Storage: every role goes through a codec. q, k and v have 8 bits at least, because they have to fit the exact
# statistics. A few channels of the residual stream are far larger than the others: stored apart, they cost under 1% of
# the bytes, and most of the error disappears. Few linear inputs are stored at all (those of heads and poolers), and an
# error in these matters. The input of a checkpointed layer has 8 bits in every preset: it is small, and the whole
# layer, q and k included, is recomputed from it.
_INT8 = CompressionConfig(
    linear="int8", norm="int8_outliers", mlp="int8", attention="int8", other="int8", checkpoint_input="int8_outliers"
)
_INT4 = replace(_INT8, norm="int4_128_outliers", mlp="int4_outliers")

# what a config is called that is none of the presets
CUSTOM = "custom"

PRESETS: dict[str, CompressionConfig] = {
    "exact": CompressionConfig(),
    # exact, too, for long contexts: MLPs keep their input alone and are recomputed in tiles
    "long": CompressionConfig(tiled_mlp="auto"),
    "int8": _INT8,
    "int4": _INT4,
    # attention in 5 bits, too: it runs again in backward, so that its statistics fit what was stored
    "int4_attention": replace(_INT4, attention="int5_channels", attention_variant="recomputed"),
    # where `calibrate` starts; without it, the residual stream has twice the bits of the MLPs
    "adaptive": replace(_INT8, mlp="int4_outliers", other="identity"),
    "fp8": CompressionConfig(
        linear="fp8_e4m3", norm="fp8_e4m3", mlp="fp8_e4m3", attention="fp8_e4m3", checkpoint_input="int8_outliers"
    ),
    "offload": CompressionConfig(
        linear="offload", norm="offload", mlp="offload", attention="offload", checkpoint_input="offload"
    ),
    # presets whose ops keep other tensors than "exact" keeps
    "tempo": CompressionConfig(activation_variant="output", norm_variant="output", attention_variant="tempo"),
    "inverted": CompressionConfig(activation_variant="output"),
    "fewbit": CompressionConfig(activation_variant="steps3"),
    "forward_ad": CompressionConfig(activation_variant="derivative"),
    # the papers' own quantisers. ActNN: what linear layers, convolutions, BatchNorms and pointwise activations read.
    # Mesa: all roles. GACT: all but attention, whose q and k of 4 bits would not fit the exact logsumexp
    "actnn": CompressionConfig(linear="int2_ranked", mlp="int2_ranked", other="int2_ranked"),
    "mesa": CompressionConfig(
        linear="int8_running",
        norm="int8_running",
        mlp="int8_running",
        attention="int8_running",
        other="int8_running",
    ),
    "gact": CompressionConfig(
        linear="int4_measured",
        norm="int4_measured",
        mlp="int4_measured",
        attention="int8_stochastic",
        other="int8_stochastic",
        refresh_bits=1000,
    ),
    # estimates of the weight gradient from part of a linear's input
    "dropit": CompressionConfig(linear="topk10", derive_linear=False),
    "blocksparse": CompressionConfig(linear="block30", derive_linear=False),
    "pooled": CompressionConfig(linear="pool2", derive_linear=False),
    "sampled": CompressionConfig(linear="wtacrs30", derive_linear=False),
    "wtacrs": CompressionConfig(linear="wtacrs30", derive_linear=False, gradient_norms=16384),
}


class Configured(Protocol):
    """An object that carries a config, such as a plan or a calibration."""

    @property
    def config(self) -> CompressionConfig: ...


def resolve(config: CompressionConfig | Configured | str) -> CompressionConfig:
    """The config itself, the one that an object carries, or the preset of that name."""
    carried = getattr(config, "config", config)
    if isinstance(carried, CompressionConfig):
        return carried
    if isinstance(config, str):
        return CompressionConfig.from_preset(config)
    raise UnknownOptionError("config", config, [*PRESETS, "a CompressionConfig"])


def preset_of(config: CompressionConfig) -> str:
    """The preset that a config is, compiled or not, or "custom"."""
    kept = replace(config, compile=False)
    return next((name for name, preset in PRESETS.items() if preset == kept), CUSTOM)
