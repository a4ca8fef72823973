"""Pack prepared tokens for benchmarks on a machine without text: `make gpu-pack`.

    SWEEP_CACHE=.gpu/cache python tests/benchmarks/pack.py TEXT_FOLDER .gpu/data.json

Writes the tokens of each benchmarked model to the cache, as `sweep data prepare` does, and the
identity of the text to a file, which the variable BENCHMARK_DATA names for other benchmarks.
"""

import json
import sys
from pathlib import Path

from memory import benchmark_settings

from sweep.config.trial import tokenizer_of
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data


def main() -> None:
    text, target = sys.argv[1:]
    identity = identify_data(text)
    for model in ("reference", "small", "quick"):
        tokenizer = tokenizer_of(benchmark_settings(model, data=text))
        assert tokenizer is not None
        prepared = prepare_data(identity, text, tokenizer)
        print(f"{model}: {len(prepared.train):,} tokens of training, {len(prepared.valid):,} valid")
    Path(target).write_text(json.dumps(identity) + "\n")


if __name__ == "__main__":
    main()
