"""One contender of `throughput.py`: trains one model, and takes steps on command.

    python tests/benchmarks/contenders.py NAME MODEL BATCH DEVICE PRECISION

Every contender trains the same model on the same windows with AdamW, clipping, warmup and cosine.
It takes WARM_UP steps and prints their time and, if available, their losses. Then it reads numbers
of steps from stdin, takes them, and prints their seconds. An empty line ends it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import trial_config
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.models.build import autocast, build_model
from sweep.plan.learning_rate import learning_rate_at
from sweep.training import loop
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import available_cores
from sweep.training.step import TrainingStep
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus
from sweep.workloads.build import build_workload

WARM_UP = 10  # steps
WINDOWS = 32  # distinct batches, repeated by the contenders other than sweep
PEAK_RATE, RATE_WARM_UP = 1e-3, 2  # large enough for a wrong step to change the next losses


def matrix_size(device: str) -> int:
    """Return N of the N × N product: large enough to keep the device busy."""
    return 8192 if device.startswith("cuda") else 2048


def benchmarked(
    model: str,
    batch: int,
    device: str,
    precision: str,
    compiled: bool,
    graph_bound: int | None = None,  # None: as a plan decides
) -> TrialConfig:
    """Return the config of a trial that is longer than any benchmark."""
    decides = graph_bound is None
    config = trial_config(model, batch, precision, device, compiled, decides, budget=10**10)
    changes: dict[str, Any] = {"checkpoint_seconds": 1e9, "evaluation_batch_size": 32}
    if graph_bound is not None:
        changes["graph_bound"] = graph_bound
    execution = config.execution.model_copy(update=changes)
    science = config.science.model_copy(update={"learning_rate": PEAK_RATE})
    return config.model_copy(
        update={"execution": execution, "science": science, "warmup_steps": RATE_WARM_UP}
    )


class Pacer:
    """Count steps; after the commanded number print their time and wait for the next command."""

    def __init__(self, device: str, losses: Callable[[], list[float]] = list) -> None:
        self._is_cuda, self._losses = device.startswith("cuda"), losses
        self._remaining, self._start = WARM_UP, time.perf_counter()

    def tick(self) -> bool:
        """Count one step; return False if training should end."""
        self._remaining -= 1
        if self._remaining:
            return True
        if self._is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        print(json.dumps({"seconds": seconds, "losses": self._losses()}), flush=True)
        order = sys.stdin.readline().strip()
        self._losses = list
        self._remaining, self._start = int(order or 0), time.perf_counter()
        return bool(order)


def windows(config: TrialConfig) -> list[Tensor]:
    """Return the first batches of the trial's own stream, on its device."""
    device, size = torch.device(config.execution.device), config.science.batch_size
    workload = build_workload(config, device)
    return [workload.build_batch(i * size, size)[0] for i in range(WINDOWS)]


def run_sweep(config: TrialConfig) -> None:
    """Run sweep's own loop, as a worker does."""
    device = torch.device(config.execution.device)
    losses: list[float] = []

    class RecordingStep(TrainingStep):
        """Record the losses of the first steps."""

        def __call__(self, *arguments: Any) -> torch.Tensor:
            loss = super().__call__(*arguments)
            if len(losses) < WARM_UP:
                losses.append(loss.item())
            return loss

    with tempfile.TemporaryDirectory() as name:
        folder = TrialFolder(Path(name) / "benchmark")
        folder.path.mkdir()
        folder.write_config(config)
        folder.write_status(TrialStatus(attempts=1, fencing=1))
        pacer = Pacer(config.execution.device, lambda: losses)
        step = RecordingStep(config, device)
        store = CheckpointStore(folder, 1)
        started = time.perf_counter()

        def should_stop() -> str | None:
            return None if pacer.tick() else "stopped"

        loop.train(config, step, store, should_stop, started)


def run_plain(config: TrialConfig) -> None:
    """Run a hand-written loop with fused AdamW, compiled if the config says so."""
    science, device = config.science, torch.device(config.execution.device)
    torch.manual_seed(science.seed)
    model = build_model(science.model, science.seed, False).to(device)
    optimizer = _adamw(model, config)
    batches, losses = windows(config), list[float]()
    pacer = Pacer(config.execution.device, lambda: losses)

    def loss_of(batch: Tensor) -> Tensor:
        with autocast(device, science.precision):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    function = torch.compile(loss_of) if config.execution.compile else loss_of
    for t in range(1, 10**9):
        loss = function(batches[(t - 1) % WINDOWS])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, t)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if t <= WARM_UP:
            losses.append(loss.item())
        if not pacer.tick():
            return


