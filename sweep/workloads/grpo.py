"""Group relative policy optimization: sample, score, compare within groups, update.

Prompts and rewards come from a task (sweep/workloads/tasks).

Losses: Shao et al. 2024 (grpo), Liu et al. 2025 (dr_grpo), Yu et al. 2025 (dapo). Completion i
belongs to prompt i // group_size. Shapes: B completions of N tokens, prompts of P tokens.
"""

import copy
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweep.config.objective import REWARD
from sweep.config.trial import TrialConfig
from sweep.config.workloads import FINAL_PROMPTS, GrpoSettings
from sweep.data.tokens import TextTokenizer, TokenizedText
from sweep.errors import SweepError
from sweep.models.build import HasHidden, autocast
from sweep.models.generation import completion_uniforms, generate
from sweep.models.loss import linear_log_probs, widened
from sweep.trial import watchdog
from sweep.workloads.language import LanguageWorkload
from sweep.workloads.tasks.build import (
    REWARD_STATISTICS,
    build_reward,
    build_task,
    refuse_unusable_task,
)
from sweep.workloads.tasks.task import Completion, Prompt, Reward, Task
from sweep.workloads.workload import Batch, FinalEvaluation, Floats, Meter, Metrics

HELD_OUT = 1 << 40  # first number of the completions of evaluations; training does not reach it
SCALE_EPS = 1e-4  # added to the standard deviation of rewards


