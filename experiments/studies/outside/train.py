"""Train the model `quick` on synthetic stories, with a loop of its own."""

import argparse
import json
import math
import os

import torch
from torch.nn.functional import cross_entropy

from sweep.config.models import MODEL_PRESETS
from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.tokens import SequenceStream, prepare_data
from sweep.models.build import build_model
from sweep.workloads.pretrain import gather

parser = argparse.ArgumentParser()
for name in ("--batch-size", "--steps", "--seed"):
    parser.add_argument(name, type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--log", required=True)
parser.add_argument("--resume", help="checkpoint to continue from, if it exists, and to write")
parser.add_argument("--warmup", type=int, default=1)
parser.add_argument("--microbatch", type=int)
parser.add_argument("--beta2", type=float, default=0.999)
parser.add_argument("--weight-decay", type=float, default=0.1)
args = parser.parse_args()

torch.use_deterministic_algorithms(True)
settings = MODEL_PRESETS["quick"]
context = settings.context
size = args.batch_size
tokenizer = TokenizerSettings(kind="bpe", vocabulary=settings.vocabulary)
text = prepare_data(identify_data("synthetic"), None, tokenizer)
stream = SequenceStream((len(text.train) - 1) // context, args.seed)
model = build_model(settings, args.seed)
matrices = [p for p in model.parameters() if p.ndim > 1]
others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
optimizer = torch.optim.AdamW(
    [{"params": matrices}, others],
    lr=args.lr,
    betas=(0.9, args.beta2),
    weight_decay=args.weight_decay,
    fused=True,
)


def losses(tokens, indices):
    windows = torch.from_numpy(gather(tokens, indices, context))
    logits = model(windows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")


def report(step, **metrics):
    with open(args.log, "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


first = 0
if args.resume and os.path.exists(args.resume):
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

for step in range(first + 1, args.steps + 1):
    rate = args.lr * step / args.warmup
    if step > args.warmup:
        progress = (step - args.warmup) / (args.steps - args.warmup)
        rate = args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate
    batch = stream.indices((step - 1) * size, size)
    loss = 0.0
    for start in range(0, size, args.microbatch or size):
        part = losses(text.train, batch[start : start + (args.microbatch or size)])
        part = part.sum() / (size * context)
        part.backward()
        loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, **{"train/loss": loss})
    if args.resume and step % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.resume + ".part")
        os.replace(args.resume + ".part", args.resume)

with torch.no_grad():
    count = (len(text.valid) - 1) // context
    parts = torch.arange(count).split(128)
    total = sum(losses(text.valid, part.numpy()).double().sum().item() for part in parts)
    rest = torch.from_numpy(text.valid[count * context :].astype("int64"))
    total += cross_entropy(model(rest[None, :-1])[0], rest[1:], reduction="sum").item()
report(args.steps, **{"valid/loss": total / (len(text.valid) - 1)})
