"""What ``test_frameworks`` runs: frameworks train on a pack, and each rank writes down what it saw.

    python tests/frameworks_program.py PACK OUT FRAMEWORK [FRAMEWORK ...]
    python -m torch.distributed.run --nproc-per-node 2 tests/frameworks_program.py PACK OUT FRAMEWORK [FRAMEWORK ...]

Records are seen as their labels, which are their numbers in the pack.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import packfmt

BATCH, EPOCHS, STOP = 4, 2, 3  # STOP: steps before the break of a run that is resumed
TRAINING = 32  # records; the rest is for evaluation
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def parts_of(pack: str, **options: Any) -> tuple[packfmt.ImageDataset, packfmt.ImageDataset]:
    dataset = packfmt.ImageDataset(pack, crop=packfmt.RandomResizedCrop(8), threads=1, **options)
    train, val = dataset.select(slice(0, TRAINING)), dataset.select(slice(TRAINING, None))
    val.crop = packfmt.Resize(8)
    return train, val


def lightning(pack: str, out: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 * 8 * 8, 2)
            self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": []}

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen["train"].append(batch[1].tolist())
            return self.layer(batch[0].flatten(1) / 255.0).mean()

        def validation_step(self, batch: Any, number: int) -> None:
            self.seen["val"].append(batch[1].tolist())

        def test_step(self, batch: Any, number: int) -> None:
            self.seen["test"].append(batch[1].tolist())

        def predict_step(self, batch: Any, number: int) -> Any:
            return batch[1]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def trainer(**options: Any) -> Any:
        return pl.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp" if RANKS > 1 else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
            **options,
        )

    def train_loader() -> packfmt.Loader:
        return packfmt.Loader(train, BATCH)

    train, val = parts_of(pack)
    val_loader = packfmt.Loader(val, 3, shuffle=False)
    whole = Model()
    run = trainer(max_epochs=EPOCHS, enable_checkpointing=False, num_sanity_val_steps=0)
    run.fit(whole, train_loader(), val_loader)
    seen = dict(whole.seen, val=whole.seen["val"][: len(whole.seen["val"]) // EPOCHS])
    run.validate(whole, val_loader, verbose=False)
    run.test(whole, val_loader, verbose=False)
    seen["predict"] = [labels.tolist() for labels in run.predict(whole, val_loader)]

    saving = pl.callbacks.ModelCheckpoint(out / "saved", "middle", every_n_train_steps=STOP)
    broken, resumed = Model(), Model()
    trainer(max_steps=STOP, callbacks=[saving]).fit(broken, train_loader(), val_loader)
    again = trainer(
        max_epochs=EPOCHS, callbacks=[pl.callbacks.ModelCheckpoint(out / "saved", every_n_train_steps=STOP)]
    )
    again.fit(resumed, train_loader(), val_loader, ckpt_path=out / "saved" / "middle.ckpt", weights_only=False)
    seen["broken"], seen["resumed"] = broken.seen["train"], resumed.seen["train"]

    sampler = packfmt.BlockBatchSampler(train, BATCH)
    wrapped = Model()
    trainer(max_epochs=1, enable_checkpointing=False, use_distributed_sampler=False).fit(
        wrapped, DataLoader(train, batch_sampler=sampler)
    )
    return {**seen, "dataloader": wrapped.seen["train"]}


def fabric(pack: str, out: Path) -> dict[str, Any]:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
    runner.launch()
    train, _ = parts_of(pack)
    loader = packfmt.Loader(train, BATCH, device=runner.device)
    model = nn.Linear(3 * 8 * 8, 2)
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    seen = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            seen.append(labels.tolist())
            runner.backward(model(images.flatten(1) / 255.0).mean())
            optimizer.step()
            optimizer.zero_grad()
    sampler = packfmt.BlockBatchSampler(train, BATCH)
    wrapped = runner.setup_dataloaders(DataLoader(train, batch_sampler=sampler), use_distributed_sampler=False)
    return {"train": seen, "dataloader": [labels.tolist() for _, labels in wrapped]}


def accelerate(pack: str, out: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    train, _ = parts_of(pack)
    loader = packfmt.Loader(train, BATCH, device=accelerator.device)
    model = nn.Linear(3 * 8 * 8, 2)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    accelerator.register_for_checkpointing(loader)
    seen = []
    for step, (images, labels) in enumerate(chain(prepared, prepared), 1):
        seen.append(labels.tolist())
        accelerator.backward(model(images.flatten(1) / 255.0).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == STOP:
            accelerator.save_state(out / "state")

    fresh = packfmt.Loader(train, BATCH)
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(fresh)
    accelerator.load_state(out / "state")
    resumed = [labels.tolist() for _, labels in chain(fresh, fresh)]
    return {"train": seen, "broken": seen[:STOP], "resumed": resumed}


def trainer(pack: str, out: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 * 8 * 8, 64)
            self.seen: list[list[int]] = []

        def forward(self, pixel_values: Any, labels: Any = None) -> dict[str, Any]:
            if self.training:
                self.seen.append(labels.tolist())
            logits = self.layer(pixel_values.flatten(1) / 255.0)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def run(**options: Any) -> Any:
        arguments = TrainingArguments(
            out / "trainer",
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_steps=STOP,
            disable_tqdm=True,
        )
        return Trainer(Model(), arguments, train_dataset=train, eval_dataset=val, **options)

    train, val = parts_of(pack, sample="dict")
    whole = run()
    whole.train()
    metrics = whole.evaluate()
    predicted = whole.predict(val)
    resumed = run()
    resumed.train(resume_from_checkpoint=str(out / "trainer" / f"checkpoint-{STOP}"))
    default = run(data_collator=torch.utils.data.default_collate)
    default.train()
    return {
        "train": whole.model.seen,
        "broken": whole.model.seen[:STOP],
        "resumed": resumed.model.seen,
        "default_collate": default.model.seen,
        "loss is finite": bool(torch.isfinite(torch.tensor(metrics["eval_loss"]))),
        "predict": predicted.label_ids.tolist(),
    }


RUNS = {"lightning": lightning, "fabric": fabric, "accelerate": accelerate, "trainer": trainer}


def main() -> None:
    pack, out, *frameworks = sys.argv[1:]
    seen = {framework: RUNS[framework](pack, Path(out)) for framework in frameworks}
    (Path(out) / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