class Grpo(LanguageWorkload):
    """GRPO on the model and the task of a trial; a sequence is a prompt and its completion."""

    objective = REWARD.metric
    direction = REWARD.direction
    unit = REWARD.unit

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        super().__init__(config, device)
        settings = config.science.workload.settings_of_grpo
        assert settings is not None
        self.settings = settings
        self.updates_per_step = self.settings.num_iterations
        self.wide_dtype = torch.float32 if device.type == "mps" else torch.float64
        self.reference: nn.Module | None = None
        tokenizer = config.science.tokenizer
        self.end = tokenizer.end if tokenizer else 0  # id that ends a completion

    @cached_property
    def task(self) -> Task:
        return build_task(self.settings, self.text, self.config.science.seed)

    @cached_property
    def reward(self) -> Reward:
        return build_reward(self.settings, self.task)

    def check(self, text: TokenizedText | None) -> None:
        """Check the extra and the reward; with a text, or a task without one, also the prompts."""
        refuse_unusable_task(self.settings)
        if text is None and self.config.science.data is not None:
            return  # the prompts are checked once the text is prepared
        self.text = text
        prompts = [self.task.prompt(number, True) for number in range(32)]
        self.encode(prompts)
        self.reward(prompts[0], Completion("", True))

    def start(self, model: nn.Module) -> None:
        if not self.settings.kl:
            return
        # Cloned one by one: a deep copy of fake tensors does not preserve shared storages.
        copies: dict[int, Any] = {id(tensor): tensor.clone() for tensor in model.buffers()}
        for weight in model.parameters():
            copies[id(weight)] = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.reference = copy.deepcopy(model, copies).eval()

    def build_batch(self, first: int, count: int) -> Batch:
        """Return the numbers of completions, (count,)."""
        return (torch.arange(first, first + count),)

    def random_batch(self, count: int) -> Batch:
        """Return random prompts (count, P) and random numbers (count, N)."""
        shape = (count, self.settings.prompt_tokens)
        ids = torch.randint(self.vocabulary, shape, device=self.device)
        shape = (count, self.settings.new_tokens)
        return ids, torch.rand(shape, dtype=self.wide_dtype, device=self.device)

    def loss_tokens(self, batch: Batch) -> int | Tensor:
        mask = batch[1]
        if self.settings.loss == "grpo":
            return len(mask)
        return mask.numel() if self.settings.loss == "dr_grpo" else mask.sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        ids, mask, gain, sampled, reference = batch
        log_probs, entropies = self.log_probs(model, ids)
        old = sampled if self.updates_per_step > 1 else None
        losses, metrics = surrogate(log_probs, old, reference, gain, self.settings)
        add_means(self.meter, {**metrics, "grpo/entropy": entropies}, mask)
        if self.settings.loss == "grpo":  # the mean over the tokens of each completion
            mask = mask / mask.sum(dim=1, keepdim=True)
        return (losses * mask).sum()

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of completions, (B, N) each, from (B, P + N)."""
        temperature = self.settings.temperature
        first = self.settings.prompt_tokens
        targets = ids[:, first:]
        if isinstance(model, HasHidden):
            states, weight = self.head(model, ids[:, :-1], first - 1)
            rows = self.config.execution.loss_chunk_rows
            if not rows:
                rows = len(states)
            log_probs, entropies = linear_log_probs(
                states, weight, targets.flatten(), rows, temperature
            )
            return log_probs.view(targets.shape), entropies.view(targets.shape)

        with autocast(self.device, self.config.science.precision):
            logits = model(ids)[:, first - 1 : -1]
        every = torch.log_softmax(widened(logits) / temperature, dim=-1)
        constant = every.detach()
        entropies = -(constant.exp() * constant).sum(-1)
        log_probs = every.gather(-1, targets[..., None]).squeeze(-1)
        return log_probs, entropies

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return ids (B, P + N), mask (B, N), advantages (B,), old and reference log-probabilities.

        These are zeros if they are not needed, as are the advantages of a `random_batch`.
        """
        settings = self.settings
        size = settings.group_size
        is_random = len(batch) > 1
        prompts: list[Prompt] = []
        if is_random:
            ids, uniforms = batch
        else:
            numbers = batch[0].numpy()
            for group in numbers[::size] // size:
                prompts += [self.task.prompt(int(group), False)] * size
            ids = self.encode(prompts)
            uniforms = completion_uniforms(self.config.science.seed, numbers, settings.new_tokens)

        with self._phase("generate"):
            at_once = self.config.completions_at_once(microbatch_size)
            end = None if is_random else self.end
            completions = self.generate(model, ids, uniforms, at_once, end)

        with self._phase("score"):
            gain = torch.zeros(len(ids), device=self.device)
            if not is_random:
                rewards, components = score(self.reward, prompts, completions, self.tokenizer)
                add_rewards(self.meter, rewards, components, size)
                scores = torch.from_numpy(rewards).float().to(self.device)
                gain = advantages(scores, size, settings.scale_rewards)
            mask = completion_mask(completions, self.end)
            self.meter.add("completion/tokens", mask.sum(), len(mask))

        with self._phase("log_probs"), torch.no_grad():
            ids = torch.cat((ids, completions), dim=1)
            parts = torch.split(ids, microbatch_size)
            old = reference = torch.zeros_like(mask)
            if self.updates_per_step > 1:
                old = torch.cat([self.log_probs(model, part)[0] for part in parts])
            if self.reference is not None:
                reference = torch.cat([self.log_probs(self.reference, part)[0] for part in parts])
        return ids, mask, gain, old, reference

    def encode(self, prompts: list[Prompt]) -> Tensor:
        """Return the ids of prompts, (B, P), padded on the left with separators."""
        length = self.settings.prompt_tokens
        rows = []
        for prompt in prompts:
            if prompt.ids:
                ids = list(prompt.ids)
            else:
                ids = self.tokenizer.encode_batch([prompt.text])[0].tolist()
            if len(ids) > length:
                raise SweepError(
                    f"prompt_tokens must hold the longest prompt, got {length} for {prompt.text!r} "
                    f"with {len(ids)} tokens. Set workload.prompt_tokens to {len(ids)} or more."
                )
            rows.append([self.end] * (length - len(ids)) + ids)
        return torch.tensor(rows, device=self.device)

    def generate(
        self, model: nn.Module, prompts: Tensor, uniforms: Tensor, size: int, end: int | None
    ) -> Tensor:
        """Sample completions (B, N) of prompts (B, P), `size` at a time, until `end` if given."""
        sample = functools.partial(
            generate,
            model,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            end=end,
            is_rehearsal=self.is_rehearsal,
        )
        uniforms = uniforms.to(self.device, self.wide_dtype)
        pairs = [*zip(torch.split(prompts, size), torch.split(uniforms, size), strict=True)]
        parts = []
        if self.is_rehearsal:  # the peak is at one of the last two, next to all completions before
            parts = [ids.new_empty(numbers.shape) for ids, numbers in pairs[:-2]]
            pairs = pairs[-2:]

        was_training = model.training
        model.eval()
        with autocast(self.device, self.config.science.precision):
            parts += [sample(ids, numbers) for ids, numbers in pairs]
        model.train(was_training)
        return torch.cat(parts)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meter.add(f"perf/{name}_seconds", time.perf_counter() - start, 1)
        self.on_phase(name)

    def evaluate(self, model: nn.Module) -> Metrics:
        """Return the mean reward of one completion of each held-out prompt."""
        return {"reward": self._mean_reward(model, self.evaluation_sequences, is_held_out=True)}

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        held_out = self._mean_reward(model, FINAL_PROMPTS, is_held_out=True)
        completions = self.config.science.tokens // self.tokens_per_sequence
        groups = max(1, completions // self.settings.group_size)
        train = self._mean_reward(model, min(FINAL_PROMPTS, groups), is_held_out=False)
        return FinalEvaluation({"reward": held_out}, train_reward=train)

    def _mean_reward(self, model: nn.Module, count: int, is_held_out: bool) -> float:
        size = self.config.execution.evaluation_batch_size
        at_once = min(size, self.config.completions_at_once(self.config.microbatch_size))
        parts = []
        for first in range(0, count, size):
            watchdog.progress()
            numbers = np.arange(first, min(first + size, count))
            prompts = [self.task.prompt(int(number), is_held_out) for number in numbers]
            uniforms = completion_uniforms(0, numbers + HELD_OUT, self.settings.new_tokens)
            ids = self.generate(model, self.encode(prompts), uniforms, at_once, self.end)
            rewards, _ = score(self.reward, prompts, ids, self.tokenizer)
            parts.append(rewards)
        return float(np.concatenate(parts).mean())

    def epochs(self) -> float | None:
        prompts = self.task.prompts_in_epoch
        if not prompts:
            return None
        tokens_per_prompt = self.tokens_per_sequence * self.settings.group_size
        return self.config.science.tokens / tokens_per_prompt / prompts


def advantages(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """Return advantages over the group (B,), divided by the deviation of group, batch or none."""
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    centered = centered.masked_fill(is_equal, 0.0)  # exactly 0 even if the mean was rounded
    if scale == "group":
        centered = centered / (groups.std(dim=1, keepdim=True) + SCALE_EPS)
    elif scale == "batch":
        centered = centered / (rewards.std() + SCALE_EPS)
    return centered.reshape(-1)


def completion_mask(completions: Tensor, end: int) -> Tensor:
    """Return 1 up to and including the first end id, then 0, (B, N) in float32."""
    is_end = (completions == end).to(torch.int64)
    ends_before = is_end.cumsum(dim=1) - is_end
    return (ends_before == 0).float()


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def add_means(meter: Meter, values: Mapping[str, Tensor], mask: Tensor) -> None:
    """Add values (B, N) by name where the mask (B, N) is 1."""
    for name, value in values.items():
        meter.add(name, (value.detach() * mask).sum(), mask.sum())


def surrogate(
    log_probs: Tensor, old: Tensor | None, reference: Tensor, gain: Tensor, settings: GrpoSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped loss and the metrics of each token, (B, N); gain (B,) is the advantage.

    `old`: log-probabilities under the sampling policy; None if it is the current one.
    """
    if old is None:
        old = log_probs.detach()
    ratios = torch.exp(log_probs - old)
    low = 1 - settings.clip
    high = 1 + (settings.clip_high if settings.clip_high else settings.clip)

    gain = gain[:, None]
    losses = -torch.minimum(ratios * gain, ratios.clamp(low, high) * gain)
    is_clipped = ((ratios < low) & (gain < 0)) | ((ratios > high) & (gain > 0))
    metrics = {"grpo/ratio": ratios, "grpo/clip_fraction": is_clipped.float()}
    if settings.kl:
        difference = reference - log_probs
        metrics["grpo/kl"] = torch.exp(difference) - difference - 1  # Schulman's k3 estimate
        losses = losses + settings.kl * metrics["grpo/kl"]
    return losses, metrics


def score(
    reward: Reward, prompts: list[Prompt], completions: Tensor, tokenizer: TextTokenizer
) -> tuple[Floats, dict[str, Floats]]:
    """Return rewards (B,) and their components, (B,) each, of completions (B, N)."""
    rows: list[dict[str, float]] = []
    for prompt, ids in zip(prompts, completions.cpu().numpy(), strict=True):
        ends = np.flatnonzero(ids == tokenizer.end)
        has_ended = len(ends) > 0
        if has_ended:
            ids = ids[: ends[0]]
        completion = Completion(tokenizer.decode(ids.tolist()), has_ended)
        rows.append(reward(prompt, completion))

    names: dict[str, None] = {}  # in the order of their first completion
    for row in rows:
        names |= dict.fromkeys(row)
    components = {}
    for name in names:
        components[name] = np.array([row.get(name, 0.0) for row in rows])
    total = np.sum([*components.values(), np.zeros(len(rows))], axis=0)
    return total, components


def add_rewards(
    meter: Meter, rewards: Floats, components: dict[str, Floats], group_size: int
) -> None:
    """Add rewards (B,) and components, (B,) each, which are 0 for completions without them."""
    deviations = rewards.reshape(-1, group_size).std(axis=1)
    meter.add("reward/std", rewards.std(), 1)
    meter.add("reward/group_std", deviations.sum(), len(deviations))
    for name, values in {"mean": rewards, **components}.items():
        meter.add(f"reward/{name}", values.sum(), len(rewards))

    _, count = meter.sums["reward/mean"]
    for name in meter.sums.keys() - {f"reward/{name}" for name in REWARD_STATISTICS}:
        if name.startswith("reward/"):
            total, _ = meter.sums[name]
            meter.sums[name] = (total, count)
