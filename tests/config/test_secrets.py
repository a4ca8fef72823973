"""Secrets in commands are refused by their names; names that only look alike are not."""

import re
import shlex

import pytest

from sweep.config.experiment import load_experiment
from sweep.config.secrets import refuse_secrets
from sweep.errors import SweepError

PLAIN = "sh -c 'true {batch_size} {learning_rate} {seed} {steps}'"


@pytest.mark.parametrize(
    "words",
    [
        "env WANDB_API_KEY=Vq9 true",
        "sh -c 'WANDB_API_KEY=Vq9 exec true'",
        "bash -c \"export TOKEN='Vq9 w'; exec true\"",
        "env AWS_SECRET_ACCESS_KEY=Vq9 true",
        "docker run -e OPENAI_API_KEY=Vq9 image",
        "sbatch --export=ALL,HF_TOKEN=Vq9 job.sh",
        "true --api-key Vq9",
        "true --apiKey=Vq9",
        "true --token=Vq9",
        "true --hub_token Vq9",
        "true --password Vq9",
        "true --my-key Vq9aa7d6f5a4sdf7",
        "true wandb.api_key=Vq9",
        """true --config '{"api_key": "Vq9"}'""",
        "true -H 'Authorization: Bearer Vq9'",
        "true --db postgresql://user:Vq9@host/db",
        "true --whatever hf_Vq9aaaaaaaaaaaaaaaaa",
        "true --password 'Vq9 without an end",
    ],
)
def test_a_secret_is_refused_by_name_and_not_shown(words):
    with pytest.raises(SweepError) as refused:
        refuse_secrets(words)
    assert "variable" in str(refused.value) and "Vq9" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "true --tokenizer gpt2 --max-tokens 100 --keyboard qwerty --monkey=3",
        "true --num_key_value_heads 4 --key-dim 64 --token-level 3",
        "true --pad_token '<pad>' --eos-token EOS --eos_token_id 2 --text-key content2",
        "env TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONPATH=src:lib true",
        "env WANDB_API_KEY= true",
        "sh -c 'WANDB_API_KEY=$WANDB_API_KEY true'",
        "true --use_auth_token True --ask-password",
        "true --password-file /run/secrets/x --secret-name x",
        "true --tokens {tokens} --token {seed}",
        "true --url https://host/x?version=2",
        "true --db postgresql://user@host/db --other postgresql://user:$PASSWORD@host/db",
    ],
)
def test_words_that_hold_no_secret_are_allowed_without_a_warning(words, caplog):
    refuse_secrets(words)
    assert not caplog.records


def test_a_key_of_unknown_kind_with_a_plain_word_is_allowed_with_a_warning(caplog):
    refuse_secrets("true --my-key accuracy")
    (record,) = caplog.records
    assert "my-key" in record.getMessage() and "accuracy" not in record.getMessage()


def test_an_experiment_with_a_secret_is_refused_before_it_is_planned():
    assert load_experiment(overrides={"command": PLAIN, "budget": "8", "batches": "4"})
    command = f"env WANDB_API_KEY=Vq9 {PLAIN}"
    for overrides in (
        {"command": command, "budget": "8", "batches": "4"},
        {"workload": "own:Own", "model": "own:Model", "model_option": "api_key=Vq9"},
    ):
        with pytest.raises(SweepError) as refused:
            load_experiment(overrides=overrides)
        assert "secret" in str(refused.value) and "Vq9" not in str(refused.value)


def test_the_commands_of_the_pages_are_allowed(request, caplog):
    pages = [*request.config.rootpath.glob("docs/**/*.md")]
    pages += [*request.config.rootpath.glob("examples/**/*.md")]
    commands = [m for page in pages for m in re.findall(r'--command "([^"]+)"', page.read_text())]
    assert commands
    for command in commands:
        refuse_secrets(command)
        assert shlex.split(command.replace("\\\n", ""))
    assert not caplog.records