def run_transformers(config: TrialConfig) -> None:
    """Run Hugging Face's Trainer with a LlamaForCausalLM of the same shapes."""
    import transformers

    settings, science = config.science.model, config.science
    assert settings.kind == "transformer"
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.d_model,
            intermediate_size=settings.d_ff,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    own = build_model(settings, 0)
    assert sum(p.numel() for p in llama.parameters()) == sum(p.numel() for p in own.parameters())
    pacer = Pacer(config.execution.device)

    class Pace(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not pacer.tick()

    device = config.execution.device
    with tempfile.TemporaryDirectory() as name:
        arguments = transformers.TrainingArguments(
            output_dir=name,
            per_device_train_batch_size=science.batch_size,
            max_steps=config.steps,
            learning_rate=science.learning_rate,
            weight_decay=science.optimizer.weight_decay,
            adam_beta1=science.optimizer.beta1,
            adam_beta2=science.optimizer.beta2,
            max_grad_norm=science.optimizer.clip,
            lr_scheduler_type="cosine",
            warmup_steps=config.warmup_steps,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            bf16=science.precision == "bf16",
            torch_compile=config.execution.compile,
        )
        # LlamaForCausalLM shifts the labels itself and trains on one target less per sequence.
        items = [
            {"input_ids": row[:-1], "labels": row[:-1]} for b in windows(config) for row in b.cpu()
        ]
        trainer = transformers.Trainer(
            llama, arguments, train_dataset=_Endless(items), callbacks=[Pace()]
        )
        trainer.train()


def run_lightning(config: TrialConfig) -> None:
    """Run Lightning with sweep's model."""
    import lightning

    science, device = config.science, config.execution.device
    pacer = Pacer(device)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            model = build_model(science.model, science.seed, False)
            self.model = torch.compile(model) if config.execution.compile else model

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            optimizer = _adamw(self, config)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda t: _rate(config, t + 1) / science.learning_rate
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Pace(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not pacer.tick():
                trainer.should_stop = True

    rows = [row for batch in windows(config) for row in batch.cpu()]
    loader = torch.utils.data.DataLoader(_Endless(rows), science.batch_size, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed" if science.precision == "bf16" else "32-true",
        callbacks=[Pace()],
        gradient_clip_val=science.optimizer.clip,
        max_steps=config.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


def run_matrix_product(config: TrialConfig) -> None:
    """Run a matrix product; a step is 2·N³ operations."""
    device, dtype = torch.device(config.execution.device), torch.float32
    if config.science.precision.startswith("bf16"):
        dtype = torch.bfloat16
    size = matrix_size(config.execution.device)
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, pacer = torch.empty_like(first), Pacer(config.execution.device)
    while True:
        torch.mm(first, second, out=out)
        if not pacer.tick():
            return


class _Endless(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that repeat, so that no epoch ends."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        return self._rows[index % len(self._rows)]


def _adamw(model: nn.Module, config: TrialConfig) -> torch.optim.AdamW:
    settings, parameters = config.science.optimizer, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    rate = config.science.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.eps, fused=True)


def _rate(config: TrialConfig, t: int) -> float:
    science = config.science
    return learning_rate_at(
        t, science.learning_rate, config.steps, config.warmup_steps, science.schedule
    )


GRAPH_BOUNDS = {"sweep with graph": 1 << 30, "sweep without graph": 0}
# Functions, with whether they are compiled.
CONTENDERS: dict[str, tuple[Callable[[TrialConfig], None], bool]] = {
    "sweep": (run_sweep, True),
    "sweep with graph": (run_sweep, True),
    "sweep without graph": (run_sweep, True),
    "sweep eager": (run_sweep, False),
    "plain loop": (run_plain, False),
    "plain loop compiled": (run_plain, True),
    "transformers": (run_transformers, False),
    "transformers compiled": (run_transformers, True),
    "lightning": (run_lightning, False),
    "lightning compiled": (run_lightning, True),
    "matrix product": (run_matrix_product, False),
}


def main() -> None:
    """Run the contender named on the command line."""
    name, model, batch, device, precision = sys.argv[1:]
    torch.set_num_threads(available_cores())
    run, is_compiled = CONTENDERS[name]
    bound = GRAPH_BOUNDS.get(name)
    run(benchmarked(model, int(batch), device, precision, is_compiled, bound))


if __name__ == "__main__":
    main()
