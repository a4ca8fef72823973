"""Recommend a batch size for a larger training: from sweeps, or from published laws."""

import logging
from typing import Any

import click

from sweep.cli.commands.arguments import json_option, sweep_folder
from sweep.cli.options import echo, print_document
from sweep.errors import SweepError

LOG = logging.getLogger(__name__)


class Count(click.ParamType[int]):
    """A whole number as people write it: 1B, 350M."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from sweep.config.numbers import parse_count

        try:
            return parse_count(value, param.name if param and param.name else "number")
        except SweepError as error:
            self.fail(str(error), param, ctx)


tokens_option = click.option(
    "--tokens", type=Count(), required=True, metavar="N", help="Training tokens: 1B, 300G."
)


@click.command()
@click.argument("folders", type=str, nargs=-1, required=True, metavar="DIR…")
@tokens_option
@click.option(
    "--params",
    type=Count(),
    metavar="N",
    help="Parameters without embeddings: 350M; by default those of the sweeps.",
)
@json_option
def recommend(folders: tuple[str, ...], tokens: int, params: int | None, json: bool) -> None:
    """Recommend a batch size and a rate for a larger training, from sweeps at several budgets.

    Sweeps at three or more budgets give a law with an interval. Far beyond them, the answer says
    up to which budget they tell, and what published laws say there.
    """
    LOG.info("Reading the sweeps")
    from sweep.analysis.recommend import recommend as recommend_from
    from sweep.analysis.recommendation import describe_recommendation

    answer = recommend_from([sweep_folder(folder).path for folder in folders], tokens, params)
    if json:
        print_document(answer.as_json())
        return
    echo("\n".join(describe_recommendation(answer)))


@click.command()
@click.option(
    "--params",
    type=Count(),
    required=True,
    metavar="N",
    help="Parameters of the model without embeddings: 100M.",
)
@tokens_option
@json_option
def suggest(params: int, tokens: int, json: bool) -> None:
    """Print what published laws say about a training; trains nothing.

    A law gives a number only inside the range in which it was fitted.
    """
    from sweep.analysis.recommend import suggest as suggest_from
    from sweep.analysis.recommendation import describe_suggestion

    answer = suggest_from(params, tokens)
    if json:
        print_document(answer.as_json())
        return
    echo("\n".join(describe_suggestion(answer)))
