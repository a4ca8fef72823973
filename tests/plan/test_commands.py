"""The command that answers the question, and what it costs."""

import shlex

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.plan.plan import answering_command, answering_cost, grow_plan, typed_command
from tests.plans import build_plan

CPU = Execution(device="cpu", threads=1)


def plan(command=(), **settings):
    fields = {"batches": "4,8", "precision": "fp32", **settings}
    experiment = load_experiment("quadratic", fields)
    return build_plan(experiment, CPU, data=None, command=command)


def test_only_flags_that_were_given_are_kept():
    words = typed_command("quick", {"lr": "1e-3", "seeds": None, "activation_checkpointing": True,
                                    "keep": None})  # fmt: skip
    assert shlex.join(words) == "sweep run quick --lr 1e-3 --activation-checkpointing"


def test_the_answer_tunes_the_rate_at_all_batch_sizes_of_the_sweep_and_keeps_the_other_flags():
    first = plan(typed_command("quadratic", {"batches": "4,8", "lr": "0.1", "out": "x y"}))
    grown = grow_plan(first, plan(typed_command("quadratic", {"batches": "16"}), batches="16"))
    assert answering_command(first) == (
        "sweep run quadratic --out 'x y' --batches 4,8 --lr tuned --seeds 3"
    )
    assert "--batches 4,8,16" in answering_command(grown)


def test_seeds_that_were_asked_for_are_kept_and_a_tuned_sweep_needs_no_other():
    assert answering_command(plan(seeds=5)).endswith("--lr tuned --seeds 5")
    assert answering_command(plan(lr="tuned")) is None
    assert answering_command(plan(lr="tuned", seeds=1)).endswith("--seeds 3")


def test_the_cost_is_five_rates_and_three_seeds_at_each_batch_size():
    assert answering_cost(plan(), {4: 10.0, 8: 20.0}) == (16, 8 * 30.0)
    assert answering_cost(plan(), {4: 10.0}) == (16, None)


def test_python_values_are_written_as_the_command_line_reads_them():
    words = typed_command("quick", {"batches": [4, 8], "budget": 1000, "microbatch": 2})
    assert shlex.join(words) == "sweep run quick --batches 4,8 --budget 1000 --microbatch 2"


def test_a_grown_plan_says_whether_its_tokens_are_still_common():
    first = plan(batches="4", budget=1000)
    grown = grow_plan(first, plan(batches="384", budget=1000))
    assert first.tokens_are_common and not grown.tokens_are_common


def test_growing_keeps_the_commands_that_added_something():
    first = plan(("sweep", "run", "a"))
    again = grow_plan(first, plan(("sweep", "run", "a", "--quiet")))
    assert again.commands == (("sweep", "run", "a"),)
    grown = grow_plan(first, plan(("sweep", "run", "b"), seeds=2))
    assert grown.commands == (("sweep", "run", "a"), ("sweep", "run", "b"))
