"""Losses outside of a wrapped model: under the Trainer, and under engines that hook the model's output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_actcompress import ActCompressCallback, ops
from tests.models.loss_head_models import batch, llama, pair
from tests.models.rl_losses import LOSSES, total


class OwnLossTrainer(Trainer):  # type: ignore[misc]
    """Gives the labels to the model, but computes a loss of its own from the logits."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: object, **__: object) -> Tensor:
        return total(LOSSES["own cross entropy"](model(**inputs).logits, inputs["labels"]))


def test_a_trainer_with_a_loss_of_its_own_under_the_callback(tmp_path: Path) -> None:
    ids = batch(rows=8, length=17)["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "learning_rate": 0.1}
    trained = []
    start = llama().train()
    for callbacks in ([], [ActCompressCallback("exact")]):
        model = copy.deepcopy(start)
        arguments = TrainingArguments(output_dir=str(tmp_path), save_strategy="no", **options)
        OwnLossTrainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()
        trained.append(model)
    for (name, a), b in zip(trained[0].named_parameters(), trained[1].parameters(), strict=True):
        # in two steps of Adam in fp32, one rounding may change the sign of a gradient near zero
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2, msg=name)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp, unused parameters": lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
    "fsdp2": shard,
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("logits", (True, False), ids=("logits", "no logits"))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_under_engines_that_hook_the_output(wrapper: str, logits: bool) -> None:
    stock, ours = pair(llama, logits=logits)
    ids = batch()["input_ids"]
    grads = []
    for model in (stock, ours):
        wrapped = WRAPPERS[wrapper](model)
        output = wrapped(input_ids=ids).logits
        total(LOSSES["grpo with entropy"](output, ids)).backward()
        named = model.named_parameters()
        grads.append({n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named})
    assert isinstance(output, ops.DeferredLogits)
    for name in grads[0]:
        # fp32 sums of some hundred terms
        torch.testing.assert_close(grads[1][name], grads[0][name], rtol=1e-4, atol=1e-6, msg=name)
