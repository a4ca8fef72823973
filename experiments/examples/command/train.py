"""Train a small network to predict the next byte of a text from those before it."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CONTEXT = 8  # bytes that a prediction sees

parser = argparse.ArgumentParser()
parser.add_argument("text", help="a text file, of which the last tenth is for validation")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log", default="log.jsonl")
parser.add_argument("--checkpoint", default="checkpoint.pt")
args = parser.parse_args()


def loss_of(text, starts):
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(windows[:, :-1]), windows[:, -1])


def log(step, **metrics):
    with open(args.log, "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
train, valid = text.split([len(text) - len(text) // 10, len(text) // 10])
torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(32 * CONTEXT, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
)
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
first = 0
if os.path.exists(args.checkpoint):
    first, *states, random = torch.load(args.checkpoint)
    for part, state in zip((model, optimizer, schedule), states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)

for step in range(first + 1, args.steps + 1):
    loss = loss_of(train, torch.randint(len(train) - CONTEXT, (args.batch_size,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 10 == 0:
        log(step, **{"train/loss": loss.item()})
        states = [part.state_dict() for part in (model, optimizer, schedule)]
        torch.save([step, *states, torch.get_rng_state()], args.checkpoint + ".new")
        os.replace(args.checkpoint + ".new", args.checkpoint)

with torch.no_grad():
    loss = loss_of(valid, torch.arange(len(valid) - CONTEXT))
    log(args.steps, **{"valid/loss": loss.item()})
