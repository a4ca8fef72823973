"""Optimizers and schedules as users write them: `own_optimizers:Name`."""

import torch


class Counting(torch.optim.Optimizer):
    """Signs with momentum, whose rate depends on numbers in its groups and its states."""

    def __init__(self, groups, lr, momentum=0.9):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(calls=0, velocity=torch.zeros_like(weight))
                state["calls"] += 1
                state["velocity"].lerp_(weight.grad, 1 - group["momentum"])
                rate = group["lr"] / (1 + 0.01 * (group["calls"] + state["calls"]))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.sub_(state["velocity"].sign(), alpha=rate)


class Late(Counting):
    """Creates a state at its third step, which a checkpoint cannot be restored into."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if self.state[weight]["calls"] == 3:
                    self.state[weight]["late"] = torch.ones(2)


class Listing(Counting):
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state.setdefault("history", []).append(1.0)


class Failing(Counting):
    def step(self, closure=None):
        raise RuntimeError("no step today")


class Newton(torch.optim.Optimizer):
    """Plain steps that are multiplied by the inverse curvature of the quadratic: 1, 2, 3, …"""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                inverse = torch.arange(1.0, len(weight) + 1)
                weight.sub_(group["lr"] * inverse * weight.grad)


def no_optimizer(groups, lr):
    return lr


def triangle(step, steps, warmup_steps):
    return min(step / max(1, warmup_steps), (steps - step + 1) / steps)


def negative(step, steps, warmup_steps):
    return 0.5 - step / steps


def unknown(step, steps, warmup_steps):
    return float("nan")
