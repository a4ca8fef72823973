"""Build the task and the reward of a trial."""

import math
from collections.abc import Callable
from typing import Any

from sweep.config.workloads import GrpoSettings
from sweep.data.tokens import TokenizedText
from sweep.errors import user_code
from sweep.usercode.objects import load_object
from sweep.workloads.tasks.chess_moves import Chess
from sweep.workloads.tasks.openings import Openings
from sweep.workloads.tasks.task import Completion, Prompt, Reward, Task
from sweep.workloads.tasks.words import Words

# Each class is called with the text (None without data), the seed and the length of prompts.
TASKS: dict[str, Callable[[Any, int, int], Task]] = {
    "words": Words,
    "text": Openings,
    "chess": Chess,
}
REWARD_STATISTICS = ("mean", "std", "group_std")  # logged as reward/<name>, with the components


def refuse_unusable_task(settings: GrpoSettings) -> None:
    """Import the task and the reward, and refuse a task that needs a missing package."""
    check_installed = getattr(_task_class(settings), "check_installed", None)
    if check_installed is not None:
        check_installed()
    if settings.reward is not None:
        load_object(settings.reward)


def build_task(settings: GrpoSettings, text: TokenizedText | None, seed: int) -> Task:
    task_class = _task_class(settings)
    with user_code(f"task {settings.task!r} must accept a text, a seed and prompt_tokens"):
        task: Task = task_class(text, seed, settings.prompt_tokens)
        return task


def _task_class(settings: GrpoSettings) -> Any:
    if settings.task in TASKS:
        return TASKS[settings.task]
    return load_object(settings.task)


def build_reward(settings: GrpoSettings, task: Task) -> Reward:
    name = settings.reward
    if name is None:
        return task.reward
    function = load_object(name)

    def reward(prompt: Prompt, completion: Completion) -> dict[str, float]:
        with user_code(
            f"reward {name!r} must return a finite number, or a dict of them without the names "
            f"{', '.join(REWARD_STATISTICS)}, for any completion"
        ):
            result = function(prompt.text, completion.text)  # a number, or a dict of numbers to add
            components = result if isinstance(result, dict) else {"own": result}
            values = {str(key): float(value) for key, value in components.items()}
            is_finite = all(map(math.isfinite, values.values()))
            if not is_finite or values.keys() & set(REWARD_STATISTICS):
                raise ValueError(f"got {result!r}")
        return values

    return reward
