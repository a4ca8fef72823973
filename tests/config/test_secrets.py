"""Secrets in commands are refused by their names; names that only look alike are not."""

import re
import shlex
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweep.config.load import load_experiment
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
        "env PGPASSWORD=Vq9 true",
        "env PGPASSWORD=1234 true",
        "env WANDBKEY=Vq true",
        "env API_KEYS=Vq9,b true",
        "env API_KEY_2=Vq9 true",
        "env MYSQL_PWD=Vq9 true",
        "env DB_PASS=Vq9 true",
        "env GITHUB_PAT=Vq9 true",
        "env INPUT_API_KEY=Vq9 true",
        "env API_KEY_VALUE=Vq9 true",
        "sbatch --export=HF_TOKEN=Vq9 job.sh",
        "docker run --env=MY_SECRET=Vq9 image",
        "true --mysecrets Vq9",
        "true --db-passwords Vq9",
        "true --pw Vq9 --lr 1",
        "true --pass Vq9",
        "true --auth me:Vq9",
        "true --url 'https://host/x?a=1&access_token=Vq9'",
        "git clone https://Vq9aaaaaaaaaaaaaaaaaaaa@host/x",
        "git clone https://Vq9aaaaaaaaaaaaaaaaaaaa:@host/x",
        "curl https://hooks.slack.com/services/T0/B0/Vq9",
        "curl https://discord.com/api/webhooks/1/Vq9",
        "env MY_API_KEYs=Vq9 true",
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
        "true --tokenizer-name bpe --tokenize words --keyboard us --keywords a --hotkey F5",
        "true --max_new_tokens all --num-tokens 64k --tokens-per-x 4k --n-tokens all --turkey b",
        "true --key_value_heads few --keep all --bypass x --compass north --author me --path x",
        "true --special-tokens chat --mask_token M --cls-token C --image-token I --dataset-key d",
        "true --secretary x --passwordless y --key-size large --patience 3 --passes 2 --pattern x",
        "env TOKENS=64k KEY_FILE=/run/x TOKEN_PATH=/run/y EOS_TOKEN=E MAX_TOKENS=all true",
        "git clone https://$TOKEN@host/x ssh://git@host/x",
        "curl https://hooks.slack.com/services/$HOOK",
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


@pytest.mark.parametrize(
    "words",
    [
        "env TOKENS=Vq true",
        "env TEXT_KEY=Vq true",
        "env INPUT_TOKEN=Vq true",
        "env DBPASS_X_KEYS=Vq true",
        "env FORWARD_PASS=77 true",
        "env PWD=/Vq true",
        "true --access-key-id AKIAVq",
        "true --secret-id Vq",
        "true --wandbkey Vq",
        "true --pw Vq",
        "true --pass Vq",
        "true --pwd Vq",
        "true --auth Vq",
        "true --oauth Vq",
        "true --dbpass Vq",
        "true --keys Vq,b",
        "true --token-kind Vq",
        "true --token-tokenizer Vq",
        "true --dataset-token Vq",
        "git clone https://Vq@host/x",
    ],
)
def test_a_name_that_contains_a_word_for_secrets_gets_one_warning(words, caplog):
    refuse_secrets(words)
    (record,) = caplog.records
    assert "Vq" not in record.getMessage() and "77" not in record.getMessage()


SECRET_WORDS = st.sampled_from(["key", "token", "secret", "password"])
NAME_PARTS = st.text(string.ascii_lowercase + "_", max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAME_PARTS, SECRET_WORDS, st.booleans(), st.sampled_from(["env {}=Vqx", "true --{} Vqx"]))
def test_a_word_for_secrets_at_the_end_of_any_name_is_seen(caplog, start, word, is_upper, form):
    caplog.clear()
    name = f"x{start}q{word}"
    try:
        refuse_secrets(form.format(name.upper() if is_upper else name))
    except SweepError:
        return
    assert len(caplog.records) == 1


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
    pages += [*request.config.rootpath.glob("experiments/**/*.md")]
    commands = [m for page in pages for m in re.findall(r'--command "([^"]+)"', page.read_text())]
    assert commands
    for command in commands:
        refuse_secrets(command)
        assert shlex.split(command.replace("\\\n", ""))
    assert not caplog.records
