"""A step stock and one patched: what is right, and that what is wrong is found by each of the ways to judge."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_actcompress import kept_bytes, patch_model, patched
from hf_actcompress.memory.fidelity import checkup
from hf_actcompress.memory.fidelity.checkup import check_up
from hf_actcompress.memory.fidelity.checkup_report import CheckUp

ROOM = 2**30
IDS = torch.arange(32).view(2, 16)
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).to(dtype).train()


def check(model=None, config="exact", **options):
    return check_up(model or llama(), BATCH, config, **{"rounds": 1, "room": ROOM, **options})


@contextmanager
def wrong(model, config):
    """Patched, and one gradient of many is 2% too large."""
    with patched(model, config):
        handle = model.model.layers[1].mlp.down_proj.weight.register_hook(lambda g: 1.02 * g)
        try:
            yield
        finally:
            handle.remove()


def test_bits_and_bytes():
    """These gradients have stock's bits in bf16, where a program rounds where stock rounds, and not in fp32."""
    found = check(llama(torch.bfloat16))
    assert found.right and found.patched == "patched 2 layers, exact"
    assert found.verdict == "equal, bit by bit" and found.compared() == f"all {found.gradients} have stock's bits"
    assert found.difference == 0
    model = llama(torch.bfloat16)
    kept = [kept_bytes(lambda: model(**BATCH), "cpu")]
    patch_model(model)
    kept.append(kept_bytes(lambda: model(**BATCH), "cpu"))
    assert [side.kept_bytes for side in found.figures] == kept
    assert all(side.peak_bytes > side.kept_bytes and side.seconds > 0 for side in found.figures)


@pytest.mark.parametrize("room", [ROOM, None, 1000])
def test_a_wrong_gradient_is_found(monkeypatch, room):
    """By its error against fp64, and by its difference from stock where fp64 is too large."""
    assert check(room=room).right
    monkeypatch.setattr(checkup, "patched", wrong)
    found = check(room=room)
    assert (found.stock_error is None) == (room != ROOM)
    assert not found.right and found.verdict.startswith("NOT RIGHT: the gradients")


def test_work_is_bounded(monkeypatch):
    monkeypatch.setattr(checkup, "_MOST_WORK", 6 * 32 * sum(p.numel() for p in llama().parameters()) - 1)
    assert check().stock_error is None


def test_dropout_that_fp64_draws_otherwise_is_no_error():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    found = check(GPT2LMHeadModel(config).train())
    assert found.right and found.stock_error is None and "difference from stock" in str(found)


def test_experts_have_no_fp64():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=64)
    found = check(MixtralForCausalLM(config).train())
    assert found.right and found.stock_error is None and "difference from stock" in str(found)


def test_lossy_is_said_and_a_loss_is_judged(monkeypatch):
    found = check(config="int8")
    assert found.right and found.verdict.startswith("lossy, as asked")
    assert found.patched_error > found.stock_error

    @contextmanager
    def other_loss(model, config):
        with patched(model, config), torch.no_grad():
            weight = model.lm_head.weight
            weight.mul_(1.5)
            with torch.enable_grad():
                yield
            weight.div_(1.5)

    monkeypatch.setattr(checkup, "patched", other_loss)
    assert "the loss is another one" in check(config="int8").faults


def test_missing_and_infinite_gradients(monkeypatch):
    both = checkup._both

    def without_one(*args):
        stock, (loss, ours), line = both(*args)
        return stock, (loss, {name: g for name, g in ours.items() if name != "model.norm.weight"}), line

    monkeypatch.setattr(checkup, "_both", without_one)
    assert check().faults == ("only one of the two has a gradient of model.norm.weight",)
    for side, said in ((0, "stock's own gradients"), (1, "there are gradients")):

        def infinite(*args, side=side):
            found = both(*args)
            found[side][1]["model.norm.weight"][0] = torch.inf
            return found

        monkeypatch.setattr(checkup, "_both", infinite)
        (fault,) = check().faults
        assert fault.startswith(said)


def test_autocast_leaves_the_model_as_it_was():
    model = llama()
    before = type(model.model.layers[0])
    found = check(model, autocast=torch.bfloat16)
    assert found.right and found.bound == pytest.approx(torch.finfo(torch.bfloat16).eps ** 0.5)
    assert type(model.model.layers[0]) is before


def test_it_serialises_and_writes_a_model_card():
    found = check(config="long")
    assert found.verdict == "equal up to rounding" and found.equal_gradients < found.gradients
    assert CheckUp.from_json(found.to_json()) == found
    card = found.model_card("batch 2 x 16")
    assert "patched 2 layers, long, exact" in card and "batch 2 x 16" in card
    rows = [line for line in card.splitlines() if line.startswith(("| stock", "| long"))]
    for row, side in zip(rows, found.figures, strict=True):
        assert f"| {side.kept_bytes / 1024:.1f} KiB |" in row and f"| {1000 * side.seconds:.1f} |" in row
    assert max(map(len, found.summary().splitlines())) <= 80
