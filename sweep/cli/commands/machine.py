"""Prepare data, and examine this machine."""

import logging
from functools import partial
from typing import Any

import click

from sweep.cli.commands.arguments import json_option
from sweep.cli.options import SettingsCommand, echo, print_document, say

LOG = logging.getLogger(__name__)


@click.command(cls=SettingsCommand)
@click.argument("action", type=click.Choice(["prepare", "info"]))
@click.argument("source", default="tinystories")
@json_option
def data(action: str, source: str, json: bool, **settings: Any) -> None:
    """Prepare or describe SOURCE (tinystories, synthetic, hf:OWNER/NAME, or a path).

    prepare: download and tokenize it into the cache. info: token counts only if it is prepared.
    """
    from sweep.config.load import load_experiment
    from sweep.config.trial import tokenizer_of
    from sweep.data.describe import data_lines, describe_data, summarize_data
    from sweep.data.sources import identify_data
    from sweep.data.tokens import prepare_data

    experiment = load_experiment(overrides={"data": source, **settings})
    tokenizer = tokenizer_of(experiment)
    column = experiment.text_column
    assert tokenizer, "the experiment has data"
    if action == "prepare":
        prepare_data(identify_data(source, column), source, tokenizer, partial(echo, err=True))

    document = describe_data(source, tokenizer, column)
    for line in data_lines(summarize_data(document["identity"], source, tokenizer)):
        say(line, to_stderr=True)
    print_document(document, json)


@click.command()
@json_option
def doctor(json: bool) -> None:
    """Check this machine: what is installed, which devices exist, what is missing."""
    LOG.info("Examining this machine")
    from sweep.cli.doctor import examine_machine, print_machine

    document = examine_machine()
    if json:
        print_document(document)
    else:
        print_machine(document)
